"""Chat templates are found and rendered as transformers does: the same prompt, and an error where it has one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import AutoTokenizer

from config.errors import SettingsError
from server.models.formats.gguf_file import read_header
from server.text.chat.template import ChatTemplate, ChatTemplateError
from server.text.errors import TextTooLong
from server.text.gguf_tokenizer import make_tokenizer
from server.text.tokenizer import Tokenizer
from tests.models.gguf_files import add_byte_level, write_to
from tests.text.tiny_tokenizers import byte_level

TEMPLATES = {file.stem: file.read_text() for file in (Path(__file__).parent / "templates").glob("*.jinja")}
TINY = Path(__file__).parents[2] / "server" / "models" / "tiny"
Messages = list[dict[str, Any]]

CALL = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1, "b": [True, None, "<é>"]}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TEXT = {"type": "text", "text": "A line."}
CONVERSATIONS: dict[str, Messages] = {
    "question": [{"role": "user", "content": "  Why is 1 < 2 & 'so'?\n"}],
    "dialogue": [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": "Hello \N{WAVING HAND SIGN}"},
        {"role": "assistant", "content": " Hi! \n"},
        {"role": "user", "content": "</s> {{ 1 + 1 }} <|im_end|>"},
    ],
    "answered": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two,\n three  "}],
    "nothing said": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    "nulls": [{"role": "user", "content": "x", "name": None}, {"role": "assistant", "content": None}],
    "reasoning": [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two.", "reasoning_content": "\nOne and one.\n"},
    ],
    "reasoning by another name": [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two.", "reasoning": "One and one.", "tool_calls": None},
    ],
    "tools": [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ],
    "two users": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "developer": [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}],
}


def directory(path: Path, config: dict[str, Any] | None = None, **files: str) -> Path:
    byte_level().save(str(path / "tokenizer.json"))
    written: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    written |= {"eos_token": {"__type": "AddedToken", "content": "</s>"}}
    (path / "tokenizer_config.json").write_text(json.dumps(written | (config or {})))
    for name, text in files.items():
        file = path / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return path


class Both:
    """A model's directory, read by transformers and by us."""

    def __init__(self, path: Path) -> None:
        self._theirs = AutoTokenizer.from_pretrained(path)
        self._ours = ChatTemplate.from_directory(path)

    def render(self, messages: Messages, **how: Any) -> tuple[str | None, str | None]:
        """What they and we make of messages; None is an error."""
        return self._by_transformers(messages, **how), self._by_us(messages, **how)

    def _by_transformers(self, messages: Messages, **how: Any) -> str | None:
        try:
            return str(self._theirs.apply_chat_template(messages, tokenize=False, **how))
        except Exception:  # jinja's, ValueError, TypeError
            return None

    def _by_us(self, messages: Messages, **how: Any) -> str | None:
        try:
            return self._ours.render(messages, **how)
        except ChatTemplateError:
            return None


WAYS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": False, "continue_final_message": True},
    {"add_generation_prompt": True, "enable_thinking": False, "date_string": "1 May 1900"},
    {"add_generation_prompt": True, "bos_token": "<mine>"},
    {"add_generation_prompt": True, "tools": [TOOL]},
    {"add_generation_prompt": True, "tools": []},
    {"add_generation_prompt": True, "continue_final_message": True},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("template", TEMPLATES)
def test_as_transformers(model: Path, template: str, how: dict[str, Any]) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATES[template])
    both = Both(model)
    for name, messages in CONVERSATIONS.items():
        theirs, ours = both.render(messages, **how)
        assert ours == theirs, name


KNOWN_ROLES = {  # by template: it leaves other roles out, or has words of its own for them
    "qwen25": {"system", "user", "assistant", "tool"},
    "phi3": {"system", "user", "assistant"},
    "mistral": {"system", "user", "assistant"},
}


@pytest.mark.parametrize("content", ["Two", [TEXT, TEXT]], ids=str)
@pytest.mark.parametrize("template", KNOWN_ROLES)
@pytest.mark.parametrize("role", ["system", "assistant", "tool", "asistant"])
def test_a_role_that_the_template_leaves_out_is_refused(template: str, role: str, content: Any) -> None:
    chat = ChatTemplate({"default": TEMPLATES[template]}, {"bos_token": "<s>", "eos_token": "</s>"})
    messages: Messages = [{"role": "user", "content": "One?"}, {"role": role, "content": content}]
    messages = messages[::-1] if role == "system" else messages
    if role in KNOWN_ROLES[template]:
        assert chat.render_strict(messages) == chat.render(messages)
    else:
        with pytest.raises(ChatTemplateError, match=f'"{role}"'):
            chat.render_strict(messages)


