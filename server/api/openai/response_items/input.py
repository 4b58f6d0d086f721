"""The body of POST /v1/responses, and the chat that it stands for. Knows no response.

Input items become messages. Calls become `tool_calls` of the assistant's message before them, reasoning becomes a part
of the message or the calls after it, and outputs of calls become messages of the role `tool`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    ValidationInfo,
    model_validator,
)

from config.wording import format_value
from server.api.http.errors import Location
from server.api.http.json_body import Body, Ignored, PathError, get_field_notes
from server.api.openai.request_models import INT64, GenerationRequest, Unsupported, allow_only
from server.api.openai.tools.definitions import TOOL_NAME, check_tool_type

ROLES = ("user", "assistant", "system", "developer")
# Types of tools that are no functions, or how their dated types begin
OTHER_TOOLS = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp", "tool_search"),
    *("local_shell", "shell", "custom", "apply_patch", "namespace", "programmatic_tool_calling"),
)
CALLS = ("function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call")
ANSWERS = tuple(f"{call}_output" for call in CALLS)
# Types of items of tools that OpenAI's servers run; the model is shown nothing of them
LEFT_OUT = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("computer_call", "computer_call_output", "tool_search_call", "tool_search_output"),
    *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
)
TEXT_TYPES = ("input_text", "output_text", "text")  # types of parts of a message that are text


class ResponseTool(Body):
    path_prefix = "tools."

    type: Literal["function"] = Field(description="the only type of tools that a model can call")
    name: str = Field(pattern=TOOL_NAME, description="name of its own among the tools")
    description: str | None = Field(None, description="what the function does, for the model")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments, which are an object")
    strict: bool | None = Field(None, description="whether a grammar holds calls to the schemas of all tools")
    # How OpenAI's servers offer a function to programs and searches of theirs, and what such a program reads
    allowed_callers: Ignored[list[Any]] = None
    defer_loading: Ignored[bool] = None
    output_schema: Ignored[dict[str, Any]] = None
    async_: Ignored[bool] = Field(None, alias="async")

    @model_validator(mode="wrap")
    @classmethod
    def _check_type(cls, value: Any, handler: ModelWrapValidatorHandler[ResponseTool]) -> ResponseTool:
        check_tool_type(value)
        return handler(value)

    def make_chat_tool(self) -> dict[str, Any]:
        """Return the tool in the form of a chat."""
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": function}


def _skip_other_tools(value: Any, info: ValidationInfo) -> Any:
    """Return the list without tools that a model cannot call: those that OpenAI's servers run, and free text."""
    if not isinstance(value, list):
        return value
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in value]
    for kind in kinds:
        if isinstance(kind, str) and kind.startswith(OTHER_TOOLS):
            get_field_notes(info.context).note_ignored(f"tools.{kind}")
    return [tool for tool, kind in zip(value, kinds, strict=True) if not str(kind).startswith(OTHER_TOOLS)]


class ReasoningOptions(Body):
    path_prefix = "reasoning."

    effort: str | None = Field(
        None, max_length=64, description="given to the chat template as the variable reasoning_effort"
    )
    summary: Ignored[str] = None
    generate_summary: Ignored[str] = None


