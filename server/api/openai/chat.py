"""POST /v1/chat/completions: messages become a prompt by the model's template; the rest is as for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Response
from pydantic import Field, ValidationInfo, field_validator

from server.api.http.errors import ApiError, make_error_responses
from server.api.http.json_route import JsonRoute
from server.api.openai.conversation import Messages, Rendering, encode_chat
from server.api.openai.conversation_key import get_chat_beginning, make_conversation_key
from server.api.openai.generation import Generation, OutputDelta
from server.api.openai.generation_job import (
    HeadersParam,
    Job,
    PromptTokens,
    RequestHeaders,
    Serving,
    check_ids,
    check_prompt,
    make_job,
    make_sampling,
    may_be_unbounded,
    resolve_max_tokens,
)
from server.api.openai.logprobs import ChatLogprobs, make_chat_logprobs
from server.api.openai.request_models import (
    INT64,
    GenerationRequest,
    LongList,
    MaxTokens,
    Unsupported,
    allow_only,
)
from server.api.openai.response_models import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatMessage,
    Delta,
    DeltaFunctionCall,
    DeltaToolCall,
    FunctionCall,
    MessageToolCall,
)
from server.api.openai.responses import (
    Format,
    make_chunk_fields,
    make_response_fields,
    respond,
    set_choice_fields,
    set_prompt_fields,
)
from server.api.openai.structured.check import (
    check_constraint,
    check_content,
    check_each_schema,
    check_readable,
    get_constraint,
)
from server.api.openai.tools.definitions import (
    Tool,
    ToolChoice,
    ToolChoiceField,
    adapt_schemas,
    check_choice,
    get_schemas,
)
from server.api.openai.tools.message_format import MessageFormat, MessageParsing
from server.engine.ipc.messages import ThinkingBudget
from server.grammar.constraint import Constraint
from server.text.tokenizer import truncate_prompt
from server.text.tool_parsers.calls import ToolCall
from server.text.tool_parsers.message_grammar import MessageKind, MessageOutline


class ChatRequest(GenerationRequest, Rendering):
    """Body of POST /v1/chat/completions."""

    messages: Messages = Field(min_length=1, description="the conversation so far")
    max_tokens: MaxTokens = Field(None, description="the older name of max_completion_tokens")
    max_completion_tokens: MaxTokens = Field(
        None, description="most tokens to generate; -1: no limit; default: as many as fit the context"
    )
    logprobs: bool = Field(False, description="return log-probabilities of tokens")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="number of alternatives to each token; above 0 only with logprobs: true"
    )
    add_special_tokens: bool = Field(
        False, description="add the special tokens that the model expects, besides those of the chat template"
    )
    modalities: Annotated[LongList[str], allow_only(["text"])] = Field(default=["text"])
    tool_choice: ToolChoiceField | None = Field(
        None,
        validate_default=True,
        description="whether the model may, must or must not call tools; an object names functions; default: auto with "
        "tools, none without",
    )
    parallel_tool_calls: bool = Field(True, description="false: return only the first call of a message")
    include_reasoning: bool = Field(
        True, description="return the model's reasoning apart from the content; false: leave it out"
    )
    thinking_token_budget: int | None = Field(
        None,
        ge=0,
        lt=INT64,
        description="most tokens of reasoning, which is ended then, as in vLLM; of models whose markers of reasoning "
        "are tokens of their own; default: any number",
    )
    functions: Annotated[list[Any], allow_only([], instead="use tools, which replace it")] = Field(default_factory=list)
    function_call: Annotated[Any, allow_only("none", "auto", instead="use tool_choice, which replaces it")] = "none"
    audio: Unsupported = None
    moderation: Unsupported = None
    web_search_options: Unsupported = None

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("allowed only with logprobs: true")
        return value

    @field_validator("max_completion_tokens")
    @classmethod
    def _check_max_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("max_tokens", value) not in (None, value):
            raise ValueError("differs from max_tokens; send one of them")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _check_tool_choice(cls, value: ToolChoice | None, info: ValidationInfo) -> ToolChoice | None:
        if "tools" in info.data:  # otherwise they have an error of their own
            check_choice(value, info.data["tools"])
        if value is not None and value.mode == "required" and info.data.get("continue_final_message"):
            raise ValueError("a call cannot be required together with continue_final_message")
        return value

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def callable_tools(self) -> list[Tool]:
        """Return the tools that the model may call."""
        choice = self.tool_choice or ToolChoice("auto")
        return [tool for tool in self.tools if choice.allows(tool.function.name)]

    @property
    def constrains_calls(self) -> bool:
        """Whether calls have to be by a grammar: a tool is strict, or one may not be called."""
        tools = self.callable_tools
        return any(tool.function.strict for tool in tools) or 0 < len(tools) < len(self.tools)

    @property
    def must_call(self) -> bool:
        """Whether the model has to call a tool."""
        return self.tool_choice is not None and self.tool_choice.mode == "required"

    @property
    def may_call_several(self) -> bool:
        """Whether a message may have several calls."""
        return self.parallel_tool_calls and not (self.tool_choice is not None and self.tool_choice.is_one_call)


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(route_class=JsonRoute, tags=["chat"], responses=make_error_responses(400, 404, 413, 429, 503))

    @routes.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, headers: HeadersParam) -> Response:
        return respond(Generation(serving, await make_chat_job(serving, body, headers)), CHAT_FORMAT)

    return routes


async def make_chat_job(serving: Serving, body: ChatRequest, headers: RequestHeaders) -> Job[ChatRequest]:
    """Return the job (the engine's requests) of an HTTP request.

    Raises ApiError for a wrong request, EngineLost without an engine, TextError if the prompt cannot be encoded.
    """
    hello, hints = serving.resolve_request(body, headers)
    serving.limits.check_choices(1, body.n)
    serving.limits.check_stop(body.stop)
    constraint = get_constraint(body.iter_constraints())
    parsing = make_parsing(serving.message_format, body, constrains_content=constraint is not None)
    encoded = await encode_chat(serving, body.messages, body, add_special_tokens=body.add_special_tokens)
    grammar = await make_grammar(serving, body, constraint, encoded.text)
    if constraint is not None and parsing is not None:
        await check_readable(serving, constraint, parsing, encoded.text)
    prompt = PromptTokens(truncate_prompt(encoded.ids, body.truncate_prompt_tokens), encoded.text)
    max_tokens = resolve_max_tokens(body.requested_max_tokens, [prompt], hello)
    check_prompt(prompt.ids, max_tokens, hello, unbounded=may_be_unbounded(hello, body, hints))
    sampling = make_sampling(
        body,
        hello,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    if body.thinking_token_budget is not None:
        thinking = await make_thinking_budget(serving, body, body.thinking_token_budget, encoded.text)
        check_ids(thinking.closing, hello, "thinking_token_budget")
        sampling = msgspec.structs.replace(sampling, thinking=thinking)
    conversation = make_conversation_key(hints, body, get_chat_beginning(body.messages))
    return make_job("chatcmpl", body, [prompt], sampling, body.n, hints, [conversation], grammar, parsing)


async def make_thinking_budget(serving: Serving, body: ChatRequest, num_tokens: int, prompt: str) -> ThinkingBudget:
    """Return the budget of the reasoning of messages that follow the prompt.

    Raises ApiError if the model's markers of reasoning are not known, or are no tokens that can be forced.
    """
    format = serving.message_format.reasoning
    if format is None:
        message = "the chat template shows no known way to mark reasoning; the setting reasoning_parser names one"
        raise _refuse_budget(message)
    if format.harmony and body.must_call:
        message = "cannot be combined with a required tool call, as this model ends reasoning with its answer"
        raise _refuse_budget(message)
    openings, ends, closing = [
        [tuple(await serving.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        for texts in (format.openings, format.ends, [format.closing_text])
    ]
    if not format.harmony and any(len(marker) > 1 for marker in (*openings, *ends)):
        message = "the model's markers of reasoning are several tokens each, so that it cannot be ended for certain"
        raise _refuse_budget(message)
    is_open = not body.continue_final_message and format.is_open(prompt)
    return ThinkingBudget(num_tokens, is_open, tuple(openings), tuple(ends), closing[0])


def _refuse_budget(message: str) -> ApiError:
    return ApiError(400, f"thinking_token_budget: {message}", param="thinking_token_budget")


async def make_grammar(serving: Serving, body: ChatRequest, constraint: Constraint | None, prompt: str) -> str | None:
    """Return the grammar of the messages that follow the prompt; None: they may be any text.

    `constraint` is what the content of a message has to be. Raises as `check_constraint`.
    """
    kind = choose_kind(body, constraint)
    if kind is None:
        return None
    format = serving.message_format
    reasoning = "over" if body.continue_final_message else format.find_reasoning_state(prompt)
    if constraint is not None and kind == "content" and reasoning == "over":
        return await check_constraint(serving, constraint)
    schemas = adapt_schemas(body.callable_tools)
    frame = format.make_grammar(MessageOutline(kind, schemas, body.may_call_several, reasoning))
    if frame is None:
        return None
    try:
        if constraint is None or kind in ("calls", "text with calls"):
            return await check_constraint(serving, Constraint("lark", frame, "tools"))
        return await check_content(serving, frame, constraint, frame_param="tools" if schemas else None)
    except ApiError as error:
        if error.param == "tools":
            await check_each_schema(serving, schemas, error)
        raise


def choose_kind(body: ChatRequest, constraint: Constraint | None) -> MessageKind | None:
    """Return what a message is after its reasoning; None: any text, in which there may be calls."""
    if body.must_call:
        return "calls"
    if constraint is not None:
        return "calls or content" if body.callable_tools else "content"
    return "text with calls" if body.constrains_calls else None


def make_parsing(format: MessageFormat, body: ChatRequest, *, constrains_content: bool) -> MessageParsing | None:
    """Return how a chat's messages are split; None if they are not. Raises ApiError if tools cannot be used."""
    if body.callable_tools and format.tools is None:
        message = (
            "tools: the model's chat template shows no known way to write tool calls, so they could not be told from "
            "text; use a model that was trained with tools, name its format in the setting tool_call_parser, or send "
            'tool_choice: "none"'
        )
        raise ApiError(400, message, param="tools", code="tools_not_supported")
    if not body.callable_tools and format.reasoning is None:
        return None
    schemas = get_schemas(body.callable_tools) if body.callable_tools else None
    return MessageParsing(
        format,
        schemas,
        body.parallel_tool_calls,
        body.include_reasoning,
        constrains_content,
        calls_only=body.must_call,
    )


# ---------------------------------------------------------------- functions that make a response of generated text
def make_chat_chunks(delta: OutputDelta | None, generation: Generation[ChatRequest]) -> list[ChatChunk]:
    """Return the chunks of a delta: a choice's role comes before its text, and its finish reason after it.

    Only the first chunk of the response has the fields of the prompt (its token ids and log-probabilities).
    """
    if delta is None:
        return [ChatChunk(**make_chunk_fields(None, generation), choices=[])]
    chunks = []
    if delta.is_first:
        role = OutputDelta(delta.choice, "", [], [], is_first_of_all=delta.is_first_of_all)
        chunks.append(_make_chunk(role, Delta("", "assistant"), generation))
        if delta.is_first_of_all:
            set_prompt_fields(chunks[0], delta.choice, generation)
            delta = delta._replace(is_first_of_all=False)
    if delta.finish_reason is None:
        return [*chunks, _make_chunk(delta, _make_delta(delta), generation)]
    if delta.text or delta.reasoning or delta.tool_calls:
        parts = delta._replace(finish_reason=None, stop_reason=None, record=None, comparison=None)
        chunks.append(_make_chunk(parts, _make_delta(delta), generation))
        delta = delta._replace(text="", reasoning="", tool_calls=(), tokens=[], logprobs=[])
    return [*chunks, _make_chunk(delta, Delta(), generation)]


def _make_delta(delta: OutputDelta) -> Delta:
    """Return the parts of a delta that are not empty; the content if all are."""
    message = Delta(delta.text) if delta.text or not (delta.reasoning or delta.tool_calls) else Delta()
    if delta.reasoning:
        message.reasoning = message.reasoning_content = delta.reasoning
    if delta.tool_calls:
        message.tool_calls = [_make_call_delta(call) for call in delta.tool_calls]
    return message


def _make_call_delta(call: ToolCall) -> DeltaToolCall:
    if not call.id:
        return DeltaToolCall(call.number, DeltaFunctionCall(call.arguments))
    return DeltaToolCall(call.number, DeltaFunctionCall(call.arguments, call.name), call.id, "function")


def _make_chunk(delta: OutputDelta, message: Delta, generation: Generation[ChatRequest]) -> ChatChunk:
    logprobs = _make_logprobs(delta, generation) if delta.tokens else None
    choice = ChatChunkChoice(index=delta.choice, delta=message, logprobs=logprobs)
    set_choice_fields(choice, delta, generation)
    return ChatChunk(**make_chunk_fields(delta, generation), choices=[choice])


def make_chat_completion(deltas: Sequence[OutputDelta], generation: Generation[ChatRequest]) -> ChatCompletion:
    choices = []
    for delta in deltas:
        choice = ChatChoice(
            index=delta.choice, message=_make_message(delta), logprobs=_make_logprobs(delta, generation)
        )
        set_choice_fields(choice, delta, generation)
        choices.append(choice)
    response = ChatCompletion(**make_response_fields(generation), choices=choices)
    set_prompt_fields(response, 0, generation)
    return response


def _make_message(delta: OutputDelta) -> ChatMessage:
    message = ChatMessage(delta.text if delta.text or not (delta.reasoning or delta.tool_calls) else None)
    if delta.reasoning:
        message.reasoning = message.reasoning_content = delta.reasoning
    if delta.tool_calls:
        message.tool_calls = [
            MessageToolCall(call.id, FunctionCall(call.name, call.arguments)) for call in delta.tool_calls
        ]
    return message


CHAT_FORMAT = Format(make_chat_chunks, make_chat_completion)


def _make_logprobs(delta: OutputDelta, generation: Generation[ChatRequest]) -> ChatLogprobs | None:
    body = generation.job.body
    if not body.logprobs:
        return None
    top, by_id = body.top_logprobs or 0, body.return_tokens_as_token_ids
    return make_chat_logprobs(generation.tokenizer, delta.tokens, delta.logprobs, top, by_id=by_id)
