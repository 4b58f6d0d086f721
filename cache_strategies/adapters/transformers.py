"""Any strategy as `past_key_values` of transformers: what `model.generate` computes is kept by a KVCache of ours.

For use without the server, which never imports this: it needs transformers, and it gathers keys for transformers to
attend over. Knows strategies by their seam, those that forget also by `BlockTableCache.visible`; models by their
config.

transformers masks by position. It takes the j-th of the keys returned for position kv_offset + j, and lets a query see
those up to its own, within the model's window. For what an exact strategy keeps that is right. Where a strategy forgets
in the middle of a row, each query would need a mask of its own, which no cache can give it: such rows are refused, and
rows of one token (`generate(..., prefill_chunk_size=1)`) never are, as their only query sees all that is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.configuration_utils import PreTrainedConfig

from cache_strategies.base import CacheUsage, Geometry, Plan, Row, Seat
from cache_strategies.block_table import BlockTableCache
from cache_strategies.standalone import build_alone
from kernels.types import LayerSpec

_UNNAMED = -1  # a cache of transformers is not told the tokens: they are kept, and shared with nobody

KV = tuple[Tensor, Tensor]


class StrategyCacheError(ValueError):
    """What this strategy, or transformers with it, cannot do. The message says what to use instead."""


class StrategyCache(Cache):
    """One batch of sequences under one strategy. Takes all memory at once and never more; `reset()` begins anew."""

    def __init__(
        self,
        config: PreTrainedConfig,
        strategy: str = "paged",
        *,
        max_seq_len: int,
        max_batch_size: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        equal_lengths: bool = False,
        **options: Any,
    ) -> None:
        """`options` are those of the kind, as in the server's settings; beams and returned sequences count as batch.

        `dtype` may be narrower than the model's, which saves memory and rounds; by default it is the config's.
        `equal_lengths` promises that no prompt of a batch is padded, of which a cache is not told.
        Raises SettingsError for a kind or option there is not, StrategyCacheError for a model it cannot serve.
        """
        text = config.get_text_config(decoder=True)
        self.max_seq_len = max_seq_len
        self.max_batch_size = max_batch_size
        self._specs = _layer_specs(text)
        self._dtype_given = dtype is not None
        self._kind = strategy
        self._equal_lengths = equal_lengths
        kv_dtype = dtype or _dtype_of(text)
        if min(max_batch_size, max_seq_len) < 1:
            raise ValueError("max_batch_size and max_seq_len must be at least 1")
        geometry = Geometry(self._specs, kv_dtype, max_batch_size, max_seq_len, max_num_batched_tokens=max_seq_len)
        self._cache = build_alone(strategy, options, geometry, torch.device(device))
        self._exact = self._cache.contract.exact
        self._gaps = not self._exact and any(map(self._leaves_gaps, set(self._specs)))
        self._seats: list[Seat] = []  # one per row of the batch, all of the same length
        self._step: _ForwardPass | None = None  # begun by the first layer's update, committed with the last layer's
        croppable = self._cache.contract.rewind is None
        layers: list[Any] = [StrategyLayer(self, i, spec.window, croppable) for i, spec in enumerate(self._specs)]
        super().__init__(layers=layers)

    # ---------------------------------------------------------------- what transformers asks for
    @property
    def length(self) -> int:
        """Tokens of each sequence that went through all layers."""
        return self._seats[0].length if self._seats else 0

    @property
    def batch_size(self) -> int:
        return len(self._seats) or -1  # transformers' word for a cache that is not in use yet

    def usage(self) -> CacheUsage:
        """Where the memory is, in bytes."""
        return self._cache.usage()

    def reset(self) -> None:
        """Forgets all sequences and keeps the memory."""
        self._step = None
        while self._seats:
            self._cache.close(self._seats.pop())

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the latest tokens, given as a negative number as in transformers; 0 drops a forward that failed."""
        if tokens_to_remove > 0 or -tokens_to_remove > self.length:
            raise ValueError(
                f"crop({tokens_to_remove}): give the number of tokens to remove as a negative one, "
                f"{-self.length} at most"
            )
        self._step = None
        rewind = self._cache.contract.rewind
        if rewind is not None and -tokens_to_remove > rewind:
            self._refuse(
                f"can drop {rewind} of its latest tokens, not {-tokens_to_remove}",
                "use paged or contiguous, or reset() and enter the text again",
            )
        length = self.length + tokens_to_remove
        for seat in self._seats if tokens_to_remove else ():
            self._cache.crop(seat, length)
            assert seat.length == length, "seats without named tokens are cropped exactly"

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on as row beam_idx[i] was: beam search."""
        self._arrange(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows, in this order."""
        self._arrange(torch.arange(len(self._seats))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, side by side."""
        self._arrange([row for row in range(len(self._seats)) for _ in range(repeats)])

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise StrategyCacheError(
            "a StrategyCache cannot be copied: to go on from one prompt several times, crop() back to it each time"
        )

    def _arrange(self, rows: Sequence[int]) -> None:
        """Seats of these rows; a row named again is forked, one not named is closed."""
        self._nothing_unfinished()
        if not self._seats:
            return
        if len(rows) > self.max_batch_size:
            raise ValueError(f"{len(rows)} rows are more than max_batch_size={self.max_batch_size}: raise it")
        if len(set(rows)) < len(rows) and not self._cache.contract.forkable:
            self._refuse("cannot double a sequence", "use paged, or num_beams=1 and num_return_sequences=1")
        for i in set(range(len(self._seats))) - set(rows):  # first, so that there is room
            self._cache.close(self._seats[i])
        self._seats = [
            self._seats[row] if row not in rows[:i] else self._forked(self._seats[row]) for i, row in enumerate(rows)
        ]

    def _forked(self, seat: Seat) -> Seat:
        child = self._cache.fork(seat)
        if child is None:
            raise MemoryError(f"{self._kind} found no room to double a sequence")
        return child

    # ---------------------------------------------------------------- what layers ask for
    def mask_sizes(self, layer: int, more: int) -> tuple[int, int]:
        """How many keys `enter` will return with `more` tokens, and the position transformers takes the first for."""
        keys = self._num_seen(self._specs[layer], self.length + 1) + more - 1
        return keys, self.length + more - keys

    @torch.no_grad()
    def enter(self, layer: int, key: Tensor, value: Tensor) -> KV:
        """key and value [B, H, n, D] of the new tokens -> K and V [B, H, S, D] of all that these tokens may see."""
        self._check(layer, key, value)
        B, _, n, _ = key.shape
        if self._step is None:
            self._step = self._begin(B, n)
        step = self._step
        if layer in step.entered or (B, n) != (len(self._seats), step.more):
            self._nothing_unfinished()
        dtype = self._cache.setup.geometry.kv_dtype
        k, v = (x.detach().to(dtype).transpose(1, 2).flatten(0, 1) for x in (key, value))  # [B * n, H, D]
        step.plan.attend(layer, k, k, v, torch.empty_like(v))  # keeps, and attends to nothing
        step.entered.add(layer)
        if layer in step.past:
            new = (x.unflatten(0, (B, n)).transpose(1, 2) for x in (k, v))
            found = [torch.cat(pair, 2) for pair in zip(step.past.pop(layer), new, strict=True)]
        else:
            found = list(_stacked(step.plan, layer, B))
        assert found[0].shape[2] == self.mask_sizes(layer, n)[0], "transformers was promised another number of keys"
        if len(step.entered) == len(self._specs):
            self._cache.commit(step.plan, [[_UNNAMED] * n] * B)
            self._step = None
        return found[0].to(key.dtype), found[1].to(value.dtype)

    # ---------------------------------------------------------------- steps
    def _begin(self, B: int, n: int) -> _ForwardPass:
        """Room and a plan for n more tokens of each row. Raises ValueError if they do not fit, or cannot be masked."""
        self._check_row(B, n)
        if not self._seats:
            self._open(B)
        self._cache.poll()
        for seat in self._seats:
            self._grow(seat, n)
        past = self._past(n)
        return _ForwardPass(n, past, self._cache.plan([Row(seat, n) for seat in self._seats]))

    def _open(self, B: int) -> None:
        for _ in range(B):
            seat = self._cache.open([_UNNAMED])
            if seat is None:
                raise MemoryError(f"{self._kind} found no room for {B} sequences")
            self._seats.append(seat)

    def _grow(self, seat: Seat, more: int) -> None:
        if self._cache.grow(seat, more):
            return
        # Sequences that part ways copy what they share, and originals are held until a step has run: an empty one.
        self._cache.commit(self._cache.plan([]), [])
        if not self._cache.grow(seat, more):
            raise MemoryError(f"{self._kind} found no room for {more} more tokens")

    def _past(self, n: int) -> dict[int, KV]:
        """Per layer, the earlier keys that the row's first token sees, where its last token does not see all of them.

        A plan tells what the last token sees; so a step of one token, never committed, is asked before the real one.
        """
        S = self.length
        layers = [
            i for i, spec in enumerate(self._specs) if self._num_seen(spec, S + n) < self._num_seen(spec, S + 1) + n - 1
        ]
        if not layers:
            return {}
        plan = self._cache.plan([Row(seat, 1) for seat in self._seats])
        return {i: self._earlier(plan, i) for i in layers}

    def _earlier(self, plan: Plan, layer: int) -> KV:
        """K and V [B, H, S, D] of what a next token sees, without itself."""
        spec, setup, B = self._specs[layer], self._cache.setup, len(self._seats)
        shape, device = (B, spec.num_kv_heads, spec.head_dim), setup.arena.memory.device
        nothing = torch.zeros(shape, dtype=setup.geometry.kv_dtype, device=device)
        plan.attend(layer, nothing, nothing, nothing, torch.empty_like(nothing))
        k, v = _stacked(plan, layer, B)
        return k[:, :, :-1], v[:, :, :-1]

    # ---------------------------------------------------------------- what a token sees
    def _num_seen(self, spec: LayerSpec, length: int) -> int:
        """Keys that the last of `length` tokens gets."""
        return self._all_seen(spec, length) if self._exact else len(self._visible(spec, length))

    def _all_seen(self, spec: LayerSpec, length: int) -> int:
        """The same, if nothing is forgotten."""
        return length if spec.window is None else min(length, spec.window)

    def _visible(self, spec: LayerSpec, length: int) -> Tensor:
        if not isinstance(self._cache, BlockTableCache):
            self._refuse(
                "forgets, and does not say beforehand how many keys are left, which transformers has to know",
                "use a strategy whose contract is exact, or let it subclass TableCache",
            )
        return self._cache.visible(length, spec)

    def _leaves_gaps(self, spec: LayerSpec) -> bool:
        """Whether what is kept of a long text is more than its end."""
        positions = self._visible(spec, self.max_seq_len)
        return bool(positions[0] + len(positions) != self.max_seq_len)

    # ---------------------------------------------------------------- refusals
    def _check(self, layer: int, key: Tensor, value: Tensor) -> None:
        spec, setup = self._specs[layer], self._cache.setup
        kv_dtype, device = setup.geometry.kv_dtype, setup.arena.memory.device
        for x in (key, value):
            if x.dim() != 4 or (x.shape[1], x.shape[3]) != (spec.num_kv_heads, spec.head_dim):
                raise StrategyCacheError(
                    f"layer {layer} gave keys or values of shape {list(x.shape)}; by the config there are "
                    f"{spec.num_kv_heads} heads of {spec.head_dim}: pass this model's own config, or use DynamicCache"
                )
        if key.device != device:
            raise ValueError(f"the keys are on {key.device}, the cache on {device}: pass device={str(key.device)!r}")
        if key.dtype != kv_dtype and not self._dtype_given:
            raise ValueError(f"the keys are {key.dtype}, the config says {kv_dtype}: pass the dtype to keep them in")

    def _check_row(self, rows: int, n: int) -> None:
        S, max_row = self.length, self._cache.contract.max_row
        if rows > self.max_batch_size:
            raise ValueError(f"{rows} rows are more than max_batch_size={self.max_batch_size}: raise it (beams count)")
        if self._seats and rows != len(self._seats):
            raise ValueError(f"the cache holds {len(self._seats)} rows, {rows} came: keep the batch, or reset() first")
        if S + n > self.max_seq_len:
            raise ValueError(f"no room for {n} tokens after {S}: raise max_seq_len={self.max_seq_len}, or reset()")
        if rows > 1 and self._gaps and not self._equal_lengths:
            self._refuse(
                "keeps the first tokens of every row, which is padding where prompts are padded, and a cache is not "
                "told which are",
                "use sinks=0, rows of one prompt, or equal_lengths=True if all rows are equally long",
            )
        if max_row is not None and n > max_row:
            self._refuse(
                f"takes {max_row} tokens of a sequence at once, not {n}",
                f"generate(..., prefill_chunk_size={max_row}), or raise max_row if the kind has that option",
            )
        if n > 1 and any(self._num_seen(spec, S + n) < self._all_seen(spec, S + n) for spec in set(self._specs)):
            self._refuse(
                f"forgets while tokens {S} to {S + n - 1} enter, and transformers cannot hide from each what it forgot",
                "enter them one by one, generate(..., prefill_chunk_size=1), keep more, or use `kvmux serve`",
            )

    def _nothing_unfinished(self) -> None:
        """Raises if a forward pass entered some layers and not the others: its tokens are in no layer that counts."""
        if self._step is not None:
            entered, layers = len(self._step.entered), len(self._specs)
            raise StrategyCacheError(
                f"the last forward pass gave tokens to {entered} of {layers} layers: if it failed, call "
                "crop(0) and repeat it; a model that leaves layers out needs DynamicCache"
            )

    def _refuse(self, why: str, instead: str) -> NoReturn:
        raise StrategyCacheError(f"the strategy {self._kind!r} {why}; instead: {instead}")


class StrategyLayer(CacheLayerMixin):
    """One layer as transformers sees it."""

    supports_early_init = False

    def __init__(self, owner: StrategyCache, index: int, window: int | None, croppable: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = window is not None  # transformers makes one mask for layers that are and one for the others
        self.is_croppable = croppable
        self._owner = owner
        self._index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """All memory was taken beforehand."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KV:
        return self._owner.enter(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.mask_sizes(self._index, query_length)

    def get_seq_length(self) -> int:
        return self._owner.length

    def get_max_length(self) -> int:
        return self._owner.max_seq_len


@dataclass
class _ForwardPass:
    """Tokens on their way through the layers."""

    more: int  # per row
    past: dict[int, KV]  # see StrategyCache._past
    plan: Plan
    entered: set[int] = field(default_factory=set)  # layers


def _dtype_of(config: PreTrainedConfig) -> torch.dtype:
    """A model's own; once it was saved its config has the name alone."""
    found = getattr(config, "dtype", None) or torch.float32
    resolved: torch.dtype = getattr(torch, found) if isinstance(found, str) else found
    return resolved


def _stacked(plan: Plan, layer: int, rows: int) -> KV:
    """What the last tokens of all rows see: K and V [B, H, S, D]."""
    found = [plan.keys(layer, row) for row in range(rows)]
    k, v = (torch.stack([x[i] for x in found]).transpose(1, 2) for i in (0, 1))
    return k, v


def _layer_specs(config: Any) -> list[LayerSpec]:
    """What the config says of each layer, as transformers' own cache reads it. Raises StrategyCacheError."""
    layers = DynamicCache(config=config).layers
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    try:
        query_heads = getattr(config, "num_attention_heads", None)
        heads = getattr(config, "num_key_value_heads", None) or query_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    except (AttributeError, TypeError):  # it depends on the layer, or is called otherwise
        heads = None
    if not plain or not isinstance(heads, int) or getattr(config, "attention_chunk_size", None):
        raise StrategyCacheError(
            f"{type(config).__name__}: a strategy can keep layers that attend to all tokens or to a sliding window of "
            "them, with keys and values of their own, and this model has others: use DynamicCache"
        )
    return [LayerSpec(heads, heads, dim, dim, window=getattr(layer, "sliding_window", None)) for layer in layers]
