"""Random operations on seats of several caches over one small arena, compared with lists of each seat's tokens.

The q, k and v of a token are computed from a hash of all tokens up to it, so that a block that is shared by mistake
shows at once. The rules do anything that a scheduler may do, in any order and mostly with full memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from unittest.mock import patch

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from cache_strategies.base import Clearing, KVCache, Pinning, Plan, Row, Seat
from cache_strategies.types import EVERYTHING, NO_SALT, Geometry, Pin, PinError, Salt, SaltScope
from config.settings import StrategySettings
from kernels.store import KVStore
from kernels.types import LayerSpec
from server.engine.batch import Batch, RowInput
from tests.cache_strategies.cache_driver import find_cached
from tests.contract.failing_ops import FailingOps
from tests.contract.harness import World
from tests.contract.visible_tokens import check_keys, visible_in_row
from tests.kernels.brute_force import KEEPS, attention, visible_keys

LAYERS = (LayerSpec(1, 2, 4, 4, scale=1.0), LayerSpec(2, 2, 4, 4, window=6, scale=2.0))
_FULL = LayerSpec(1, 2, 4, 4, scale=1.0)
_WINDOW = LayerSpec(1, 2, 4, 4, window=6, scale=2.0)
HYBRID = (_WINDOW, _FULL, _WINDOW._replace(window=3), _WINDOW)  # as in Gemma 3, but with two windows
WINDOWS = (_WINDOW, _WINDOW)  # as in Mistral 7B
LONGEST = 20


def geometry_of(layers: Sequence[LayerSpec]) -> Geometry:
    """Return the geometry of the machine's batches, for a model with these layers."""
    return Geometry(layers, torch.float32, max_seats=5, max_seq_len=LONGEST, max_num_batched_tokens=LONGEST)


SCOPES = (EVERYTHING, SaltScope("", ""), SaltScope("tenant"), SaltScope("tenant", "salt"))

Token = tuple[int, int]  # id, and what tells embeddings with the same negative id apart


