"""The families of models by how they write tool calls: one row for each, named as vLLM's --tool-call-parser names it.

A family is known by texts in its chat template. Readers of its calls are in `syntaxes.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    begins: tuple[str, ...] = ()  # markers before a call
    inner: tuple[str, ...] = ()  # a further marker that may follow those
    within: tuple[str, ...] = ()  # markers within a call
    ends: tuple[str, ...] = ()  # markers that may follow a call, and are no text of the message
    bare: tuple[str, ...] = ()  # beginnings of calls without a marker
    read_bare: Syntax | None = None  # reads a call from such a beginning on; default: `read`
    bare_at_start: bool = False  # whether such a beginning counts only at the start of a message, or after a call
    make_id: Callable[[str, int], str] = make_openai_id
    # The text with which a call begins, up to the tool's name or, if the name is given, up to the arguments
    begin_call: Callable[[str | None], str] | None = None
    # Writes calls, for chat templates of the family that have no place for them
    write: Callable[[Sequence[Mapping[str, Any]]], str] | None = None
    aliases: tuple[str, ...] = ()
    harmony: bool = False  # whether the whole message is in gpt-oss's format, which `harmony.py` reads

    @property
    def markers(self) -> tuple[str, ...]:
        """Return all markers; those that are special tokens must be in the text that is read."""
        return (*self.begins, *self.inner, *self.within, *self.ends, *self.bare)


def _begin_json(before: str, arguments: str = "arguments") -> Callable[[str | None], str]:
    """Return `begin_call` of a family that writes JSON objects after `before`."""
    return lambda name: f'{before}{{"name": "' + ("" if name is None else f'{name}", "{arguments}": ')


def _begin_named(before: str, after: str) -> Callable[[str | None], str]:
    """Return `begin_call` of a family that writes a tool's name between these texts."""
    return lambda name: before if name is None else f"{before}{name}{after}"


def _write_list(before: str, after: str) -> Callable[[Sequence[Mapping[str, Any]]], str]:
    """Return `write` of a family that writes a list of JSON objects between these texts."""

    def write(calls: Sequence[Mapping[str, Any]]) -> str:
        listed = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
        return before + json.dumps(listed, ensure_ascii=False) + after

    return write


