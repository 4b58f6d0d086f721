"""`python -m tools.checkpoint_replay`: what each checkpoint policy computes again of agents' conversations.

Conversations (agent_conversation.py) enter the caches that the server uses, turn by turn and one after the other,
without a model: the bookkeeping alone says which tokens are found. Memory is given in longest conversations.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_left
from collections.abc import Sequence
from itertools import zip_longest
from random import Random
from typing import Any, NamedTuple

import torch

from cache_strategies import registry
from cache_strategies.base import KVCache, KVSequence, Rows
from cache_strategies.checkpoints import list_policies
from cache_strategies.memory import make_memory
from cache_strategies.types import Geometry, Text
from config.settings import StrategySettings
from config.tables import format_table
from kernels.reference.backend import ReferenceOps
from kernels.states import StateTensor
from kernels.types import LayerSpec
from tools.agent_conversation import END, KINDS, Turn

KEYS = [LayerSpec(1, 1, 8, 8)]  # the smallest: only the ratio of bytes matters
TOKEN_BYTES = 2 * 8 * 4
ROW = 512  # tokens of a prompt that enter at once


class Computed(NamedTuple):
    """Tokens of prompts."""

    total: int
    new: int  # that no earlier prompt or answer begins with: what has to be computed
    computed: int
    checkpoints: int  # at the end


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40, help="turns of a conversation (default: 40)")
    parser.add_argument("--conversations", type=int, default=3, help="that take turns (default: 3)")
    parser.add_argument("--checkpoint", type=int, default=3144, help="tokens of keys that a checkpoint is as large as")
    parser.add_argument("--interval", type=int, default=1024, help="checkpoint_interval (default: 1024)")
    parser.add_argument("--memory", type=float, nargs="+", default=[4, 8, 32], help="in longest conversations")
    parser.add_argument("--seed", default="0")
    flags = parser.parse_args(argv)
    rows = []
    for kind in KINDS:
        turns = make_turns(kind, flags.conversations, flags.turns, flags.seed)
        for policy in sorted(list_policies()):
            found = [replay(turns, policy, flags, memory) for memory in flags.memory]
            total, new, *_ = found[0]
            rows.append([kind, policy, f"{total:,}", f"{new / total:.1%}", *map(describe, found)])
    titles = [f"computed, in {memory:g} conversations" for memory in flags.memory]
    print(format_table(["conversation", "policy"], ["prompt tokens", "new", *titles], rows))
    return 0


def describe(found: Computed) -> str:
    return f"{found.computed / found.total:.1%} ({found.checkpoints} checkpoints)"


def make_turns(kind: str, num_conversations: int, num_turns: int, seed: str) -> list[Turn]:
    """Return the turns of some conversations, which take turns."""
    made = [KINDS[kind](Random(f"{seed}/{i}"), num_turns) for i in range(num_conversations)]
    return [turn for group in zip_longest(*made) for turn in group if turn is not None]


def replay(turns: Sequence[Turn], policy: str, flags: argparse.Namespace, memory: float) -> Computed:
    """Let turns enter one after the other; return what was computed."""
    longest = max(len(turn.prompt) + len(turn.answer) for turn in turns)
    cache = make_cache(policy, flags.interval, flags.checkpoint, longest, memory)
    seen = Prefixes()
    total = new = computed = 0
    for turn in turns:
        sequence = cache.open(Text(turn.prompt))
        assert sequence is not None
        total += len(turn.prompt)
        computed += len(turn.prompt) - sequence.length
        new += len(turn.prompt) - seen.count_known(turn.prompt)
        text = [*turn.prompt, *turn.answer]
        for end in [*range(sequence.length + ROW, len(turn.prompt), ROW), *range(len(turn.prompt), len(text))]:
            enter(cache, sequence, text[sequence.length : end])
        sequence.close()
        seen.add(text[:-1])
    names: Any = cache
    return Computed(total, new, computed, len(names.slots.list_checkpoints()))


def make_cache(policy: str, interval: int, checkpoint: int, longest: int, memory: float) -> KVCache:
    """Return a paged cache beside states of so many tokens' bytes, in memory for so many longest texts."""
    settings = StrategySettings(kind="paged", checkpoints=policy, checkpoint_interval=interval)
    states = [[StateTensor((checkpoint * TOKEN_BYTES // 4,), torch.float32)]]
    geometry = Geometry(KEYS, torch.float32, 1, longest, ROW, states, frozenset({END}))
    (declared,) = registry.resolve_instances({"paged": settings})
    shared = make_memory(int(memory * longest * TOKEN_BYTES))
    return registry.build_cache(declared, geometry, shared, ReferenceOps())


def enter(cache: KVCache, sequence: KVSequence, tokens: Sequence[int]) -> None:
    """Let the next tokens of a text enter; what is idle makes room."""
    cache.poll()
    while not sequence.reserve(len(tokens)):
        assert cache.evict(max(TOKEN_BYTES * 32, cache.idle_bytes // 16)), "one text fills the memory"
    cache.locate(Rows([sequence], [len(tokens)]))
    sequence.commit(tokens)


class Prefixes:
    """The beginnings of texts that were seen."""

    def __init__(self) -> None:
        self._texts: list[list[int]] = []

    def add(self, text: list[int]) -> None:
        self._texts.append(text)

    def count_known(self, prompt: Sequence[int]) -> int:
        """Return how many tokens a prompt has in common with the beginning of an earlier text: not its last one."""
        return max((count_equal(prompt[:-1], text) for text in self._texts), default=0)


def count_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many first items are equal."""
    longest = min(len(a), len(b))
    return bisect_left(range(1, longest + 1), True, key=lambda count: a[:count] != b[:count])


if __name__ == "__main__":
    sys.exit(main())
