"""Any strategy as `past_key_values` of transformers: what `model.generate` computes is kept by a KVCache of ours.

For use without the server, which never imports this: it needs transformers, and it gathers keys for transformers to
attend over. Knows strategies by their seam, those that forget also by `BlockTableCache.visible_positions`; models by
their config.

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
from cache_strategies.standalone import build_standalone_cache
from kernels.types import LayerSpec

_UNKNOWN_TOKEN_ID = -1  # a cache of transformers is not told the tokens: they are kept, and shared with nobody

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
        self._specs = _make_layer_specs(text)
        self._has_explicit_dtype = dtype is not None
        self._kind = strategy
        self._equal_lengths = equal_lengths
        kv_dtype = dtype or _resolve_dtype(text)
        if min(max_batch_size, max_seq_len) < 1:
            raise ValueError("max_batch_size and max_seq_len must be at least 1")
        geometry = Geometry(self._specs, kv_dtype, max_batch_size, max_seq_len, max_num_batched_tokens=max_seq_len)
        self._cache = build_standalone_cache(strategy, options, geometry, torch.device(device))
        self._exact = self._cache.contract.exact
        self._has_gaps = not self._exact and any(map(self._leaves_gaps, set(self._specs)))
        self._seats: list[Seat] = []  # one per row of the batch, all of the same length
        # Begun by the first layer's update, committed with the last layer's.
        self._forward_pass: _ForwardPass | None = None
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
        """Forget all sequences and keep the memory."""
        self._forward_pass = None
        while self._seats:
            self._cache.close(self._seats.pop())

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the latest tokens, given as a negative number as in transformers; 0 drops a forward pass that failed."""
        if tokens_to_remove > 0 or -tokens_to_remove > self.length:
            raise ValueError(
                f"crop({tokens_to_remove}): give the number of tokens to remove as a negative one, "
                f"{-self.length} at most"
            )
        self._forward_pass = None
        rewind = self._cache.contract.rewind
        if rewind is not None and -tokens_to_remove > rewind:
            self._refuse(
                f"can drop {rewind} of its latest tokens, not {-tokens_to_remove}",
                "use paged or contiguous, or reset() and enter the text again",
            )
        length = self.length + tokens_to_remove
        for seat in self._seats if tokens_to_remove else ():
            self._cache.crop(seat, length)
            assert seat.length == length, "seats of unknown tokens are cropped exactly"

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue row i as row beam_idx[i] was, for beam search."""
        self._select_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        self._select_rows(torch.arange(len(self._seats))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, side by side."""
        self._select_rows([row for row in range(len(self._seats)) for _ in range(repeats)])

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise StrategyCacheError(
            "a StrategyCache cannot be copied: to go on from one prompt several times, crop() back to it each time"
        )

    def _select_rows(self, rows: Sequence[int]) -> None:
        """Keep the seats of these rows; a row given again is forked, one not given is closed."""
        self._check_no_partial_pass()
        if not self._seats:
            return
        if len(rows) > self.max_batch_size:
            raise ValueError(f"{len(rows)} rows are more than max_batch_size={self.max_batch_size}: raise it")
        if len(set(rows)) < len(rows) and not self._cache.contract.forkable:
            self._refuse("cannot double a sequence", "use paged, or num_beams=1 and num_return_sequences=1")
        for i in set(range(len(self._seats))) - set(rows):  # first, so that there is room
            self._cache.close(self._seats[i])
        self._seats = [
            self._seats[row] if row not in rows[:i] else self._fork_seat(self._seats[row]) for i, row in enumerate(rows)
        ]

    def _fork_seat(self, seat: Seat) -> Seat:
        child = self._cache.fork(seat)
        if child is None:
            raise MemoryError(f"{self._kind} found no room to double a sequence")
        return child

    # ---------------------------------------------------------------- what layers ask for
    def mask_sizes(self, layer: int, more: int) -> tuple[int, int]:
        """Return how many keys `update_layer` will return with `more` tokens, and the position of the first."""
        keys = self._count_visible(self._specs[layer], self.length + 1) + more - 1
        return keys, self.length + more - keys

    @torch.no_grad()
    def update_layer(self, layer: int, key: Tensor, value: Tensor) -> KV:
        """Write key and value [B, H, n, D] of the new tokens -> K and V [B, H, S, D] of all that these may see."""
        self._check_update(layer, key, value)
        B, _, n, _ = key.shape
        if self._forward_pass is None:
            self._forward_pass = self._begin_forward_pass(B, n)
        forward_pass = self._forward_pass
        if layer in forward_pass.updated_layers or (B, n) != (len(self._seats), forward_pass.num_new_tokens):
            self._check_no_partial_pass()
        dtype = self._cache.setup.geometry.kv_dtype
        k, v = (x.detach().to(dtype).transpose(1, 2).flatten(0, 1) for x in (key, value))  # [B * n, H, D]
        forward_pass.plan.attend(layer, k, k, v, torch.empty_like(v))  # keeps, and attends to nothing
        forward_pass.updated_layers.add(layer)
        if layer in forward_pass.past:
            new = (x.unflatten(0, (B, n)).transpose(1, 2) for x in (k, v))
            kv = [torch.cat(pair, 2) for pair in zip(forward_pass.past.pop(layer), new, strict=True)]
        else:
            kv = list(_stack_kv(forward_pass.plan, layer, B))
        assert kv[0].shape[2] == self.mask_sizes(layer, n)[0], "transformers was promised another number of keys"
        if len(forward_pass.updated_layers) == len(self._specs):
            self._cache.commit(forward_pass.plan, [[_UNKNOWN_TOKEN_ID] * n] * B)
            self._forward_pass = None
        return kv[0].to(key.dtype), kv[1].to(value.dtype)

    # ---------------------------------------------------------------- steps
    def _begin_forward_pass(self, B: int, n: int) -> _ForwardPass:
        """Plan n more tokens of each row. Raises ValueError if they do not fit, or cannot be masked."""
        self._check_batch(B, n)
        if not self._seats:
            self._open_seats(B)
        self._cache.poll()
        for seat in self._seats:
            self._grow_seat(seat, n)
        past = self._gather_past(n)
        return _ForwardPass(n, past, self._cache.plan([Row(seat, n) for seat in self._seats]))

    def _open_seats(self, B: int) -> None:
        for _ in range(B):
            seat = self._cache.open([_UNKNOWN_TOKEN_ID])
            if seat is None:
                raise MemoryError(f"{self._kind} found no room for {B} sequences")
            self._seats.append(seat)

    def _grow_seat(self, seat: Seat, more: int) -> None:
        if self._cache.grow(seat, more):
            return
        # Sequences that part ways copy what they share, and originals are held until a step has run: an empty one.
        self._cache.commit(self._cache.plan([]), [])
        if not self._cache.grow(seat, more):
            raise MemoryError(f"{self._kind} found no room for {more} more tokens")

    def _gather_past(self, n: int) -> dict[int, KV]:
        """Return per layer the earlier keys that the first new token sees, where the last one does not see them all.

        A plan tells what the last token sees; so a step of one token, never committed, is asked before the real one.
        """
        S = self.length
        layers = [
            i
            for i, spec in enumerate(self._specs)
            if self._count_visible(spec, S + n) < self._count_visible(spec, S + 1) + n - 1
        ]
        if not layers:
            return {}
        plan = self._cache.plan([Row(seat, 1) for seat in self._seats])
        return {i: self._gather_layer_past(plan, i) for i in layers}

    def _gather_layer_past(self, plan: Plan, layer: int) -> KV:
        """Return K and V [B, H, S, D] of what a next token sees, without itself."""
        spec, setup, B = self._specs[layer], self._cache.setup, len(self._seats)
        shape, device = (B, spec.num_kv_heads, spec.head_dim), setup.arena.memory.device
        nothing = torch.zeros(shape, dtype=setup.geometry.kv_dtype, device=device)
        plan.attend(layer, nothing, nothing, nothing, torch.empty_like(nothing))
        k, v = _stack_kv(plan, layer, B)
        return k[:, :, :-1], v[:, :, :-1]

    # ---------------------------------------------------------------- what a token sees
    def _count_visible(self, spec: LayerSpec, length: int) -> int:
        """Return the number of keys that the last of `length` tokens sees."""
        return self._count_visible_if_exact(spec, length) if self._exact else len(self._visible_positions(spec, length))

    def _count_visible_if_exact(self, spec: LayerSpec, length: int) -> int:
        """Return the number of keys that it would see if nothing were forgotten."""
        return length if spec.window is None else min(length, spec.window)

    def _visible_positions(self, spec: LayerSpec, length: int) -> Tensor:
        positions = self._cache.visible_positions(length, spec)
        if positions is None:
            self._refuse(
                "forgets, and does not say beforehand how many keys are left, which transformers has to know",
                "use a strategy whose contract is exact, or define its `visible_positions`",
            )
        return positions

    def _leaves_gaps(self, spec: LayerSpec) -> bool:
        """Return whether what is kept of a long text is more than its end."""
        positions = self._visible_positions(spec, self.max_seq_len)
        return bool(positions[0] + len(positions) != self.max_seq_len)

    # ---------------------------------------------------------------- refusals
    def _check_update(self, layer: int, key: Tensor, value: Tensor) -> None:
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
        if key.dtype != kv_dtype and not self._has_explicit_dtype:
            raise ValueError(f"the keys are {key.dtype}, the config says {kv_dtype}: pass the dtype to keep them in")

    def _check_batch(self, rows: int, n: int) -> None:
        S, max_row = self.length, self._cache.contract.max_row
        if rows > self.max_batch_size:
            raise ValueError(f"{rows} rows are more than max_batch_size={self.max_batch_size}: raise it (beams count)")
        if self._seats and rows != len(self._seats):
            raise ValueError(f"the cache holds {len(self._seats)} rows, {rows} came: keep the batch, or reset() first")
        if S + n > self.max_seq_len:
            raise ValueError(f"no room for {n} tokens after {S}: raise max_seq_len={self.max_seq_len}, or reset()")
        if rows > 1 and self._has_gaps and not self._equal_lengths:
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
        if n > 1 and any(
            self._count_visible(spec, S + n) < self._count_visible_if_exact(spec, S + n) for spec in set(self._specs)
        ):
            self._refuse(
                f"forgets while tokens {S} to {S + n - 1} enter, and transformers cannot hide from each what it forgot",
                "enter them one by one, generate(..., prefill_chunk_size=1), keep more, or use `kvmux serve`",
            )

    def _check_no_partial_pass(self) -> None:
        """Raise if a forward pass updated some layers and not the others: its tokens count in none of them."""
        if self._forward_pass is not None:
            updated, layers = len(self._forward_pass.updated_layers), len(self._specs)
            raise StrategyCacheError(
                f"the last forward pass gave tokens to {updated} of {layers} layers: if it failed, call "
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
        """Do nothing: all memory was taken beforehand."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KV:
        return self._owner.update_layer(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.mask_sizes(self._index, query_length)

    def get_seq_length(self) -> int:
        return self._owner.length

    def get_max_length(self) -> int:
        return self._owner.max_seq_len


@dataclass
class _ForwardPass:
    """Tokens on their way through the layers."""

    num_new_tokens: int  # per row
    past: dict[int, KV]  # see StrategyCache._gather_past
    plan: Plan
    updated_layers: set[int] = field(default_factory=set)


def _resolve_dtype(config: PreTrainedConfig) -> torch.dtype:
    """Return a model's own dtype; the config of a saved model has its name alone."""
    dtype = getattr(config, "dtype", None) or torch.float32
    resolved: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return resolved


def _stack_kv(plan: Plan, layer: int, rows: int) -> KV:
    """Return what the last tokens of all rows see: K and V [B, H, S, D]."""
    per_row = [plan.gather_kv(layer, row) for row in range(rows)]
    k, v = (torch.stack([x[i] for x in per_row]).transpose(1, 2) for i in (0, 1))
    return k, v


def _make_layer_specs(config: Any) -> list[LayerSpec]:
    """Return what the config says of each layer, as transformers' own cache reads it. Raises StrategyCacheError."""
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
