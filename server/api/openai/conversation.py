"""Messages of a conversation as clients send them, and the prompt that they become. Knows no endpoint.

Fields that the server reads are checked strictly; roles and their order are for the model's chat template to check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from typing_extensions import TypedDict  # pydantic cannot read the TypedDict of Python 3.11's typing

from config.wording import format_value
from server.api.http.errors import ApiError
from server.api.http.json_body import MAX_VALUES, Body, FieldNotes, Ignored, count_values, get_field_notes
from server.api.openai.generation_job import Serving
from server.api.openai.request_models import MAX_NAME_LENGTH, LongList, Unsupported, allow_only
from server.api.openai.tools.definitions import Tools
from server.text.chat.template import RESERVED
from server.text.errors import TextRefused
from server.text.processes.messages import EncodeChat, Encoded


def _parse_arguments(value: Any, info: ValidationInfo) -> Any:
    """Return the arguments of a tool call as an object, which templates need; OpenAI's clients send JSON in a string.

    A model may have written something else, which every later request of the conversation repeats. It becomes an empty
    object, so that the conversation can go on.
    """
    if not isinstance(value, str):
        return value
    if not value:
        return {}
    try:
        parsed = msgspec.json.decode(value) if _looks_like_object(value) else None
    except (msgspec.DecodeError, RecursionError):
        parsed = None
    if parsed is None:
        get_field_notes(info.context).note_ignored(f"{Function.path_prefix}arguments")
        return {}
    return parsed


def _looks_like_object(text: str) -> bool:
    return text.lstrip(" \t\r\n").startswith("{")


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


PART_NO_EFFECT_FIELDS = {"cache_control": dict, "prompt_cache_breakpoint": dict}  # with their types
PART_FIELDS = {"type", "text", *PART_NO_EFFECT_FIELDS}
INVALID_CONTENT = 'should be a text, or a list of {"type": "text", "text": "..."}'


def _validate_content(value: Any, info: ValidationInfo) -> Any:
    """Return a message's content, checked without pydantic, whose errors for a union list all alternatives."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"{INVALID_CONTENT}, not {format_value(value)}")
    notes = get_field_notes(info.context)
    return [TextPart(type="text", text=_read_part_text(part, notes)) for part in value]


def _read_part_text(part: Any, notes: FieldNotes) -> str:
    """Return the text of a part of a message's content, or its refusal, which is a text, too."""
    match part:
        case {"type": "text", "text": str(text)}:
            fields = PART_FIELDS
        case {"type": "refusal", "refusal": str(text)}:
            fields = PART_FIELDS - {"text"} | {"refusal"}
        case _:
            raise ValueError(f"{INVALID_CONTENT}, not {format_value(part)}")
    if len(part) > 2:
        present = {name: value for name, value in part.items() if value is not None}
        suggested = {name: name for name in fields}
        kept = notes.filter_fields(present, "messages.content.", fields, PART_NO_EFFECT_FIELDS, suggested)
        for name, value in kept.items():
            if name not in fields:
                hint = notes.suggestions.get(f"messages.content.{name}", "")
                raise ValueError(f"parts of this type have no field {name[:MAX_NAME_LENGTH]}{hint}")
            if not isinstance(value, PART_NO_EFFECT_FIELDS.get(name, str)):
                raise ValueError(f"{name} of a part should be an object")
    return text


Content = Annotated[
    str | list[TextPart], PlainValidator(_validate_content, json_schema_input_type=str | list[TextPart])
]