_DSML = "<\uff5cDSML\uff5c"  # DeepSeek V3.2's tags begin so
_DEEPSEEK_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_DEEPSEEK_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
TOOL_FORMATS = (  # the first whose texts are in a chat template is that template's
    ToolFormat(
        "openai",
        (("<|channel|>", "<|message|>"),),
        read_json,
        begins=HARMONY_MARKERS,
        begin_call=lambda name: (
            f"<|channel|>commentary to=functions.{name or ''}"
            + ("" if name is None else " <|constrain|>json<|message|>")
        ),
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
        begin_call=_begin_named(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>"
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
        begin_call=_begin_named(f'{_DSML}function_calls>\n{_DSML}invoke name="', '">\n'),
        aliases=("deepseek_v4",),
    ),
    ToolFormat(
        "deepseek_v3",
        ((_DEEPSEEK_CALLS, "```json"),),
        read_deepseek,
        begins=(_DEEPSEEK_CALLS, _DEEPSEEK_CALL, "<\uff5ctool_calls_begin\uff5c>", "<\uff5ctool calls begin\uff5c>"),
        inner=(_DEEPSEEK_CALL,),
        within=("<\uff5ctool\u2581sep\uff5c>",),
        ends=("<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
        begin_call=_begin_named(f"{_DEEPSEEK_CALLS}{_DEEPSEEK_CALL}function<\uff5ctool\u2581sep\uff5c>", "\n```json\n"),
    ),
    ToolFormat(
        "deepseek_v31",
        ((_DEEPSEEK_CALLS,),),
        read_deepseek,
        begins=(_DEEPSEEK_CALLS, _DEEPSEEK_CALL, "<\uff5ctool_calls_begin\uff5c>", "<\uff5ctool calls begin\uff5c>"),
        inner=(_DEEPSEEK_CALL,),
        within=("<\uff5ctool\u2581sep\uff5c>",),
        ends=("<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
        begin_call=_begin_named(f"{_DEEPSEEK_CALLS}{_DEEPSEEK_CALL}", "<\uff5ctool\u2581sep\uff5c>"),
    ),
    ToolFormat(
        "minimax_m2",
        (("<minimax:tool_call>",), ("minimax:tool_call",)),
        read_tagged(('<invoke name="', '">', "</invoke>"), ('<parameter name="', ">", "</parameter>")),
        begins=("<minimax:tool_call>",),
        ends=("</minimax:tool_call>",),
        bare=('<invoke name="',),
        begin_call=_begin_named('<minimax:tool_call>\n<invoke name="', '">\n'),
    ),
    ToolFormat(
        "glm45",
        (("<arg_key>", "<arg_value>"),),
        read_glm,
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        begin_call=_begin_named("<tool_call>", "\n"),
        aliases=("glm47",),
    ),
    ToolFormat(
        "seed_oss",
        (("<seed:tool_call>",), ("seed:tool_call",)),
        read_tagged(("<function=", ">", "</function>"), ("<parameter=", ">", "</parameter>")),
        begins=("<seed:tool_call>",),
        ends=("</seed:tool_call>",),
        bare=("<function=",),
        begin_call=_begin_named("<seed:tool_call>\n<function=", ">\n"),
    ),
    ToolFormat(
        "qwen3_coder",
        (("<function=", "<parameter="),),
        read_tagged(("<function=", ">", "</function>"), ("<parameter=", ">", "</parameter>")),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        bare=("<function=",),
        begin_call=_begin_named("<tool_call>\n<function=", ">\n"),
        aliases=("qwen3_xml",),
    ),
    ToolFormat(
        "mistral_v11",
        (("[TOOL_CALLS]", "[ARGS]"),),
        read_mistral,
        begins=("[TOOL_CALLS]",),
        within=("[ARGS]", "[CALL_ID]"),
        make_id=make_mistral_id,
        begin_call=_begin_named("[TOOL_CALLS]", "[ARGS]"),
    ),
    ToolFormat(
        "mistral",
        (("[TOOL_CALLS]",),),
        read_mistral,
        begins=("[TOOL_CALLS]",),
        within=("[ARGS]", "[CALL_ID]"),
        make_id=make_mistral_id,
        begin_call=_begin_json("[TOOL_CALLS]["),
    ),
    ToolFormat(
        "phi4_mini_json",
        (("<|tool|>", "<|/tool|>"), ("functools[",)),
        read_json,
        begins=("<|tool_call|>", "functools"),
        ends=("<|/tool_call|>",),
        begin_call=_begin_json("<|tool_call|>["),
        write=_write_list("<|tool_call|>", "<|/tool_call|>"),
        aliases=("phi4_mini",),
    ),
    ToolFormat(
        "granite",
        (("<|tool_call|>",),),
        read_json,
        begins=("<|tool_call|>", "<tool_call>"),
        begin_call=_begin_json("<|tool_call|>["),
        write=_write_list("<|tool_call|>", ""),
        ends=("</tool_call>",),
    ),
    ToolFormat(
        "lfm2",
        (("<|tool_call_start|>",),),
        read_pythonic(marked=True),
        begins=("<|tool_call_start|>",),
        ends=("<|tool_call_end|>",),
        begin_call=_begin_named("<|tool_call_start|>[", "("),
    ),
    ToolFormat(
        "nemotron_json",
        (("<TOOLCALL>",),),
        read_json,
        begins=("<TOOLCALL>",),
        ends=("</TOOLCALL>",),
        begin_call=_begin_json("<TOOLCALL>["),
    ),
    ToolFormat(
        "hermes",
        (("<tool_call>",),),
        read_json,
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        begin_call=_begin_json("<tool_call>\n"),
        aliases=("qwen25", "qwen3", "granite4"),
    ),
    ToolFormat(
        "functionary_v31_llama3",
        (("<function=example_function_name>",), ("<function=", "</function>")),
        read_name_and_json(">"),
        begins=("<function=",),
        ends=("</function>",),
        begin_call=_begin_named("<function=", ">"),
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
        begin_call=_begin_named("[", "("),
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
        begin_call=_begin_json("", "parameters"),
        aliases=("llama3", "llama4_json"),
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
