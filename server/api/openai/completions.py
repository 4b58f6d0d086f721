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
from server.api.http.errors import ApiError, documented
from server.api.http.json_values import DecodedIds, ReadAs
from server.api.openai.generation import Generation, OutputDelta
from server.api.openai.generation_job import MANY_PROMPTS, Job, PromptTokens, check_prompt, job_of, sampling_of
from server.api.openai.logprobs import CompletionLogprobs, completion_logprobs, id_of, joined
from server.api.openai.request_models import INT64, LONGEST_NAME, GenerationRequest, Ignored, LongList, Prompt
from server.api.openai.response_models import CompletionChoice, CompletionResponse
from server.api.openai.responses import Serving, Writer, answering
from server.engine.ipc.messages import Hello, Sampling
from server.text.errors import InfillError
from server.text.output import placed
from server.text.tokenizer import TokenizerBase, keep_last
from server.text.vocabulary import Vocabulary


def _decoded_prompts(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Return ids that the decoder has checked as a list of prompts."""
    if not isinstance(value, DecodedIds):
        return validate(value)
    prompts = value.ids if value.nested else [value.ids]
    return prompts if all(prompts) else validate(prompts)


def _as_prompts(value: Any) -> Any:
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
    BeforeValidator(_as_prompts, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
    WrapValidator(_decoded_prompts),
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
    def _best_of(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < info.data.get("n", 1):
            raise ValueError(f"should be at least n, not {value}")
        if value is not None and value > info.data.get("n", 1) and info.data.get("stream"):
            raise ValueError("more than n cannot be streamed: the best is known at the end")
        return value

    @field_validator("suffix")
    @classmethod
    def _suffix(cls, value: str, info: ValidationInfo) -> str:
        if value and info.data.get("echo"):
            raise ValueError("cannot be combined with echo")
        return value


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(route_class=JsonRoute, tags=["completions"], responses=documented(400, 404, 413, 429, 503))
    tokenizer = serving.tokenizer

    @routes.post("/v1/completions")
    async def create_completion(
        body: CompletionRequest,
        x_kv_cache: Annotated[str | None, Header(max_length=LONGEST_NAME)] = None,
        authorization: Annotated[str | None, Header(include_in_schema=False)] = None,
    ) -> Response:
        hello, how = serving.asked(body, x_kv_cache, authorization)
        choices = body.best_of or body.n
        serving.most.check_choices(len(body.prompt), choices)
        serving.most.check_stop(body.stop)
        context = hello.max_seq_len if body.truncate_prompt_tokens is None else None
        serving.most.check_text(body.suffix, "suffix", context)
        for prompt in body.prompt:
            serving.most.check_text(prompt, "prompt", context)
        serving.most.check_together(body.prompt, "prompt", MANY_PROMPTS)
        prompts = [await read(tokenizer, prompt, body) for prompt in body.prompt]
        for each in prompts:
            check_prompt(each.ids, body.max_tokens, hello)
        job = job_of("cmpl", body, prompts, _sampling(body, hello, choices), choices, how)
        return answering(serving, CompletionWriter(tokenizer, body, job))

    return routes


def _sampling(body: CompletionRequest, hello: Hello, choices: int) -> Sampling:
    """Return the sampling.

    Choices that are compared need log-probabilities, and so does an echo of the prompt with them.
    """
    compared = 0 if choices > body.n else None
    of_prompt = [top for top in (body.logprobs if body.echo else None, body.prompt_logprobs) if top is not None]
    return sampling_of(
        body,
        hello,
        max_tokens=body.max_tokens,
        logprobs=compared if body.logprobs is None else body.logprobs,
        prompt_logprobs=max(of_prompt, default=None),
    )


async def read(tokenizer: TokenizerBase, prompt: str | list[int], body: CompletionRequest) -> PromptTokens:
    """Return a prompt's ids, truncated if asked for, and its text. Raises ApiError, TextError."""
    if isinstance(prompt, str) and body.suffix:
        try:
            ids = await tokenizer.infill(prompt, body.suffix)
        except InfillError as error:
            raise ApiError(400, f"suffix: {error}", param="suffix") from None
    elif isinstance(prompt, str):
        ids = await tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens)
    elif body.suffix:
        raise ApiError(400, "suffix: only with a prompt that is a text", param="suffix")
    else:
        ids = prompt
    kept = keep_last(ids, body.truncate_prompt_tokens)
    if isinstance(prompt, str) and len(kept) == len(ids):
        return PromptTokens(ids, prompt)
    text = await tokenizer.decode_many(kept, skip_special_tokens=body.skip_special_tokens) if body.echo else ""
    return PromptTokens(kept, text)


class CompletionWriter(Writer[CompletionRequest]):
    """Writes completions. With `echo` a choice's text begins with its prompt."""

    def __init__(self, tokenizer: Vocabulary, body: CompletionRequest, job: Job) -> None:
        super().__init__(tokenizer, body, job)
        self._echoed: dict[int, CompletionLogprobs] = {}  # by the prompt's first choice
        self._name = id_of if body.return_tokens_as_token_ids else tokenizer.token_string

    def chunk(self, piece: OutputDelta | None, generation: Generation) -> CompletionResponse:
        return self._completion([] if piece is None else [self._part(piece, generation)])

    def whole(self, pieces: list[OutputDelta], generation: Generation) -> CompletionResponse:
        choices = [self._part(piece, generation) for piece in self._best(pieces)]
        for index, choice in enumerate(choices):
            choice.index = index
        return self._completion(choices)

    def _completion(self, choices: list[CompletionChoice]) -> CompletionResponse:
        return CompletionResponse(**self.about, choices=choices)

    def _part(self, piece: OutputDelta, generation: Generation) -> CompletionChoice:
        """Return what a piece adds to its choice."""
        part = CompletionChoice(index=piece.choice, text=piece.text)
        if (top := self.body.logprobs) is not None:
            base = len(self.job.prompt_of(piece.choice).text) if self.body.echo else 0
            part.logprobs = completion_logprobs(self._name, piece.tokens, piece.scores, top, base)
        if self._tell(part, piece, generation):
            self._tell_prompt(part, piece.choice, generation)
            if self.body.echo:
                self._echo(part, generation)
        return part

    def _echo(self, part: CompletionChoice, generation: Generation) -> None:
        """Put the prompt before the first part of its choice."""
        part.text = self.job.prompt_of(part.index).text + part.text
        if part.logprobs is not None:
            part.logprobs = joined(self._of_echo(part.index, generation), part.logprobs)

    def _of_echo(self, choice: int, generation: Generation) -> CompletionLogprobs:
        """Return the log-probabilities of a choice's prompt."""
        head = self.job.first_of(choice)
        if head not in self._echoed:
            assert self.body.logprobs is not None
            prompt, scores = self.job.prompt_of(head), [None, *generation.prompt_scores(head)]
            tokens = placed(self.tokenizer, prompt.ids, prompt.text)
            self._echoed[head] = completion_logprobs(self._name, tokens, scores, self.body.logprobs)
        return self._echoed[head]

    def _best(self, pieces: list[OutputDelta]) -> list[OutputDelta]:
        """Return the n choices of each prompt whose tokens are likeliest on average, the best first."""
        if self.job.choices == self.body.n:
            return pieces
        best: list[OutputDelta] = []
        for first in range(0, len(pieces), self.job.choices):
            best += sorted(pieces[first : first + self.job.choices], key=_mean_logprob, reverse=True)[: self.body.n]
        return best


def _mean_logprob(piece: OutputDelta) -> float:
    return sum(score.logprob for score in piece.scores) / max(1, len(piece.scores))