# As Qwen's templates from 3.5 on do it
ONE_SYSTEM_MESSAGE = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% elif m.role not in ['system', 'user'] %}
{{- raise_exception('Unexpected message role.') }}{% endif %}{{ m.role + ':' + m.content + '|' }}{% endfor %}"""
SYSTEM, DEVELOPER, USER = ({"role": role, "content": role[0]} for role in ("system", "developer", "user"))


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([SYSTEM, USER], "system:s|user:u|"),
        ([SYSTEM, SYSTEM, USER], "system:s\n\ns|user:u|"),
        ([DEVELOPER, USER], "system:d|user:u|"),
        ([SYSTEM, DEVELOPER | {"content": [TEXT]}, USER], "system:s\n\nA line.|user:u|"),
        ([SYSTEM, SYSTEM | {"content": ""}, USER], "system:s|user:u|"),
        ([SYSTEM | {"content": None}, SYSTEM, USER], "system:s|user:u|"),
        ([USER, DEVELOPER], None),
        ([SYSTEM, USER, SYSTEM], None),
    ],
)
def test_system_messages_are_merged_where_the_template_takes_one(messages: Messages, prompt: str | None) -> None:
    chat = ChatTemplate({"default": ONE_SYSTEM_MESSAGE}, {})
    if prompt is None:
        with pytest.raises(ChatTemplateError, match=r"at the beginning|Unexpected message role"):
            chat.render_strict(messages)
    else:
        assert chat.render_strict(messages) == prompt


@pytest.mark.parametrize("template", KNOWN_ROLES)
def test_a_developers_message_is_the_systems_where_the_template_has_none(template: str) -> None:
    chat = ChatTemplate({"default": TEMPLATES[template]}, {"bos_token": "<s>", "eos_token": "</s>"})
    assert chat.render_strict([DEVELOPER, USER]) == chat.render([DEVELOPER | {"role": "system"}, USER])


def test_a_template_that_takes_all_messages_gets_them_as_they_are() -> None:
    chat = ChatTemplate({"default": "{% for m in messages %}{{ m.role + ':' + m.content + '|' }}{% endfor %}"}, {})
    assert chat.render_strict([SYSTEM, DEVELOPER, USER, SYSTEM]) == "system:s|developer:d|user:u|system:s|"


def test_an_answer_without_content_has_an_empty_one() -> None:
    chat = ChatTemplate({"default": "{% for m in messages %}{{ m.role + ':' + m.content + '|' }}{% endfor %}"}, {})
    cut: Messages = [USER, {"role": "assistant", "content": None, "reasoning_content": "Hm"}, USER]
    assert chat.render_strict(cut) == "user:u|assistant:|user:u|"


CALL = {"id": "a", "type": "function", "function": {"name": "get_time", "arguments": {"zone": "CET"}}}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": "I look."}])
def test_tool_calls_that_the_template_would_leave_out_are_refused(content: dict[str, Any]) -> None:
    """SmolLM2's adds the content to a text, and looks for nothing else."""
    source = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '|' }}{% endfor %}"
    chat = ChatTemplate({"default": source}, {})
    messages: Messages = [USER, {"role": "assistant", "tool_calls": [CALL]} | content, {"role": "tool", "content": "9"}]
    with pytest.raises(ChatTemplateError, match=r"no place for tool_calls, .* leave tool_calls out, or use a model"):
        chat.render_strict(messages)
    assert chat.render_strict([USER, {"role": "assistant", "tool_calls": []} | content, USER]).endswith("<user>u|")


def test_a_template_that_writes_whole_messages_writes_tool_calls() -> None:
    chat = ChatTemplate({"default": "{% for m in messages %}{{ m | tojson }}{% endfor %}"}, {})
    assert '"zone": "CET"' in chat.render_strict([USER, {"role": "assistant", "tool_calls": [CALL]}, USER])


@pytest.mark.parametrize("template", ["llama3", "qwen3", "smollm3"])
def test_a_template_that_writes_any_role_takes_any(template: str) -> None:
    chat = ChatTemplate({"default": TEMPLATES[template]}, {"bos_token": "<s>"})
    messages: Messages = [{"role": role, "content": "One?"} for role in ("user", "poet", "poet", "critic")]
    assert chat.render_strict(messages) == chat.render(messages)


def test_a_template_may_change_what_it_is_given() -> None:
    chat = ChatTemplate({"default": "{% for m in messages %}{{ m.content | upper | trim }}\n{% endfor %}"}, {})
    assert chat.render_strict([{"role": "poet", "content": "one "}]) == "ONE\n"


