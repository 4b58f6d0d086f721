"""Families that write calls as in Python, or in a notation of their own."""

from __future__ import annotations

from server.text.tool_parsers.syntaxes.elements import read_elements
from server.text.tool_parsers.syntaxes.gemma import read_gemma
from server.text.tool_parsers.syntaxes.pythonic import read_bare_llama4, read_pythonic, read_pythonic_until
from server.text.tool_parsers.tool_format import CallForm, ToolFormat

_MARK = "]<]minimax[>["  # before each tag of MiniMax M3's
NOTATION_FORMATS = (
    ToolFormat(
        "lfm2",
        (("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [", "keep_past_thinking")),
        read_pythonic,
        begins=("<|tool_call_start|>",),
        ends=("<|tool_call_end|>",),
        form=CallForm(
            "NAME(ARGUMENTS)", "python", before="<|tool_call_start|>[", between=", ", after="]<|tool_call_end|>"
        ),
    ),
    ToolFormat(
        "olmo3",
        (("<function_calls>",),),
        read_pythonic_until("</function_calls>"),
        begins=("<function_calls>",),
        within=("</function_calls>",),
        form=CallForm("NAME(ARGUMENTS)", "python", before="<function_calls>", between="\n", after="</function_calls>"),
    ),
    ToolFormat(
        "gemma4",
        (("<|tool_call>", "<tool_call|>"),),
        read_gemma('<|"|>'),
        begins=("<|tool_call>",),
        within=('<|"|>',),
        ends=("<tool_call|>",),
        form=CallForm("<|tool_call>call:NAME{ARGUMENTS}<tool_call|>", "gemma", mark='<|"|>'),
    ),
    ToolFormat(
        "functiongemma",
        (("<start_function_call>",),),
        read_gemma("<escape>"),
        begins=("<start_function_call>",),
        within=("<escape>",),
        ends=("<end_function_call>",),
        form=CallForm("<start_function_call>call:NAME{ARGUMENTS}<end_function_call>", "gemma", mark="<escape>"),
    ),
    ToolFormat(
        "minimax_m3",
        ((_MARK,),),
        read_elements(_MARK),
        begins=(f"{_MARK}<tool_call>",),
        within=(_MARK,),
        ends=(f"{_MARK}</tool_call>",),
        bare=(f'{_MARK}<invoke name="',),
        form=CallForm(
            f'{_MARK}<tool_call>\n{_MARK}<invoke name="NAME">ARGUMENTS{_MARK}</invoke>\n{_MARK}</tool_call>',
            "elements",
            mark=_MARK,
        ),
    ),
    ToolFormat(
        "llama4_pythonic",
        (("<|python_start|>",), ("[func_name1(",)),
        read_pythonic,
        begins=("<|python_start|>",),
        ends=("<|python_end|>",),
        bare=("[", "{"),
        read_bare=read_bare_llama4,
        bare_at_start=True,
        form=CallForm("NAME(ARGUMENTS)", "python", before="[", between=", ", after="]"),
        aliases=("pythonic",),
    ),
)
