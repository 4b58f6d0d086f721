"""Conversations become prompts by the model's chat template, which is found and rendered as transformers does.

Templates come with models, so they run in jinja's sandbox, and in a process with limits of time and memory
(`processes/sandbox.py`). A message is a dict, as the template gets it; the API has validated it before. Knows neither
requests nor token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import jinja2
from jinja2.meta import find_undeclared_variables

from config.errors import SettingsError
from server.text.chat.call_style import CallStyle, find_call_style, writes_calls
from server.text.chat.environment import find_compared_texts, make_environment, reads_content_parts
from server.text.chat.messages import END_MARK, SYSTEM_ROLES, Message, append_mark, join_parts, mark_end, simplify
from server.text.errors import ChatTemplateError, TextTooLong, shorten_message
from server.text.model_files import read_json_object, read_special_tokens
from server.text.tool_parsers.formats import find_tool_format

MAX_PROMPT_LENGTH = 2**25  # characters
MAX_KNOWN_LEADING = 4  # messages of the system at the beginning, of which is remembered whether a template drops them
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
COMMON_ROLES = frozenset({"user", "assistant"})  # roles that every chat template accepts
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "model"})
BYTE_ORDER_MARK = "\ufeff"  # at the beginning of a template, no part of the prompt
REASONING = ("reasoning_content", "thinking", "reasoning")  # message keys for reasoning; templates read the first two


class ChatTemplate:
    """A model's chat templates: the default one, and possibly others by name ("tool_use")."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._tokens = dict(tokens)
        self._environment = make_environment()
        self._compiled: dict[str, _Template] = {}
        # By template, and role and whether there is a text of each message of the system at the beginning of a chat
        self._dropping: dict[tuple[str, tuple[tuple[str, bool], ...]], bool] = {}

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplate:
        """Read the templates in a directory; without any, `render` fails. Raises SettingsError for unusable files."""
        return cls(_read_sources(directory), read_special_tokens(directory))

    @property
    def source(self) -> str | None:
        """Return the default template as jinja source text; None if there is none."""
        return self._sources.get("default")

    @property
    def sources(self) -> str:
        """Return the jinja source text of all templates."""
        return "\n".join(self._sources.values())

    def render(
        self,
        messages: Sequence[Message],
        max_length: int = MAX_PROMPT_LENGTH,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt with its special tokens: encode it without adding them.

        With `continue_final_message` the prompt ends within the last message, which the model continues. `variables`
        are those of the template, such as enable_thinking. May take any time and memory: a template is a program.
        Raises ChatTemplateError if the template refuses the messages, TextTooLong for a prompt of more than
        `max_length` characters.
        """
        if not messages:
            raise ChatTemplateError("there should be at least one message")
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("either add_generation_prompt or continue_final_message; set the other to false")
        if reserved := sorted(RESERVED & variables.keys()):
            raise ChatTemplateError(f"{', '.join(reserved)} cannot be given to the chat template as a variable")
        template = self._get_template(with_tools=tools is not None)
        prepared = [each for message in messages for each in template.prepare_message(message)]
        template.add_tools(prepared, tools)
        continued = ""
        if continue_final_message:
            continued, prepared[-1] = mark_end(prepared[-1])
        context = {
            "messages": prepared,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = template.render(self._tokens | variables | context, max_length)
        return _cut_at_mark(text, continued) if continue_final_message else text

    def render_strict(self, messages: Sequence[Message], max_length: int = MAX_PROMPT_LENGTH, /, **options: Any) -> str:
        """Return the prompt as `render` does. Raises ChatTemplateError also for what the template would leave out.

        Messages that the template refuses are tried in a plainer form: agents send several system messages, which Qwen
        3.5's template and later ones refuse, and answers that were cut before they had any content. So are system
        messages of which the template writes only some, as those of DeepSeek and gpt-oss do.
        """
        plainer = simplify(messages)
        try:
            return self._render_all(
                plainer if self._drops_first(messages, max_length, options) else messages, max_length, options
            )
        except TextTooLong:
            raise
        except ChatTemplateError as error:
            if plainer == [*messages]:
                raise
            with suppress(ChatTemplateError):
                return self._render_all(plainer, max_length, options)
            raise error from None

    def _render_all(self, messages: Sequence[Message], max_length: int, options: Mapping[str, Any]) -> str:
        """Return the prompt. Raises ChatTemplateError for messages that the template refuses or leaves out.

        Left-out roles are found by rendering messages with marks, as many templates accept roles that they do not name.
        """
        tools, documents = options.get("tools"), options.get("documents")
        template = self._get_template(with_tools=tools is not None)
        calls = any(message.get("tool_calls") for message in messages)
        places = (
            ("tools", tools, template.takes_tools),
            ("documents", documents, "documents" in template.variables),
            ("tool_calls", calls, not calls or template.takes_calls),
        )
        for name, given, has_place in places:
            if given and not has_place:
                raise ChatTemplateError(
                    f"the model's chat template has no place for {name}, so the model would not see them; leave {name} "
                    "out, or use a model that was trained with them"
                )
        known = COMMON_ROLES | template.compared_texts
        unnamed = {message["role"]: place for place, message in enumerate(messages) if message["role"] not in known}
        try:
            text = self.render(messages, max_length, **options)
        except TextTooLong:
            raise
        except ChatTemplateError as error:
            if unnamed and (named := sorted(ROLES & template.compared_texts)):
                hint = f"it names the roles {', '.join(named)}, and not {_quote_roles(unnamed)}"
                raise ChatTemplateError(f"{error} ({hint})") from None
            raise
        if omitted := self._find_omitted(messages, unnamed.values(), max_length, options):
            roles = _quote_roles(messages[place]["role"] for place in omitted)
            raise ChatTemplateError(
                f"the model's chat template has no role {roles}: it leaves such messages out; send other roles"
            )
        return text

    def _drops_first(self, messages: Sequence[Message], max_length: int, options: Mapping[str, Any]) -> bool:
        """Return whether the template leaves out messages of the system or the developer at the beginning."""
        leading = list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages))
        if [message["role"] for message in leading] in ([], ["system"]):
            return False
        template = "tool_use" if options.get("tools") is not None else "default"
        known = template, tuple((message["role"], bool(message.get("content"))) for message in leading)
        if (drops := self._dropping.get(known)) is None:
            filled = [{**message, "content": message.get("content") or ""} for message in leading]
            whole = [*filled, *messages[len(leading) :]]
            drops = bool(self._find_omitted(whole, range(len(leading)), max_length, options))
            if len(leading) <= MAX_KNOWN_LEADING:
                self._dropping[known] = drops
        return drops

    def _find_omitted(
        self, messages: Sequence[Message], places: Iterable[int], max_length: int, options: Mapping[str, Any]
    ) -> list[int]:
        """Return those of the places in `messages` that are not in the prompt, by rendering them with marks."""
        marked = [*messages]
        marks: dict[int, str] = {}
        for place in places:
            if (content := append_mark(messages[place].get("content"), mark := f"messageends{place}x")) is not None:
                marks[place], marked[place] = mark, {**messages[place], "content": content}
        if not marks:
            return []
        try:
            text = self.render(marked, max_length + sum(map(len, marks.values())), **options).lower()
        except ChatTemplateError:  # if they are refused also without marks, that says why
            return []
        return [place for place, mark in marks.items() if mark not in text]

    def _get_template(self, *, with_tools: bool) -> _Template:
        """Return the default template or the one for tools, compiled at first use: completions do not need it."""
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
    """One compiled template, and whether it reads a message's content as text or as a list of parts."""

    def __init__(self, environment: jinja2.Environment, source: str) -> None:
        self._source = source
        try:
            parsed = environment.parse(source)
            self._reads_parts = reads_content_parts(parsed)
            self.compared_texts = find_compared_texts(parsed)
            self.variables = find_undeclared_variables(parsed)
            self._template = environment.from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # bugs of jinja's compiler may raise any exception
            raise ChatTemplateError(f"the model's chat template is broken: {shorten_message(error)}") from None

    def prepare_message(self, message: Message) -> list[dict[str, Any]]:
        """Return a message as the template sees it, which may be two.

        Null values are left out, as templates only test whether a key exists.
        """
        given = {key: value for key, value in message.items() if value is not None}
        messages = self._call_style.apply(given) if given.get("tool_calls") else [given]
        return [self._prepare_content(each) for each in messages]

    def _prepare_content(self, prepared: dict[str, Any]) -> dict[str, Any]:
        if isinstance(parts := prepared.get("content"), list):
            text = join_parts(parts)  # also for the system, whose message some templates write as it is
            reads_parts = self._reads_parts and prepared["role"] not in SYSTEM_ROLES
            prepared["content"] = parts if reads_parts else text
        reasoning = next((prepared[name] for name in REASONING if name in prepared), None)
        return prepared if reasoning is None else {"thinking": reasoning} | prepared | {"reasoning_content": reasoning}

    @cached_property
    def _call_style(self) -> CallStyle:
        """The form in which the template takes tool calls; found when there is the first one."""
        family = find_tool_format(self._source)
        if family is None or not family.writes_calls or family.form is None:
            return find_call_style(self._template.render, None)
        return find_call_style(self._template.render, family.form.write_list)

    @cached_property
    def takes_calls(self) -> bool:
        """Whether the template writes an assistant's tool calls, as far as can be seen."""
        return "tool_calls" in self._source or writes_calls(self._template.render, self._call_style)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template writes tools into the prompt."""
        return "tools" in self.variables or self._takes_tools_in_system_message

    @cached_property
    def _takes_tools_in_system_message(self) -> bool:
        """Whether the template looks for tools in the system message, as that of Phi-4-mini does."""
        return "tools" not in self.variables and "tools" in self.compared_texts

    def add_tools(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Put the tools into the system message if the template looks for them there."""
        if not tools or not self._takes_tools_in_system_message:
            return
        if not messages or messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        messages[0] = messages[0] | {"tools": listed}

    def render(self, variables: Mapping[str, Any], max_length: int) -> str:
        pieces, size = [], 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > max_length:
                    break
            else:
                return "".join(pieces)
        except MemoryError:
            raise
        except Exception as error:  # a template is a program and may raise any exception
            raise ChatTemplateError(
                f"the model's chat template does not take these messages: {shorten_message(error)}"
            ) from None
        raise TextTooLong(
            f"the chat template makes more than {max_length} characters of these messages, which cannot fit; send less"
        )


# ---------------------------------------------------------------- finding templates
def has_chat_template(directory: Path) -> bool:
    """Return whether a model's directory has a default chat template. Raises SettingsError for unusable files."""
    return "default" in _read_sources(directory)


def _read_sources(directory: Path) -> dict[str, str]:
    """Return templates by name; if there are .jinja files, those in the JSON configuration are ignored."""
    named = {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (default := directory / "chat_template.jinja").is_file():
        named["default"] = default
    if named:
        return {name: _read(file) for name, file in named.items()}
    for name in ("tokenizer_config.json", "chat_template.json"):  # older models have chat_template.json
        if (found := read_json_object(directory / name).get("chat_template")) is not None:
            return _parse_sources(found, directory / name)
    return {}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").removeprefix(BYTE_ORDER_MARK)
    except ValueError:
        raise SettingsError(f"model: {file} is not UTF-8") from None


def _parse_sources(found: Any, file: Path) -> dict[str, str]:
    """Return templates by name, from one template, a list of {"name", "template"} objects, or an object by name."""
    if isinstance(found, list) and all(isinstance(item, dict) for item in found):
        found = {item.get("name"): item.get("template") for item in found}
    sources = found if isinstance(found, dict) else {"default": found}
    if not all(isinstance(text, str) for pair in sources.items() for text in pair):
        raise SettingsError(f"model: chat_template in {file} should be a template, or a list of name and template")
    return {name: text.removeprefix(BYTE_ORDER_MARK) for name, text in sources.items()}


# ---------------------------------------------------------------- prompts
def _quote_roles(roles: Iterable[str]) -> str:
    return ", ".join(f'"{role}"' for role in sorted(roles))


def _cut_at_mark(text: str, continued: str) -> str:
    """Return the prompt up to the mark; if the template stripped the message's text, without spaces at the end."""
    mark = END_MARK.rstrip()
    begins = text.rfind(mark)
    if begins < 0 or continued.strip() not in text:
        raise ChatTemplateError("continue_final_message: the model's chat template does not show the last message")
    return text[:begins] if text.startswith(END_MARK, begins) else text[:begins].rstrip()