@pytest.mark.parametrize("template", TEMPLATES)
def test_most_of_these_conversations_have_a_prompt(model: Path, template: str) -> None:
    """Or the test above would compare nothing."""
    (model / "chat_template.jinja").write_text(TEMPLATES[template])
    both = Both(model)
    rendered = [both.render(messages, add_generation_prompt=True)[0] for messages in CONVERSATIONS.values()]
    assert sum(text is not None for text in rendered) >= 5


def test_the_embedded_models_own_template() -> None:
    both = Both(TINY)
    for messages in CONVERSATIONS.values():
        for how in WAYS:
            theirs, ours = both.render(messages, **how)
            assert ours == theirs
    chat = ChatTemplate.from_directory(TINY)
    text = chat.render_strict(CONVERSATIONS["dialogue"])
    assert text.startswith("<s>Be brief.\nQ: Hello")
    assert text.endswith("\nA:")
    for role in ("developer", "tool", "function"):
        assert chat.render_strict([{"role": role, "content": "One."}]).startswith("<s>One.")
    with pytest.raises(ChatTemplateError, match='no role "cat"'):
        chat.render_strict([{"role": "cat", "content": "miaow"}])


def test_the_ids_of_a_prompt_are_those_of_transformers() -> None:
    theirs, ours = AutoTokenizer.from_pretrained(TINY), Tokenizer.from_directory(TINY)
    for name in ("question", "dialogue", "answered"):
        ids = asyncio.run(ours.encode(ours.chat_template.render(CONVERSATIONS[name]), add_special_tokens=False))
        assert ids == theirs.apply_chat_template(CONVERSATIONS[name], add_generation_prompt=True, return_dict=False)


# ---------------------------------------------------------------- where the template is
FILE, CONFIG = "file {{ messages[0].content }} {{ bos_token }}{{ eos_token }}", "config {{ messages[0].content }}"


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": CONFIG}, {}),
        ({"chat_template": [{"name": "default", "template": CONFIG}]}, {}),
        ({"chat_template": [{"name": "default", "template": CONFIG}, {"name": "tool_use", "template": FILE}]}, {}),
        ({"chat_template": {"default": CONFIG, "tool_use": FILE}}, {}),
        ({"chat_template": [{"name": "rag", "template": CONFIG}]}, {}),
        ({"chat_template": None}, {}),
        ({}, {"chat_template_dot_jinja": FILE}),
        ({"chat_template": CONFIG}, {"chat_template_dot_jinja": FILE}),
        (
            {"chat_template": CONFIG},
            {"chat_template_dot_jinja": FILE, "additional_chat_templates__tool_use_dot_jinja": "tools {{ tools }}"},
        ),
        ({"chat_template": CONFIG}, {"additional_chat_templates__tool_use_dot_jinja": "tools {{ tools }}"}),
        ({"chat_template": CONFIG}, {"additional_chat_templates__default_dot_jinja": FILE}),
        ({"chat_template": CONFIG}, {"chat_template_dot_json": json.dumps({"chat_template": FILE})}),
        ({"bos_token": None, "pad_token": "<p>"}, {"chat_template_dot_jinja": "{{ bos_token }}{{ pad_token }}"}),
        (
            {},
            {
                "chat_template_dot_jinja": FILE,
                "special_tokens_map_dot_json": json.dumps({"bos_token": {"content": "</s>"}}),
            },
        ),
        (
            {"added_tokens_decoder": {"0": {"content": "<s>", "special": True}}},
            {"chat_template_dot_jinja": FILE, "special_tokens_map_dot_json": json.dumps({"bos_token": "</s>"})},
        ),
        ({"chat_template": "{% for %}"}, {}),
        ({"chat_template": "{{ messages[0].content.nothing.at.all }}"}, {}),
        ({"chat_template": "{{ ''.__class__ }}{{ messages.append(1) }}"}, {}),
        ({"chat_template": "{{ namespace(__html__=1) }}"}, {}),
        ({"chat_template": "{% set n = namespace({'a': 1}, b=2) %}{% set n._c = 1 %}{{ n.b }}"}, {}),
        ({"chat_template": "{% set n = namespace({'a': 1}, b=2) %}{% set n.a = 3 %}{{ n.a + n.b }}"}, {}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_it_is_found_where_transformers_finds_it(tmp_path: Path, config: dict[str, Any], files: dict[str, str]) -> None:
    both = Both(directory(tmp_path, config, **files))
    for tools in (None, [TOOL]):
        theirs, ours = both.render(CONVERSATIONS["question"], add_generation_prompt=True, tools=tools)
        assert ours == theirs


def test_a_processors_template_is_taken_where_there_is_no_other(tmp_path: Path) -> None:
    directory(tmp_path, chat_template_dot_json=json.dumps({"chat_template": FILE}))
    assert ChatTemplate.from_directory(tmp_path).render([{"role": "user", "content": "x"}]) == "file x <s></s>"


@pytest.mark.parametrize(
    "written", ["\ufeffx{{ bos_token }}", [{"name": "default", "template": "\ufeffx{{ bos_token }}"}]]
)
def test_a_byte_order_mark_is_no_part_of_the_prompt(tmp_path: Path, written: Any) -> None:
    directory(tmp_path, {"chat_template": written})
    assert ChatTemplate.from_directory(tmp_path).render([{"role": "user", "content": "\ufeff"}]) == "x<s>"


def test_a_gguf_files_template(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    add_byte_level(writer, byte_level())
    writer.add_chat_template(TEMPLATES["mistral"])
    tokenizer, config = make_tokenizer(read_header(write_to(writer, tmp_path / "a.gguf")).metadata)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, ours = Both(tmp_path).render(CONVERSATIONS["dialogue"], add_generation_prompt=True)
    assert ours == theirs
    assert ours is not None
    assert ours.startswith("<s>[INST] Be brief.")


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": 5}, {}),
        ({"chat_template": [{"name": "default"}]}, {}),
        ({"chat_template": ["a"]}, {}),
        ({}, {"chat_template_dot_json": "{"}),
    ],
)
def test_files_that_make_no_sense(tmp_path: Path, config: dict[str, Any], files: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="model: "):
        ChatTemplate.from_directory(directory(tmp_path, config, **files))


