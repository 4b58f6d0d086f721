"""Families that write calls in tags, each with a text before and after every argument."""

from __future__ import annotations

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
TAG_FORMATS = (
    ToolFormat(
        "deepseek_v32",
        ((f"{_DSML}invoke",), ("DSML", "invoke name=")),
        read_tagged(
            f'{_DSML}invoke name="NAME">ARGUMENTS{_DSML_END}invoke>',
            f'{_DSML}parameter name="KEY>VALUE{_DSML_END}parameter>',
            outer=(f"{_DSML_END}function_calls>", f"{_DSML_END}tool_calls>"),
        ),
        begins=(f"{_DSML}function_calls>", f"{_DSML}tool_calls>"),
        ends=(f"{_DSML_END}function_calls>", f"{_DSML_END}tool_calls>"),
        bare=(f'{_DSML}invoke name="',),
        form=CallForm(
            f'{_DSML}function_calls>\n{_DSML}invoke name="NAME">\nARGUMENTS{_DSML_END}invoke>\n'
            f"{_DSML_END}function_calls>",
            "tags",
            parameter=f'{_DSML}parameter name="KEY" string="true">VALUE{_DSML_END}parameter>\n',
        ),
        aliases=("deepseek_v4",),
    ),
    ToolFormat(
        "gigachat35",
        ((f"{_GCML}invoke",), ("GCML", "invoke name=")),
        read_tagged(
            f'{_GCML}invoke name="NAME">ARGUMENTS{_GCML_END}invoke>',
            f'{_GCML}parameter name="KEY>VALUE{_GCML_END}parameter>',
            outer=(f"{_GCML_END}tool_calls>",),
        ),
        begins=(f"{_GCML}tool_calls>",),
        ends=(f"{_GCML_END}tool_calls>",),
        bare=(f'{_GCML}invoke name="',),
        form=CallForm(
            f'{_GCML}tool_calls>\n{_GCML}invoke name="NAME">\nARGUMENTS{_GCML_END}invoke>\n{_GCML_END}tool_calls>',
            "tags",
            parameter=f'{_GCML}parameter name="KEY" string="true">VALUE{_GCML_END}parameter>\n',
        ),
    ),
    ToolFormat(
        "step3",
        (("<steptml:invoke",), ("steptml:invoke",)),
        read_tagged(
            '<steptml:invoke name="NAME">ARGUMENTS</steptml:invoke>',
            '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
            outer=_STEP_ENDS,
        ),
        begins=(_STEP_CALLS, _STEP_CALL),
        inner=(_STEP_CALL, f"function{_STEP_SEP}"),
        within=(_STEP_SEP,),
        ends=(*_STEP_ENDS, _STEP_SEP),
        bare=('<steptml:invoke name="',),
        form=CallForm(
            f'{_STEP_CALLS}\n{_STEP_CALL}function{_STEP_SEP}<steptml:invoke name="NAME">\nARGUMENTS</steptml:invoke>'
            + "\n".join(_STEP_ENDS),
            "tags",
            parameter='<steptml:parameter name="KEY">VALUE</steptml:parameter>\n',
        ),
    ),
    ToolFormat(
        "minimax_m2",
        (("<minimax:tool_call>",), ("minimax:tool_call",)),
        read_tagged(
            '<invoke name="NAME">ARGUMENTS</invoke>',
            '<parameter name="KEY>VALUE</parameter>',
            outer=("</minimax:tool_call>",),
        ),
        begins=("<minimax:tool_call>",),
        ends=("</minimax:tool_call>",),
        bare=('<invoke name="',),
        form=CallForm(
            '<minimax:tool_call>\n<invoke name="NAME">\nARGUMENTS</invoke>\n</minimax:tool_call>',
            "tags",
            parameter='<parameter name="KEY">VALUE</parameter>\n',
        ),
    ),
    ToolFormat(
        "kimi_k3",
        (("<|open|>", "<|sep|>"),),
        read_tagged(
            '<|open|>call tool="NAME<|sep|>ARGUMENTS<|close|>call<|sep|>',
            '<|open|>argument key="KEY<|sep|>VALUE<|close|>argument<|sep|>',
        ),
        begins=("<|open|>tools<|sep|>",),
        within=KIMI_K3_TOKENS,
        ends=("<|close|>tools<|sep|>",),
        around=KIMI_K3_CONTENT,
        bare=('<|open|>call tool="',),
        form=CallForm(
            '<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>ARGUMENTS<|close|>call<|sep|>'
            "<|close|>tools<|sep|>",
            "tags",
            parameter='<|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>',
        ),
    ),
    ToolFormat(
        "dots",
        (("<dots_function_call>",),),
        read_tagged(
            '<invoke name="NAME">ARGUMENTS</invoke>',
            '<parameter name="KEY">VALUE</parameter>',
            outer=("</dots_function_call>",),
        ),
        begins=("<dots_function_call>",),
        ends=("</dots_function_call>",),
        bare=('<invoke name="',),
        form=CallForm(
            '<dots_function_call>\n<invoke name="NAME">\nARGUMENTS</invoke>\n</dots_function_call>',
            "tags",
            parameter='<parameter name="KEY">VALUE</parameter>\n',
        ),
    ),
    ToolFormat(
        "hy_v3",
        (("<tool_sep>", "<arg_key>"),),
        read_tagged("NAME<tool_sep>ARGUMENTS</tool_call>", "<arg_key>KEY</arg_key> <arg_value>VALUE</arg_value>"),
        begins=("<tool_calls>", "<tool_call>"),
        inner=("<tool_call>",),
        within=("<tool_sep>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
        ends=("</tool_calls>",),
        form=CallForm(
            "<tool_calls>\n<tool_call>NAME<tool_sep>\nARGUMENTS</tool_call>\n</tool_calls>",
            "tags",
            parameter="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
        ),
    ),
    ToolFormat(
        "glm45",
        (("<arg_key>", "<arg_value>"),),
        read_tagged("NAME ARGUMENTS</tool_call>", "<arg_key>KEY</arg_key> <arg_value>VALUE</arg_value>"),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        form=CallForm(
            "<tool_call>NAME\nARGUMENTS</tool_call>",
            "tags",
            parameter="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
        ),
        aliases=("glm47", "ling3", "poolside_v1", "spark25"),
    ),
    ToolFormat(
        "solar_open2",
        (("<|tool_arg:start|>",),),
        read_tagged("NAME ARGUMENTS<|tool_call:end|>", "<|tool_arg:start|>KEY<|tool_arg:value|>VALUE<|tool_arg:end|>"),
        begins=("<|tool_call:start|>",),
        within=("<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>", "<|tool_call:end|>"),
        form=CallForm(
            "<|tool_call:start|>NAME\nARGUMENTS<|tool_call:end|>",
            "tags",
            parameter="<|tool_arg:start|>KEY<|tool_arg:value|>VALUE<|tool_arg:end|>\n",
        ),
    ),
    ToolFormat(
        "minicpm5",
        (("<function name=", "<param name="),),
        read_tagged('<function name="NAME">ARGUMENTS</function>', '<param name="KEY">VALUE</param>', cdata=True),
        bare=('<function name="',),
        form=CallForm(
            '<function name="NAME">ARGUMENTS</function>', "tags", parameter='<param name="KEY">VALUE</param>'
        ),
    ),
    ToolFormat(
        "seed_oss",
        (("<seed:tool_call>",), ("seed:tool_call",)),
        read_tagged(
            "<function=NAME>ARGUMENTS</function>",
            "<parameter=KEY>VALUE</parameter>",
            outer=("</seed:tool_call>",),
        ),
        begins=("<seed:tool_call>",),
        ends=("</seed:tool_call>",),
        bare=("<function=",),
        form=CallForm(
            "<seed:tool_call>\n<function=NAME>\nARGUMENTS</function>\n</seed:tool_call>",
            "tags",
            parameter="<parameter=KEY>VALUE</parameter>\n",
        ),
    ),
    ToolFormat(
        "qwen3_coder",
        (("<function=", "<parameter="),),
        read_tagged(
            "<function=NAME>ARGUMENTS</function>",
            "<parameter=KEY>VALUE</parameter>",
            outer=("</tool_call>",),
            own_lines=True,
        ),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        bare=("<function=",),
        form=CallForm(
            "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
            "tags",
            parameter="<parameter=KEY>\nVALUE\n</parameter>\n",
        ),
        aliases=("qwen3_xml", "step3p5", "mimo"),
    ),
)
