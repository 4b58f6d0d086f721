"""Families that write calls in tags, each with a text before and after every argument."""

from __future__ import annotations

from typing import Any

from server.text.tool_parsers.reasoning import KIMI_K3_CONTENT, KIMI_K3_TOKENS
from server.text.tool_parsers.syntaxes.tagged import read_tagged
from server.text.tool_parsers.tool_format import CallForm, ToolFormat

_BAR = "\uff5c"  # a wide vertical bar, which DeepSeek and Step have in their special tokens
_DSML = f"<{_BAR}DSML{_BAR}"  # DeepSeek V3.2's tags begin so
_DSML_END = f"</{_BAR}DSML{_BAR}"
_GCML = f"<{_BAR}GCML{_BAR}"  # and GigaChat 3.5's so
_GCML_END = f"</{_BAR}GCML{_BAR}"
_STEP_CALLS = f"<{_BAR}tool_calls_begin{_BAR}>"
_STEP_CALL = f"<{_BAR}tool_call_begin{_BAR}>"
_STEP_SEP = f"<{_BAR}tool_sep{_BAR}>"
_STEP_ENDS = (f"<{_BAR}tool_call_end{_BAR}>", f"<{_BAR}tool_calls_end{_BAR}>")


def _make_format(
    name: str,
    in_template: tuple[tuple[str, ...], ...],
    call: str,
    parameter: str,
    written_call: str,
    written_parameter: str,
    *,
    ends: tuple[str, ...] = (),
    outer: tuple[str, ...] | None = None,
    cdata: bool = False,
    own_lines: bool = False,
    **markers: Any,
) -> ToolFormat:
    """Return the format of a family whose calls are in tags.

    Calls are read as `call` and `parameter` say (`read_tagged`), and written as `written_call` and `written_parameter`
    say (`CallForm`). `outer` is that of `read_tagged`, by default `ends`. `markers` are further fields of ToolFormat.
    """
    opening = call.partition("NAME")[0]  # a call may begin with it, without a marker; empty: the name comes first
    return ToolFormat(
        name,
        in_template,
        read_tagged(call, parameter, outer=ends if outer is None else outer, cdata=cdata, own_lines=own_lines),
        CallForm(written_call, "tags", parameter=written_parameter),
        ends=ends,
        bare=(opening,) if opening else (),
        **markers,
    )


