"""How each family writes tool calls, written down a second time: from calls to text, for tests of the parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from server.text.tool_parsers.calls import merge_calls
from server.text.tool_parsers.formats import list_tool_formats
from server.text.tool_parsers.harmony import HarmonyParser
from server.text.tool_parsers.message_parser import MessageDelta, MessageParser, MessageText, join_parts
from server.text.tool_parsers.reasoning import list_reasoning_formats

Call: TypeAlias = tuple[str, dict[str, Any]]
Write: TypeAlias = Callable[[Sequence[Call]], str]

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": ["number", "null"]},
            "exact": {"type": "boolean"},
            "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
            "options": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        },
        "$defs": {"place": {"type": "object"}},
    },
    "mcp.server-1/look_up": {"type": "object", "properties": {}},
    "f": {"type": "object", "properties": {"text": {"type": "string"}}},
}


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def write_list(before: str, after: str, arguments: str = "arguments") -> Write:
    return lambda calls: before + dump([{"name": name, arguments: given} for name, given in calls]) + after


def write_each(
    before: str, between: str, after: str, separator: str = "\n", around: tuple[str, str] = ("", "")
) -> Write:
    def write(calls: Sequence[Call]) -> str:
        each = [before + name + between + dump(arguments) + after for name, arguments in calls]
        return around[0] + separator.join(each) + around[1]

    return write


def write_objects(before: str, after: str, separator: str, arguments: str = "arguments") -> Write:
    def write(calls: Sequence[Call]) -> str:
        return separator.join(before + dump({"name": name, arguments: given}) + after for name, given in calls)

    return write


def write_value(value: Any) -> str:
    return value if isinstance(value, str) else dump(value)


def write_tags(call: str, parameter: str, end: str, around: tuple[str, str], line: str = "\n") -> Write:
    """`call` and `parameter` are formats with a name, and with a key and a value."""

    def write(calls: Sequence[Call]) -> str:
        texts = []
        for name, arguments in calls:
            parts = [parameter.format(key, f"{line}{write_value(value)}{line}") for key, value in arguments.items()]
            texts.append("\n".join([call.format(name), *parts, end]))
        return around[0] + f"{around[1]}\n{around[0]}".join(texts) + around[1]

    return write


def write_glm(calls: Sequence[Call]) -> str:
    def pairs(arguments: dict[str, Any]) -> str:
        return "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{write_value(value)}</arg_value>\n"
            for key, value in arguments.items()
        )

    return "\n".join(f"<tool_call>{name}\n{pairs(arguments)}</tool_call>" for name, arguments in calls)


def write_hy(calls: Sequence[Call]) -> str:
    each = [
        f"<tool_call>{name}<tool_sep>\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{write_value(value)}</arg_value>\n" for key, value in given.items()
        )
        + "</tool_call>\n"
        for name, given in calls
    ]
    return "<tool_calls>\n" + "".join(each) + "</tool_calls>"


def write_solar(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<|tool_call:start|>{name}\n"
        + "".join(
            f"<|tool_arg:start|>{key}<|tool_arg:value|>{write_value(value)}<|tool_arg:end|>\n"
            for key, value in given.items()
        )
        + "<|tool_call:end|>"
        for name, given in calls
    )


def write_kimi_k3(calls: Sequence[Call]) -> str:
    """Write what `encoding_k3.py` of the model does; each argument says its type."""
    types = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}
    each = [
        f'<|open|>call tool="{name}" index="{index}"<|sep|>'
        + "".join(
            f'<|open|>argument key="{key}" type="{types.get(type(value), "null")}"<|sep|>'
            f"{write_value(value)}<|close|>argument<|sep|>"
            for key, value in given.items()
        )
        + "<|close|>call<|sep|>"
        for index, (name, given) in enumerate(calls, 1)
    ]
    return f"<|open|>tools<|sep|>{''.join(each)}<|close|>tools<|sep|>"


def write_minicpm(calls: Sequence[Call]) -> str:
    def write_parameter(key: str, value: Any) -> str:
        text = write_value(value)
        marked = f"<![CDATA[{text}]]>" if isinstance(value, str) and set("<&\n") & set(text) else text
        return f'<param name="{key}">{marked}</param>'

    return "\n".join(
        f'<function name="{name}">{"".join(write_parameter(*each) for each in given.items())}</function>'
        for name, given in calls
    )


def write_python(before: str, after: str, separator: str = ", ") -> Write:
    def write(calls: Sequence[Call]) -> str:
        each = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
        return before + separator.join(each) + after

    return write


def write_elements(calls: Sequence[Call]) -> str:
    """Write what MiniMax M3's chat template does; a null, which that leaves out, is a text."""
    mark = "]<]minimax[>["

    def write_any(value: Any) -> str:
        if isinstance(value, dict):
            return "".join(f"{mark}<{key}>{write_any(each)}{mark}</{key}>" for key, each in value.items())
        if isinstance(value, list):
            return "".join(f"{mark}<item>{write_any(each)}{mark}</item>" for each in value)
        return write_value(value)

    each = [f'{mark}<invoke name="{name}">{write_any(given)}{mark}</invoke>\n' for name, given in calls]
    return f"{mark}<tool_call>\n{''.join(each)}{mark}</tool_call>"


