"""Families that write calls as in Python, or in a notation of their own."""

from __future__ import annotations

from server.text.tool_parsers.syntaxes.gemma import read_gemma
from server.text.tool_parsers.syntaxes.pythonic import read_bare_llama4, read_pythonic, read_pythonic_until
from server.text.tool_parsers.tool_format import CallForm, ToolFormat

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
        (("<function_calls>", "<functions>"), ("<function_calls>", "function_calls")),
        read_pythonic_until("</function_calls>"),
        begins=("<function_calls>",),
        within=("</function_calls>",),
        form=CallForm(
            "NAME(ARGUMENTS)", "python", before="<function_calls>\n", between="\n", after="\n</function_calls>"
        ),
    ),
    ToolFormat(
        "gemma4",
        (("<|tool_call>", "<tool_call|>"),),
        read_gemma('<|"|>'),
        begins=("<|tool_call>",),
        within=('<|"|>',),
        ends=("<tool_call|>",),
        form=CallForm("<|tool_call>call:NAME{ARGUMENTS}<tool_call|>", "gemma", quote='<|"|>'),
    ),
    ToolFormat(
        "functiongemma",
        (("<start_function_call>",),),
        read_gemma("<escape>"),
        begins=("<start_function_call>",),
        within=("<escape>",),
        ends=("<end_function_call>",),
        form=CallForm("<start_function_call>call:NAME{ARGUMENTS}<end_function_call>", "gemma", quote="<escape>"),
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
