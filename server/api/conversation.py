"""Messages of a conversation as clients send them, and the prompt they come to. Knows no endpoint.

Strict where the server reads them; what roles there are, and their order, is for the model's chat template to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)
from typing_extensions import TypedDict  # pydantic cannot read that of Python 3.11

from server.api.errors import ApiError
from server.api.schemas import LONGEST_NAME, Body, LongList
from server.text.chat import RESERVED, ChatTemplate, ChatTemplateError


def _as_object(value: Any) -> Any:
    """OpenAI writes the arguments of a call as JSON in a string; templates want what it says."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value) if value else {}
    except (msgspec.DecodeError, RecursionError):
        raise ValueError("should be a JSON object") from None


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


def _text_or_parts(value: Any) -> Any:
    """Not a union for pydantic: its errors speak of all alternatives."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(map(_is_text_part, value)):
        return [TextPart(type="text", text=part["text"]) for part in value]
    raise ValueError('should be a text, or a list of {"type": "text", "text": "..."}; nothing else is supported')


def _is_text_part(part: Any) -> bool:
    match part:
        case {"type": "text", "text": str()}:
            return all(value is None for key, value in part.items() if key not in ("type", "text"))
    return False


Content = Annotated[str | list[TextPart], PlainValidator(_text_or_parts, json_schema_input_type=str | list[TextPart])]


def _not_reserved(variables: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(RESERVED & variables.keys()):
        raise ValueError(f"{', '.join(taken)} cannot be given to the chat template here")
    return variables


class Function(Body):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_as_object, json_schema_input_type=str | dict[str, Any])]


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


WITHOUT_EFFECT = {"refusal", "annotations", "audio", "function_call"}


class Message(Body):
    """One message; what it has beside role and content is for the template."""

    role: str = Field(min_length=1, max_length=LONGEST_NAME)
    content: Content | None = Field(None, description="a text, or parts of the type text")
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: LongList[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: Any = Field(None, description="of an answer that is sent back; no effect, like the next three")
    annotations: Any = None
    audio: Any = None
    function_call: Any = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError("content is required; only an assistant's message may be without")
        return self


class Rendering(Body):
    """How messages become a prompt."""

    add_generation_prompt: bool = Field(True, description="end with the beginning of an answer")
    continue_final_message: bool = Field(
        False, description="end within the last message; only with add_generation_prompt: false"
    )
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_not_reserved)] = Field(
        default_factory=dict, description="variables of the chat template, such as enable_thinking"
    )

    @field_validator("continue_final_message")
    @classmethod
    def _no_new_answer(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("add_generation_prompt"):
            raise ValueError("allowed only with add_generation_prompt: false")
        return value


async def prompt_of(template: ChatTemplate, messages: Sequence[Message], how: Rendering, longest: int) -> str:
    """The prompt, of at most so many characters, to be encoded without special tokens. Rendered in a thread.

    Raises ApiError.
    """
    plain = [message.model_dump(exclude_none=True, exclude=WITHOUT_EFFECT) for message in messages]
    try:
        return await asyncio.to_thread(
            template.render,
            plain,
            longest,
            add_generation_prompt=how.add_generation_prompt,
            continue_final_message=how.continue_final_message,
            **how.chat_template_kwargs,
        )
    except ChatTemplateError as error:
        logged = "messages: the chat template refuses them"
        raise ApiError(400, f"messages: {error}", param="messages", logged=logged) from None
