"""Chat templates of public models with tools: rendered as by transformers, and their own calls are found again.

A template that writes an assistant's tool calls into a prompt writes them as the model does: so it is an independent
writer for what the parsers read.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from server.text.chat.template import ChatTemplate, ChatTemplateError
from server.text.tool_parsers.formats import find_tool_format
from server.text.tool_parsers.harmony import HarmonyParser
from server.text.tool_parsers.message_parser import MessageParser
from server.text.tool_parsers.reasoning import find_reasoning_format
from tests.text.test_chat import directory
from tests.text.tool_parsers.writers import parse

TEMPLATES = {file.stem: file.read_text() for file in (Path(__file__).parent / "templates/tools").glob("*.jinja")}
TEMPLATES["llama3"] = (Path(__file__).parent / "templates/llama3.jinja").read_text()
FAMILIES = {  # the rows of tool calls and of reasoning, by template
    "apertus": ("apertus", "apertus"),
    "apriel15": ("jamba", None),
    "apriel16": ("jamba", None),
    "deepseek_r1_distill": ("deepseek_v3", "qwen3"),
    "deepseek_v31": ("deepseek_v31", "qwen3"),
    "deepseek_v32": ("deepseek_v32", "qwen3"),
    "devstral": ("mistral_v11", None),
    "functionary31": ("functionary_v31_llama3", None),
    "functiongemma": ("functiongemma", None),
    "gemma4": ("gemma4", "gemma4"),
    "gigachat3": ("gigachat3", None),
    "gigachat31": ("gigachat3", None),
    "glm47": ("glm45", "qwen3"),
    "qwen35": ("qwen3_coder", "qwen3"),
    "glm46": ("glm45", "qwen3"),
    "gpt_oss": ("openai", "openai_gptoss"),
    "granite_20b_fc": ("granite_20b_fc", None),
    "granite33": ("granite", "qwen3"),
    "granite4": ("hermes", None),
    "hermes2_pro": ("hermes", None),
    "internlm2": ("internlm", None),
    "kimi_k2": ("kimi_k2", None),
    "llama3": ("llama3_json", None),
    "minimax_m1": ("minimax", None),
    "minimax_m2": ("minimax_m2", "qwen3"),
    "ministral3": ("mistral_v11", "mistral"),
    "mistral_nemo": ("mistral", None),
    "mistral_small32": ("mistral_v11", None),
    "olmo31": ("olmo3", None),
    "phi4_mini": ("phi4_mini_json", None),
    "qwen25": ("hermes", None),
    "qwen3": ("hermes", "qwen3"),
    "qwen3_coder": ("qwen3_coder", None),
    "qwq": ("hermes", "qwen3"),
    "seed_oss": ("seed_oss", "seed_oss"),
    "step35": ("qwen3_coder", "qwen3"),
    "xlam_llama": ("xlam", None),
    "xlam_qwen": ("xlam", None),
}
WITHOUT_TOOLS = {"deepseek_r1_distill", "deepseek_v31"}  # these read calls in messages, but take no tools
# What transformers must be given, as the template wants it: arguments as text, and the content beside calls
ARGUMENTS_AS_TEXT = {"deepseek_r1_distill", "deepseek_v31"}
CONTENT = {"deepseek_v31": "", "devstral": "", "qwen3": "", "qwq": ""}
BY_US_ONLY = {"deepseek_r1_distill"}  # it writes calls only beside a content that is null, which transformers drops
WITH_ONE_CALL_ONLY = {"llama3", "gpt_oss", "gigachat3", "gigachat31"}  # of a message
TOOLS_WITH_A_SYSTEM_MESSAGE = {"functiongemma"}  # and without one it leaves them out
NO_PLACE_FOR_CALLS = {"granite33": ("<|tool_call|>", ""), "phi4_mini": ("<|tool_call|>", "<|/tool_call|>")}

QUESTION = "What is the weather in Z\u00fcrich, and what time is it?"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Return the "weather" of a place \u2603.',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of the place."},
                    "days": {"type": "integer", "description": "Number of days."},
                    "units": {"type": "string", "enum": ["c", "f"], "description": "Units."},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "Return the time.",
            "parameters": {
                "type": "object",
                "properties": {"zone": {"type": "string", "description": "a"}},
                "required": [],
            },
        },
    },
]
CALLS = [("get_weather", {"city": '\nZ\u00fcrich "a" <b>\n{x}\n', "days": 3}), ("get_time", {"zone": "CET"})]


def call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": f"abcdefgh{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def said(calls: list[tuple[str, dict[str, Any]]], **content: Any) -> dict[str, Any]:
    made = [call(number, name, arguments) for number, (name, arguments) in enumerate(calls)]
    return {"role": "assistant", "tool_calls": made, **content}


def answers(calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": f"abcdefgh{number}", "name": name, "content": f'{{"answer": {number}}}'}
        for number, (name, _) in enumerate(calls)
    ]


USER = {"role": "user", "content": QUESTION}
SYSTEM = {"role": "system", "content": "Be brief."}


def conversations(template: str) -> list[list[dict[str, Any]]]:
    calls = CALLS[:1] if template in WITH_ONE_CALL_ONLY else CALLS
    plain = [[USER], [SYSTEM, USER], [USER, {"role": "assistant", "content": "Fine."}, USER]]
    if template in BY_US_ONLY:
        return plain
    return [
        *plain,
        [USER, said(calls), *answers(calls)],
        [SYSTEM, USER, said(calls), *answers(calls), {"role": "assistant", "content": "Fine."}, USER],
        [USER, said(calls, content="I look.\n"), *answers(calls)],
    ]


def for_transformers(template: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the form that the template is made for."""
    if "tool_calls" not in message:
        return message
    calls = [each["function"] for each in message["tool_calls"]]
    if template in NO_PLACE_FOR_CALLS:
        before, after = NO_PLACE_FOR_CALLS[template]
        listed = before + json.dumps(calls, ensure_ascii=False) + after
        return {"role": "assistant", "content": message.get("content", "") + listed}
    if template in CONTENT and not message.get("content"):
        message = message | {"content": CONTENT[template]}
    if template in ARGUMENTS_AS_TEXT:
        texts = [json.dumps(each["arguments"], ensure_ascii=False) for each in calls]
        made = [call(number, each["name"], text) for number, (each, text) in enumerate(zip(calls, texts, strict=True))]
        message = message | {"tool_calls": made}
    return message