class TextFormat(Body):
    """The form of the text: a chat's `response_format`, with the members of its `json_schema` beside the type."""

    path_prefix = "text.format."

    type: Literal["text", "json_object", "json_schema"] = Field(description="what the text is")
    name: str | None = Field(None, description="no effect")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="the schema of the text")
    description: str | None = Field(None, description="no effect")
    strict: Ignored[bool] = None

    def make_response_format(self) -> dict[str, Any]:
        """Return the response_format of a chat."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {} if self.schema_ is None else {"schema": self.schema_}
        return {"type": self.type, "json_schema": {"name": self.name or "", **schema}}


class TextOptions(Body):
    path_prefix = "text."

    format: TextFormat = Field(
        default_factory=lambda: TextFormat(type="text"),
        description="as response_format of a chat, with name and schema beside the type; default: any text",
    )
    verbosity: Ignored[str] = None


def _check_input(value: Any, info: ValidationInfo) -> InputChat:
    """Return the messages that the input stands for."""
    chat, note_ignored = InputChat(), get_field_notes(info.context).note_ignored
    if isinstance(value, str):
        chat.add({"role": "user", "content": value}, None, note_ignored)
        return chat
    if not isinstance(value, list):
        raise ValueError(f"should be a text, or a list of items, not {format_value(value)}")
    if not value:
        raise ValueError("should have 1 or more items, not 0")
    for index, item in enumerate(value):
        chat.add(item, index, note_ignored)
    return chat


class InputChat:
    """The messages that input items become, in the JSON form of a chat."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._item_indices: list[int | None] = []  # for each message, the index of its first item
        self._reasoning: str | None = None  # that the next item belongs to
        self._call_ids: dict[str, str] = {}  # of each call, by itself and by the other id that an output may name

    def find_item(self, message_index: int) -> Location:
        """Return the place in the body of the item that a message was made of."""
        index = self._item_indices[message_index] if message_index < len(self._item_indices) else None
        return ("input",) if index is None else ("input", index)

    def add(self, item: Any, index: int | None, note_ignored: Callable[[str], None]) -> None:
        """Add the item of this index; None: it is the whole input. Raises PathError for one that is not supported.

        Calls of tools that are no functions are shown to the model as calls with the item's input, action or operation.
        """
        path = () if index is None else (index,)
        match item:
            case {"type": "function_call"}:
                call_id, name, arguments = (_read_text(item, key, path) for key in ("call_id", "name", "arguments"))
                self._add_call(call_id, name, arguments, index)
            case {"type": "custom_tool_call"}:
                call_id, name = (_read_text(item, key, path) for key in ("call_id", "name"))
                self._add_call(call_id, name, json.dumps({"input": item.get("input")}), index)
            case {"type": "local_shell_call" | "shell_call" | "apply_patch_call" as kind}:
                call_id, action = _read_text(item, "call_id", path), item.get("action", item.get("operation"))
                self._add_call(call_id, kind.removesuffix("_call"), json.dumps(action), index)
                if isinstance(id := item.get("id"), str):
                    self._call_ids.setdefault(id, call_id)
            case {"type": str(kind)} if kind in ANSWERS:
                message = self._start("tool", index)
                message["tool_call_id"] = self._read_answered_call(item, path)
                message["content"] = _read_output(item, path)
            case {"type": str(kind)} if kind in LEFT_OUT:
                note_ignored(f"input.{kind}")
            case {"type": "reasoning"}:
                self._reasoning = _read_reasoning(item, path)
            case {"role": str(role)} if role in ROLES and item.get("type", "message") == "message":
                is_answer = role == "assistant"
                message = self._get_assistant(index, is_text=True) if is_answer else self._start(role, index)
                if item.get("content") is not None or not is_answer:  # an answer may have calls only
                    content = _read_content(item.get("content"), (*path, "content"))
                    content = _join_contents(message["content"], content) if "content" in message else content
                    message["content"] = content
            case {"type": str(kind)} if kind != "message":
                raise PathError((*path, "type"), f"items of the type {format_value(kind)} are not supported")
            case {"type": "message"} | {"role": _}:
                roles = f"{', '.join(ROLES[:-1])} or {ROLES[-1]}"
                raise PathError((*path, "role"), f"should be {roles}, not {format_value(item.get('role'))}")
            case _:
                raise PathError(path, f"should be a message or another item with a type, not {format_value(item)}")

    def _add_call(self, call_id: str, name: str, arguments: str, index: int | None) -> None:
        self._call_ids[call_id] = call_id
        calls = self._get_assistant(index).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _start(self, role: str, index: int | None) -> dict[str, Any]:
        self.messages.append({"role": role})
        self._item_indices.append(index)
        return self.messages[-1]

    def _get_assistant(self, index: int | None, *, is_text: bool = False) -> dict[str, Any]:
        """Return the assistant's message that an item belongs to: the last one, unless a new one begins.

        A text begins one unless it follows a call: the model has written both in one message.
        """
        last = self.messages[-1] if self.messages else {"role": None}
        is_new = last["role"] != "assistant" or self._reasoning is not None
        if is_new or (is_text and "tool_calls" not in last):
            message = self._start("assistant", index)
            if self._reasoning is not None:
                message["reasoning_content"], self._reasoning = self._reasoning, None
        return self.messages[-1]

    def _read_answered_call(self, item: dict[str, Any], path: Location) -> str:
        """Return the id of the call that an output answers. OpenAI's outputs of a local shell have it as `id`."""
        has_id_alone = item.keys() & {"id", "call_id"} == {"id"}
        key = "id" if item["type"] == "local_shell_call_output" and has_id_alone else "call_id"
        call_id = _read_text(item, key, path)
        if call_id not in self._call_ids:
            message = f"answers the call {format_value(call_id)}, but no function_call before it has this call_id"
            raise PathError((*path, key), message)
        return self._call_ids[call_id]


def _read_text(item: dict[str, Any], key: str, path: Location) -> str:
    if not isinstance(value := item.get(key), str):
        raise PathError((*path, key), f"should be a text, not {format_value(value)}")
    if key != "arguments" and not value:
        raise PathError((*path, key), "should not be empty")
    return value


def _read_output(item: dict[str, Any], path: Location) -> Any:
    """Return the output of a call in the form of a chat: what a shell wrote as JSON, and a patch's status if alone."""
    match item:
        case {"type": "shell_call_output", "output": [{"stdout": _}, *_] as written}:
            return json.dumps(written, ensure_ascii=False)
        case {"type": "apply_patch_call_output", "status": str(status)} if item.get("output") is None:
            return status
    return _read_content(item.get("output"), (*path, "output"))