TAG_FORMATS = (
    _make_format(
        "deepseek_v32",
        ((f"{_DSML}invoke",), ("DSML", "invoke name=")),
        f'{_DSML}invoke name="NAME">ARGUMENTS{_DSML_END}invoke>',
        f'{_DSML}parameter name="KEY>VALUE{_DSML_END}parameter>',
        f'{_DSML}function_calls>\n{_DSML}invoke name="NAME">\nARGUMENTS{_DSML_END}invoke>\n{_DSML_END}function_calls>',
        f'{_DSML}parameter name="KEY" string="true">VALUE{_DSML_END}parameter>\n',
        begins=(f"{_DSML}function_calls>", f"{_DSML}tool_calls>"),
        ends=(f"{_DSML_END}function_calls>", f"{_DSML_END}tool_calls>"),
        aliases=("deepseek_v4",),
    ),
    _make_format(
        "gigachat35",
        ((f"{_GCML}invoke",), ("GCML", "invoke name=")),
        f'{_GCML}invoke name="NAME">ARGUMENTS{_GCML_END}invoke>',
        f'{_GCML}parameter name="KEY>VALUE{_GCML_END}parameter>',
        f'{_GCML}tool_calls>\n{_GCML}invoke name="NAME">\nARGUMENTS{_GCML_END}invoke>\n{_GCML_END}tool_calls>',
        f'{_GCML}parameter name="KEY" string="true">VALUE{_GCML_END}parameter>\n',
        begins=(f"{_GCML}tool_calls>",),
        ends=(f"{_GCML_END}tool_calls>",),
    ),
    _make_format(
        "step3",
        (("<steptml:invoke",), ("steptml:invoke",)),
        '<steptml:invoke name="NAME">ARGUMENTS</steptml:invoke>',
        '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
        f'{_STEP_CALLS}\n{_STEP_CALL}function{_STEP_SEP}<steptml:invoke name="NAME">\nARGUMENTS</steptml:invoke>'
        + "\n".join(_STEP_ENDS),
        '<steptml:parameter name="KEY">VALUE</steptml:parameter>\n',
        begins=(_STEP_CALLS, _STEP_CALL),
        inner=(_STEP_CALL, f"function{_STEP_SEP}"),
        within=(_STEP_SEP,),
        ends=(*_STEP_ENDS, _STEP_SEP),
        outer=_STEP_ENDS,
    ),
    _make_format(
        "minimax_m2",
        (("<minimax:tool_call>",), ("minimax:tool_call",)),
        '<invoke name="NAME">ARGUMENTS</invoke>',
        '<parameter name="KEY>VALUE</parameter>',
        '<minimax:tool_call>\n<invoke name="NAME">\nARGUMENTS</invoke>\n</minimax:tool_call>',
        '<parameter name="KEY">VALUE</parameter>\n',
        begins=("<minimax:tool_call>",),
        ends=("</minimax:tool_call>",),
    ),
    _make_format(
        "kimi_k3",
        (("<|open|>", "<|sep|>"),),
        '<|open|>call tool="NAME<|sep|>ARGUMENTS<|close|>call<|sep|>',
        '<|open|>argument key="KEY<|sep|>VALUE<|close|>argument<|sep|>',
        '<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>ARGUMENTS<|close|>call<|sep|>'
        "<|close|>tools<|sep|>",
        '<|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>',
        begins=("<|open|>tools<|sep|>",),
        within=KIMI_K3_TOKENS,
        ends=("<|close|>tools<|sep|>",),
        outer=(),
        around=KIMI_K3_CONTENT,
    ),
    _make_format(
        "dots",
        (("<dots_function_call>",),),
        '<invoke name="NAME">ARGUMENTS</invoke>',
        '<parameter name="KEY">VALUE</parameter>',
        '<dots_function_call>\n<invoke name="NAME">\nARGUMENTS</invoke>\n</dots_function_call>',
        '<parameter name="KEY">VALUE</parameter>\n',
        begins=("<dots_function_call>",),
        ends=("</dots_function_call>",),
    ),
    _make_format(
        "hy_v3",
        (("<tool_sep>", "<arg_key>"),),
        "NAME<tool_sep>ARGUMENTS</tool_call>",
        "<arg_key>KEY</arg_key> <arg_value>VALUE</arg_value>",
        "<tool_calls>\n<tool_call>NAME<tool_sep>\nARGUMENTS</tool_call>\n</tool_calls>",
        "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
        begins=("<tool_calls>", "<tool_call>"),
        inner=("<tool_call>",),
        within=("<tool_sep>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
        ends=("</tool_calls>",),
        outer=(),
    ),
    _make_format(
        "glm45",
        (("<arg_key>", "<arg_value>"),),
        "NAME ARGUMENTS</tool_call>",
        "<arg_key>KEY</arg_key> <arg_value>VALUE</arg_value>",
        "<tool_call>NAME\nARGUMENTS</tool_call>",
        "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        outer=(),
        aliases=("glm47", "ling3", "poolside_v1", "spark25"),
    ),
    _make_format(
        "solar_open2",
        (("<|tool_arg:start|>",),),
        "NAME ARGUMENTS<|tool_call:end|>",
        "<|tool_arg:start|>KEY<|tool_arg:value|>VALUE<|tool_arg:end|>",
        "<|tool_call:start|>NAME\nARGUMENTS<|tool_call:end|>",
        "<|tool_arg:start|>KEY<|tool_arg:value|>VALUE<|tool_arg:end|>\n",
        begins=("<|tool_call:start|>",),
        within=("<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>", "<|tool_call:end|>"),
    ),
    _make_format(
        "minicpm5",
        (("<function name=", "<param name="),),
        '<function name="NAME">ARGUMENTS</function>',
        '<param name="KEY">VALUE</param>',
        '<function name="NAME">ARGUMENTS</function>',
        '<param name="KEY">VALUE</param>',
        cdata=True,
    ),
    _make_format(
        "seed_oss",
        (("<seed:tool_call>",), ("seed:tool_call",)),
        "<function=NAME>ARGUMENTS</function>",
        "<parameter=KEY>VALUE</parameter>",
        "<seed:tool_call>\n<function=NAME>\nARGUMENTS</function>\n</seed:tool_call>",
        "<parameter=KEY>VALUE</parameter>\n",
        begins=("<seed:tool_call>",),
        ends=("</seed:tool_call>",),
    ),
    _make_format(
        "qwen3_coder",
        (("<function=", "<parameter="),),
        "<function=NAME>ARGUMENTS</function>",
        "<parameter=KEY>VALUE</parameter>",
        "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
        "<parameter=KEY>\nVALUE\n</parameter>\n",
        own_lines=True,
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        aliases=("qwen3_xml", "step3p5", "mimo"),
    ),
)