class Rendered:
    """A template as transformers and we render it."""

    def __init__(self, path: Path, template: str) -> None:
        (path / "chat_template.jinja").write_text(TEMPLATES[template])
        self._template = template
        self._theirs = AutoTokenizer.from_pretrained(path)
        self.ours = ChatTemplate.from_directory(path)

    def by_transformers(self, messages: list[dict[str, Any]], **how: Any) -> str | None:
        given = [for_transformers(self._template, message) for message in messages]
        if self._template == "phi4_mini" and (tools := how.pop("tools", None)):
            given = given if given[0]["role"] == "system" else [{"role": "system", "content": ""}, *given]
            listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
            given = [given[0] | {"tools": listed}, *given[1:]]
        try:
            return str(self._theirs.apply_chat_template(given, tokenize=False, **how))
        except Exception:  # jinja's, ValueError, TypeError
            return None

    def by_us(self, messages: list[dict[str, Any]], **how: Any) -> str | None:
        try:
            return self.ours.render(messages, **how)
        except ChatTemplateError:
            return None


@pytest.fixture(params=sorted(TEMPLATES), scope="module")
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def rendered(template: str, tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return Rendered(directory(tmp_path_factory.mktemp(template)), template)


@pytest.mark.parametrize(
    "variables", [{}, {"enable_thinking": False}, {"thinking": True}, {"date_string": "1 May 1900"}], ids=str
)
def test_tools_are_rendered_as_by_transformers(template: str, rendered: Rendered, variables: dict[str, Any]) -> None:
    """Variables that the template may not know are given with every second conversation."""
    compared = 0
    step, choices = (1, (None, TOOLS[:1], TOOLS)) if not variables else (2, (None, TOOLS))
    for messages in conversations(template)[::step]:
        for tools in choices:
            how: dict[str, Any] = {"add_generation_prompt": True, "tools": tools, **variables}
            theirs = rendered.by_transformers(messages, **how)
            assert rendered.by_us(messages, **how) == theirs
            compared += theirs is not None
            has_place = template not in TOOLS_WITH_A_SYSTEM_MESSAGE or messages[0] is SYSTEM
            if tools and theirs and template not in WITHOUT_TOOLS and has_place:
                assert "get_weather" in theirs
            if theirs and any("tool_calls" in message for message in messages):
                assert "CET" in theirs or template in WITH_ONE_CALL_ONLY
    assert compared >= (3 if variables else 9), "or nothing would be compared"


def test_documents_are_rendered_as_by_transformers(template: str, rendered: Rendered) -> None:
    documents = [{"title": "A", "text": "The text.", "doc_id": 1}]
    theirs = rendered.by_transformers([USER], documents=documents, add_generation_prompt=True)
    assert rendered.by_us([USER], documents=documents) == theirs
    if theirs is not None and "The text." in theirs:
        assert rendered.ours.render_strict([USER], documents=documents) == theirs
    elif "documents" not in TEMPLATES[template]:
        with pytest.raises(ChatTemplateError, match="no place for documents"):
            rendered.ours.render_strict([USER], documents=documents)


def test_tools_without_a_place_are_refused(template: str, rendered: Rendered) -> None:
    if template in WITHOUT_TOOLS:
        with pytest.raises(ChatTemplateError, match="no place for tools"):
            rendered.ours.render_strict([USER], tools=TOOLS)
    else:
        messages = [SYSTEM, USER] if template in TOOLS_WITH_A_SYSTEM_MESSAGE else [USER]
        assert "get_weather" in rendered.ours.render_strict(messages, tools=TOOLS)


def test_the_family_is_known_by_the_template(template: str) -> None:
    tools, reasoning = FAMILIES[template]
    source = TEMPLATES[template]
    assert getattr(find_tool_format(source), "name", None) == tools
    assert getattr(find_reasoning_format(source), "name", None) == reasoning


def test_the_templates_own_calls_are_found(template: str, rendered: Rendered) -> None:
    calls = CALLS[:1] if template in WITH_ONE_CALL_ONLY else CALLS
    render = rendered.by_us if template in BY_US_ONLY else rendered.by_transformers
    prompt = render([USER], tools=TOOLS, add_generation_prompt=True)
    written = render([USER, said(calls)], tools=TOOLS, add_generation_prompt=False)
    assert prompt is not None
    assert written is not None
    text = written.removeprefix(prompt)
    if text == written:  # the prompt ends otherwise where the model is to go on
        text = written[written.rindex(QUESTION) + len(QUESTION) :]
    tools = find_tool_format(TEMPLATES[template])
    assert tools is not None
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    make = HarmonyParser if tools.harmony else MessageParser
    for pieces in ([text], list(text)):
        assert parse(make(tools, None, schemas=schemas), pieces)[2] == calls


def test_calls_beside_a_text_are_written(template: str, rendered: Rendered) -> None:
    """Also by templates that write either; some leave out the text, with transformers, too."""
    calls = CALLS[:1] if template in WITH_ONE_CALL_ONLY else CALLS
    text = rendered.by_us([USER, said(calls, content="I look."), *answers(calls)], tools=TOOLS)
    assert text is not None
    assert "get_weather" in text.split(QUESTION)[-1]
    if template in BY_US_ONLY:
        assert "I look." in text


@pytest.mark.parametrize("tools", ["", "{{ tools }}", "{% for tool in tools or [] %}{{ tool }}{% endfor %}"])
@pytest.mark.parametrize("arguments", ["arguments", "arguments | tojson"])
def test_a_template_that_writes_either_text_or_calls_gets_two_messages(tools: str, arguments: str) -> None:
    """Whether it writes the tools as JSON or as Python does."""
    source = tools + (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
        "{% for c in m.tool_calls %}{{ '[' + c.function.name + ' ' + (c.function."
        + arguments
        + ") + ']' }}{% endfor %}"
        "{% else %}{{ m.role[0] + ':' + m.content + '|' }}{% endif %}{% endfor %}"
    )
    template = ChatTemplate({"default": source}, {})
    messages = [
        {"role": "user", "content": "Hi"},
        said([("get_time", {"zone": "CET"})], content="I look.", reasoning="R"),
    ]
    assert template.render(messages, tools=TOOLS).endswith('u:Hi|a:I look.|[get_time {"zone": "CET"}]')
    for content in ({}, {"content": None}, {"content": ""}):
        messages = [messages[0], said([("get_time", {"zone": "CET"})], **content)]
        assert template.render(messages, tools=TOOLS).endswith('u:Hi|[get_time {"zone": "CET"}]')


def test_thinking_can_be_switched_off(tmp_path: Path) -> None:
    """The prompt ends outside of the reasoning, so that the whole message is content."""
    ours = Rendered(directory(tmp_path), "qwen3").ours
    reasoning = find_reasoning_format(TEMPLATES["qwen3"])
    assert reasoning is not None
    prompt = ours.render([USER], enable_thinking=False)
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert not reasoning.is_open(prompt)
    assert ours.render([USER]).endswith("<|im_start|>assistant\n")


def draw_instructions(rng: random.Random) -> list[dict[str, Any]]:
    """Return what agents begin a conversation with: several messages of system and developer, some of them empty."""
    roles = rng.choices(["system", "developer"], k=rng.randint(1, 3))
    contents: list[Any] = [
        rng.choice([f"Rule{number}.", [{"type": "text", "text": f"Rule{number}."}], "", None])
        for number in range(len(roles))
    ]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]


def test_drawn_instructions_reach_the_prompt(template: str, rendered: Rendered, rng: random.Random) -> None:
    """All of them, in their order, wherever the template takes a system's message at all."""
    takes_system = rendered.by_us([{"role": "system", "content": "Rule0."}, USER])
    if takes_system is None or "Rule0." not in takes_system:
        return
    for _ in range(20):
        instructions = draw_instructions(rng)
        text = rendered.ours.render_strict([*instructions, USER, {"role": "assistant", "content": "Fine."}, USER])
        written = [f"Rule{number}." for number, each in enumerate(instructions) if each["content"]]
        assert [text.count(rule) for rule in written] == [1] * len(written), (instructions, text)
        assert sorted(written, key=text.index) == written
        assert not any(word in text for word in ("None", "'type'"))