# ---------------------------------------------------------------- content in parts
PARTS = [{"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]}]


@pytest.mark.parametrize("template", ["gemma3", "typed"])
@pytest.mark.parametrize("how", WAYS, ids=str)
def test_parts_go_to_templates_that_read_them(model: Path, template: str, how: dict[str, Any]) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATES[template])
    theirs, ours = Both(model).render(PARTS, **how)
    assert ours == theirs


@pytest.mark.parametrize("template", sorted(TEMPLATES.keys() - {"gemma3", "typed"}))
@pytest.mark.parametrize("how", WAYS[:3], ids=str)
def test_all_other_templates_get_their_text(model: Path, template: str, how: dict[str, Any]) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATES[template])
    joined: Messages = [{"role": "user", "content": " one \ntwo"}]
    rendered = ChatTemplate.from_directory(model)
    assert rendered.render(PARTS, **how) == rendered.render(joined, **how)


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        ("{% for part in message.content %}{% endfor %}", True),
        ("{% for part in message['content'] | selectattr('type') | list %}{% endfor %}", True),
        ("{% set said = message['content'] %}{% for part in said %}{% endfor %}", True),
        ("{% for line in message.content.split('\n') %}{% endfor %}", False),
        ("{% set said = message['content'] | trim %}{{ said }}", False),
        ("{% for content in messages %}{{ content }}{% endfor %}", False),
    ],
)
def test_which_templates_read_parts(template: str, reads: bool) -> None:
    messages = "{% set message = messages[0] %}"
    shown = ChatTemplate({"default": f"{messages}{template}{{{{ message.content }}}}"}, {}).render(PARTS)
    assert shown.endswith("'two'}]" if reads else "two")


def test_only_text_has_a_place_in_a_prompt() -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    for template in TEMPLATES.values():
        with pytest.raises(ChatTemplateError, match="parts of a message"):
            ChatTemplate({"default": template}, {}).render(image)


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("template", "how", "message"),
    [
        (None, {}, "has no chat template"),
        ("{% for %}", {}, "template is broken"),
        ("{{ raise_exception('only cats') }}", {}, "only cats"),
        ("{{ messages[0].content + 1 }}", {}, "does not take these messages"),
        ("{{ 1 / 0 }}", {}, "does not take these messages: division by zero"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", {}, "does not take these messages"),
        ("{{ messages }}", {"messages": []}, "messages cannot be given"),
        ("nothing of content", {"continue_final_message": True, "add_generation_prompt": False}, "does not show"),
        ("{{ messages[0].content }}", {"continue_final_message": True}, "set the other to false"),
    ],
)
def test_the_client_is_reported(template: str | None, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate({"default": template} if template else {}, {}).render([{"role": "user", "content": "x"}], **how)


def test_messages_that_are_none() -> None:
    with pytest.raises(ChatTemplateError, match="at least one"):
        ChatTemplate({"default": "x"}, {}).render([])


def test_a_template_without_end() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}x{{ j }}{% endfor %}{% endfor %}"
    with pytest.raises(TextTooLong, match="more than 1000 characters"):
        ChatTemplate({"default": endless}, {}).render([{"role": "user", "content": "x"}], 1000)


def test_the_messages_stay_as_they_are() -> None:
    messages: Messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    ChatTemplate({"default": TEMPLATES["typed"]}, {}).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
