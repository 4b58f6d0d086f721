"""POST /v1/completions: from OpenAI's request to a job, and from its pieces to OpenAI's answer."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Response

from server.api.answers import Serving, Writer, answering
from server.api.body import JsonRoute
from server.api.errors import ApiError, documented
from server.api.generation import Generation, Piece, Told
from server.api.jobs import Choosing, PromptTokens, check_prompt, job_of, sampling_of
from server.api.logprobs import completion_logprobs, joined
from server.api.models import instance_of, served_by
from server.api.objects import Completion, CompletionChoice
from server.api.schemas import LONGEST_NAME, CompletionRequest
from server.api.tenants import tenant
from server.engine.messages import Hello, Sampling, TokenScore
from server.text.detokenizer import Detokenizer
from server.text.infill import InfillError, infill_prompt
from server.text.output import OutputText, Placed
from server.text.tokenizer import Tokenizer, keep_last


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(route_class=JsonRoute, tags=["completions"], responses=documented(400, 404, 413, 429, 503))
    tokenizer = serving.tokenizer

    @routes.post("/v1/completions")
    async def create_completion(
        body: CompletionRequest,
        x_kv_cache: Annotated[str | None, Header(max_length=LONGEST_NAME)] = None,
        authorization: Annotated[str | None, Header(include_in_schema=False)] = None,
    ) -> Response:
        hello = served_by(serving.client)
        how = Choosing(x_kv_cache, instance_of(hello, body.model), tenant(authorization))
        choices = body.best_of or body.n
        serving.most.check(body.prompt, choices)
        prompts = [await read(tokenizer, prompt, body) for prompt in body.prompt]
        for prompt in prompts:
            check_prompt(prompt.ids, body.max_tokens, hello)
        job = job_of("cmpl", body, prompts, _sampling(body, hello, choices), choices, how)
        return answering(serving, body, job, CompletionWriter(tokenizer, body, job))

    return routes


def _sampling(body: CompletionRequest, hello: Hello, choices: int) -> Sampling:
    """Choices that are compared need log-probabilities, and so does an echo of the prompt with them."""
    compared = 0 if choices > body.n else None
    of_prompt = [top for top in (body.logprobs if body.echo else None, body.prompt_logprobs) if top is not None]
    return sampling_of(
        body,
        hello,
        max_tokens=body.max_tokens,
        logprobs=compared if body.logprobs is None else body.logprobs,
        prompt_logprobs=max(of_prompt, default=None),
    )


async def read(tokenizer: Tokenizer, prompt: str | list[int], body: CompletionRequest) -> PromptTokens:
    """Raises ApiError."""
    if isinstance(prompt, str) and body.suffix:
        try:
            ids = await infill_prompt(tokenizer, prompt, body.suffix)
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
    text = tokenizer.decode(kept, skip_special_tokens=body.skip_special_tokens) if body.echo else ""
    return PromptTokens(kept, text)


class CompletionWriter(Writer[CompletionRequest]):
    """With `echo` a choice's text begins with its prompt."""

    def chunk(self, piece: Piece | None, generation: Generation) -> Completion:
        return self._completion([] if piece is None else [self._part(piece, generation)])

    def whole(self, pieces: list[Piece], generation: Generation) -> Completion:
        choices = [self._part(piece, generation) for piece in pieces]
        return self._completion(choices if self._job.choices == self._body.n else self._best(choices, pieces))

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self._job.id, created=self._job.created, model=self._job.model, choices=choices)

    def _part(self, piece: Piece, generation: Generation) -> CompletionChoice:
        """What a piece adds to its choice."""
        body = self._body
        part = CompletionChoice(index=piece.choice, text=piece.text)
        prompt = self._job.prompt_of(piece.choice)
        if body.logprobs is not None:
            base = len(prompt.text) if body.echo else 0
            part.logprobs = completion_logprobs(self._tokenizer, piece.tokens, body.logprobs, base)
        if self._tell(part, piece, generation) and body.echo:
            self._echo(part, prompt, generation.prompt_scores(piece.choice))
        return part

    def _echo(self, part: CompletionChoice, prompt: PromptTokens, scores: list[TokenScore]) -> None:
        """Puts the prompt before a choice's first piece."""
        part.text = prompt.text + part.text
        if part.logprobs is not None:
            assert self._body.logprobs is not None
            told = [
                Told(placed.token, placed.offset, score)
                for placed, score in zip(self._placed(prompt.ids), [None, *scores], strict=True)
            ]
            part.logprobs = joined(completion_logprobs(self._tokenizer, told, self._body.logprobs, 0), part.logprobs)

    def _placed(self, ids: list[int]) -> list[Placed]:
        """Where each token of a prompt begins in its text."""
        text = OutputText(Detokenizer(self._tokenizer, [], skip_special=self._body.skip_special_tokens))
        return text.push(ids, "length").tokens

    def _best(self, choices: list[CompletionChoice], pieces: list[Piece]) -> list[CompletionChoice]:
        """Of each prompt's choices the n whose tokens are likeliest on average, the best first."""
        logprobs = [[told.score.logprob for told in piece.tokens if told.score] for piece in pieces]
        means = [sum(each) / max(1, len(each)) for each in logprobs]
        best: list[CompletionChoice] = []
        for first in range(0, len(choices), self._job.choices):
            of_prompt = range(first, first + self._job.choices)
            best += [choices[i] for i in sorted(of_prompt, key=lambda i: -means[i])[: self._body.n]]
        for index, choice in enumerate(best):
            choice.index = index
        return best
