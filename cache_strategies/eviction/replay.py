"""`python -m cache_strategies.eviction.replay`: the prefix-cache hit rate of a trace under each eviction policy.

Runs the requests one after another through a real PagedCache with a given number of blocks, without a model: no keys
are computed. Prints next to each hit rate the highest possible one (`optimum.py`). Reads requests as JSON lines, such
as those of `python -m loadtest.traces`. Does not know how the policies work.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from cache_strategies.base import CacheSetup, Rows
from cache_strategies.eviction import list_policies, load_policy
from cache_strategies.eviction.optimum import compute_max_hits, count_distinct_blocks, make_visits
from cache_strategies.memory import make_memory
from cache_strategies.paged.base import PagedOptions
from cache_strategies.paged.cache import PagedCache, PagedSequence
from cache_strategies.spaces import find_space
from cache_strategies.types import Geometry, Text
from config.errors import SettingsError
from config.quantities import parse_share_flag
from kernels.reference.backend import ReferenceOps
from kernels.types import LayerSpec

DEFAULT_BLOCKS_SHARES = (0.1, 0.25, 0.5)
LAYER = LayerSpec(num_kv_heads=1, num_q_heads=1, head_dim=1, v_head_dim=1)
NAME = "replay"


class RecordedRequest(NamedTuple):
    """A recorded prompt and its answer, as token ids, and the request's time in seconds since the trace began."""

    time: float
    prompt: Sequence[int]
    answer: Sequence[int]


class ReplayCounts(NamedTuple):
    """The totals of a replay: prompt tokens, those of them that were found in the cache, and evicted blocks."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were found in the cache
    evictions: int  # number of evicted blocks


class ReplayRow(NamedTuple):
    """A row of the table of results: the hit rate (cached tokens / prompt tokens) of one policy and cache size."""

    policy: str
    share: float  # size of the cache, as a share of the number of distinct blocks of all requests
    blocks: int  # size of the cache, in blocks
    evictions: int  # number of evicted blocks
    rate: float
    best_rate: float  # upper bound of the hit rate of any policy with this number of blocks

    @property
    def hit_rate_gap(self) -> float:
        """The difference between the highest possible hit rate and the policy's, in percentage points."""
        return 100 * (self.best_rate - self.rate)


# -------------------------------------------------------------------- one cache
class Replay:
    """A PagedCache through which requests run one at a time."""

    def __init__(self, blocks: int, longest: int, policy: str, block_size: int) -> None:
        """Make a cache of `blocks` blocks. Raises SettingsError if a request of `longest` tokens would not fit."""
        if blocks * block_size < longest:
            raise SettingsError(f"a request of {longest} tokens does not fit in {blocks} blocks: raise --blocks-share")
        self._now = 0.0
        options = PagedOptions(block_size=block_size, eviction=policy)
        geometry = Geometry([LAYER], torch.float32, max_seats=1, max_seq_len=longest, max_num_batched_tokens=longest)
        (block_bytes,) = PagedCache.sizes(options, geometry).block_bytes
        self._block_bytes = find_space("cpu").round_block(block_bytes)
        self._memory = make_memory(blocks * self._block_bytes)
        # The operations are never called: the replay computes no keys, and a single sequence never copies a block.
        own = self._memory.add_instance(NAME)
        setup = CacheSetup(NAME, geometry, own, ReferenceOps(), clock=lambda: self._now)
        self._cache = PagedCache(setup, options)
        self._memory.set_owner(NAME, self._cache)

    def replay_request(self, request: RecordedRequest) -> int:
        """Run a request through the cache; return the number of prompt tokens that were found in it."""
        self._now = request.time
        sequence = self._cache.open(Text(request.prompt))
        assert sequence is not None, "the longest request fits"
        cached = sequence.found
        self._append_tokens(sequence, request.prompt[cached:])
        self._append_tokens(sequence, request.answer)
        sequence.close()
        return cached

    def _append_tokens(self, sequence: PagedSequence, tokens: Sequence[int]) -> None:
        """Do the cache's bookkeeping of a step in which `tokens` are added to the sequence; nothing is computed."""
        self._cache.poll()
        is_reserved = sequence.reserve(len(tokens))
        assert is_reserved, "the longest request fits"
        self._cache.locate(Rows([sequence], [len(tokens)]))
        sequence.commit(tokens)

    @property
    def evictions(self) -> int:
        return self._memory.get_evicted_bytes(NAME) // self._block_bytes


def replay(requests: Sequence[RecordedRequest], blocks: int, policy: str, block_size: int = 32) -> ReplayCounts:
    """Run requests through a new cache of `blocks` blocks; return the totals.

    Raises SettingsError if the longest request does not fit into the cache.
    """
    longest = max(len(request.prompt) + len(request.answer) for request in requests)
    cache = Replay(blocks, longest, policy, block_size)
    cached = sum(cache.replay_request(request) for request in requests)
    return ReplayCounts(sum(len(request.prompt) for request in requests), cached, cache.evictions)


# -------------------------------------------------------------------- the command
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cache_strategies.eviction.replay", description=__doc__)
    parser.add_argument(
        "--trace",
        type=argparse.FileType(),
        default="-",
        help="trace to read, one JSON object per line (default: standard input)",
    )
    parser.add_argument(
        "--policy",
        nargs="+",
        default=sorted(list_policies()),
        help="eviction policies to compare (default: all installed ones)",
    )
    parser.add_argument(
        "--blocks-share",
        type=parse_share_flag,
        nargs="+",
        default=DEFAULT_BLOCKS_SHARES,
        help="sizes of the cache, as shares of the number of distinct blocks in the trace, such as 10%% or 0.1",
    )
    parser.add_argument("--block-size", type=int, default=32, help="number of tokens per block (default: 32)")
    parser.add_argument("--json", action="store_true", help="print JSON lines, one per row, instead of a table")
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
    """Yield the requests of a trace, given as lines of JSON. Raises ValueError for a line that is not a request."""
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            yield RecordedRequest(entry["time"], entry["prompt"], entry["answer"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} of the trace is not a request: {error!r}") from None


def compare_policies(
    requests: Sequence[RecordedRequest], policies: Sequence[str], shares: Sequence[float], block_size: int = 32
) -> Iterator[ReplayRow]:
    """Replay the requests under every policy and every size of the cache; yield the rows of the table of results.

    Prints the progress to stderr. Raises ValueError if there are no requests.
    """
    if not requests:
        raise ValueError("the trace is empty")
    for policy in policies:
        load_policy(policy)  # raises SettingsError for an unknown policy, before the slow part
    visits = make_visits(((request.prompt, request.answer) for request in requests), block_size)
    for share in shares:
        blocks = round(share * count_distinct_blocks(visits))
        max_hits = compute_max_hits(visits, blocks) * block_size
        for policy in policies:
            print(f"{policy}, {blocks} blocks", file=sys.stderr)
            tokens, cached, evictions = replay(requests, blocks, policy, block_size)
            yield ReplayRow(policy, share, blocks, evictions, cached / tokens, max_hits / tokens)


def format_table(results: Sequence[ReplayRow]) -> str:
    """Return the results as a Markdown table."""
    lines = ["| policy | share of the blocks | hit rate | Belady | difference |", "|---|" + "---:|" * 4]
    for r in results:
        rates = f"{100 * r.rate:.1f} % | {100 * r.best_rate:.1f} % | {r.hit_rate_gap:.1f} points"
        lines.append(f"| {r.policy} | {r.share:g} ({r.blocks:,}) | {rates} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
