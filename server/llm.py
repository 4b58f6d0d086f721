"""`LLM`: a model with its caches in this process, for programs that need no server: `LLM(...).generate(...)`.

Names, bounds and defaults are those of the HTTP API and of the settings. It submits requests to the same core as the
server, and computes its steps in the caller's thread: what is generated at the same time shares steps.
"""

from __future__ import annotations

import operator
import os
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack, cast

from llguidance import LLTokenizer
from pydantic import ValidationError

from config.settings import load_settings
from config.sources import did_you_mean
from config.wording import explain_problem
from server.api.http.json_body import Body
from server.api.openai.request_models import SamplingRequest
from server.api.openai.structured.models import StructuredRequest
from server.engine.build import Engine, build_engine
from server.engine.ipc.messages import (
    Admitted,
    Failed,
    FromEngine,
    PromptScores,
    SamplingParams,
    Submit,
    TokenLogprob,
    Tokens,
)
from server.grammar.lark import write_lark
from server.grammar.matcher import TokenTable, compile_grammar
from server.text.encoder import Encoder
from server.text.errors import GrammarError, TokenizerError
from server.text.output import Detokenizer, OutputText
from server.text.vocabulary import Vocabulary

B = TypeVar("B", bound=Body)
FinishReason = Literal["stop", "length"]
Prompt = str | Sequence[int]  # a text or token ids

MAX_NUM_SEQS = 4  # maximum number of texts in a step; the server's default would reserve memory for many more
MAX_QUEUED = 1 << 20  # a batch may have any number of prompts
WORKER = 0  # the only one
STALLED_SECONDS = 0.001  # seconds of pause after a step without any result, as while a grammar is compiled


class GenerationError(RuntimeError):
    """Raised if a text ends with an error; `code` says which, as in errors of the HTTP API."""

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.code = code


