"""Any operations on sequences of several caches in one small memory, compared with lists of each sequence's tokens.

The q, k and v of a token are computed from a hash of all tokens up to it, so that a block that is shared by mistake
shows at once. Operations may come in any order, and mostly with full memory, as a scheduler may call them. Who calls
them draws their arguments: `play.py`, or hypothesis.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from cache_strategies.address_ranges import AddressRanges
from cache_strategies.base import KVCache, KVSequence
from cache_strategies.features import Clearing, Pinning, PrefixListing, Reporting
from cache_strategies.memory import Bounds
from cache_strategies.one_tensor import OneTensor
from cache_strategies.types import Geometry, Pin, PinError, Salt, SaltScope, Text
from config.settings import StrategySettings
from kernels.ops import Ops
from kernels.types import LayerSpec
from plugin_kit.driver.failing_ops import FailingOps, InjectedError
from plugin_kit.driver.features import EVERY_NODE, check_drop, check_evict, check_features
from plugin_kit.driver.reference import attention
from plugin_kit.driver.steps import Keys, count_until_stop, find_instance, gather, iter_rows, turn
from plugin_kit.driver.texts import rotate
from plugin_kit.driver.visible import (
    ROUNDING,
    Definition,
    check_keys,
    is_quantized,
    list_seen,
    place_keys,
    replace_kept,
)
from plugin_kit.driver.world import World
from server.engine.batch import Batch, RowInput
from server.engine.instance_reports import read_usage

LAYERS = (LayerSpec(1, 2, 8, 8, scale=0.5, rotate=rotate), LayerSpec(2, 2, 8, 8, window=6, scale=1.0, rotate=rotate))
LONGEST = 20
REPEATED = 1e-5  # of its norm, by which a key may differ that was rotated and rounded several times


def geometry_of(layers: Sequence[LayerSpec]) -> Geometry:
    """Return the geometry of a history's batches, for a model with these layers."""
    return Geometry(layers, torch.float32, max_seats=5, max_seq_len=LONGEST, max_num_batched_tokens=LONGEST)


Token = tuple[int, int]  # id, and what tells embeddings with the same negative id apart

# Returns how many tokens open() will find cached, from (cache, ids, salt, max_cached); None if that is not known.
FindCached = Callable[[KVCache, Sequence[int], Salt, int | None], int | None]


def expect_any_length(cache: KVCache, ids: Sequence[int], salt: Salt, max_cached: int | None) -> int | None:
    """Return None: it is not known how many tokens open() finds."""
    return None