def _read_content(content: Any, path: Location) -> Any:
    """Return a content in the form of a chat: a text, or parts of the type text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PathError(path, f"should be a text or a list of parts, not {format_value(content)}")
    return [{"type": "text", "text": _read_part(part, (*path, index))} for index, part in enumerate(content)]


def _join_contents(first: Any, second: Any) -> Any:
    """Return two contents in the form of a chat as one, in which nothing is between their texts."""
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    head, tail = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second))
    if not head or not tail:
        return [*head, *tail]
    return [*head[:-1], {"type": "text", "text": head[-1]["text"] + tail[0]["text"]}, *tail[1:]]


def _read_part(part: Any, path: Location) -> str:
    match part:
        case {"type": str(kind), "text": str(text)} if kind in TEXT_TYPES:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
    raise PathError(path, f"parts should be texts, not {format_value(part)}")


def _read_reasoning(item: dict[str, Any], path: Location) -> str:
    key = "content" if item.get("content") else "summary"
    parts = item.get(key) or []
    if not isinstance(parts, list):
        raise PathError((*path, key), f"should be a list of parts, not {format_value(parts)}")
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise PathError((*path, key, index), "parts of reasoning should have a text")
    return "\n".join(map(str, texts))


def _check_choice(value: Any, info: ValidationInfo) -> Any:
    """Return a choice of tools without those that a model cannot call."""
    match value:
        case {"type": "allowed_tools", "tools": [_, *_] as tools}:
            value = value | {"tools": (left := _skip_other_tools(tools, info))}
            if not left and value.get("mode") == "auto":
                return "none"
    make_chat_choice(value)
    return value


def make_chat_choice(value: Any) -> Any:
    """Return a choice of tools in the form of a chat. Raises ValueError for one that is not supported."""
    match value:
        case None | "none" | "auto" | "required":
            return value
        case {"type": "function", "name": str(name)} if len(value) == 2:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)} if len(value) == 3 and all(
            isinstance(tool, dict) and tool.get("type") == "function" for tool in tools
        ):
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*map(make_chat_choice, tools)]}}
    raise ValueError(
        'should be "none", "auto", "required", {"type": "function", "name": ...} or {"type": "allowed_tools", "mode": '
        f'"auto" or "required", "tools": [...]}}; other choices are not supported, such as {format_value(value)}'
    )


class ResponseRequest(GenerationRequest):
    """Body of POST /v1/responses, beside the fields of all generation."""

    foreign_names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
    }

    input: Annotated[InputChat, PlainValidator(_check_input, json_schema_input_type=str | list[Any])] = Field(
        description="a text, or a list of items; the items of a response may be sent back as they came"
    )
    instructions: str | None = Field(None, description="a message of the role system before the input")
    max_output_tokens: int | None = Field(
        None, ge=1, lt=INT64, description="most tokens to generate; default: as many as fit the context"
    )
    tools: Annotated[list[ResponseTool], BeforeValidator(_skip_other_tools)] = Field(
        default_factory=list, description="functions that the model may call"
    )
    tool_choice: Annotated[Any, PlainValidator(_check_choice)] = Field(
        None,
        description="as in chats, with the name of a function beside the type; default: auto with tools, none without",
    )
    parallel_tool_calls: bool = Field(True, description="false: return only the first call of a message")
    reasoning: ReasoningOptions | None = Field(None, description="how the model reasons")
    text: TextOptions = Field(default_factory=TextOptions, description="what the text is")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the chat template, as in chats")
    # Fields of other endpoints that a response has no place for
    n: Annotated[int, allow_only(1)] = 1
    explain: Annotated[bool, allow_only(False)] = False
    kv_cache_reference: Annotated[str | None, allow_only(None)] = None
    prompt_logprobs: Annotated[int | None, allow_only(None)] = None
    return_token_ids: Annotated[bool, allow_only(False)] = False
    return_tokens_as_token_ids: Annotated[bool, allow_only(False)] = False
    response_format: Annotated[Any, allow_only(instead="use text.format")] = None
    # Fields of OpenAI's that are not supported
    background: Annotated[bool, allow_only(False)] = False
    truncation: Annotated[str, allow_only("disabled")] = "disabled"
    top_logprobs: Annotated[int, allow_only(0)] = 0
    previous_response_id: Annotated[Any, allow_only(instead="send the earlier items in `input`")] = None
    conversation: Annotated[Any, allow_only(instead="send the earlier items in `input`")] = None
    prompt: Unsupported = None
    include: Ignored[list[Any]] = None
    max_tool_calls: Ignored[int] = None
    client_metadata: Ignored[dict[str, Any]] = None

    def make_chat_body(self) -> dict[str, Any]:
        """Return the body of the chat that the request stands for."""
        own = set(ResponseRequest.model_fields) - set(GenerationRequest.model_fields)
        body = self.model_dump(exclude_unset=True, exclude=own | {"stream_options", "response_format"})
        if self.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return body | {
            "messages": first + self.input.messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": [tool.make_chat_tool() for tool in self.tools],
            "tool_choice": make_chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
            "response_format": self.text.format.make_response_format(),
        }