class SamplingOptions(TypedDict, total=False):
    """Sampling parameters and stop conditions, with the names and meanings of docs/reference/api.md."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    allowed_token_ids: list[int]
    seed: int
    stop: str | list[str]
    stop_token_ids: list[int]
    include_stop_str_in_output: bool
    min_tokens: int
    ignore_eos: bool
    skip_special_tokens: bool


class StreamedToken(NamedTuple):
    """A generated token with the text that it added. A character of several tokens comes with its last one."""

    text: str
    token_id: int
    finish_reason: FinishReason | None  # why the text ended; None except for the last token
    logprob: TokenLogprob | None = None  # None unless `logprobs` was given


class Completion(NamedTuple):
    """The generated continuation of a prompt."""

    text: str
    token_ids: list[int]  # ids of the generated tokens, including the stop token if one ended the text
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    kv_cache: str  # the strategy instance that was used
    logprobs: list[TokenLogprob] | None = None  # of each generated token; None unless `logprobs` was given
    # Of each token of the prompt but the first; None unless `prompt_logprobs` was given, and for further choices
    prompt_logprobs: list[TokenLogprob] | None = None


class LLM:
    """A model with its tokenizer and its caches, for use in one thread; several streams may be open at a time."""

    def __init__(
        self, model: str | os.PathLike[str] = "tiny", *, max_num_seqs: int = MAX_NUM_SEQS, **settings: Any
    ) -> None:
        """Load a model: a directory, a name on the hub or a GGUF file, as for `kvmux serve`.

        `max_num_seqs` is the number of texts that are computed at a time; others wait. Other arguments are settings of
        the server by their names in a settings file; those of HTTP have no effect. Raises SettingsError for settings
        that cannot work.
        """
        given = {"model": os.fspath(model), "max_num_seqs": max_num_seqs, "max_queued_requests": MAX_QUEUED} | settings
        self._use_engine(build_engine(load_settings(None, given, are_flags=False)))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Return an LLM that computes with an engine that is built already."""
        llm = cls.__new__(cls)
        llm._use_engine(engine)
        return llm

    def _use_engine(self, engine: Engine) -> None:
        self.engine = engine
        self._encoder = Encoder.from_directory(engine.model_dir)
        self._texts: dict[str, _Text] = {}  # that have not ended, by request id
        self._numbers = count()

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 16,
        kv_cache: str | None = None,
        structured_outputs: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Return the continuation of a prompt, which is a text or token ids.

        `kv_cache` names the strategy instance; by default the settings choose it. `structured_outputs` says what the
        text has to be, as the field of the HTTP API does: {"json": schema}, for example. `logprobs` and
        `prompt_logprobs` are numbers of likeliest tokens beside each log-probability. Raises ValueError for invalid
        arguments, GrammarError if the text cannot go on as it has to be, GenerationError if computing fails.
        """
        [[completion]] = self.generate_batch(
            [prompt],
            max_tokens=max_tokens,
            kv_cache=kv_cache,
            structured_outputs=structured_outputs,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **sampling,
        )
        return completion

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int = 1,
        max_tokens: int = 16,
        kv_cache: str | None = None,
        structured_outputs: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> list[list[Completion]]:
        """Return `n` continuations of each prompt, computed in common steps; choice i is drawn with the seed + i.

        Raises the errors of `generate`; then none of the texts goes on.
        """
        options, grammar = _check_sampling(sampling), self._make_grammar(structured_outputs)
        params = _Parameters(max_tokens, kv_cache, grammar, logprobs, prompt_logprobs, options)
        groups: list[list[TokenStream]] = []
        try:
            for prompt in prompts:
                groups.append([])
                groups[-1] += self._start(prompt, n, params)
            return [[stream.complete() for stream in group] for group in groups]
        finally:
            for stream in (stream for group in groups for stream in group):
                stream.close()

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 16,
        kv_cache: str | None = None,
        structured_outputs: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> TokenStream:
        """Return an iterator over the tokens of the continuation.

        `next()` computes steps until there is a token; open streams share them. Memory is allocated with the first step
        and freed when the text has ended, or the iterator is closed or dropped. Raises the errors of `generate`.
        """
        options, grammar = _check_sampling(sampling), self._make_grammar(structured_outputs)
        params = _Parameters(max_tokens, kv_cache, grammar, logprobs, None, options)
        [stream] = self._start(prompt, 1, params)
        return stream

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that the model expects.

        Raises TokenizerError if the tokenizer fails.
        """
        return self._encoder.encode(text, add_special_tokens=True)

    # ---------------------------------------------------------------- requests
    def _start(self, prompt: Prompt, n: int, params: _Parameters) -> list[TokenStream]:
        """Submit the requests for `n` continuations of a prompt. Raises ValueError if they are refused."""
        try:
            ids = self.encode(prompt) if isinstance(prompt, str) else [operator.index(token) for token in prompt]
        except TokenizerError as error:
            raise ValueError(f"prompt: {error}") from None
        if operator.index(n) < 1:
            raise ValueError(f"n is {n}: ask for at least one text")
        drawing = params.options.to_sampling(
            operator.index(params.max_tokens), logprobs=params.logprobs, prompt_logprobs=params.prompt_logprobs
        )
        self._check(ids, drawing)
        streams: list[TokenStream] = []
        head = f"{next(self._numbers)}"
        for choice in range(n):
            name = f"{head}-{choice}"
            submit = Submit(
                name,
                ids,
                drawing.for_choice(choice),
                kv_cache=params.kv_cache,
                sibling_of=f"{head}-0" if choice else None,
                rollouts=False,
                grammar=params.grammar,
            )
            text = self._texts[name] = _Text(ids, params.options, drawing.for_choice(choice), self._encoder.vocabulary)
            streams.append(TokenStream(self, name, text))
            refused = self.engine.core.submit(WORKER, submit)
            if refused is not None:
                for stream in streams:
                    stream.close()
                assert isinstance(refused.message, Failed)
                if refused.message.status < 500:
                    raise ValueError(refused.message.message)
                raise GenerationError(refused.message.message, refused.message.code)
        return streams

    def _check(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Raise ValueError for numbers that the model cannot take, which the server's API refuses, too."""
        most, info = sampling.max_tokens, self.engine.core.model.info
        if most < 1:
            raise ValueError(f"max_tokens is {most}: ask for at least one token")
        if sampling.min_tokens > most:
            raise ValueError(f"min_tokens is {sampling.min_tokens}, more than max_tokens ({most}): lower it")
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(sampling, name)
            if number is not None and not 0 <= operator.index(number) <= info.vocab_size:
                raise ValueError(f"{name} is {number}: the vocabulary has {info.vocab_size} tokens")
        named: dict[str, Sequence[int]] = {
            "prompt": prompt,
            "stop_token_ids": sampling.stop_token_ids,
            "logit_bias": [token for token, _ in sampling.logit_bias],
            "allowed_token_ids": array("q", sampling.allowed_token_ids),
        }
        for name, ids in named.items():
            if ids and not 0 <= min(ids) <= max(ids) < info.vocab_size:
                raise ValueError(f"{name}: token ids should be from 0 to {info.vocab_size - 1}")

    def _make_grammar(self, structured_outputs: Mapping[str, Any] | None) -> str | None:
        """Return the grammar that a text has to follow. Raises ValueError if it cannot be used."""
        if structured_outputs is None:
            return None
        request = _check(StructuredRequest, {"structured_outputs": dict(structured_outputs)})
        (constraint,) = request.iter_constraints()
        try:
            lark = write_lark(constraint.kind, constraint.text)
            compile_grammar(self._grammar_tokens, lark)
        except GrammarError as error:
            raise ValueError(f"structured_outputs: {error}") from None
        return lark

    @cached_property
    def _grammar_tokens(self) -> LLTokenizer:
        """Return the tokens as llguidance reads them."""
        return TokenTable(self._encoder.vocabulary).make_tokenizer()

    def _step(self) -> None:
        """Compute a step, and give each text what has come of it."""
        result = self.engine.core.step()
        for _, message in result.events:
            name = getattr(message, "request_id", "")
            if (text := self._texts.get(name)) is not None:
                text.accept(message)
                if text.has_ended:
                    self._end(name)
        if not result.events and not result.report.rows:
            time.sleep(STALLED_SECONDS)

    def _end(self, name: str) -> None:
        """End a request, if it has not ended yet."""
        if self._texts.pop(name, None) is not None:
            self.engine.core.cancel(WORKER, name, "stop")


class TokenStream(Iterator[StreamedToken]):
    """The tokens of one text, as they are computed."""

    def __init__(self, llm: LLM, name: str, text: _Text) -> None:
        self._llm, self._name, self._text = llm, name, text

    def __next__(self) -> StreamedToken:
        text = self._text
        while not text.pieces:
            if text.error is not None:
                error, text.error = text.error, None
                raise error
            if text.has_ended:
                raise StopIteration
            self._llm._step()
        return text.pieces.popleft()

    def complete(self) -> Completion:
        """Return the whole text, once it has ended."""
        text = self._text
        pieces = list(self)
        finish_reason = pieces[-1].finish_reason
        assert finish_reason is not None
        logprobs = [each.logprob for each in pieces if each.logprob is not None]
        return Completion(
            "".join(piece.text for piece in pieces),
            [piece.token_id for piece in pieces],
            finish_reason,
            text.prompt,
            text.kv_cache,
            None if text.sampling.logprobs is None else logprobs,
            None if text.sampling.prompt_logprobs is None else text.prompt_logprobs,
        )

    def close(self) -> None:
        """End the text and free its memory."""
        self._text.has_ended = True
        self._text.pieces.clear()
        self._llm._end(self._name)

    def __del__(self) -> None:
        self.close()


class _Parameters(NamedTuple):
    """The arguments of `generate_batch` that are the same for all prompts."""

    max_tokens: int
    kv_cache: str | None
    grammar: str | None  # what each text has to be
    logprobs: int | None
    prompt_logprobs: int | None
    options: SamplingRequest


class _Text:
    """What has come of a request: its tokens with their text, to the end or a stop string."""

    def __init__(
        self, prompt: list[int], options: SamplingRequest, sampling: SamplingParams, vocabulary: Vocabulary
    ) -> None:
        self.prompt, self.sampling = prompt, sampling
        self.kv_cache = ""  # the instance, once it is known
        self.pieces: deque[StreamedToken] = deque()  # that nobody has taken yet
        self.prompt_logprobs: list[TokenLogprob] = []
        self.error: Exception | None = None
        self.has_ended = False
        self._output = OutputText(
            Detokenizer(vocabulary, prompt, skip_special=options.skip_special_tokens),
            options.stop,
            include_stop=options.include_stop_str_in_output,
            min_tokens=options.min_tokens,
        )

    def accept(self, message: FromEngine) -> None:
        """Take an event of the request."""
        match message:
            case Admitted():
                self.kv_cache = message.instance
            case PromptScores(_, logprobs):
                self.prompt_logprobs += logprobs
            case Tokens():
                self._add(message)
            case Failed():
                known = message.code == "grammar_failed"
                self.error = GrammarError(message.message) if known else GenerationError(message.message, message.code)
                self.has_ended = True

    def _add(self, message: Tokens) -> None:
        for i, token in enumerate(message.tokens):
            is_last = i == len(message.tokens) - 1
            reason = cast("FinishReason | None", message.finish_reason if is_last else None)
            text = self._output.push([token], reason, ends_with_text=is_last and message.completes_grammar).text
            if self._output.stop_reason is not None:
                reason = "stop"
            logprob = None if message.logprobs is None else message.logprobs[i]
            self.pieces.append(StreamedToken(text, token, reason, logprob))
            if reason is not None:
                self.has_ended = True
                return


def _check_sampling(sampling: Mapping[str, Any]) -> SamplingRequest:
    """Return checked sampling parameters. Raises ValueError for invalid values, and TypeError for unknown names."""
    known = SamplingOptions.__annotations__
    for name in sampling.keys() - known.keys():
        raise TypeError(f"{name!r} is not a sampling parameter{did_you_mean(name, known)}")
    values = dict(sampling)
    if isinstance(bias := values.get("logit_bias"), Mapping):
        values["logit_bias"] = {str(token): by for token, by in bias.items()}  # as JSON has it
    return _check(SamplingRequest, values)


def _check(kind: type[B], values: dict[str, Any]) -> B:
    """Return checked arguments. Raises ValueError for invalid values."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ValueError("; ".join(_format_validation_error(problem) for problem in error.errors())) from None


def _format_validation_error(problem: Any) -> str:
    """Return a validation error as text: "temperature: should be 2 or less, not 3"."""
    where = ".".join(str(part) for part in problem["loc"])
    return explain_problem(where, problem)
