"""`python -m cache_strategies.replay`: how much of their prompts recorded requests find under each eviction policy.

A real PagedCache takes the requests one after the other, with a given number of blocks, and no model computes anything:
keys of one number a token, which nobody writes. What could have been found at best says `optimum.py`. Reads requests as
JSON lines, for instance those of `python -m loadtest.traces`; knows neither how they came about nor the policies.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from cache_strategies.arena import Arena
from cache_strategies.base import CacheSetup, Geometry, Row, Seat
from cache_strategies.eviction import load_policy, policies
from cache_strategies.optimum import distinct, most_hits, visits
from cache_strategies.paged.cache import PagedCache, PagedOptions
from config.errors import SettingsError
from kernels.reference.backend import ReferenceOps
from kernels.types import LayerSpec

SHARES = (0.1, 0.25, 0.5)
LAYER = LayerSpec(num_kv_heads=1, num_q_heads=1, head_dim=1, v_head_dim=1)
NAME = "replay"


class RecordedRequest(NamedTuple):
    """A prompt and what was answered, as token ids."""

    time: float
    prompt: Sequence[int]
    answer: Sequence[int]


class ReplayCounts(NamedTuple):
    """What came of a replay."""

    prompt_tokens: int
    cached_tokens: int  # of these, not to be computed again
    evictions: int  # blocks


class ReplayRow(NamedTuple):
    """A row of the table; rates are cached tokens by prompt tokens."""

    policy: str
    share: float  # of the distinct blocks of all requests
    blocks: int
    evictions: int
    rate: float
    best_rate: float  # of any policy, with so many blocks

    @property
    def short_of(self) -> float:
        """Points of a hundred."""
        return 100 * (self.best_rate - self.rate)


# -------------------------------------------------------------------- one cache
class Replay:
    """One cache, one request at a time."""

    def __init__(self, blocks: int, longest: int, policy: str, block_size: int) -> None:
        """`longest`: tokens of the longest request, which has to fit."""
        if blocks * block_size < longest:
            raise SettingsError(f"{blocks} blocks have no room for a request of {longest} tokens")
        self._now = 0.0
        options = PagedOptions(block_size=block_size, eviction=policy)
        geometry = Geometry([LAYER], torch.float32, max_seats=1, max_seq_len=longest, max_num_batched_tokens=longest)
        self._arena = Arena(blocks, PagedCache.seat_shape(options, geometry).block_bytes)
        # Which operations does not matter: nothing is computed, and who is alone writes nothing that others hold.
        setup = CacheSetup(NAME, geometry, self._arena, ReferenceOps(), clock=lambda: self._now)
        self._cache = PagedCache(setup, options)

    def take(self, request: RecordedRequest) -> int:
        """Tokens of the prompt that were found."""
        self._now = request.time
        seat = self._cache.open(request.prompt)
        assert seat is not None, "alone it fits"
        cached = seat.cached
        self._enter(seat, request.prompt[cached:])
        self._enter(seat, request.answer)
        self._cache.close(seat)
        return cached

    def _enter(self, seat: Seat, tokens: Sequence[int]) -> None:
        """The host's part of a step."""
        self._cache.poll()
        grown = self._cache.grow(seat, len(tokens))
        assert grown, "alone it fits"
        self._cache.commit(self._cache.plan([Row(seat, len(tokens))]), [tokens])

    @property
    def evictions(self) -> int:
        return self._arena.reclaimed(NAME)


def replay(requests: Sequence[RecordedRequest], blocks: int, policy: str, block_size: int = 32) -> ReplayCounts:
    """Raises SettingsError if the longest request has no room."""
    longest = max(len(request.prompt) + len(request.answer) for request in requests)
    cache = Replay(blocks, longest, policy, block_size)
    cached = sum(cache.take(request) for request in requests)
    return ReplayCounts(sum(len(request.prompt) for request in requests), cached, cache.evictions)


# -------------------------------------------------------------------- the command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cache_strategies.replay", description=__doc__)
    parser.add_argument("--trace", type=argparse.FileType(), default="-", help="JSON lines (default: standard input)")
    parser.add_argument("--policy", nargs="+", default=sorted(policies()), help="default: all that are installed")
    parser.add_argument(
        "--blocks-share",
        type=float,
        nargs="+",
        default=SHARES,
        help="size of the cache, by the trace's distinct blocks",
    )
    parser.add_argument("--block-size", type=int, default=32, help="tokens of a block (default: 32)")
    parser.add_argument("--json", action="store_true", help="one JSON line a figure instead of a table")
    options = parser.parse_args(arguments)
    try:
        results = list(compare(list(read(options.trace)), options.policy, options.blocks_share, options.block_size))
    except (SettingsError, ValueError) as error:
        parser.error(str(error))
    print("\n".join(json.dumps(r._asdict()) for r in results) if options.json else table(results))


def read(lines: Iterable[str]) -> Iterator[RecordedRequest]:
    """Raises ValueError for what is not a request."""
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            yield RecordedRequest(entry["time"], entry["prompt"], entry["answer"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} of the trace is not a request: {error!r}") from None


def compare(
    requests: Sequence[RecordedRequest], chosen: Sequence[str], shares: Sequence[float], block_size: int = 32
) -> Iterator[ReplayRow]:
    """Every policy at every size; shows on stderr what it is at."""
    if not requests:
        raise ValueError("the trace is empty")
    for policy in chosen:
        load_policy(policy)  # before anything takes time
    visited = visits(((request.prompt, request.answer) for request in requests), block_size)
    for share in shares:
        blocks = round(share * distinct(visited))
        most = most_hits(visited, blocks) * block_size
        for policy in chosen:
            print(f"{policy}, {blocks} blocks", file=sys.stderr)
            tokens, cached, evictions = replay(requests, blocks, policy, block_size)
            yield ReplayRow(policy, share, blocks, evictions, cached / tokens, most / tokens)


def table(results: Sequence[ReplayRow]) -> str:
    """Markdown."""
    lines = ["| policy | share of the blocks | hit rate | Belady | difference |", "|---|" + "---:|" * 4]
    for r in results:
        rates = f"{100 * r.rate:.1f} % | {100 * r.best_rate:.1f} % | {r.short_of:.1f} points"
        lines.append(f"| {r.policy} | {r.share:g} ({r.blocks:,}) | {rates} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