# ---------------------------------------------------------------- tokens
@cache
def computed(tokens: tuple[Token, ...], salt: Salt, layer: int, spec: LayerSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [T,Hq,D], k [T,H,D], v [T,H,Dv] of a text; all are multiples of 1/128, which are exact in float32."""
    numbers, so_far = [], "/".join(map(str, salt))
    query, kv, dim, v_dim = spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
    for token in tokens:
        so_far += f" {token}"
        digest = hashlib.shake_128(f"{layer} {so_far}".encode()).digest((query + kv) * dim + kv * v_dim)
        numbers.append([byte / 128 - 1 for byte in digest])
    q, k, v = torch.tensor(numbers).split([query * dim, kv * dim, kv * v_dim], 1)
    return q.unflatten(1, (query, dim)), k.unflatten(1, (kv, dim)), v.unflatten(1, (kv, v_dim))


@dataclass(eq=False)
class OpenText:
    """A sequence, and the tokens that entered it or will: a record of its own, with the rest of its prompt."""

    cache: KVCache
    sequence: KVSequence
    tokens: list[Token]
    salt: Salt

    def ids(self, start: int, end: int) -> list[int]:
        """Return the ids of the tokens at positions [start, end)."""
        return [token for token, _ in self.tokens[start:end]]

    @property
    def layers(self) -> Sequence[LayerSpec]:
        return self.cache.setup.geometry.layers

    def computed(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of all tokens in a layer."""
        return computed(tuple(self.tokens), self.salt, layer, self.layers[layer])


@dataclass
class DrawnRow:
    """A text's row in a step."""

    text: OpenText
    start: int
    num_tokens: int
    accepted: int
    in_prompt: bool

    def work(self) -> RowInput:
        """Return the row as a batch takes it."""
        ids = self.text.ids(self.start, self.start + self.num_tokens)
        return RowInput(find_instance(self.text.cache), self.text.sequence, self.start, ids, 1)


class History:
    """Caches in one memory, their open sequences, and the operations on them, each of which checks its result."""

    def __init__(
        self,
        strategies: Mapping[str, StrategySettings],
        memory_bytes: int,
        ops: Ops,
        definition: Definition,
        layers: Sequence[LayerSpec] = LAYERS,
        find_cached: FindCached = expect_any_length,
        space: type[AddressRanges] | type[OneTensor] | None = None,
    ) -> None:
        self.strategies, self.layers, self.memory_bytes = strategies, layers, memory_bytes
        self._definition, self._find_cached = definition, find_cached
        self.ops = FailingOps(ops)
        self.world = World(
            strategies,
            self.ops,
            layers=layers,
            max_seats=geometry_of(layers).max_seats,
            max_seq_len=LONGEST,
            max_num_batched_tokens=LONGEST,
            memory_bytes=memory_bytes,
            space=space,
        )
        self.memory = self.world.memory
        self.open_texts: list[OpenText] = []
        self.pins: list[tuple[Pinning, Pin]] = []
        self.embeddings = 0
        self.retention: tuple[int, float | None] = (0, None)  # priority and ttl of the sequences that are opened

    def _name(self, which: int) -> str:
        return sorted(self.strategies)[which % len(self.strategies)]

    def token(self, id_: int) -> Token:
        """Return a token id; embeddings have negative ids, all of them distinct."""
        self.embeddings += id_ < 0
        return id_, self.embeddings if id_ < 0 else 0

    # ------------------------------------------------------------ sequences
    def open(
        self, which: int, begin_like: int, common: int, rest: list[int], salt: Salt, max_cached: int | None, times: int
    ) -> None:
        """Open one or more sequences for a prompt that often has a common prefix with another."""
        beginnings = [text.tokens for text in self.open_texts] + [[(0, 0)] * LONGEST]
        tokens = beginnings[begin_like % len(beginnings)][:common] + [self.token(i) for i in (*rest, 1)]
        for _ in range(times):
            self._open(self._name(which), tokens[:LONGEST], salt, max_cached)

    def _open(self, name: str, tokens: list[Token], salt: Salt, max_cached: int | None) -> None:
        ids = [token for token, _ in tokens]
        cache_ = self.world.caches[name]
        expected = self._find_cached(cache_, ids, salt, max_cached)
        sequence = cache_.open(Text(ids, salt, max_cached, *self.retention))
        if sequence is None:
            return
        found = sequence.length
        assert sequence.found == found <= len(ids) - 1, (
            f"open() found {found} (found={sequence.found}) of {len(ids)} tokens"
        )
        assert max_cached is None or found <= max_cached, f"open() found {found} tokens, max_cached is {max_cached}"
        assert expected is None or found == expected, f"open() found {found} tokens, {expected} are cached"
        self.open_texts.append(OpenText(cache_, sequence, list(tokens), salt))

    def fork(self, which: int) -> None:
        """Fork a sequence, one that is past its prompt if there is one."""
        past_prompt = [text for text in self.open_texts if text.sequence.length == len(text.tokens)]
        parent = (past_prompt or self.open_texts)[which % len(past_prompt or self.open_texts)]
        sequence = parent.sequence.fork()
        if sequence is None:
            return
        assert sequence.length == parent.sequence.length, (
            f"a fork of {parent.sequence.length} tokens has {sequence.length}"
        )
        tokens = parent.tokens[: sequence.length]
        self.open_texts.append(OpenText(parent.cache, sequence, tokens, parent.salt))

    def truncate(self, which: int, by: int) -> None:
        """Drop tokens at the end of a sequence, as many as its contract allows."""
        text = self.open_texts[which % len(self.open_texts)]
        rewind = text.cache.contract.rewind
        length = max(0, text.sequence.length - min(by, by if rewind is None else rewind))
        text.sequence.truncate(length)
        assert text.sequence.length <= length, (
            f"a sequence has {text.sequence.length} tokens after truncate() to {length}"
        )
        del text.tokens[length:]

    def close(self, which: int, *, spoiled: bool) -> None:
        """Close the open sequence number `which`; with `spoiled`, as one whose keys were found to be NaN."""
        text = self.open_texts.pop(which % len(self.open_texts))
        if spoiled:
            text.sequence.spoiled = True
        text.sequence.close()

    # ------------------------------------------------------------ what is kept
    def set_retention(self, priority: int, ttl: float | None) -> None:
        """Set how long the tokens of sequences that are opened from now on stay cached."""
        self.retention = priority, ttl

    def clear(self, which: int, scope: SaltScope) -> None:
        """Clear the idle memory of a cache that can do so."""
        cache_ = self.world.caches[self._name(which)]
        if not isinstance(cache_, Clearing):
            return
        name = self._name(which)
        held = self.memory.get_held_bytes(name)
        freed = cache_.clear(scope)
        fell = held - self.memory.get_held_bytes(name)
        assert freed == fell, f"clear() returned {freed} bytes, and freed {fell}"
        for text in self.open_texts:
            if text.cache is cache_ and scope.includes(text.salt):
                found = self._find_cached(text.cache, text.ids(0, LONGEST), text.salt, None)
                assert not found, f"{found} tokens are found after clear()"

    def pin(self, which: int, ttl: float) -> None:
        """Pin what is cached of a sequence's tokens, in a cache that can do so."""
        text = self.open_texts[which % len(self.open_texts)]
        if isinstance(text.cache, Pinning):
            with contextlib.suppress(PinError):
                self.pins.append((text.cache, text.cache.pin(text.ids(0, LONGEST), salt=text.salt, ttl=ttl)))

    def pin_prefix(self, which: int, chosen: int, ttl: float) -> None:
        """Pin a cached prefix, in a cache that can do so."""
        cache_ = self.world.caches[self._name(which)]
        if not isinstance(cache_, PrefixListing) or not isinstance(cache_, Pinning):
            return
        if prefixes := cache_.list_prefixes(EVERY_NODE)[0]:
            with contextlib.suppress(PinError):
                self.pins.append((cache_, cache_.pin_prefix(prefixes[chosen % len(prefixes)].id, ttl=ttl)))

    def drop_prefix(self, which: int, chosen: int) -> None:
        """Drop a cached prefix, in a cache that can do so."""
        cache_ = self.world.caches[self._name(which)]
        if isinstance(cache_, PrefixListing) and (prefixes := cache_.list_prefixes(EVERY_NODE)[0]):
            check_drop(cache_, cache_, prefixes, prefixes[chosen % len(prefixes)].id)

    def unpin(self, which: int) -> None:
        """Remove a pin."""
        cache_, pin = self.pins.pop(which % len(self.pins))
        known = pin in cache_.pins()
        assert cache_.unpin(pin.id) == known, "unpin() did not say whether there was such a pin"

    # ------------------------------------------------------------ memory
    def evict(self, which: int, percent: int) -> None:
        """Free idle blocks of a cache, of at least this share of the memory."""
        check_evict(self.world.caches[self._name(which)], self.memory_bytes * percent // 100)

    def set_share(self, which: int, floor: int, limit: int) -> None:
        """Change how much memory a cache may hold; floor and limit are percent of all."""
        shares = (self.memory_bytes * percent // 100 for percent in (floor, limit))
        self.memory.set_share(self._name(which), **Bounds(*shares)._asdict())

    # ------------------------------------------------------------ steps
    def step(self, rng: random.Random, *, fails: bool) -> None:
        """Run a step for some of the sequences; if it `fails`, repeat it."""
        for cache_ in self.world.caches.values():
            cache_.poll()
        chosen = [text for text in self.open_texts if rng.random() < 0.7]
        rng.shuffle(chosen)
        rows: list[DrawnRow] = []
        for text in chosen:
            if rng.random() < 0.05:
                self._preempt(rows, rng)
            if text in self.open_texts and (row := self._row(text, rng)):
                rows.append(row)
        if not rows:
            return
        if fails:
            self._fail(rows, rng.randrange(len(self.layers) * len({id(r.text.cache) for r in rows})))
        batch = Batch([row.work() for row in rows])
        self._run(batch, rows, check=True)
        _commit(batch, rows)
        for row in rows:
            length, wanted = row.text.sequence.length, row.start + row.accepted
            assert length == wanted, f"a sequence has {length} tokens after commit() of {row.accepted}, not {wanted}"
            if not row.in_prompt:
                del row.text.tokens[row.start + row.accepted :]

    def _preempt(self, rows: Sequence[DrawnRow], rng: random.Random) -> None:
        """Close a text that is not in the step, to free memory for another."""
        if others := [text for text in self.open_texts if all(row.text is not text for row in rows)]:
            text = rng.choice(others)
            self.open_texts.remove(text)
            text.sequence.close()

    def _row(self, text: OpenText, rng: random.Random) -> DrawnRow | None:
        """Return the next tokens of a prompt, or new ones; None if the text is not in this step."""
        start, most = text.sequence.length, count_until_stop(text.sequence, rng.choice([1, 1, 3, 6, 20]))
        in_prompt = len(text.tokens) - start
        n = min(most, in_prompt or LONGEST - start)
        if n == 0 or not text.sequence.ready():
            return None
        if text.sequence.room < start + n and not text.sequence.reserve(n):
            return None
        if not in_prompt:
            text.tokens += [self.token(rng.choice([0, 1, 1, -1])) for _ in range(n)]
        return DrawnRow(text, start, n, n if rng.random() < 0.7 else rng.randint(0, n), bool(in_prompt))

    def _fail(self, rows: Sequence[DrawnRow], calls: int) -> None:
        self.ops.calls = calls
        try:
            self._run(Batch([row.work() for row in rows]), rows, check=False)
        except InjectedError:
            return
        assert self.ops.calls is not None, "the strategy swallowed an error that an operation raised"
        self.ops.calls = None  # fewer operations were called

    def _run(self, batch: Batch, rows: Sequence[DrawnRow], *, check: bool) -> None:
        """Compute all layers, and compare every output and every visible key with the definition."""
        rows = [rows[i] for i in batch.row_order]
        shift = batch.positions - torch.cat([torch.arange(row.start, row.start + row.num_tokens) for row in rows])
        located = list(iter_rows(batch))
        for layer in range(len(self.layers)):
            inputs = [row.text.computed(layer) for row in rows]
            now = [slice(row.start, row.start + row.num_tokens) for row in rows]
            q, k, v = (torch.cat([x[part][at] for x, at in zip(inputs, now, strict=True)]) for part in range(3))
            q, k = (turn(self.layers[layer], x, shift) for x in (q, k))
            outs = batch.attend(layer, q, k, v).split([row.num_tokens for row in rows])
            if check:
                for row, out, each in zip(rows, outs, located, strict=True):
                    self._check_row(row, layer, out, gather(*each, layer))

    def _check_row(self, row: DrawnRow, layer: int, out: Tensor, keys: Keys) -> None:
        start, end, spec = row.start, row.start + row.num_tokens, row.text.layers[layer]
        q, k, v = (x[:end] for x in row.text.computed(layer))
        mask = self._definition(row.text.cache, row.text.ids(0, end), layer, start, end - start)
        is_rounded = mask is None or is_quantized(row.text.cache)
        rounding, shift = ROUNDING if is_rounded else 0.0, -row.text.sequence.shift
        if row.text.cache.contract.unbounded:
            rounding = max(rounding, REPEATED)
            seen = list_seen(keys, k.shape[1], end) if mask is None else mask.any(1)
            k, q = place_keys(spec, k, seen, shift), turn(spec, q.double(), torch.full((end,), shift))
        last = check_keys(k, v, keys, rounding=rounding)
        sees_right = mask is None or torch.equal(last, mask[:, -1])
        assert sees_right, f"the token at position {end - 1} sees other positions than it should"
        if mask is None or is_rounded:
            mask, start = last[:, None], end - 1
            k, v = replace_kept(k, v, keys)
        error = float((out[start - end :].double() - attention(q[start:end], k, v, spec, mask)).abs().max())
        most = 10 * REPEATED if row.text.cache.contract.unbounded else 1e-5
        assert error < most, f"attention differs by {error:.2g} from the reference (layer {layer}, position {end - 1})"

    # ------------------------------------------------------------ always
    def check_books(self) -> None:
        """Assert that the bookkeeping of all caches agrees with the memory and the open sequences."""
        self.world.check_integrity()
        for name, cache_ in self.world.caches.items():
            usage, held = read_usage(find_instance(cache_)), self.memory.get_held_bytes(name)
            assert usage.reserved == held, f"usage(): reserved is {usage.reserved}, and {held} bytes of blocks are held"
            assert usage.reserved == usage.used + usage.idle + usage.wasted, f"usage() does not add up: {usage}"
            assert min(usage) >= 0, f"usage() has a negative number: {usage}"
            num_open = sum(text.cache is cache_ for text in self.open_texts)
            if isinstance(cache_, Reporting):
                assert usage.seats == num_open, f"usage(): seats is {usage.seats}, and {num_open} sequences are open"
            check_features(cache_)

    def check_progress(self) -> None:
        """Assert that in each cache with open sequences one of them is ready."""
        for cache_ in self.world.caches.values():
            cache_.poll()
            waiting = [text.sequence for text in self.open_texts if text.cache is cache_]
            assert not waiting or any(each.ready() for each in waiting), (
                "all sequences wait for each other: see ready()"
            )

    def finish(self) -> None:
        """Close all sequences; assert that nothing has leaked, and that the longest text fits again everywhere."""
        for text in self.open_texts:
            text.sequence.close()
        for pinning, pin in self.pins:
            pinning.unpin(pin.id)
        self.world.check_integrity()
        for name, cache_ in self.world.caches.items():
            self.memory.set_share(name, floor=0, limit=self.memory_bytes)
            sequence = cache_.open(Text([1] * LONGEST))
            assert sequence is not None, f"open() returned None for {name}, and all memory is free or idle"
            sequence.close()
        for cache_ in self.world.caches.values():
            cache_.evict(self.memory_bytes)
        self.world.check_integrity()
        held = self.memory.held_bytes
        assert not held, f"{held} bytes are still held when all sequences are closed and idle blocks are evicted"


def _commit(batch: Batch, rows: Sequence[DrawnRow]) -> None:
    """Commit the accepted tokens of each row."""
    for row in [rows[i] for i in batch.row_order]:
        row.text.sequence.commit(row.text.ids(row.start, row.start + row.accepted))
    for row in rows:
        row.text.sequence.compact()