def write_gemma(before: str, quote: str, after: str) -> Write:
    """Write what Gemma's chat templates do: no quotes around keys, and texts between `quote`s."""

    def write_any(value: Any) -> str:
        if isinstance(value, str):
            return quote + value + quote
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{write_any(each)}" for key, each in sorted(value.items())) + "}"
        return f"[{','.join(map(write_any, value))}]" if isinstance(value, list) else dump(value)

    return lambda calls: "".join(f"{before}call:{name}{write_any(given)}{after}" for name, given in calls)


def write_harmony(calls: Sequence[Call]) -> str:
    each = [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dump(arguments)}<|call|>"
        for name, arguments in calls
    ]
    return "<|start|>assistant".join(each)


D = "\uff5c"
DEEPSEEK = (f"<{D}tool\u2581calls\u2581begin{D}>", f"<{D}tool\u2581calls\u2581end{D}>")
WRITERS: dict[str, Write] = {
    "openai": write_harmony,
    "kimi_k2": write_each(
        "<|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "deepseek_v32": write_tags(
        f'<{D}DSML{D}invoke name="{{}}">',
        f'<{D}DSML{D}parameter name="{{}}" string="true">{{}}</{D}DSML{D}parameter>',
        f"</{D}DSML{D}invoke>",
        (f"<{D}DSML{D}function_calls>\n", f"\n</{D}DSML{D}function_calls>"),
        line="",
    ),
    "deepseek_v3": write_each(
        f"<{D}tool\u2581call\u2581begin{D}>function<{D}tool\u2581sep{D}>",
        "\n```json\n",
        f"\n```<{D}tool\u2581call\u2581end{D}>",
        around=DEEPSEEK,
    ),
    "deepseek_v31": write_each(
        f"<{D}tool\u2581call\u2581begin{D}>", f"<{D}tool\u2581sep{D}>", f"<{D}tool\u2581call\u2581end{D}>", "", DEEPSEEK
    ),
    "gigachat35": write_tags(
        f'<{D}GCML{D}invoke name="{{}}">',
        f'<{D}GCML{D}parameter name="{{}}" string="true">{{}}</{D}GCML{D}parameter>',
        f"</{D}GCML{D}invoke>",
        (f"<{D}GCML{D}tool_calls>\n", f"\n</{D}GCML{D}tool_calls>"),
        line="",
    ),
    "dots": write_tags(
        '<invoke name="{}">',
        '<parameter name="{}">{}</parameter>',
        "</invoke>",
        ("<dots_function_call>\n", "\n</dots_function_call>"),
        line="",
    ),
    "step3": write_tags(
        '<steptml:invoke name="{}">',
        '<steptml:parameter name="{}">{}</steptml:parameter>',
        "</steptml:invoke>",
        (
            f"<{D}tool_calls_begin{D}>\n<{D}tool_call_begin{D}>function<{D}tool_sep{D}>",
            f"<{D}tool_call_end{D}>\n<{D}tool_calls_end{D}>",
        ),
        line="",
    ),
    "hy_v3": write_hy,
    "kimi_k3": write_kimi_k3,
    "solar_open2": write_solar,
    "minicpm5": write_minicpm,
    "minimax_m2": write_tags(
        '<invoke name="{}">',
        '<parameter name="{}">{}</parameter>',
        "</invoke>",
        ("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
        line="",
    ),
    "glm45": write_glm,
    "seed_oss": write_tags(
        "<function={}>",
        "<parameter={}>{}</parameter>",
        "</function>",
        ("<seed:tool_call>\n", "\n</seed:tool_call>"),
        line="",
    ),
    "qwen3_coder": write_tags(
        "<function={}>", "<parameter={}>{}</parameter>", "</function>", ("<tool_call>\n", "\n</tool_call>")
    ),
    "mistral_v11": write_each("[TOOL_CALLS]", "[ARGS]", "", ""),
    "mistral": write_list("[TOOL_CALLS]", ""),
    "phi4_mini_json": write_list("functools", ""),
    "granite": write_list("<|tool_call|>", ""),
    "lfm2": write_python("<|tool_call_start|>[", "]<|tool_call_end|>"),
    "olmo3": write_python("<function_calls>", "</function_calls>", "\n"),
    "gemma4": write_gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
    "minimax_m3": write_elements,
    "functiongemma": write_gemma("<start_function_call>", "<escape>", "<end_function_call>"),
    "nemotron_json": write_list("<TOOLCALL>", "</TOOLCALL>"),
    "hermes": write_objects("<tool_call>\n", "\n</tool_call>", "\n"),
    "functionary_v31_llama3": write_each("<function=", ">", "</function>", ""),
    "llama4_pythonic": write_python("[", "]"),
    "xlam": write_list("", ""),
    "cohere_command3": lambda calls: (
        "<|START_ACTION|>"
        + dump([{"tool_call_id": "0", "tool_name": name, "parameters": given} for name, given in calls])
        + "<|END_ACTION|>"
    ),
    "internlm": write_objects("<|action_start|><|plugin|>\n", "<|action_end|>", "\n", "parameters"),
    "longcat": write_objects("<longcat_tool_call>\n", "\n</longcat_tool_call>", "\n"),
    "minimax": lambda calls: (
        "<tool_calls>\n"
        + "".join(dump({"name": name, "arguments": given}) + "\n" for name, given in calls)
        + "</tool_calls>"
    ),
    "apertus": lambda calls: f"<|tools_prefix|>{dump([{name: given} for name, given in calls])}<|tools_suffix|>",
    "gigachat3": write_objects("<|function_call|>", "", "\n"),
    "jamba": write_list("<tool_calls>", "</tool_calls>"),
    "granite_20b_fc": write_objects("<function_call> ", "", "\n"),
    "llama3_json": write_objects("", "", "; ", "parameters"),
}
TAGGED = {  # values are text between tags
    "deepseek_v32",
    "dots",
    "gigachat35",
    "glm45",
    "hy_v3",
    "kimi_k3",
    "minicpm5",
    "minimax_m2",
    "qwen3_coder",
    "seed_oss",
    "solar_open2",
    "step3",
}
OWN_LINES = {"qwen3_coder"}  # line breaks around values are no part of them
PYTHONIC = {"lfm2", "llama4_pythonic", "olmo3"}  # names are those of Python
GEMMA = {"gemma4", "functiongemma"}  # keys are bare
ELEMENTS = {"minimax_m3"}  # keys are names of tags
IN_PARTS = WRITERS.keys() - TAGGED - PYTHONIC - GEMMA - ELEMENTS  # whose arguments are passed on in parts


def make_parser(family: str, reasoning: str | None = None, **how: Any) -> MessageParser:
    row = list_tool_formats()[family]
    make = HarmonyParser if row.harmony else MessageParser
    return make(row, list_reasoning_formats()[reasoning] if reasoning else None, schemas=SCHEMAS, **how)


def merge(deltas: Sequence[MessageDelta]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return content, reasoning and calls."""
    with_calls = [delta.tool_calls for delta in deltas if delta.tool_calls]
    assert all(len({call.number for call in each}) == len(each) for each in with_calls)
    calls = merge_calls(call for each in with_calls for call in each)
    assert [call.number for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    texts = "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas)
    return *texts, [(call.name, read_arguments(call.arguments)) for call in calls]


def read_arguments(text: str) -> Any:
    """Return the arguments of a call; as text, if they were cut off."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse(parser: MessageParser, pieces: Sequence[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    return merge([*map(parser.push, pieces), parser.finish()])


def parse_in_order(parser: MessageParser, pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Return the parts of a message in their order: of a text its channel and itself, of a call name and arguments."""
    deltas = [*map(parser.push, pieces), parser.finish()]
    parts = join_parts(part for delta in deltas for part in delta.parts)
    return [tuple(part) if isinstance(part, MessageText) else (part.name, part.arguments) for part in parts]
