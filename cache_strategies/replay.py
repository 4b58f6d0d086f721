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
from cache_strategies.base import CacheSetup, Geometry, Row
from cache_strategies.eviction import list_policies, load_policy
from cache_strategies.optimum import compute_max_hits, count_distinct_blocks, make_visits
from cache_strategies.paged.cache import PagedCache, PagedOptions
from cache_strategies.paged.seat import PagedSeat
from config.errors import SettingsError
from kernels.reference.backend import ReferenceOps
from kernels.types import LayerSpec

DEFAULT_BLOCKS_SHARES = (0.1, 0.25, 0.5)
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
    def hit_rate_gap(self) -> float:
        """Points of a hundred."""
        return 100 * (self.best_rate - self.rate)


# -------------------------------------------------------------------- one cache
class Replay:
    """One cache, one request at a time."""

    def __init__(self, blocks: int, longest: int, policy: str, block_size: int) -> None:
        """Make a cache of `blocks` blocks; a request of `longest` tokens, the longest of all, has to fit."""
        if blocks * block_size < longest:
            raise SettingsError(f"{blocks} blocks have no room for a request of {longest} tokens")
        self._now = 0.0
        options = PagedOptions(block_size=block_size, eviction=policy)
        geometry = Geometry([LAYER], torch.float32, max_seats=1, max_seq_len=longest, max_num_batched_tokens=longest)
        self._arena = Arena(blocks, PagedCache.seat_shape(options, geometry).block_bytes)
        # Which operations does not matter: nothing is computed, and a seat alone writes nothing that others hold.
        setup = CacheSetup(NAME, geometry, self._arena, ReferenceOps(), clock=lambda: self._now)
        self._cache = PagedCache(setup, options)

    def replay_request(self, request: RecordedRequest) -> int:
        """Run a request through the cache; return the number of prompt tokens that were found."""
        self._now = request.time
        seat = self._cache.open(request.prompt)
        assert seat is not None, "alone it fits"
        cached = seat.cached
        self._append_tokens(seat, request.prompt[cached:])
        self._append_tokens(seat, request.answer)
        self._cache.close(seat)
        return cached

    def _append_tokens(self, seat: PagedSeat, tokens: Sequence[int]) -> None:
        """Do the host's part of a step."""
        self._cache.poll()
        grown = self._cache.grow(seat, len(tokens))
        assert grown, "alone it fits"
        self._cache.commit(self._cache.plan([Row(seat, len(tokens))]), [tokens])

    @property
    def evictions(self) -> int:
        return self._arena.num_reclaimed_pages(NAME)


def replay(requests: Sequence[RecordedRequest], blocks: int, policy: str, block_size: int = 32) -> ReplayCounts:
    """Run requests through a cache, and count. Raises SettingsError if the longest request has no room."""
    longest = max(len(request.prompt) + len(request.answer) for request in requests)
    cache = Replay(blocks, longest, policy, block_size)
    cached = sum(cache.replay_request(request) for request in requests)
    return ReplayCounts(sum(len(request.prompt) for request in requests), cached, cache.evictions)


# -------------------------------------------------------------------- the command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cache_strategies.replay", description=__doc__)
    parser.add_argument("--trace", type=argparse.FileType(), default="-", help="JSON lines (default: standard input)")
    parser.add_argument("--policy", nargs="+", default=sorted(list_policies()), help="default: all that are installed")
    parser.add_argument(
        "--blocks-share",
        type=float,
        nargs="+",
        default=DEFAULT_BLOCKS_SHARES,
        help="size of the cache, by the trace's distinct blocks",
    )
    parser.add_argument("--block-size", type=int, default=32, help="tokens of a block (default: 32)")
    parser.add_argument("--json", action="store_true", help="one JSON line a figure instead of a table")
    options = parser.parse_args(arguments)
    try:
        results = list(
            compare_policies(
                list(read_requests(options.trace)), options.policy, options.blocks_share, options.block_size
            )
        )
    except (SettingsError, ValueError) as error:
        parser.error(str(error))
    print("\n".join(json.dumps(r._asdict()) for r in results) if options.json else format_table(results))


def read_requests(lines: Iterable[str]) -> Iterator[RecordedRequest]:
    """Yield the requests of a trace. Raises ValueError for a line that is not a request."""
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            yield RecordedRequest(entry["time"], entry["prompt"], entry["answer"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} of the trace is not a request: {error!r}") from None


def compare_policies(
    requests: Sequence[RecordedRequest], policies: Sequence[str], shares: Sequence[float], block_size: int = 32
) -> Iterator[ReplayRow]:
    """Replay every policy at every size; shows on stderr what it is at."""
    if not requests:
        raise ValueError("the trace is empty")
    for policy in policies:
        load_policy(policy)  # before anything takes time
    visits = make_visits(((request.prompt, request.answer) for request in requests), block_size)
    for share in shares:
        blocks = round(share * count_distinct_blocks(visits))
        max_hits = compute_max_hits(visits, blocks) * block_size
        for policy in policies:
            print(f"{policy}, {blocks} blocks", file=sys.stderr)
            tokens, cached, evictions = replay(requests, blocks, policy, block_size)
            yield ReplayRow(policy, share, blocks, evictions, cached / tokens, max_hits / tokens)


def format_table(results: Sequence[ReplayRow]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| policy | share of the blocks | hit rate | Belady | difference |", "|---|" + "---:|" * 4]
    for r in results:
        rates = f"{100 * r.rate:.1f} % | {100 * r.best_rate:.1f} % | {r.hit_rate_gap:.1f} points"
        lines.append(f"| {r.policy} | {r.share:g} ({r.blocks:,}) | {rates} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
