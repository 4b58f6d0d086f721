"""`StrategyCache`: lets a KV-cache strategy store the keys and values of `model.generate`, as its `cache`.

For use without the server, which never imports this file: it needs transformers, and it gathers the keys over which
transformers then computes attention. Knows strategies by the interface `KVCache`, and models by their config.

transformers masks by position: the j-th of the returned keys has position kv_offset + j. A strategy that drops keys in
the middle of a row would need a mask for each query, which no cache can give: such rows raise StrategyCacheError. Rows
of one token always work (`generate(..., prefill_chunk_size=1)`), as their only query attends to all returned keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.configuration_utils import PreTrainedConfig

from cache_strategies.adapters.standalone import build_standalone_cache
from cache_strategies.base import KVSequence, Locations, Rows
from cache_strategies.features import Gathering, Reporting
from cache_strategies.types import CacheUsage, Geometry, Text
from kernels.types import LayerSpec

_UNKNOWN_TOKEN_ID = -1  # stands for every token id, as transformers passes none to a cache; prevents prefix sharing

KV = tuple[Tensor, Tensor]


class StrategyCacheError(ValueError):
    """Raised for an operation that the strategy, or its use within transformers, does not allow; says what to use."""


class StrategyCache(Cache):
    """A transformers cache that stores one batch of sequences with a strategy. All memory is allocated at the start."""

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
        """Allocate a cache for `max_batch_size` sequences (each beam counts) of up to `max_seq_len` tokens.

        `strategy` is the kind, and `options` are its options as in the server's settings. `dtype` (default: the
        config's) may be narrower than the model's, which saves memory and rounds. Set `equal_lengths` if no prompt of a
        batch is padded: the cache cannot see padding. Raises SettingsError for an unknown kind or option, and
        StrategyCacheError for a model with layers that are neither full nor sliding-window attention.
        """
        text = config.get_text_config(decoder=True)
        self.max_seq_len = max_seq_len
        self.max_batch_size = max_batch_size
        self._specs = _make_layer_specs(text)
        self._has_explicit_dtype = dtype is not None
        self._kind, self._equal_lengths = strategy, equal_lengths
        kv_dtype = dtype or _resolve_dtype(text)
        if min(max_batch_size, max_seq_len) < 1:
            raise ValueError("max_batch_size and max_seq_len must be at least 1")
        geometry = Geometry(self._specs, kv_dtype, max_batch_size, max_seq_len, max_num_batched_tokens=max_seq_len)
        self._cache = build_standalone_cache(strategy, options, geometry, torch.device(device))
        self._exact = self._cache.contract.exact
        if not isinstance(self._cache, Gathering):
            self._refuse("does not let its keys be read", "define its method `gather`")
        if self._cache.contract.unbounded:
            self._refuse("counts positions within the cache, and transformers in the text", "use `kvmux serve`")
        self._has_gaps = not self._exact and self._leaves_gaps()
        self._sequences: list[KVSequence] = []  # one sequence per sequence of the batch, all of the same length
        self._forward_pass: _ForwardPass | None = None  # the forward pass in which not all layers are updated yet
        self._num_cropped = 0  # tokens dropped since the last forward pass
        self._first_stop = self._find_first_stop()
        croppable = self._cache.contract.rewind != 0
        layers: list[Any] = [StrategyLayer(self, i, spec.window, croppable) for i, spec in enumerate(self._specs)]
        super().__init__(layers=layers)

    # ---------------------------------------------------------------- the interface of transformers
    @property
    def length(self) -> int:
        """The number of tokens per sequence that have gone through all layers."""
        return self._sequences[0].length if self._sequences else 0

    @property
    def batch_size(self) -> int:
        return len(self._sequences) or -1  # in transformers -1 means that the cache is unused

    def usage(self) -> CacheUsage:
        """Return the cache's memory in bytes: reserved, used by tokens, idle and wasted."""
        if isinstance(self._cache, Reporting):
            return self._cache.usage()
        held, tokens = self._cache.setup.memory.held_bytes, sum(each.length for each in self._sequences)
        return CacheUsage(len(self._sequences), tokens, held, held, 0, 0, self._cache.setup.memory.limit_bytes)

    def reset(self) -> None:
        """Drop all sequences; keep the allocated memory for the next batch."""
        self._forward_pass = None
        while self._sequences:
            self._sequences.pop().close()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the latest tokens; their number is given negated, as in transformers. 0 drops a failed forward pass."""
        if tokens_to_remove > 0 or -tokens_to_remove > self.length:
            raise ValueError(
                f"crop({tokens_to_remove}): pass the number of tokens to remove as a negative number, "
                f"from {-self.length} to 0"
            )
        self._forward_pass = None
        rewind = self._cache.contract.rewind
        if rewind is not None and self._num_cropped - tokens_to_remove > rewind:
            self._refuse(
                f"can drop {rewind} of its latest tokens, not {self._num_cropped - tokens_to_remove}",
                "use contiguous, or call reset() and pass the text again",
            )
        length = self.length + tokens_to_remove
        self._num_cropped -= tokens_to_remove
        for sequence in self._sequences if tokens_to_remove else ():
            sequence.truncate(length)
            assert sequence.length == length, "a sequence without shared blocks is cropped exactly"

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace sequence i of the batch by sequence beam_idx[i], for beam search."""
        self._select_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences of the batch at these indices, in this order."""
        self._select_rows(torch.arange(len(self._sequences))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch `repeats` times; its copies are adjacent."""
        self._select_rows([row for row in range(len(self._sequences)) for _ in range(repeats)])

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise StrategyCacheError(
            "a StrategyCache cannot be copied: to reuse a prompt several times, crop() back to its end each time"
        )

    def _select_rows(self, rows: Sequence[int]) -> None:
        """Make the batch consist of the sequences at the indices `rows`: fork repeated ones, close missing ones.

        Raises ValueError if they are more than max_batch_size, and StrategyCacheError if the strategy cannot fork.
        """
        self._check_no_partial_pass()
        if not self._sequences:
            return
        if len(rows) > self.max_batch_size:
            raise ValueError(f"{len(rows)} rows exceed max_batch_size={self.max_batch_size}: raise it")
        for i in set(range(len(self._sequences))) - set(rows):  # closed first, so that forks can use their memory
            self._sequences[i].close()
        self._sequences = [
            self._sequences[row] if row not in rows[:i] else self._fork_sequence(self._sequences[row])
            for i, row in enumerate(rows)
        ]

    def _fork_sequence(self, sequence: KVSequence) -> KVSequence:
        if type(sequence).fork is KVSequence.fork:
            self._refuse("cannot fork a sequence", "use paged, or num_beams=1 and num_return_sequences=1")
        child = sequence.fork()
        if child is None:
            raise MemoryError(f"strategy {self._kind!r} has not enough memory to fork a sequence: raise max_batch_size")
        return child

    # ---------------------------------------------------------------- called by the layers
    def mask_sizes(self, layer: int, num_new_tokens: int) -> tuple[int, int]:
        """Return (number of keys that `update_layer` will return for the new tokens, position of the first key)."""
        num_keys = self._count_visible(layer, self.length + 1) + num_new_tokens - 1
        return num_keys, self.length + num_new_tokens - num_keys

    @torch.no_grad()
    def update_layer(self, layer: int, key: Tensor, value: Tensor) -> KV:
        """Write key and value [B, H, n, D] of n new tokens -> K and V [B, H, S, D] of all tokens they may attend to."""
        self._check_update(layer, key, value)
        B, _, n, _ = key.shape
        if self._forward_pass is None:
            self._forward_pass = self._begin_forward_pass(B, n)
        forward_pass = self._forward_pass
        if layer in forward_pass.updated_layers or (B, n) != (len(self._sequences), forward_pass.num_new_tokens):
            self._check_no_partial_pass()
        dtype = self._cache.setup.geometry.kv_dtype
        k, v = (x.detach().to(dtype).transpose(1, 2).flatten(0, 1) for x in (key, value))  # each [B * n, H, D]
        self._write(forward_pass.located, forward_pass.rows, layer, k, v)
        forward_pass.updated_layers.add(layer)
        if layer in forward_pass.past:
            new = (x.unflatten(0, (B, n)).transpose(1, 2) for x in (k, v))
            kv = [torch.cat(pair, 2) for pair in zip(forward_pass.past.pop(layer), new, strict=True)]
        else:
            kv = list(self._stack_kv(forward_pass.rows, layer))
        assert kv[0].shape[2] == self.mask_sizes(layer, n)[0], "mask_sizes() returned another number of keys"
        if len(forward_pass.updated_layers) == len(self._specs):
            for sequence in self._sequences:
                sequence.commit([_UNKNOWN_TOKEN_ID] * n)
                sequence.compact()
            self._forward_pass, self._num_cropped = None, 0
        return kv[0].to(key.dtype), kv[1].to(value.dtype)

    # ---------------------------------------------------------------- steps
    def _begin_forward_pass(self, B: int, n: int) -> _ForwardPass:
        """Locate the rows of n new tokens for each of B sequences.

        Raises ValueError if they do not fit or if transformers cannot mask the keys that the strategy keeps, and
        MemoryError if the strategy has not enough memory.
        """
        self._check_batch(B, n)
        if not self._sequences:
            self._open_sequences(B)
        self._cache.poll()
        for sequence in self._sequences:
            self._grow_sequence(sequence, n)
        past = self._gather_past(n)
        rows = Rows(self._sequences, [n] * len(self._sequences))
        return _ForwardPass(n, past, rows, self._cache.locate(rows))

    def _open_sequences(self, B: int) -> None:
        for _ in range(B):
            sequence = self._cache.open(Text([_UNKNOWN_TOKEN_ID]))
            if sequence is None:
                raise MemoryError(f"strategy {self._kind!r} has not enough memory for {B} sequences")
            self._sequences.append(sequence)

    def _grow_sequence(self, sequence: KVSequence, num_tokens: int) -> None:
        if sequence.reserve(num_tokens):
            return
        self._cache.locate(Rows([], []))  # runs the copies of shared blocks, whose sources stay referenced until then
        if not sequence.reserve(num_tokens):
            raise MemoryError(f"strategy {self._kind!r} has not enough memory for {num_tokens} more tokens")

    def _gather_past(self, n: int) -> dict[int, KV]:
        """Return K and V of all past tokens that any of n new tokens attends to, by layer.

        The result has only the layers whose window moves past some of them before the last new token. As
        gather() returns only what a row's last token attends to, rows of the first new token alone are located, which
        are never committed.
        """
        S, count = self.length, self._count_visible
        layers = [i for i in range(len(self._specs)) if count(i, S + n) < count(i, S + 1) + n - 1]
        if not layers:
            return {}
        rows = Rows(self._sequences, [1] * len(self._sequences))
        located = self._cache.locate(rows)
        return {i: self._gather_layer_past(located, rows, i) for i in layers}

    def _gather_layer_past(self, located: Locations, rows: Rows, layer: int) -> KV:
        """Return K and V [B, H, S, D] of the past tokens that the next token of each sequence attends to."""
        spec, setup, B = self._specs[layer], self._cache.setup, len(self._sequences)
        shape, kv_dtype = (B, spec.num_kv_heads, spec.head_dim), setup.geometry.kv_dtype
        zeros = torch.zeros(shape, dtype=kv_dtype, device=setup.memory.device)
        self._write(located, rows, layer, zeros, zeros)
        k, v = self._stack_kv(rows, layer)
        return k[:, :, :-1], v[:, :, :-1]

    def _write(self, located: Locations, rows: Rows, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the keys and values [B * n, H, D] of rows in a layer."""
        location = located.by_layer[layer]
        if location is None:  # its operations write only: build_standalone_cache
            self._cache.attend(layer, rows, k, k, v, torch.empty_like(v))
        else:
            self._cache.setup.ops.write_kv(location.store, layer, k, v, location.at)

    def _stack_kv(self, rows: Rows, layer: int) -> KV:
        """Return K and V [B, H, S, D] of a layer that the last token of each row attends to."""
        assert isinstance(self._cache, Gathering)
        per_row = [self._cache.gather(layer, rows, row) for row in range(len(rows))]
        k, v = (torch.stack([x[i] for x in per_row]).transpose(1, 2) for i in (0, 1))
        return k, v

    # ---------------------------------------------------------------- visible keys
    def _count_visible(self, layer: int, length: int) -> int:
        """Return the number of keys that the last of `length` tokens attends to in a layer, its own included."""
        others = self._cache.count_visible(layer, length - 1)
        return self._count_visible_if_exact(layer, length) if others is None else others + 1

    def _count_visible_if_exact(self, layer: int, length: int) -> int:
        """Return the number of keys that the last of `length` tokens would attend to in a layer if none was dropped."""
        window = self._specs[layer].window
        return length if window is None else min(length, window)

    def _find_first_stop(self) -> int | None:
        """Return the position at which the first row of a text has to end; None: anywhere."""
        text = self._cache.open(Text([_UNKNOWN_TOKEN_ID]))
        assert text is not None, "there is memory for a text"
        stop = text.stop
        text.close()
        return stop

    def _leaves_gaps(self) -> bool:
        """Return whether the positions that a long text's last token sees are not contiguous, as with sinks.

        Raises StrategyCacheError if heads keep different keys, or if there is no mask for what tokens see.
        """
        text = self._cache.open(Text([_UNKNOWN_TOKEN_ID]))
        assert text is not None, "there is memory for a text"
        try:
            return self._find_gaps(text)
        finally:
            text.close()

    def _find_gaps(self, text: KVSequence) -> bool:
        """Let a text without keys grow to max_seq_len, and look at what its last token sees."""
        assert isinstance(self._cache, Gathering)
        longest = self.max_seq_len
        while text.length < longest:
            count = min(longest - text.length, longest - 1 if text.stop is None else text.stop - text.length)
            count = min(count, longest - 1 - text.length) or 1
            self._cache.poll()
            self._grow_sequence(text, count)
            rows = Rows([text], [count])
            located = self._cache.locate(rows)
            if text.length == longest - 1:
                has_hooks = any(at is None for at in located.by_layer)  # by which no key was written: none is there
                seen = [] if has_hooks else [self._cache.gather(i, rows, 0)[2] for i in range(len(self._specs))]
                if has_hooks or any(each.dim() > 1 for each in seen):
                    self._refuse(
                        "drops keys head by head or reads only some, and transformers cannot mask the others",
                        "use a strategy whose contract is exact, or one that all heads of a layer share",
                    )
                return any(int(each[0]) + len(each) != longest for each in seen)
            text.commit([_UNKNOWN_TOKEN_ID] * count)
            text.compact()
        return False

    # ---------------------------------------------------------------- checks
    def _check_update(self, layer: int, key: Tensor, value: Tensor) -> None:
        spec, setup = self._specs[layer], self._cache.setup
        kv_dtype, device = setup.geometry.kv_dtype, setup.memory.device
        for x in (key, value):
            if x.dim() != 4 or (x.shape[1], x.shape[3]) != (spec.num_kv_heads, spec.head_dim):
                raise StrategyCacheError(
                    f"layer {layer} has keys or values of shape {list(x.shape)}, but the config has "
                    f"{spec.num_kv_heads} heads of {spec.head_dim}: pass this model's own config, or use DynamicCache"
                )
        if key.device != device:
            raise ValueError(f"the keys are on {key.device}, the cache on {device}: pass device={str(key.device)!r}")
        if key.dtype != kv_dtype and not self._has_explicit_dtype:
            raise ValueError(f"the keys are {key.dtype}, but the config says {kv_dtype}: pass the dtype of the cache")

    def _check_batch(self, rows: int, n: int) -> None:
        S = self.length
        stop = self._sequences[0].stop if self._sequences else self._first_stop
        max_row = None if stop is None else stop - S
        if rows > self.max_batch_size:
            raise ValueError(f"{rows} rows exceed max_batch_size={self.max_batch_size}: raise it (each beam is a row)")
        if self._sequences and rows != len(self._sequences):
            raise ValueError(
                f"the cache has {len(self._sequences)} rows and the input has {rows}: keep the batch size, or call "
                "reset()"
            )
        if S + n > self.max_seq_len:
            raise ValueError(
                f"{n} tokens do not fit after {S} cached ones: raise max_seq_len={self.max_seq_len}, or call reset()"
            )
        if rows > 1 and self._has_gaps and not self._equal_lengths:
            self._refuse(
                "keeps the first tokens of every row, which may be padding in a batch, and a cache cannot see padding",
                "use sinks=0, rows of one prompt, or equal_lengths=True if all rows are equally long",
            )
        if max_row is not None and n > max_row:
            self._refuse(
                f"accepts at most {max_row} tokens of a sequence at once, not {n}",
                f"call generate(..., prefill_chunk_size={max_row}), or raise max_row if the kind has that option",
            )
        if n > 1 and any(
            self._count_visible(i, S + n) < self._count_visible_if_exact(i, S + n) for i in range(len(self._specs))
        ):
            self._refuse(
                f"drops keys while tokens {S} to {S + n - 1} enter, and transformers cannot mask them for each token",
                "call generate(..., prefill_chunk_size=1), enlarge the window, or use `kvmux serve`",
            )

    def _check_no_partial_pass(self) -> None:
        """Raise StrategyCacheError if a forward pass has updated some layers but not all of them."""
        if self._forward_pass is not None:
            updated, layers = len(self._forward_pass.updated_layers), len(self._specs)
            raise StrategyCacheError(
                f"the last forward pass updated {updated} of {layers} layers: if it failed, call "
                "crop(0) and repeat it; a model that skips layers needs DynamicCache"
            )

    def _refuse(self, why: str, advice: str) -> NoReturn:
        raise StrategyCacheError(f"strategy {self._kind!r} {why}: {advice}")


class StrategyLayer(CacheLayerMixin):
    """One layer of a StrategyCache, with the interface of transformers' cache layers."""

    supports_early_init = False

    def __init__(self, owner: StrategyCache, index: int, window: int | None, croppable: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = window is not None  # read by transformers, which makes a different mask for sliding layers
        self.is_croppable = croppable
        self._owner = owner
        self._index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: all memory was allocated by the StrategyCache."""

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
    """A forward pass in which some layers have passed their keys and values to the cache, and others not yet."""

    num_new_tokens: int  # number of new tokens per sequence
    past: dict[int, KV]  # K and V of past tokens by layer, for layers whose window drops some of them in this pass
    rows: Rows
    located: Locations
    updated_layers: set[int] = field(default_factory=set)


def _resolve_dtype(config: PreTrainedConfig) -> torch.dtype:
    """Return the torch.dtype of a model's config, which may have a torch.dtype, its name, or none (then float32)."""
    dtype = getattr(config, "dtype", None) or torch.float32
    resolved: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return resolved


def _make_layer_specs(config: Any) -> list[LayerSpec]:
    """Return the specification of each layer of a model's config, with the windows that DynamicCache reads from it.

    Raises StrategyCacheError if a layer is neither full nor sliding-window attention.
    """
    layers = DynamicCache(config=config).layers
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    try:
        query_heads = getattr(config, "num_attention_heads", None)
        heads = getattr(config, "num_key_value_heads", None) or query_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    except (AttributeError, TypeError):  # the config names heads differently, or their number or size by layer
        heads = None
    if not plain or not isinstance(heads, int) or getattr(config, "attention_chunk_size", None):
        raise StrategyCacheError(
            f"{type(config).__name__}: strategies only support layers with full or sliding-window attention and their "
            "own keys and values, and this model has others: use DynamicCache"
        )
    return [LayerSpec(heads, heads, dim, dim, window=getattr(layer, "sliding_window", None)) for layer in layers]