def _check_not_reserved(variables: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(RESERVED & variables.keys()):
        raise ValueError(f"{', '.join(taken)} cannot be given to the chat template here")
    return variables


class Function(Body):
    path_prefix = "messages.tool_calls.function."

    name: str = Field(description="name of the function")
    arguments: Annotated[
        dict[str, Any], BeforeValidator(_parse_arguments, json_schema_input_type=str | dict[str, Any])
    ] = Field(description="arguments of the call, as an object or as its text in JSON")
    parsed_arguments: Ignored[Any] = None


class AssistantToolCall(Body):
    path_prefix = "messages.tool_calls."

    id: str | None = Field(None, description="id of the call")
    type: Literal["function"] = Field("function", description="what is called")
    function: Function = Field(description="the called function")
    index: Ignored[int] = None  # position in a streamed response, which clients send back


class Message(Body):
    """One message of a conversation. The chat template gets its fields, except those without effect."""

    path_prefix = "messages."

    role: str = Field(
        min_length=1, max_length=MAX_NAME_LENGTH, description="who wrote the message; the chat template knows the roles"
    )
    content: Content | None = Field(None, description="a text, or a list of parts of the type text or refusal")
    name: str | None = Field(None, description="given to the chat template")
    reasoning_content: str | None = Field(None, description="the reasoning before an assistant's message")
    reasoning: str | None = Field(None, description="another name of reasoning_content")
    tool_calls: LongList[AssistantToolCall] | None = Field(
        None, description="calls in an assistant's message, as the response had them"
    )
    tool_call_id: str | None = Field(
        None, description="id of the call that a message of the role tool answers; required there"
    )
    prefix: Annotated[bool, allow_only(False, instead="use continue_final_message")] = Field(False, exclude=True)
    audio: Unsupported = None
    function_call: Unsupported = None
    id: Ignored[str] = None
    refusal: Ignored[str] = None
    annotations: Ignored[list[Any]] = None
    parsed: Ignored[Any] = None
    cache_control: Ignored[dict[str, Any]] = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError("content is required; only an assistant's message may be without")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(
                f"a message of the role {format_value(self.role)} has no tool_calls, only an assistant's has"
            )
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("tool_call_id is required: the id of the tool call that the message answers")
        return self


def _check_arguments(messages: Any) -> Any:
    """Raise ValueError if the arguments of all tool calls have more than MAX_VALUES values; called before decoding."""
    values = 0
    for arguments in _iter_encoded_arguments(messages):
        values += count_values(arguments.encode())
        if values > MAX_VALUES:
            raise ValueError(f"all tool calls' arguments together may have at most {MAX_VALUES} values; send less")
    return messages


def _iter_encoded_arguments(messages: Any) -> Iterator[str]:
    """Yield the tool calls' arguments that are a JSON object in a string; `messages` is not yet checked."""
    for message in messages if isinstance(messages, list) else ():
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else ():
            match call:
                case {"function": {"arguments": str(arguments)}} if _looks_like_object(arguments):
                    yield arguments


def _check_answers(messages: list[Message]) -> list[Message]:
    """Raise ValueError for a message of the role tool that answers a call which no message before it has."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        called |= {call.id for call in message.tool_calls or () if call.id is not None}
        if message.role == "tool" and message.tool_call_id not in called:
            raise ValueError(
                f"messages[{index}] answers the tool call {format_value(message.tool_call_id)}, but no assistant's "
                "message before it has a tool call with this id"
            )
    return messages


Messages = Annotated[LongList[Message], BeforeValidator(_check_arguments), AfterValidator(_check_answers)]


class Rendering(Body):
    """The fields for the chat template, which makes a prompt of the messages."""

    add_generation_prompt: bool | None = Field(
        None, description="end the prompt with the start of an answer; default: not continue_final_message"
    )
    continue_final_message: bool = Field(
        False, description="end the prompt within the last message, which the model continues"
    )
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_check_not_reserved)] = Field(
        default_factory=dict,
        description="variables of the chat template, such as enable_thinking; default: the setting "
        "default_chat_template_kwargs",
    )
    tools: Tools = Field(default_factory=list, description="functions that the model may call")
    documents: LongList[dict[str, Any]] | None = Field(
        None,
        description="documents to answer from, for chat templates that write them into the prompt; others refuse them",
    )
    reasoning_effort: str | None = Field(
        None,
        max_length=MAX_NAME_LENGTH,
        description="given to the chat template as a variable; some templates do not read it",
    )

    @property
    def template_variables(self) -> dict[str, Any]:
        """Return the variables of the chat template; chat_template_kwargs has precedence over reasoning_effort."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs

    @field_validator("continue_final_message")
    @classmethod
    def _check_continue(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("add_generation_prompt"):
            raise ValueError("cannot be combined with add_generation_prompt: true")
        return value

    @property
    def adds_generation_prompt(self) -> bool:
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


def iter_texts(messages: Sequence[Message]) -> Iterator[str]:
    """Yield every text in the messages."""
    for message in messages:
        texts = (message.content, message.reasoning_content, message.reasoning)
        yield from (text for text in texts if isinstance(text, str))
        if isinstance(message.content, list):
            yield from (part["text"] for part in message.content)


async def encode_chat(
    serving: Serving, messages: Sequence[Message], rendering: Rendering, *, add_special_tokens: bool
) -> Encoded:
    """Return the prompt that the chat template makes of messages, and its ids.

    Raises ApiError 400 for messages that the template refuses, or that are too long, as they are or as a prompt.
    """
    serving.limits.check_total_length(iter_texts(messages), "messages")
    chat = EncodeChat(
        [message.model_dump(exclude_none=True) for message in messages],
        serving.limits.max_prompt_characters,
        add_special_tokens=add_special_tokens,
        add_generation_prompt=rendering.adds_generation_prompt,
        continue_final_message=rendering.continue_final_message,
        variables=rendering.template_variables,
        tools=[tool.written for tool in rendering.tools] or None,
        documents=rendering.documents,
    )
    try:
        return await serving.tokenizer.encode_chat(chat)
    except TextRefused as error:
        logged = "messages: they cannot become a prompt"
        raise ApiError(400, f"messages: {error}", param="messages", code=error.code, log_message=logged) from None
