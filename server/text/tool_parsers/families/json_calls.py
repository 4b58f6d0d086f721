"""Families that write the arguments of a call as a JSON object."""

from __future__ import annotations

from server.text.tool_parsers.calls import make_kimi_id, make_mistral_id
from server.text.tool_parsers.reasoning import HARMONY_MARKERS
from server.text.tool_parsers.syntaxes.json_calls import (
    read_bare_json,
    read_deepseek,
    read_json,
    read_json_objects,
    read_json_until,
    read_kimi,
    read_mistral,
    read_name_and_json,
    read_named_objects,
    read_only_json,
)
from server.text.tool_parsers.tool_format import CallForm, ToolFormat, make_list_form

_OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
_PARAMETERS = '{"name": "NAME", "parameters": ARGUMENTS}'
_COHERE = '{"tool_call_id": "0", "tool_name": "NAME", "parameters": ARGUMENTS}'
_BAR = "\uff5c"  # a wide vertical bar, which DeepSeek has in its special tokens
_DEEPSEEK_CALLS = f"<{_BAR}tool\u2581calls\u2581begin{_BAR}>"
_DEEPSEEK_CALL = f"<{_BAR}tool\u2581call\u2581begin{_BAR}>"
_DEEPSEEK_SEP = f"<{_BAR}tool\u2581sep{_BAR}>"
_DEEPSEEK_BEGINS = (
    _DEEPSEEK_CALLS,
    _DEEPSEEK_CALL,
    f"<{_BAR}tool_calls_begin{_BAR}>",
    f"<{_BAR}tool calls begin{_BAR}>",
)
_DEEPSEEK_ENDS = (f"<{_BAR}tool\u2581call\u2581end{_BAR}>", f"<{_BAR}tool\u2581calls\u2581end{_BAR}>")
JSON_FORMATS = (
    ToolFormat(
        "openai",
        (("<|channel|>", "<|message|>"),),
        read_json,
        begins=HARMONY_MARKERS,
        form=CallForm("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>"),
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
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS"
            "<|tool_call_end|><|tool_calls_section_end|>"
        ),
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
            f"{_DEEPSEEK_CALLS}{_DEEPSEEK_CALL}function{_DEEPSEEK_SEP}NAME\n```json\nARGUMENTS\n```{''.join(_DEEPSEEK_ENDS)}"
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
        form=CallForm(f"{_DEEPSEEK_CALLS}{_DEEPSEEK_CALL}NAME{_DEEPSEEK_SEP}ARGUMENTS{''.join(_DEEPSEEK_ENDS)}"),
    ),
    ToolFormat(
        "mistral_v11",
        (("[TOOL_CALLS]", "[ARGS]"),),
        read_mistral,
        begins=("[TOOL_CALLS]",),
        within=("[ARGS]", "[CALL_ID]"),
        make_id=make_mistral_id,
        form=CallForm("[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
    ),
    ToolFormat(
        "mistral",
        (("[TOOL_CALLS]",),),
        read_mistral,
        begins=("[TOOL_CALLS]",),
        within=("[ARGS]", "[CALL_ID]"),
        make_id=make_mistral_id,
        form=make_list_form(_OBJECT, "[TOOL_CALLS]"),
    ),
    ToolFormat(
        "phi4_mini_json",
        (("<|tool|>", "<|/tool|>"), ("functools[",)),
        read_json,
        begins=("<|tool_call|>", "functools"),
        ends=("<|/tool_call|>",),
        form=make_list_form(_OBJECT, "<|tool_call|>", "<|/tool_call|>"),
        writes_calls=True,
        aliases=("phi4_mini",),
    ),
    ToolFormat(
        "granite",
        (("<|tool_call|>",),),
        read_json,
        begins=("<|tool_call|>", "<tool_call>"),
        form=make_list_form(_OBJECT, "<|tool_call|>"),
        writes_calls=True,
        ends=("</tool_call>",),
    ),
    ToolFormat(
        "nemotron_json",
        (("<TOOLCALL>",),),
        read_json,
        begins=("<TOOLCALL>",),
        ends=("</TOOLCALL>",),
        form=make_list_form(_OBJECT, "<TOOLCALL>", "</TOOLCALL>"),
    ),
    ToolFormat(
        "cohere_command3",
        (("<|START_ACTION|>",),),
        read_json,
        begins=("<|START_ACTION|>",),
        ends=("<|END_ACTION|>",),
        form=make_list_form(_COHERE, "<|START_ACTION|>", "<|END_ACTION|>"),
        aliases=("cohere_command4",),
    ),
    ToolFormat(
        "apertus",
        (("<|tools_prefix|>",),),
        read_named_objects,
        begins=("<|tools_prefix|>",),
        ends=("<|tools_suffix|>",),
        form=make_list_form('{"NAME": ARGUMENTS}', "<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    ToolFormat(
        "gigachat3",
        (("<|function_call|>",), ("function call", "<|role_sep|>")),
        read_json,
        begins=("<|function_call|>", "function call<|role_sep|>"),
        within=("<|role_sep|>",),
        form=CallForm(f"<|function_call|>{_OBJECT}"),
    ),
    ToolFormat(
        "internlm",
        (("<|action_start|>",),),
        read_json,
        begins=("<|action_start|>",),
        inner=("<|plugin|>",),
        ends=("<|action_end|>",),
        form=CallForm(f"<|action_start|><|plugin|>\n{_PARAMETERS}<|action_end|>"),
        aliases=("interns1",),
    ),
    ToolFormat(
        "longcat",
        (("<longcat_tool_call>",),),
        read_json,
        begins=("<longcat_tool_call>",),
        ends=("</longcat_tool_call>",),
        form=CallForm(f"<longcat_tool_call>\n{_OBJECT}\n</longcat_tool_call>"),
    ),
    ToolFormat(
        "minimax",
        (("<tool_calls>", "<beginning_of_sentence>"),),
        read_json_until("</tool_calls>"),
        begins=("<tool_calls>",),
        ends=("</tool_calls>",),
        form=CallForm(_OBJECT, before="<tool_calls>\n", between="\n", after="\n</tool_calls>"),
        aliases=("minimax_m1",),
    ),
    ToolFormat(
        "jamba",
        (("<tool_calls>",),),
        read_json_until("</tool_calls>"),
        begins=("<tool_calls>",),
        ends=("</tool_calls>",),
        form=make_list_form(_OBJECT, "<tool_calls>", "</tool_calls>"),
        aliases=("hunyuan_a13b",),
    ),
    ToolFormat(
        "hermes",
        (("<tool_call>",),),
        read_json_objects,
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        bare=("```", "{"),
        read_bare=read_only_json,
        bare_at_start=True,
        form=CallForm(f"<tool_call>\n{_OBJECT}\n</tool_call>"),
        aliases=("qwen25", "qwen3", "granite4", "ernie45", "trinity"),
    ),
    ToolFormat(
        "functionary_v31_llama3",
        (("<function=example_function_name>",), ("<function=", "</function>")),
        read_name_and_json(">"),
        begins=("<function=",),
        ends=("</function>",),
        form=CallForm("<function=NAME>ARGUMENTS</function>"),
    ),
    ToolFormat(
        "xlam",
        (("Salesforce xLAM",),),
        read_json,
        begins=("<tool_call>", "[TOOL_CALLS]"),
        ends=("</tool_call>",),
        bare=("[",),
        read_bare=read_bare_json,
        bare_at_start=True,
        form=make_list_form(_OBJECT),
    ),
    ToolFormat(
        "llama3_json",
        (("<|python_tag|>",), ("<|start_header_id|>", '"parameters"'), ("<|header_start|>", '"parameters"')),
        read_json,
        begins=("<|python_tag|>",),
        ends=(";", "<|eom_id|>"),
        bare=("{",),
        read_bare=read_bare_json,
        form=CallForm(_PARAMETERS),
        aliases=("llama3", "llama4_json"),
    ),
    ToolFormat(
        "granite_20b_fc",
        (("<function_call>",),),
        read_json,
        begins=("<function_call>",),
        form=CallForm(f"<function_call> {_OBJECT}"),
        aliases=("granite-20b-fc",),
    ),
)
