"""POST /v1/completions: from OpenAI's request to a job, and from its pieces to OpenAI's answer."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Response
from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

from server.api.http.body import JsonRoute
from server.api.http.errors import ApiError, make_error_responses
from server.api.http.json_values import DecodedIds, ReadAs
from server.api.openai.generation import Generation, OutputDelta
from server.api.openai.generation_job import (
    TOTAL_PROMPTS_FACTOR,
    Job,
    PromptTokens,
    check_prompt,
    make_job,
    make_sampling,
)
from server.api.openai.logprobs import CompletionLogprobs, concat_logprobs, format_token_id, make_completion_logprobs
from server.api.openai.request_models import INT64, MAX_NAME_LENGTH, GenerationRequest, Ignored, LongList, Prompt
from server.api.openai.response_models import CompletionChoice, CompletionResponse
from server.api.openai.responses import Serving, Writer, create_response
from server.engine.ipc.messages import Hello, SamplingParams
from server.text.errors import InfillError
from server.text.output import locate_tokens
from server.text.tokenizer import TokenizerBase, truncate_prompt
from server.text.vocabulary import Vocabulary


def _accept_decoded_prompts(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Return ids that the decoder has checked as a list of prompts."""
    if not isinstance(value, DecodedIds):
        return validate(value)
    prompts = value.ids if value.nested else [value.ids]
    return prompts if all(prompts) else validate(prompts)


def _normalize_prompts(value: Any) -> Any:
    """Return a list of prompts, each of which is a text or ids; a request has one, or a list of them."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(item) is int for item in value)):
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
    WrapValidator(_accept_decoded_prompts),
    ReadAs.TOKEN_IDS,
]


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompts = Field(description="a text or token ids, or a list of either")
    max_tokens: int = Field(16, ge=0, lt=INT64, description="0: only the prompt is computed")
    best_of: int | None = Field(None, ge=1, le=128, description="so many are written, and the n likeliest told")
    echo: bool = Field(False, description="the text begins with the prompt")
    logprobs: int | None = Field(None, ge=0, le=5, description="log-probabilities of tokens, and so many alternatives")
    suffix: str = Field("", description="what comes behind the text, for models that fill in the middle")
    add_special_tokens: bool = Field(True, description="those which the model expects around a text")
    reasoning_effort: Ignored[str] = None

    @field_validator("best_of")
    @classmethod
    def _check_best_of(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < info.data.get("n", 1):
            raise ValueError(f"should be at least n, not {value}")
        if value is not None and value > info.data.get("n", 1) and info.data.get("stream"):
            raise ValueError("more than n cannot be streamed: the best is known at the end")
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
    tokenizer = serving.tokenizer

    @routes.post("/v1/completions")
    async def create_completion(
        body: CompletionRequest,
        x_kv_cache: Annotated[str | None, Header(max_length=MAX_NAME_LENGTH)] = None,
        authorization: Annotated[str | None, Header(include_in_schema=False)] = None,
    ) -> Response:
        hello, how = serving.resolve_request(body, x_kv_cache, authorization)
        choices = body.best_of or body.n
        serving.limits.check_choices(len(body.prompt), choices)
        serving.limits.check_stop(body.stop)
        context = hello.max_seq_len if body.truncate_prompt_tokens is None else None
        serving.limits.check_length(body.suffix, "suffix", context)
        for prompt in body.prompt:
            serving.limits.check_length(prompt, "prompt", context)
        serving.limits.check_total_length(body.prompt, "prompt", TOTAL_PROMPTS_FACTOR)
        prompts = [await encode_prompt(tokenizer, prompt, body) for prompt in body.prompt]
        for each in prompts:
            check_prompt(each.ids, body.max_tokens, hello)
        job = make_job("cmpl", body, prompts, _make_completion_sampling(body, hello, choices), choices, how)
        return create_response(serving, CompletionWriter(tokenizer, body, job))

    return routes


def _make_completion_sampling(body: CompletionRequest, hello: Hello, choices: int) -> SamplingParams:
    """Return the sampling.

    Choices that are compared need log-probabilities, and so does an echo of the prompt with them.
    """
    compared = 0 if choices > body.n else None
    of_prompt = [top for top in (body.logprobs if body.echo else None, body.prompt_logprobs) if top is not None]
    return make_sampling(
        body,
        hello,
        max_tokens=body.max_tokens,
        logprobs=compared if body.logprobs is None else body.logprobs,
        prompt_logprobs=max(of_prompt, default=None),
    )


async def encode_prompt(tokenizer: TokenizerBase, prompt: str | list[int], body: CompletionRequest) -> PromptTokens:
    """Return a prompt's ids, truncated if asked for, and its text. Raises ApiError, TextError."""
    if isinstance(prompt, str) and body.suffix:
        try:
            ids = await tokenizer.encode_infill(prompt, body.suffix)
        except InfillError as error:
            raise ApiError(400, f"suffix: {error}", param="suffix") from None
    elif isinstance(prompt, str):
        ids = await tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens)
    elif body.suffix:
        raise ApiError(400, "suffix: only with a prompt that is a text", param="suffix")
    else:
        ids = prompt
    kept = truncate_prompt(ids, body.truncate_prompt_tokens)
    if isinstance(prompt, str) and len(kept) == len(ids):
        return PromptTokens(ids, prompt)
    text = await tokenizer.decode_many(kept, skip_special_tokens=body.skip_special_tokens) if body.echo else ""
    return PromptTokens(kept, text)


