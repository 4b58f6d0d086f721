"""POST /v1/completions: converts OpenAI's request to a job, and the job's deltas to OpenAI's response.

A job has the requests that the engine gets; a delta is a piece of a choice's generated text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Response
from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
)

from server.api.http.errors import ApiError, make_error_responses
from server.api.http.json_body import Ignored
from server.api.http.json_route import JsonRoute
from server.api.openai.conversation_key import get_prompt_beginning, make_conversation_key
from server.api.openai.generation import Generation, OutputDelta
from server.api.openai.generation_job import (
    TOTAL_PROMPTS_FACTOR,
    HeadersParam,
    Job,
    PromptTokens,
    RequestHeaders,
    Serving,
    check_prompt,
    make_job,
    make_sampling,
    may_be_unbounded,
    resolve_max_tokens,
)
from server.api.openai.logprobs import CompletionLogprobs, concat_logprobs, format_token_id, make_completion_logprobs
from server.api.openai.request_models import (
    GenerationRequest,
    LongList,
    MaxTokens,
    Prompt,
)
from server.api.openai.response_models import (
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionResponse,
)
from server.api.openai.responses import (
    Format,
    make_chunk_fields,
    make_response_fields,
    respond,
    set_choice_fields,
    set_prompt_fields,
)
from server.api.openai.structured.check import check_constraint, get_constraint
from server.engine.ipc.messages import Hello, SamplingParams
from server.text.errors import InfillError
from server.text.output import locate_tokens
from server.text.tokenizer import TokenizerBase, truncate_prompt

C = TypeVar("C", bound=CompletionChunkChoice)


def _normalize_prompts(value: Any) -> Any:
    """Return the prompts of a request, which has one or a list of them; each is a text or a list of token ids."""
    if isinstance(value, str) or (isinstance(value, list) and {*map(type, value)} == {int}):
        return [value]
    if isinstance(value, list) and value and (_are_texts(value) or _are_lists(value)):
        return value
    raise ValueError(
        "should be a string, a list of token ids, or a list of such prompts, all of one kind and without empty lists"
    )


def _are_texts(prompts: list[Any]) -> bool:
    return all(isinstance(prompt, str) for prompt in prompts)


def _are_lists(prompts: list[Any]) -> bool:
    return all(isinstance(prompt, list) and prompt for prompt in prompts)


Prompts = Annotated[
    LongList[Prompt],
    BeforeValidator(_normalize_prompts, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
]


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompts = Field(
        description="a text or token ids, or a list of either; choice c of prompt p has the index p × n + c"
    )
    max_tokens: MaxTokens = Field(
        16,
        description="most tokens to generate; 0: only compute the prompt, -1: as many as fit the context, as in "
        "llama.cpp",
    )
    best_of: int | None = Field(
        None,
        ge=1,
        le=128,
        description="number of choices to generate, of which the n with the highest mean log-probability are returned, "
        "best first; all count in usage; in a stream it is n; default: n",
    )
    echo: bool = Field(
        False, description="begin the text with the prompt; with logprobs, the prompt's tokens have theirs, too"
    )
    logprobs: int | None = Field(
        None, ge=0, le=5, description="return log-probabilities of tokens, with this many alternatives"
    )
    suffix: str = Field(
        "",
        description="text after the completion, for models that fill in the middle; only with a prompt that is a text, "
        "and not with echo",
    )
    add_special_tokens: bool = Field(True, description="add the special tokens that the model expects around a text")
    reasoning_effort: Ignored[str] = None

    @field_validator("best_of")
    @classmethod
    def _check_best_of(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < info.data.get("n", 1):
            raise ValueError(f"should be at least n, not {value}")
        if value is not None and value > info.data.get("n", 1) and info.data.get("stream"):
            raise ValueError("more choices than n cannot be streamed: the best ones are known only at the end")
        return value

    @field_validator("suffix")
    @classmethod
    def _check_suffix(cls, value: str, info: ValidationInfo) -> str:
        if value and info.data.get("echo"):
            raise ValueError("cannot be combined with echo")
        return value


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(
        route_class=JsonRoute, tags=["completions"], responses=make_error_responses(400, 404, 413, 429, 503)
    )

    @routes.post("/v1/completions")
    async def create_completion(body: CompletionRequest, headers: HeadersParam) -> Response:
        return respond(Generation(serving, await make_completion_job(serving, body, headers)), COMPLETION_FORMAT)

    return routes


# ---------------------------------------------------------------- functions that convert a body to engine requests
async def make_completion_job(
    serving: Serving, body: CompletionRequest, headers: RequestHeaders
) -> Job[CompletionRequest]:
    """Return the job (the engine's requests) of an HTTP request.

    Raises ApiError for a wrong request, EngineLost without an engine, TextError if a prompt cannot be encoded.
    """
    hello, hints = serving.resolve_request(body, headers)
    choices = body.best_of or body.n
    serving.limits.check_choices(len(body.prompt), choices)
    serving.limits.check_stop(body.stop)
    serving.limits.check_length(body.suffix, "suffix")
    for prompt in body.prompt:
        serving.limits.check_length(prompt, "prompt")
    serving.limits.check_total_length(body.prompt, "prompt", TOTAL_PROMPTS_FACTOR)
    prompts = [await encode_prompt(serving.tokenizer, prompt, body) for prompt in body.prompt]
    max_tokens = resolve_max_tokens(body.max_tokens, prompts, hello)
    for each in prompts:
        check_prompt(each.ids, max_tokens, hello, unbounded=may_be_unbounded(hello, body, hints))
    sampling = _make_completion_sampling(body, hello, choices, max_tokens)
    conversations = [make_conversation_key(hints, body, get_prompt_beginning(prompt)) for prompt in body.prompt]
    constraint = get_constraint(body.iter_constraints())
    grammar = None if constraint is None else await check_constraint(serving, constraint)
    return make_job("cmpl", body, prompts, sampling, choices, hints, conversations, grammar)


def _make_completion_sampling(body: CompletionRequest, hello: Hello, choices: int, max_tokens: int) -> SamplingParams:
    """Return the sampling parameters of each prompt's first choice.

    The engine also computes log-probabilities of choices that `best_of` compares, and of prompts echoed with logprobs.
    """
    compared = 0 if choices > body.n else None
    of_prompt = [top for top in (body.logprobs if body.echo else None, body.prompt_logprobs) if top is not None]
    return make_sampling(
        body,
        hello,
        max_tokens=max_tokens,
        logprobs=compared if body.logprobs is None else body.logprobs,
        prompt_logprobs=max(of_prompt, default=None),
    )


async def encode_prompt(tokenizer: TokenizerBase, prompt: str | list[int], body: CompletionRequest) -> PromptTokens:
    """Return a prompt's ids, truncated to `truncate_prompt_tokens`, and its text.

    Without `echo` the text is empty for token ids and truncated prompts. Raises ApiError for a suffix if the prompt is
    token ids or the model cannot fill in the middle, TextError if the text cannot be encoded.
    """
    if isinstance(prompt, str) and body.suffix:
        try:
            ids = await tokenizer.encode_infill(prompt, body.suffix)
        except InfillError as error:
            raise ApiError(400, f"suffix: {error}", param="suffix") from None
    elif isinstance(prompt, str):
        ids = await tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens)
    elif body.suffix:
        raise ApiError(400, "suffix: only allowed with a prompt that is a text", param="suffix")
    else:
        ids = prompt
    kept = truncate_prompt(ids, body.truncate_prompt_tokens)
    if isinstance(prompt, str) and len(kept) == len(ids):
        return PromptTokens(ids, prompt)
    text = await tokenizer.decode_many(kept, skip_special_tokens=body.skip_special_tokens) if body.echo else ""
    return PromptTokens(kept, text)


# ---------------------------------------------------------------- functions that make a response of generated text
def make_completion_chunks(
    delta: OutputDelta | None, generation: Generation[CompletionRequest]
) -> list[CompletionChunk]:
    choices = [] if delta is None else [_make_choice(CompletionChunkChoice, delta, generation)]
    return [CompletionChunk(**make_chunk_fields(delta, generation), choices=choices)]


def make_completion(deltas: Sequence[OutputDelta], generation: Generation[CompletionRequest]) -> CompletionResponse:
    choices = [_make_choice(CompletionChoice, delta, generation) for delta in _select_best(deltas, generation.job)]
    for index, choice in enumerate(choices):
        choice.index = index
    return CompletionResponse(**make_response_fields(generation), choices=choices)


COMPLETION_FORMAT = Format(make_completion_chunks, make_completion)


def _make_choice(kind: type[C], delta: OutputDelta, generation: Generation[CompletionRequest]) -> C:
    """Return the text and fields that a delta adds to its choice. With `echo` the first text begins with the prompt."""
    job, body = generation.job, generation.job.body
    choice = kind(index=delta.choice, text=delta.text)
    if (top := body.logprobs) is not None:
        base = len(job.get_prompt(delta.choice).text) if body.echo else 0
        choice.logprobs = make_completion_logprobs(
            _get_token_namer(generation), delta.tokens, delta.logprobs, top, base
        )
    set_choice_fields(choice, delta, generation)
    if delta.is_first:
        set_prompt_fields(choice, delta.choice, generation)
        if body.echo:
            choice.text = job.get_prompt(delta.choice).text + choice.text
            if choice.logprobs is not None:
                choice.logprobs = concat_logprobs(_get_echo_logprobs(delta.choice, generation), choice.logprobs)
    return choice


def _get_token_namer(generation: Generation[CompletionRequest]) -> Callable[[int], str]:
    """Return a function that names tokens in log-probabilities: by id with return_tokens_as_token_ids, else by text."""
    by_id = generation.job.body.return_tokens_as_token_ids
    return format_token_id if by_id else generation.tokenizer.token_string


def _get_echo_logprobs(choice: int, generation: Generation[CompletionRequest]) -> CompletionLogprobs:
    """Return the log-probabilities of a choice's prompt; they are made once for all choices of the prompt."""
    top = generation.job.body.logprobs
    assert top is not None

    def compute() -> CompletionLogprobs:
        prompt, scores = generation.job.get_prompt(choice), [None, *generation.get_prompt_logprobs(choice)]
        tokens = locate_tokens(generation.tokenizer, prompt.ids, prompt.text)
        return make_completion_logprobs(_get_token_namer(generation), tokens, scores, top)

    return generation.share("echo_logprobs", choice, compute)


def _select_best(deltas: Sequence[OutputDelta], job: Job[CompletionRequest]) -> Sequence[OutputDelta]:
    """Return the n choices of each prompt whose tokens are likeliest on average, the best first."""
    count, n = job.choices_per_prompt, job.body.n
    if count == n:
        return deltas
    best: list[OutputDelta] = []
    for first in range(0, len(deltas), count):
        best += sorted(deltas[first : first + count], key=_mean_logprob, reverse=True)[:n]
    return best


def _mean_logprob(delta: OutputDelta) -> float:
    return sum(score.logprob for score in delta.logprobs) / max(1, len(delta.logprobs))
