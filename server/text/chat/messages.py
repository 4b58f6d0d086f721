"""Messages as chat templates take them: parts joined to a text, marks at the ends of texts, and a plainer form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from server.text.errors import ChatTemplateError

SYSTEM_ROLES = frozenset({"system", "developer"})
# Added to the text of the final message before rendering; its last space shows whether the template strips the text
END_MARK = "[the final message ends here] "

Message = Mapping[str, Any]


def join_parts(parts: list[Any]) -> str:
    """Return the text of all parts, for templates that expect the content to be a string."""
    texts = [text for part in parts if (text := _get_part_text(part)) is not None]
    if len(texts) < len(parts):
        raise ChatTemplateError('the parts of a message should be of the form {"type": "text", "text": "..."}')
    return "\n".join(texts)


def _get_part_text(part: Any) -> str | None:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    return None


def mark_end(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the text of the message that the model continues, and the message with a mark after that text."""
    content: Any = message.get("content")
    if (marked := append_mark(content, END_MARK)) is not None:
        return content if isinstance(content, str) else content[-1]["text"], message | {"content": marked}
    raise ChatTemplateError("continue_final_message: the last message has no content to continue")


def append_mark(content: Any, mark: str) -> Any:
    """Return a message's content with a mark after its text; None if it has no text."""
    match content:
        case str(text):
            return text + mark
        case [*before, {"text": str(text)} as last]:
            return [*before, last | {"text": text + mark}]
    return None


def simplify(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which those of system and developer at the beginning are one, and none lacks a content."""
    leading = list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages))
    contents = (message.get("content") or "" for message in leading)
    texts = [text if isinstance(text, str) else join_parts(text) for text in contents]
    first = [{**leading[0], "role": "system", "content": "\n\n".join(filter(None, texts))}] if leading else []
    return [*first, *map(_simplify_message, messages[len(leading) :])]


def _simplify_message(message: Message) -> Message:
    """Return a message with the role system instead of developer, and an empty content if it has nothing else."""
    role = "system" if message["role"] in SYSTEM_ROLES else message["role"]
    empty = message.get("content") is None and not message.get("tool_calls")
    return {**message, "role": role} | ({"content": ""} if empty else {})
