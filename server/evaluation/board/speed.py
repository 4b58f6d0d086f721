"""Measures the speed of strategies at one length, by turns, with the engine alone: no HTTP, no other requests.

Prompts are random token ids, new for each turn and the same for all strategies, so that no prefix is in a cache. Knows
no suites.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from config.errors import SettingsError
from server.engine.build import Engine
from server.evaluation.board.data import SpeedFigures
from server.llm import LLM, GenerationError
from server.profiling.background_load import Neighbours

STREAMS = 8
TOKENS = 24  # of each stream, that are timed
TURNS = 3


class SpeedTiming(NamedTuple):
    """The seconds to the first token of the last stream, tokens a second of all, and KV memory in use meanwhile."""

    first_token: float
    rate: float
    held_bytes: int


class SpeedMeter:
    """Measures strategies of an engine with texts of a length."""

    def __init__(self, engine: Engine, length: int, seed: str) -> None:
        """Raise SettingsError if the length has no room for an answer."""
        self._engine, self._seed, self._length = engine, seed, length
        self._llm = LLM.from_engine(engine)
        # A stream goes on, a token a step, while the prompts of those after it are computed: twice as many steps as if
        # each were full
        step_tokens = engine.core.scheduler.limits.max_num_batched_tokens
        self.answer_tokens = TOKENS + 2 + 2 * STREAMS * (length // step_tokens + 1)
        if 2 * self.answer_tokens > length:
            raise SettingsError(f"--lengths: should be at least {2 * self.answer_tokens:,}, to measure the speed")

    def check_room(self, names: Sequence[str]) -> None:
        """Raise SettingsError if the KV memory does not hold STREAMS texts of the length under each strategy."""
        for name in names:
            instance = self._engine.core.instances[name]
            if STREAMS * instance.bytes_for(self._length) > instance.limit_bytes:
                raise SettingsError(
                    f"--lengths: no room for {STREAMS} texts of {self._length:,} tokens under {name}: raise --kv-memory"
                )

    def measure(self, names: Sequence[str], on_turn: Callable[[str], object]) -> dict[str, SpeedFigures]:
        """Return the speed of each strategy; `on_turn` is called with its name after each turn.

        Raises SettingsError if a strategy fails.
        """
        timings: dict[str, list[tuple[SpeedTiming, SpeedTiming]]] = {name: [] for name in names}
        try:
            for name in names:  # what is computed for the first time may take longer
                self._llm.generate([1] * 64, max_tokens=4, kv_cache=name, temperature=0, ignore_eos=True)
            neighbours = Neighbours()
            for turn in range(TURNS):
                for name in names:
                    timings[name].append((self._time(name, turn, 1), self._time(name, turn, STREAMS)))
                    on_turn(name)
        except GenerationError as error:
            raise SettingsError(f"--board: {error}") from error
        share = neighbours.compute_share()
        return {name: summarize(each, share) for name, each in timings.items()}

    def _time(self, name: str, turn: int, streams: int) -> SpeedTiming:
        """Time texts that begin together.

        Requests are computed in the order in which they came, so all have had their first token when the last one has
        its own. From then on each step gives a token to each of them, until the last one has TOKENS more.
        """
        core = self._engine.core
        random = Random(f"{self._seed}/{turn}/{streams}")
        vocabulary, prompt_tokens = core.model.info.vocab_size, self._length - self.answer_tokens
        prompts = [[random.randrange(vocabulary) for _ in range(prompt_tokens)] for _ in range(streams)]
        instance, held = core.instances[name], 0
        instance.evict(instance.idle_bytes)
        start = time.perf_counter()
        texts = [
            self._llm.stream(each, max_tokens=self.answer_tokens, kv_cache=name, temperature=0, ignore_eos=True)
            for each in prompts
        ]
        try:
            for text in texts:
                next(text)
            first = time.perf_counter()
            for _ in range(TOKENS):
                next(texts[-1])
                held = max(held, core.memory.get_held_bytes(name))
            end = time.perf_counter()
        finally:
            for text in texts:
                text.close()
            instance.evict(instance.idle_bytes)
        return SpeedTiming(first - start, streams * TOKENS / (end - first), held)


def summarize(timings: Sequence[tuple[SpeedTiming, SpeedTiming]], others_share: float) -> SpeedFigures:
    """Return the figures of the turns, each of which is timed with one stream and with STREAMS."""
    ones, eights = zip(*timings, strict=True)
    return SpeedFigures(
        [each.first_token for each in ones],
        [each.rate for each in ones],
        [each.rate for each in eights],
        max(each.held_bytes for each in ones),
        max(each.held_bytes for each in eights),
        others_share,
    )
