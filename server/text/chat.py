"""A conversation as a prompt: the chat template of the model's directory, found and rendered as transformers does.

Templates come with models, so they run in jinja's sandbox and within bounds. Knows neither requests nor tokens' ids.
What a message may look like is checked elsewhere; here it is what a template sees, keys and values.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from config.errors import SettingsError
from server.text.chat_environment import environment, reads_parts
from server.text.model_files import named_tokens, read_object

LONGEST_TEXT = 2**25  # characters
LONGEST_RENDERING = 10.0  # seconds; looked at between two pieces of the text
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
REASONING = ("reasoning_content", "thinking", "reasoning")  # one thing; templates read the first or second
END = "[the final message ends here] "  # the space at its end shows whether the template trims what is said

Message = Mapping[str, Any]


class ChatTemplateError(Exception):
    """There is no prompt for these messages; tells the client why."""


class ChatTemplate:
    """A model's chat templates: the default one, and possibly others by name ("tool_use")."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._tokens = dict(tokens)
        self._environment = environment()
        self._compiled: dict[str, _Template] = {}

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplate:
        """Also of a directory without a template, where every rendering fails. Raises SettingsError."""
        return cls(_sources(directory), named_tokens(directory))

    def render(
        self,
        messages: Sequence[Message],
        longest: int = LONGEST_TEXT,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt, special tokens included: it is to be encoded without adding them. Raises ChatTemplateError.

        Also when it has more than `longest` characters.
        With `continue_final_message` it ends with the last message, which the model continues. `variables` are the
        template's own, such as enable_thinking. May take long for long conversations.
        """
        if not messages:
            raise ChatTemplateError("there should be at least one message")
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("either add_generation_prompt or continue_final_message; set the other to false")
        if taken := sorted(RESERVED & variables.keys()):
            raise ChatTemplateError(f"{', '.join(taken)} cannot be given to the chat template as a variable")
        template = self._template(with_tools=tools is not None)
        seen = [template.message(message) for message in messages]
        said = ""
        if continue_final_message:
            said, seen[-1] = _marked(seen[-1])
        given = {"messages": seen, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        text = template.render(self._tokens | variables | given, longest)
        return _cut(text, said) if continue_final_message else text

    def _template(self, *, with_tools: bool) -> _Template:
        """Compiled when it is first needed: who only wants completions is not told that it is broken."""
        if not self._sources:
            raise ChatTemplateError(
                "the model has no chat template: use /v1/completions, or put a chat_template.jinja into its directory"
            )
        name = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise ChatTemplateError(f"none of the model's chat templates is the default: {', '.join(self._sources)}")
        if name not in self._compiled:
            self._compiled[name] = _Template(self._environment, self._sources[name])
        return self._compiled[name]


class _Template:
    """One template, and what it expects of messages."""

    def __init__(self, environment: jinja2.Environment, source: str) -> None:
        try:
            self._reads_parts = reads_parts(environment.parse(source))
            self._template = environment.from_string(source)
        except Exception as error:  # the compiler's own mistakes too
            raise ChatTemplateError(f"the model's chat template is broken: {error}") from None

    def message(self, message: Message) -> dict[str, Any]:
        """As the template sees it. What is null is not there, as templates ask only whether it is."""
        seen = {key: value for key, value in message.items() if value is not None}
        if isinstance(parts := seen.get("content"), list):
            text = _joined(parts)
            seen["content"] = parts if self._reads_parts else text
        reasoning = next((seen[name] for name in REASONING if name in seen), None)
        return seen if reasoning is None else {"thinking": reasoning} | seen | {"reasoning_content": reasoning}

    def render(self, variables: Mapping[str, Any], longest: int) -> str:
        pieces, size, end = [], 0, time.monotonic() + LONGEST_RENDERING
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > longest or time.monotonic() > end:
                    break
            else:
                return "".join(pieces)
        except Exception as error:  # of any kind: a template is a program
            raise ChatTemplateError(f"the model's chat template does not take these messages: {error}") from None
        raise ChatTemplateError("the model's chat template takes too long, or its text is too long; send less")


# ---------------------------------------------------------------- where templates are
def _sources(directory: Path) -> dict[str, str]:
    """Templates by name. Files of their own come before what a configuration has, all of it."""
    named = {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (default := directory / "chat_template.jinja").is_file():
        named["default"] = default
    if named:
        return {name: _read(file) for name, file in named.items()}
    for name in ("tokenizer_config.json", "chat_template.json"):  # the latter is of an older time
        if (found := read_object(directory / name).get("chat_template")) is not None:
            return _by_name(found, directory / name)
    return {}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except ValueError:
        raise SettingsError(f"model: {file} is not UTF-8") from None


def _by_name(found: Any, file: Path) -> dict[str, str]:
    """It is written as one template, as a list of {"name", "template"}, or by name."""
    if isinstance(found, list) and all(isinstance(item, dict) for item in found):
        found = {item.get("name"): item.get("template") for item in found}
    sources = found if isinstance(found, dict) else {"default": found}
    if not all(isinstance(text, str) for pair in sources.items() for text in pair):
        raise SettingsError(f"model: chat_template in {file} should be a template, or a list of name and template")
    return sources


# ---------------------------------------------------------------- what is said
def _joined(parts: list[Any]) -> str:
    """The text of parts, for templates that know only text."""
    texts = [text for part in parts if (text := _text_of(part)) is not None]
    if len(texts) < len(parts):
        raise ChatTemplateError('the parts of a message should be of the form {"type": "text", "text": "..."}')
    return "\n".join(texts)


def _text_of(part: Any) -> str | None:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    return None


def _marked(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text that is to be continued, and the message with a mark behind it."""
    match message.get("content"):
        case str(text):
            return text, message | {"content": text + END}
        case [*before, {"text": str(text)} as last]:
            return text, message | {"content": [*before, last | {"text": text + END}]}
    raise ChatTemplateError("continue_final_message: the last message has no content to continue")


def _cut(text: str, said: str) -> str:
    """The prompt up to the mark, without the spaces before it where the template trims what is said."""
    mark = END.rstrip()
    begins = text.rfind(mark)
    if begins < 0 or said.strip() not in text:
        raise ChatTemplateError("continue_final_message: the model's chat template does not show the last message")
    return text[:begins] if text.startswith(END, begins) else text[:begins].rstrip()