# ---------------------------------------------------------------- tokens
@cache
def computed(tokens: tuple[Token, ...], salt: Salt, layer: int, spec: LayerSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [T,Hq,4], k [T,H,4], v [T,H,4] of a text; all are multiples of 1/128, which are exact in float32."""
    numbers, so_far = [], "/".join(salt)
    for token in tokens:
        so_far += f" {token}"
        digest = hashlib.blake2b(f"{layer} {so_far}".encode(), digest_size=32).digest()
        numbers.append([byte / 128 - 1 for byte in digest])
    table = torch.tensor(numbers).view(len(tokens), 8, 4)
    query, kv = spec.num_q_heads, spec.num_kv_heads
    return table[:, :query], table[:, query : query + kv], table[:, query + kv : query + 2 * kv]


@cache
def visible(kind: str, options: object, spec: LayerSpec) -> Tensor:
    """Return the mask [LONGEST, LONGEST] of the keys that each query may see."""
    return visible_keys(spec, LONGEST, KEEPS[kind](options))


@dataclass(eq=False)
class Sitter:
    """A seat, and the tokens that entered it or will: a test's own record, with the rest of its prompt."""

    cache: KVCache
    kind: str
    seat: Seat
    tokens: list[Token]
    salt: Salt

    def ids(self, start: int, end: int) -> list[int]:
        return [token for token, _ in self.tokens[start:end]]

    @property
    def layers(self) -> Sequence[LayerSpec]:
        return self.cache.setup.geometry.layers

    def computed(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        return computed(tuple(self.tokens), self.salt, layer, self.layers[layer])


@dataclass
class Planned:
    """A sitter's row in a step."""

    sitter: Sitter
    start: int
    num_tokens: int
    accepted: int
    in_prompt: bool

    def work(self) -> RowInput:
        ids = self.sitter.ids(self.start, self.start + self.num_tokens)
        return RowInput(self.sitter.cache, Row(self.sitter.seat, self.num_tokens), ids, 1)


# ---------------------------------------------------------------- a step
def run(batch: Batch, rows: Sequence[Planned], *, check: bool) -> None:
    """Compute all layers, and compare every output and every visible key with the definition."""
    rows = [rows[i] for i in batch.row_order]
    plans = [(plan, i) for _, plan in batch._parts for i in range(len(plan.rows))]
    for layer in range(len(rows[0].sitter.layers)):
        inputs = [row.sitter.computed(layer) for row in rows]
        now = [slice(row.start, row.start + row.num_tokens) for row in rows]
        q, k, v = (torch.cat([x[part][at] for x, at in zip(inputs, now, strict=True)]) for part in range(3))
        outs = batch.attend(layer, q, k, v).split([row.num_tokens for row in rows])
        if check:
            for row, out, (plan, i) in zip(rows, outs, plans, strict=True):
                _check_row(row, layer, out, plan, i)


def _check_row(row: Planned, layer: int, out: Tensor, plan: Plan, index: int) -> None:
    start, end, spec = row.start, row.start + row.num_tokens, row.sitter.layers[layer]
    q, k, v = (x[:end] for x in row.sitter.computed(layer))
    cache_, kind = row.sitter.cache, row.sitter.kind
    last = check_keys(k, v, plan.gather_kv(layer, index))
    mask = (
        visible(kind, cache_.options, spec)[start:end, :end].expand(len(last), -1, -1)
        if kind in KEEPS
        else visible_in_row(cache_, kind, row.sitter.ids(0, end), layer, start, end - start)
    )
    if mask is None:
        mask, start = last[:, None], end - 1
    assert torch.equal(last, mask[:, -1]), "the row's last token sees other positions"
    want = attention(q[start:end], k, v, spec, mask)
    assert (out[start - end :].double() - want).abs().max() < 1e-5


def commit(batch: Batch, rows: Sequence[Planned]) -> None:
    """Commit the accepted tokens of each row."""
    entered = iter([rows[i] for i in batch.row_order])
    for cache_, plan in batch._parts:
        accepted = [next(entered) for _ in plan.rows]
        cache_.commit(plan, [r.sitter.ids(r.start, r.start + r.accepted) for r in accepted])
        for row in plan.rows:
            cache_.compact(row.seat)


# ---------------------------------------------------------------- the machine
class Histories(RuleBasedStateMachine):
    """A state machine of random operations. Subclasses choose the instances, the layers and the number of pages."""

    strategies: Mapping[str, StrategySettings]
    layers: Sequence[LayerSpec]
    pages: int

    def __init__(self) -> None:
        super().__init__()
        self.ops = FailingOps()
        self.world = World(
            self.strategies,
            layers=self.layers,
            max_seats=geometry_of(self.layers).max_seats,
            max_seq_len=LONGEST,
            max_num_batched_tokens=LONGEST,
            pages=self.pages,
            ops=self.ops,
        )
        self.arena = self.world.arena
        self.sitters: list[Sitter] = []
        self.pins: list[tuple[Pinning, Pin]] = []
        self.embeddings = 0

    def token(self, id_: int) -> Token:
        """Return a token id; embeddings have negative ids, all of them distinct."""
        self.embeddings += id_ < 0
        return id_, self.embeddings if id_ < 0 else 0

    # ------------------------------------------------------------ seats
    @rule(
        which=st.integers(0, 99),
        begin_like=st.integers(0, 99),
        common=st.integers(0, 16),
        rest=st.lists(st.sampled_from([0, 1, 1, -1]), max_size=4),
        salt=st.sampled_from([NO_SALT, NO_SALT, NO_SALT, Salt("tenant", "salt")]),
        max_cached=st.sampled_from([None, None, None, 0, 6]),
        times=st.integers(1, 3),
    )
    def open(
        self, which: int, begin_like: int, common: int, rest: list[int], salt: Salt, max_cached: int | None, times: int
    ) -> None:
        """Open one or more seats for a prompt that often has a common prefix with another."""
        beginnings = [sitter.tokens for sitter in self.sitters] + [[(0, 0)] * LONGEST]
        tokens = beginnings[begin_like % len(beginnings)][:common] + [self.token(i) for i in (*rest, 1)]
        for _ in range(times):
            self._open(sorted(self.strategies)[which % len(self.strategies)], tokens[:LONGEST], salt, max_cached)

    def _open(self, name: str, tokens: list[Token], salt: Salt, max_cached: int | None) -> None:
        ids = [token for token, _ in tokens]
        cache_ = self.world.caches[name]
        found = find_cached(cache_, ids, salt=salt, max_cached=max_cached)
        seat = cache_.open(ids, salt=salt, max_cached=max_cached)
        if seat is None:
            return
        assert seat.length == seat.cached == found <= len(ids) - 1
        assert max_cached is None or found <= max_cached
        self.sitters.append(Sitter(cache_, self.strategies[name].kind, seat, list(tokens), salt))

    @precondition(lambda self: self.sitters)
    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        past_prompt = [sitter for sitter in self.sitters if sitter.seat.length == len(sitter.tokens)]
        parent = (past_prompt or self.sitters)[which % len(past_prompt or self.sitters)]
        seat = parent.cache.fork(parent.seat)
        if seat is None:
            return
        assert parent.cache.contract.forkable
        assert seat.length == parent.seat.length
        tokens = parent.tokens[: seat.length]
        self.sitters.append(Sitter(parent.cache, parent.kind, seat, tokens, parent.salt))

    @precondition(lambda self: self.sitters)
    @rule(which=st.integers(0, 99), by=st.integers(0, 9))
    def crop(self, which: int, by: int) -> None:
        sitter = self.sitters[which % len(self.sitters)]
        rewind = sitter.cache.contract.rewind
        length = max(0, sitter.seat.length - min(by, by if rewind is None else rewind))
        sitter.cache.crop(sitter.seat, length)
        assert sitter.seat.length <= length
        del sitter.tokens[length:]

    @precondition(lambda self: self.sitters)
    @rule(which=st.integers(0, 99), unsound=st.sampled_from([False, False, False, True]))
    def close(self, which: int, unsound: bool) -> None:
        sitter = self.sitters.pop(which % len(self.sitters))
        if unsound:
            with patch.object(KVStore, "find_finite_blocks", lambda _, blocks: [block % 2 == 0 for block in blocks]):
                sitter.cache.discard(sitter.seat)
        sitter.cache.close(sitter.seat)

    # ------------------------------------------------------------ what is kept
    @precondition(lambda self: self.sitters)
    @rule(which=st.integers(0, 99), priority=st.integers(0, 2), ttl=st.sampled_from([None, 1e-9, 1e9]))
    def retain(self, which: int, priority: int, ttl: float | None) -> None:
        sitter = self.sitters[which % len(self.sitters)]
        sitter.cache.retain(sitter.seat, priority=priority, ttl=ttl)

    @rule(which=st.integers(0, 99), scope=st.sampled_from(SCOPES))
    def clear(self, which: int, scope: SaltScope) -> None:
        cache_ = self.world.caches[sorted(self.strategies)[which % len(self.strategies)]]
        if isinstance(cache_, Clearing):
            held = self.arena.num_held_pages(cache_.name)  # type: ignore[attr-defined]
            freed = cache_.clear(scope)
            assert freed == (held - self.arena.num_held_pages(cache_.name)) * self.arena.page_bytes  # type: ignore[attr-defined]
            for sitter in self.sitters:
                if sitter.cache is cache_ and scope.includes(sitter.salt):
                    assert find_cached(sitter.cache, sitter.ids(0, LONGEST), salt=sitter.salt) == 0

    @precondition(lambda self: self.sitters)
    @rule(which=st.integers(0, 99), ttl=st.sampled_from([1e-9, 1e9, 1e9]))
    def pin(self, which: int, ttl: float) -> None:
        sitter = self.sitters[which % len(self.sitters)]
        if isinstance(sitter.cache, Pinning):
            with contextlib.suppress(PinError):
                self.pins.append((sitter.cache, sitter.cache.pin(sitter.ids(0, LONGEST), salt=sitter.salt, ttl=ttl)))

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 99))
    def unpin(self, which: int) -> None:
        cache_, pin = self.pins.pop(which % len(self.pins))
        known = pin in cache_.pins()
        assert cache_.unpin(pin.id) == known

    # ------------------------------------------------------------ memory
    @rule(which=st.integers(0, 99), pages=st.integers(1, 4))
    def reclaim(self, which: int, pages: int) -> None:
        name = sorted(self.strategies)[which % len(self.strategies)]
        free = self.arena.num_free_pages
        assert self.world.caches[name].reclaim(pages) == self.arena.num_free_pages - free

    @rule(which=st.integers(0, 99), floor=st.integers(0, 2), limit=st.integers(0, 30))
    def set_share(self, which: int, floor: int, limit: int) -> None:
        name = sorted(self.strategies)[which % len(self.strategies)]
        self.arena.set_share(name, floor=floor, limit=limit)

    # ------------------------------------------------------------ steps
    @precondition(lambda self: self.sitters)
    @rule(seed=st.integers(0, 2**16))
    def a_few_steps(self, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(rng.randint(1, 4)):
            self._step(rng, fails=False)

    @precondition(lambda self: self.sitters)
    @rule(seed=st.integers(0, 2**16), fails=st.booleans())
    def a_step(self, seed: int, fails: bool) -> None:
        self._step(random.Random(seed), fails=fails)

    def _step(self, rng: random.Random, *, fails: bool) -> None:
        for cache_ in self.world.caches.values():
            cache_.poll()
        chosen = [sitter for sitter in self.sitters if rng.random() < 0.7]
        rng.shuffle(chosen)
        rows: list[Planned] = []
        for sitter in chosen:
            if rng.random() < 0.05:
                self._preempt(rows, rng)
            if sitter in self.sitters and (row := self._row(sitter, rng)):
                rows.append(row)
        if not rows:
            return
        if fails:
            self._fail(rows, rng.randrange(len(self.layers) * len({id(r.sitter.cache) for r in rows})))
        batch = Batch([row.work() for row in rows])
        run(batch, rows, check=True)
        commit(batch, rows)
        for row in rows:
            assert row.sitter.seat.length == row.start + row.accepted
            if not row.in_prompt:
                del row.sitter.tokens[row.start + row.accepted :]

    def _preempt(self, rows: Sequence[Planned], rng: random.Random) -> None:
        """Close a sitter that is not in the step, to free memory for another."""
        if others := [sitter for sitter in self.sitters if all(row.sitter is not sitter for row in rows)]:
            sitter = rng.choice(others)
            self.sitters.remove(sitter)
            sitter.cache.close(sitter.seat)

    def _row(self, sitter: Sitter, rng: random.Random) -> Planned | None:
        """Return the next tokens of a prompt, or new ones; None if the sitter is not in this step."""
        start, most = (
            sitter.seat.length,
            min(rng.choice([1, 1, 3, 6, 20]), sitter.cache.row_limit(sitter.seat) or LONGEST),
        )
        in_prompt = len(sitter.tokens) - start
        n = min(most, in_prompt or LONGEST - start)
        if n == 0 or not sitter.cache.ready(sitter.seat) or not sitter.cache.grow(sitter.seat, n):
            return None
        if not in_prompt:
            sitter.tokens += [self.token(rng.choice([0, 1, 1, -1])) for _ in range(n)]
        return Planned(sitter, start, n, n if rng.random() < 0.7 else rng.randint(0, n), bool(in_prompt))

    def _fail(self, rows: Sequence[Planned], calls: int) -> None:
        self.ops.calls = calls
        try:
            run(Batch([row.work() for row in rows]), rows, check=False)
        except RuntimeError:  # injected
            return
        assert self.ops.calls is not None, "the error was lost"
        self.ops.calls = None

    # ------------------------------------------------------------ always
    @invariant()
    def books_add_up(self) -> None:
        self.world.check_integrity()
        for name, cache_ in self.world.caches.items():
            usage = cache_.usage()
            assert usage.reserved == self.arena.num_held_pages(name) * self.arena.page_bytes
            assert usage.reserved == usage.used + usage.idle + usage.wasted
            assert min(usage) >= 0
            assert usage.seats == sum(sitter.cache is cache_ for sitter in self.sitters)

    @invariant()
    def somebody_can_go_on(self) -> None:
        for cache_ in self.world.caches.values():
            cache_.poll()
            seats = [sitter.seat for sitter in self.sitters if sitter.cache is cache_]
            assert not seats or any(cache_.ready(seat) for seat in seats), "all wait for each other"

    def teardown(self) -> None:
        """Assert that nothing has leaked, and that the longest text fits again under every instance."""
        for sitter in self.sitters:
            sitter.cache.close(sitter.seat)
        for pinning, pin in self.pins:
            pinning.unpin(pin.id)
        self.world.check_integrity()
        for name, cache_ in self.world.caches.items():
            self.arena.set_share(name, floor=0, limit=self.pages)
            seat = cache_.open([1] * LONGEST)
            assert seat is not None, f"no room for {name} in an arena of idle pages"
            cache_.close(seat)
        for cache_ in self.world.caches.values():
            cache_.reclaim(self.pages)
        self.world.check_integrity()
        assert self.arena.num_free_pages == self.pages
