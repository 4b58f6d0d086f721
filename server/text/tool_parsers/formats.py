"""The families of models by how they write tool calls: one row for each, named as vLLM's --tool-call-parser names it.

A family is known by texts in its chat template. Readers of its calls are in `syntaxes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from server.text.tool_parsers.call_forms import CallForm
from server.text.tool_parsers.calls import make_kimi_id, make_mistral_id, make_openai_id
from server.text.tool_parsers.reasoning import HARMONY_MARKERS
from server.text.tool_parsers.syntaxes import (
    Syntax,
    read_bare_json,
    read_deepseek,
    read_glm,
    read_json,
    read_kimi,
    read_mistral,
    read_name_and_json,
    read_pythonic,
    read_tagged,
)


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes tool calls."""

    name: str
    in_template: tuple[tuple[str, ...], ...]  # its chat templates have all texts of one of these
    read: Syntax  # reads a call, or several, after a marker
    form: CallForm  # how a call is written
    begins: tuple[str, ...] = ()  # markers before a call
    inner: tuple[str, ...] = ()  # a further marker that may follow those
    within: tuple[str, ...] = ()  # markers within a call
    ends: tuple[str, ...] = ()  # markers that may follow a call, and are no text of the message
    bare: tuple[str, ...] = ()  # beginnings of calls without a marker
    read_bare: Syntax | None = None  # reads a call from such a beginning on; default: `read`
    bare_at_start: bool = False  # whether such a beginning counts only at the start of a message, or after a call
    make_id: Callable[[str, int], str] = make_openai_id
    writes_calls: bool = False  # whether calls are written for chat templates of the family that leave them out
    aliases: tuple[str, ...] = ()
    harmony: bool = False  # whether the whole message is in gpt-oss's format, which `harmony.py` reads

    @property
    def markers(self) -> tuple[str, ...]:
        """Return all markers; those that are special tokens must be in the text that is read."""
        return (*self.begins, *self.inner, *self.within, *self.ends, *self.bare)