class CompletionWriter(Writer[CompletionRequest]):
    """Writes completions. With `echo` a choice's text begins with its prompt."""

    def __init__(self, tokenizer: Vocabulary, body: CompletionRequest, job: Job) -> None:
        super().__init__(tokenizer, body, job)
        self._echo_logprobs: dict[int, CompletionLogprobs] = {}  # by the prompt's first choice
        self._get_token_name = format_token_id if body.return_tokens_as_token_ids else tokenizer.token_string

    def make_chunk(self, piece: OutputDelta | None, generation: Generation) -> CompletionResponse:
        return self._make_completion([] if piece is None else [self._make_choice(piece, generation)])

    def make_response(self, pieces: list[OutputDelta], generation: Generation) -> CompletionResponse:
        choices = [self._make_choice(piece, generation) for piece in self._select_best(pieces)]
        for index, choice in enumerate(choices):
            choice.index = index
        return self._make_completion(choices)

    def _make_completion(self, choices: list[CompletionChoice]) -> CompletionResponse:
        return CompletionResponse(**self.common_fields, choices=choices)

    def _make_choice(self, piece: OutputDelta, generation: Generation) -> CompletionChoice:
        """Return what a piece adds to its choice."""
        part = CompletionChoice(index=piece.choice, text=piece.text)
        if (top := self.body.logprobs) is not None:
            base = len(self.job.get_prompt(piece.choice).text) if self.body.echo else 0
            part.logprobs = make_completion_logprobs(self._get_token_name, piece.tokens, piece.logprobs, top, base)
        if self._fill_choice(part, piece, generation):
            self._fill_prompt_fields(part, piece.choice, generation)
            if self.body.echo:
                self._prepend_prompt(part, generation)
        return part

    def _prepend_prompt(self, part: CompletionChoice, generation: Generation) -> None:
        """Put the prompt before the first part of its choice."""
        part.text = self.job.get_prompt(part.index).text + part.text
        if part.logprobs is not None:
            part.logprobs = concat_logprobs(self._get_echo_logprobs(part.index, generation), part.logprobs)

    def _get_echo_logprobs(self, choice: int, generation: Generation) -> CompletionLogprobs:
        """Return the log-probabilities of a choice's prompt."""
        head = self.job.get_first_choice(choice)
        if head not in self._echo_logprobs:
            assert self.body.logprobs is not None
            prompt, scores = self.job.get_prompt(head), [None, *generation.get_prompt_logprobs(head)]
            tokens = locate_tokens(self.tokenizer, prompt.ids, prompt.text)
            self._echo_logprobs[head] = make_completion_logprobs(
                self._get_token_name, tokens, scores, self.body.logprobs
            )
        return self._echo_logprobs[head]

    def _select_best(self, pieces: list[OutputDelta]) -> list[OutputDelta]:
        """Return the n choices of each prompt whose tokens are likeliest on average, the best first."""
        if self.job.choices_per_prompt == self.body.n:
            return pieces
        best: list[OutputDelta] = []
        for first in range(0, len(pieces), self.job.choices_per_prompt):
            best += sorted(pieces[first : first + self.job.choices_per_prompt], key=_mean_logprob, reverse=True)[
                : self.body.n
            ]
        return best


def _mean_logprob(piece: OutputDelta) -> float:
    return sum(score.logprob for score in piece.logprobs) / max(1, len(piece.logprobs))
