"""A model and its caches in this process, for programs that need no server: `LLM(...).generate(...)`.

Names, bounds and defaults are those of the HTTP API and of the settings. Knows text; `generate.py` generates.
"""

from __future__ import annotations

import operator
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, TypedDict, Unpack

from pydantic import ValidationError

from config.settings import load_settings
from config.sources import did_you_mean
from server.api.openai.request_models import SamplingRequest
from server.engine.build import build_engine
from server.engine.ipc.messages import Submit
from server.engine.scheduling.request import RequestError
from server.engine.scheduling.selection import Selector
from server.generate import FinishReason, GeneratedToken, generate
from server.text.encoder import Encoder
from server.text.errors import TokenizerError
from server.text.output import Detokenizer, OutputText

MAX_NUM_SEQS = 4  # streams at a time; the server's default would take memory for many more


class SamplingOptions(TypedDict, total=False):
    """How tokens are drawn, and where a text ends: as docs/reference/api.md describes them."""

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


class Piece(NamedTuple):
    """The text that a token added. Text that is not certain yet comes with a later token."""

    text: str
    token_id: int
    finish_reason: FinishReason | None  # of the last piece


class Completion(NamedTuple):
    """The text after a prompt."""

    text: str
    token_ids: list[int]  # with the token that ended the text, if one did
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    kv_cache: str  # the instance that kept the keys and values


class _Job(NamedTuple):
    """A checked prompt, and the tokens to be generated."""

    prompt: list[int]
    kv_cache: str
    options: SamplingRequest
    tokens: Generator[GeneratedToken, None, None]


class LLM:
    """A model, its tokenizer and its caches. For one thread, in which several streams may be open."""

    def __init__(self, model: str = "tiny", *, max_num_seqs: int = MAX_NUM_SEQS, **settings: Any) -> None:
        """Load a model: a directory, a name on the hub or a GGUF file, as for `kvmux serve`.

        `max_num_seqs` is how many streams may be open at a time. The others are settings of the server by their names
        in a settings file; those of HTTP have no effect. Raises SettingsError.
        """
        given = {"model": model, "max_num_seqs": max_num_seqs} | settings
        self.engine = build_engine(load_settings(None, given, are_flags=False))
        self._encoder = Encoder.from_directory(self.engine.model_dir)
        chosen = self.engine.settings
        self._selector = Selector(self.engine.core.caches.keys(), chosen.rules, chosen.default_strategy)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 16,
        kv_cache: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Return what follows a prompt, which is a text or token ids.

        `kv_cache` names the strategy instance; None: as the settings say. Raises ValueError for what cannot be used,
        MemoryError if open streams leave no room, StrategyError or NotANumber if computing fails.
        """
        job = self._make_job(prompt, max_tokens, kv_cache, sampling)
        pieces = list(self._generate_pieces(job))
        finish_reason = pieces[-1].finish_reason
        assert finish_reason is not None
        text = "".join(piece.text for piece in pieces)
        return Completion(text, [piece.token_id for piece in pieces], finish_reason, job.prompt, job.kv_cache)

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 16,
        kv_cache: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[Piece, None, None]:
        """Return an iterator over what `generate` returns, token by token, each computed when it is asked for.

        Its memory is taken with the first token, and free when it ends or is closed. Raises as `generate` does.
        """
        return self._generate_pieces(self._make_job(prompt, max_tokens, kv_cache, sampling))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens the model expects around it. Raises TokenizerError."""
        return self._encoder.encode(text, add_special_tokens=True)

    def _make_job(
        self, prompt: str | Sequence[int], max_tokens: int, kv_cache: str | None, sampling: SamplingOptions
    ) -> _Job:
        """Check the arguments of `generate`. Raises ValueError, and TypeError for names and types that cannot be."""
        try:
            ids = self.encode(prompt) if isinstance(prompt, str) else [operator.index(token) for token in prompt]
        except TokenizerError as error:
            raise ValueError(f"prompt: {error}") from None
        options = _check_sampling(sampling)
        drawing = options.to_sampling(operator.index(max_tokens))
        try:
            submit = Submit("", ids, drawing, kv_cache=kv_cache)
            name, _ = self._selector.choose(submit, self.engine.core.arena.usage)
        except RequestError as error:
            raise ValueError(error.message) from None
        core = self.engine.core
        return _Job(ids, name, options, generate(core.model, core.caches[name], ids, drawing))

    def _generate_pieces(self, job: _Job) -> Generator[Piece, None, None]:
        """Return the job's tokens with their text, up to a stop string."""
        options = job.options
        detokenizer = Detokenizer(self._encoder.vocabulary, job.prompt, skip_special=options.skip_special_tokens)
        output = OutputText(
            detokenizer,
            options.stop,
            include_stop=options.include_stop_str_in_output,
            min_tokens=options.min_tokens,
        )
        with closing(job.tokens):
            for token, finish_reason in job.tokens:
                text = output.push([token], finish_reason).text
                reason: FinishReason | None = "stop" if output.stop_reason is not None else finish_reason
                yield Piece(text, token, reason)
                if reason is not None:
                    return


def _check_sampling(sampling: Mapping[str, Any]) -> SamplingRequest:
    """Check sampling parameters. Raises ValueError for values, and TypeError for unknown names, as Python does."""
    known = SamplingOptions.__annotations__
    for name in sampling.keys() - known.keys():
        raise TypeError(f"{name!r} is not a sampling parameter{did_you_mean(name, known)}")
    values = dict(sampling)
    if isinstance(bias := values.get("logit_bias"), Mapping):
        values["logit_bias"] = {str(token): by for token, by in bias.items()}  # as JSON has it
    try:
        return SamplingRequest.model_validate(values)
    except ValidationError as error:
        raise ValueError("; ".join(_format_validation_error(problem) for problem in error.errors())) from None


def _format_validation_error(problem: Any) -> str:
    """Return a validation error in words: "temperature: Input should be less than or equal to 2"."""
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}"