_DSML = "<\uff5cDSML\uff5c"  # DeepSeek V3.2's tags begin so
_DEEPSEEK_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_DEEPSEEK_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_DEEPSEEK_SEP = "<\uff5ctool\u2581sep\uff5c>"
_DEEPSEEK_BEGINS = (_DEEPSEEK_CALLS, _DEEPSEEK_CALL, "<\uff5ctool_calls_begin\uff5c>", "<\uff5ctool calls begin\uff5c>")
_DEEPSEEK_ENDS = ("<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>")
TOOL_FORMATS = (  # the first whose texts are in a chat template is that template's
    ToolFormat(
        "openai",
        (("<|channel|>", "<|message|>"),),
        read_json,
        begins=HARMONY_MARKERS,
        form=CallForm("named", "<|channel|>commentary to=functions.", "<|call|>", " <|constrain|>json<|message|>"),
        aliases=("gpt_oss", "harmony"),
        harmony=True,
    ),
    ToolFormat(
        "kimi_k2",
        (("<|tool_call_argument_begin|>",),),
        read_kimi,
        begins=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        inner=("<|tool_call_begin|>",),
        within=("<|tool_call_argument_begin|>",),
        ends=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        make_id=make_kimi_id,
        form=CallForm(
            "named",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
            "<|tool_call_end|><|tool_calls_section_end|>",
            ":0<|tool_call_argument_begin|>",
        ),
    ),
    ToolFormat(
        "deepseek_v32",
        ((f"{_DSML}invoke",), ("DSML", "invoke name=")),
        read_tagged(
            (f'{_DSML}invoke name="', '">', "</\uff5cDSML\uff5cinvoke>"),
            (f'{_DSML}parameter name="', ">", "</\uff5cDSML\uff5cparameter>"),
        ),
        begins=(f"{_DSML}function_calls>", f"{_DSML}tool_calls>"),
        ends=("</\uff5cDSML\uff5cfunction_calls>", "</\uff5cDSML\uff5ctool_calls>"),
        bare=(f'{_DSML}invoke name="',),
        form=CallForm(
            "tagged",
            f'{_DSML}function_calls>\n{_DSML}invoke name="',
            "</\uff5cDSML\uff5cinvoke>\n</\uff5cDSML\uff5cfunction_calls>",
            '">\n',
            parameter=(f'{_DSML}parameter name="', '" string="true">', "</\uff5cDSML\uff5cparameter>\n"),
        ),
        aliases=("deepseek_v4",),
    ),
    ToolFormat(
        "deepseek_v3",
        ((_DEEPSEEK_CALLS, "```json"),),
        read_deepseek,
        begins=_DEEPSEEK_BEGINS,
        inner=(_DEEPSEEK_CALL,),
        within=(_DEEPSEEK_SEP,),
        ends=_DEEPSEEK_ENDS,
        form=CallForm(
            "named",
            f"{_DEEPSEEK_CALLS}{_DEEPSEEK_CALL}function{_DEEPSEEK_SEP}",
            "\n```" + "".join(_DEEPSEEK_ENDS),
            "\n```json\n",
        ),
    ),
    ToolFormat(
        "deepseek_v31",
        ((_DEEPSEEK_CALLS,),),
        read_deepseek,
        begins=_DEEPSEEK_BEGINS,
        inner=(_DEEPSEEK_CALL,),
        within=(_DEEPSEEK_SEP,),
        ends=_DEEPSEEK_ENDS,
        form=CallForm(
            "named",
            f"{_DEEPSEEK_CALLS}{_DEEPSEEK_CALL}",
            "".join(_DEEPSEEK_ENDS),
            _DEEPSEEK_SEP,
        ),
    ),
    ToolFormat(
        "minimax_m2",
        (("<minimax:tool_call>",), ("minimax:tool_call",)),
        read_tagged(('<invoke name="', '">', "</invoke>"), ('<parameter name="', ">", "</parameter>")),
        begins=("<minimax:tool_call>",),
        ends=("</minimax:tool_call>",),
        bare=('<invoke name="',),
        form=CallForm(
            "tagged",
            '<minimax:tool_call>\n<invoke name="',
            "</invoke>\n</minimax:tool_call>",
            '">\n',
            parameter=('<parameter name="', '">', "</parameter>\n"),
        ),
    ),
    ToolFormat(
        "glm45",
        (("<arg_key>", "<arg_value>"),),
        read_glm,
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        form=CallForm(
            "tagged",
            "<tool_call>",
            "</tool_call>",
            "\n",
            parameter=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
        aliases=("glm47",),
    ),
    ToolFormat(
        "seed_oss",
        (("<seed:tool_call>",), ("seed:tool_call",)),
        read_tagged(("<function=", ">", "</function>"), ("<parameter=", ">", "</parameter>")),
        begins=("<seed:tool_call>",),
        ends=("</seed:tool_call>",),
        bare=("<function=",),
        form=CallForm(
            "tagged",
            "<seed:tool_call>\n<function=",
            "</function>\n</seed:tool_call>",
            ">\n",
            parameter=("<parameter=", ">", "</parameter>\n"),
        ),
    ),
    ToolFormat(
        "qwen3_coder",
        (("<function=", "<parameter="),),
        read_tagged(("<function=", ">", "</function>"), ("<parameter=", ">", "</parameter>")),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        bare=("<function=",),
        form=CallForm(
            "tagged",
            "<tool_call>\n<function=",
            "</function>\n</tool_call>",
            ">\n",
            parameter=("<parameter=", ">\n", "\n</parameter>\n"),
        ),
        aliases=("qwen3_xml",),
    ),
    ToolFormat(
        "mistral_v11",
        (("[TOOL_CALLS]", "[ARGS]"),),
        read_mistral,
        begins=("[TOOL_CALLS]",),
        within=("[ARGS]", "[CALL_ID]"),
        make_id=make_mistral_id,
        form=CallForm("named", "[TOOL_CALLS]", "", "[ARGS]"),
    ),
    ToolFormat(
        "mistral",
        (("[TOOL_CALLS]",),),
        read_mistral,
        begins=("[TOOL_CALLS]",),
        within=("[ARGS]", "[CALL_ID]"),
        make_id=make_mistral_id,
        form=CallForm("list", "[TOOL_CALLS]"),
    ),
    ToolFormat(
        "phi4_mini_json",
        (("<|tool|>", "<|/tool|>"), ("functools[",)),
        read_json,
        begins=("<|tool_call|>", "functools"),
        ends=("<|/tool_call|>",),
        form=CallForm("list", "<|tool_call|>", "<|/tool_call|>"),
        writes_calls=True,
        aliases=("phi4_mini",),
    ),
    ToolFormat(
        "granite",
        (("<|tool_call|>",),),
        read_json,
        begins=("<|tool_call|>", "<tool_call>"),
        form=CallForm("list", "<|tool_call|>"),
        writes_calls=True,
        ends=("</tool_call>",),
    ),
    ToolFormat(
        "lfm2",
        (("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        read_pythonic(marked=True),
        begins=("<|tool_call_start|>",),
        ends=("<|tool_call_end|>",),
        form=CallForm("python", "<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    ToolFormat(
        "nemotron_json",
        (("<TOOLCALL>",),),
        read_json,
        begins=("<TOOLCALL>",),
        ends=("</TOOLCALL>",),
        form=CallForm("list", "<TOOLCALL>", "</TOOLCALL>"),
    ),
    ToolFormat(
        "cohere_command3",
        (("<|START_ACTION|>",),),
        read_json,
        begins=("<|START_ACTION|>",),
        ends=("<|END_ACTION|>",),
        form=CallForm(
            "list",
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            arguments="parameters",
            name='"tool_call_id": "0", "tool_name"',
        ),
    ),
    ToolFormat(
        "internlm",
        (("<|action_start|>",),),
        read_json,
        begins=("<|action_start|>",),
        inner=("<|plugin|>",),
        ends=("<|action_end|>",),
        form=CallForm("object", "<|action_start|><|plugin|>\n", "<|action_end|>", arguments="parameters"),
    ),
    ToolFormat(
        "longcat",
        (("<longcat_tool_call>",),),
        read_json,
        begins=("<longcat_tool_call>",),
        ends=("</longcat_tool_call>",),
        form=CallForm("object", "<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    ),
    ToolFormat(
        "hermes",
        (("<tool_call>",),),
        read_json,
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        form=CallForm("object", "<tool_call>\n", "\n</tool_call>"),
        aliases=("qwen25", "qwen3", "granite4", "ernie45"),
    ),
    ToolFormat(
        "jamba",
        (("<tool_calls>",),),
        read_json,
        begins=("<tool_calls>",),
        ends=("</tool_calls>",),
        form=CallForm("list", "<tool_calls>", "</tool_calls>"),
        aliases=("hunyuan_a13b",),
    ),
    ToolFormat(
        "functionary_v31_llama3",
        (("<function=example_function_name>",), ("<function=", "</function>")),
        read_name_and_json(">"),
        begins=("<function=",),
        ends=("</function>",),
        form=CallForm("named", "<function=", "</function>", ">"),
    ),
    ToolFormat(
        "llama4_pythonic",
        (("<|python_start|>",), ("[func_name1(",)),
        read_pythonic(marked=True),
        begins=("<|python_start|>",),
        ends=("<|python_end|>",),
        bare=("[",),
        read_bare=read_pythonic(marked=False),
        bare_at_start=True,
        form=CallForm("python", ""),
        aliases=("pythonic",),
    ),
    ToolFormat(
        "llama3_json",
        (("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
        read_json,
        begins=("<|python_tag|>",),
        ends=(";", "<|eom_id|>"),
        bare=("{",),
        read_bare=read_bare_json,
        form=CallForm("object", "", arguments="parameters"),
        aliases=("llama3", "llama4_json"),
    ),
    ToolFormat(
        "granite_20b_fc",
        (("<function_call>",),),
        read_json,
        begins=("<function_call>",),
        form=CallForm("object", "<function_call> "),
    ),
)


def list_tool_formats() -> dict[str, ToolFormat]:
    """Return the rows by name, and by their other names."""
    return {name: row for row in TOOL_FORMATS for name in (row.name, *row.aliases)}


def find_tool_format(template: str) -> ToolFormat | None:
    """Return the row of a chat template, given as source text; None if it shows no known way to write tool calls."""
    return next(
        (row for row in TOOL_FORMATS if any(all(text in template for text in texts) for texts in row.in_template)), None
    )
