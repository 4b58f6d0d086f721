"""The operations that models and strategies call (`Ops`), and the types of their arguments: weights, layers, attention.

Declares interfaces only; `reference/backend.py` defines what each operation computes. types.py explains the letters in
shapes, such as [N, d].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.kv_formats import KVFormats
from kernels.states import States
from kernels.store import KVStore
from kernels.types import LayerSpec, Slots
from kernels.weights.stored import ConcatenatedWeight, StoredWeight


# ---------------------------------------------------------------- weights and layers
class PackedWeight(ABC):
    """A weight [out, in] in the memory layout of one backend: made by the backend's `Ops.pack`, and only for it."""

    shape: torch.Size  # of the weight
    nbytes: int
    device: torch.device
    format: str  # format of its numbers, such as "bfloat16" or "int4"

    @property
    def parts(self) -> Sequence[PackedWeight]:
        """The weights in one format each of which this one consists."""
        return (self,)

    @abstractmethod
    def rows(self, which: Tensor) -> Tensor:
        """Return the rows with these indices [n] int64 as a new tensor [n, in] of values."""


Weight = StoredWeight | ConcatenatedWeight | PackedWeight  # [out, in]
RopeTables = tuple[Tensor, Tensor]  # (cos, sin), both [P, rotated dimensions / 2] float32, for P positions
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, eq=False, slots=True)
class AttentionWeights:
    """The weights around attention: a norm and the projections before it, the projection and a norm after it.

    A field is None if the model does not have it. The projections to q, k and v are one matrix.
    """

    norm: Tensor  # [d]
    qkv: Weight
    qkv_bias: Tensor | None
    qk_norm: tuple[Tensor, Tensor] | None  # weights of the norm of queries [D] and of the norm of keys [D]
    tables: RopeTables | None  # RoPE's cos and sin; dimensions of a head beyond theirs are not rotated
    q_heads: int
    kv_heads: int
    o: Weight
    o_bias: Tensor | None
    post_norm: Tensor | None  # [d], weight of a norm of the output projection before it is added (Gemma)
    next_norm: Tensor  # [d], before the feed-forward
    eps: float  # of all these norms

    def pack(self, ops: Ops) -> AttentionWeights:
        """Return the same weights in the layout that the backend `ops` multiplies fastest."""
        return replace(self, qkv=ops.pack(self.qkv), o=ops.pack(self.o))

    def tensors(self) -> Iterator[Weight]:
        """Yield the tensors of these weights, without the RoPE tables."""
        for weight in (self.norm, self.qkv, self.qkv_bias, self.o, self.o_bias, self.post_norm, self.next_norm):
            if weight is not None:
                yield weight
        yield from self.qk_norm or ()


class MLP(Protocol):
    """The part of a layer after attention: a feed-forward of any kind."""

    def __call__(self, ops: Ops, h: Tensor) -> Tensor:
        """Return what the layer adds to the residual stream, [N, d], for its normalised input h [N, d]."""
        ...

    def pack(self, ops: Ops) -> MLP:
        """Return the same weights in the layout that the backend `ops` multiplies fastest."""
        ...

    def tensors(self) -> Iterator[Weight]:
        """Yield the tensors of these weights."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class GatedMLP:
    """The weights of a gated feed-forward (Shazeer 2020): gate and up are one matrix [2 f, d], down is [d, f]."""

    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None
    activation: Activation

    def __call__(self, ops: Ops, h: Tensor) -> Tensor:
        return ops.mlp(self, h)

    def pack(self, ops: Ops) -> GatedMLP:
        """Return the same weights in the layout that the backend `ops` multiplies fastest."""
        return replace(self, gate_up=ops.pack(self.gate_up), down=ops.pack(self.down))

    def tensors(self) -> Iterator[Weight]:
        for weight in (self.gate_up, self.gate_up_bias, self.down, self.down_bias):
            if weight is not None:
                yield weight


@dataclass(frozen=True, eq=False, slots=True)
class DecoderLayer:
    """One layer: attention, then a feed-forward; the output of each is added to its input."""

    spec: LayerSpec
    attention: AttentionWeights
    mlp: MLP
    post_norm: Tensor | None  # [d], weight of a norm of the feed-forward's output; None if the model has none

    def __post_init__(self) -> None:
        """Raise ValueError unless the weights and the attention have the same numbers of heads."""
        heads = self.attention.q_heads, self.attention.kv_heads
        if heads != (self.spec.num_q_heads, self.spec.num_kv_heads):
            raise ValueError(f"weights for {heads[0]} query heads and {heads[1]} KV heads do not fit {self.spec}")

    def pack(self, ops: Ops) -> DecoderLayer:
        """Return the same layer, with weights in the layout that the backend `ops` multiplies fastest."""
        return replace(self, attention=self.attention.pack(ops), mlp=self.mlp.pack(ops))

    def tensors(self) -> Iterator[Weight]:
        """Yield the tensors of the layer's weights."""
        yield from self.attention.tensors()
        yield from self.mlp.tensors()
        if self.post_norm is not None:
            yield self.post_norm


class DecoderLayers:
    """All layers of a model, in order: made by a backend's `Ops.pack_layers` for its `Ops.forward_layers`."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self.layers = layers

    def op_seconds(self) -> Mapping[str, float] | None:
        """Return the seconds that each operation took in the last `Ops.forward_layers`, by its name.

        None if the backend does not measure them.
        """
        return None


# ---------------------------------------------------------------- attention
class KVLocation(NamedTuple):
    """Where the keys and values of some rows are stored in some layers: the arguments for `Ops.attend`."""

    store: KVStore
    at: Slots
    window: int | None  # the argument of `Ops.attend`


class QueryTap(NamedTuple):
    """A request for copies of some queries, after RoPE: for strategies that score keys by recent queries."""

    tokens: Tensor  # [T] int64, ascending: which tokens of the slice
    queries: Sequence[Tensor | None]  # by layer: [T, Hq, D], dense, to which they are copied; None: not in this layer


class AttentionSlice(NamedTuple):
    """The tokens of a step that belong to one strategy, and where their keys and values are stored."""

    tokens: slice
    kv_locations: Sequence[KVLocation | None]  # by layer; None: `hook` computes the layer
    query_tap: QueryTap | None = None
    # Called as hook(layer index, q, k, v, out) with the slice's tokens, as `Attention.attend`; writes out [n,Hq,Dv].
    hook: Callable[[int, Tensor, Tensor, Tensor, Tensor], None] | None = None
    states: States | None = None  # for layers with recurrent states; None: the model has none


class Attention(Protocol):
    """The attention of one step, as a model calls it; the model sees no caches, batch or requests."""

    positions: Tensor  # [N] int64, positions of the tokens in their sequences, at which the model applies RoPE
    logit_index: Tensor  # [K] int64, rows of the hidden states for which logits are computed

    @property
    def slices(self) -> Sequence[AttentionSlice]:
        """The slices of the step, which cover all tokens in order; empty if only attend() knows what is stored.

        In a layer in which a slice has a location, attend() only calls `Ops.write_kv` and `Ops.attend` with it and
        copies queries for the slice's tap, so a backend may do that itself.
        """
        ...

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k [N,H,D] and v [N,H,Dv] of a layer to the caches; return the attention of q [N,Hq,D], [N,Hq,Dv]."""
        ...


# ---------------------------------------------------------------- operations
class Ops(Protocol):
    """The operations of models and strategies. Every backend gives the reference's results, and may inherit from it.

    Tensors may be strided views; only their last dimension is dense. Arguments that do not fit each other raise
    ValueError before any memory is read. A NaN or infinite number in one row affects no other row.
    """

    @property
    def batch_invariant_head_dim(self) -> int:
        """The largest head_dim for which a row's bits do not depend on the rest of the batch; 0 if there is none."""
        ...

    @property
    def block_formats(self) -> Container[str]:
        """The formats of GGUF files that `linear` multiplies as stored; others are better dequantized when loaded."""
        ...

    def prepare(self, layers: Sequence[LayerSpec], dtype: torch.dtype, formats: KVFormats) -> None:
        """Compile the attention kernels for these layers, for queries in `dtype`, and keys and values in `formats`.

        Called at start, so that no request waits for it. A backend that compiles nothing does nothing.
        """
        ...

    def commit(self) -> None:
        """Let the device begin with what was launched so far. Backends that compute within a call do nothing."""
        ...

    def pack(self, weight: Weight) -> Weight:
        """Return a weight [out, in] as this backend's `linear` reads it fastest, perhaps itself: once per weight."""
        ...

    def pack_layers(self, layers: Sequence[DecoderLayer], dtype: torch.dtype) -> DecoderLayers:
        """Return the layers of a model, for `forward_layers` with activations of this dtype.

        Called once per model, when it is loaded.
        """
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """Multiply x [N, in] by weight [out, in] and add bias [out] -> [N, out] in x's dtype.

        Floats are multiplied in the weight's dtype. The values of a quantized weight are those of `dequantize_weight`.
        A backend sums their products in float32, or first quantizes x to 8 bits in units of 32 columns, the largest
        magnitude becoming 127, and sums the products of a unit exactly (as llama.cpp does).
        """
        ...

    def qkv_proj_rope(
        self, layer: AttentionWeights, x: Tensor, added: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return x [N, d] plus `added` (None: nothing), and q [N,Hq,D], k [N,H,D], v [N,H,D] of the norm of that sum.

        q and k are rotated by RoPE at `positions` [N] int64. The results have the same bits as the single operations
        called one by one.
        """
        ...

    def o_proj_add_norm(self, layer: AttentionWeights, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Add the projection of attention's output, mixed [N, Hq * D], to x [N, d]; return the sum and its norm."""
        ...

    def mlp(self, weights: GatedMLP, h: Tensor) -> Tensor:
        """Compute a gated feed-forward of h [N, d] -> [N, d]: down(activation(gate) * up)."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Divide x [N, d] by its root mean square, times weight [d] -> [N, d] (Zhang & Sennrich 2019).

        Normalised in float32, and rounded to x's dtype before the weight is applied (Llama), or after if the weight
        is float32 (Gemma).
        """
        ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return x + delta, rounded to their dtype, and the `rms_norm` of that sum; all are [N, d]."""
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        """Apply RoPE (Su et al. 2021) to x [N,H,D]; cos, sin [P, D/2] float32; x[i] pairs with x[i + D/2] (NeoX)."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute silu(first half) * second half of gate_up [N, 2 f] -> [N, f] (SwiGLU, Shazeer 2020)."""
        ...

    def sample(self, logits: Tensor, params: Tensor) -> Tensor:
        """Draw a token from each row of logits [K, V] -> [K] int64, with the sampling parameters params [K, 5].

        `params` is float64 in the host's memory. Each row is a `kernels.sampling.SamplingRow`: temperature (0: the
        first of the largest logits), top-k, top-p, min-p (0, 1 and 0: every token may be drawn), and noise in [0, 1):
        the token is that one in whose interval of the cumulative probabilities the noise lies. A row of logits that
        has a NaN or whose maximum is infinite gives -1.
        """
        ...

    def check_slots(self, store: KVStore, layer: int, at: Slots, num_tokens: int) -> None:
        """Raise ValueError unless addresses fit a layer's store, lie within it, and are those of `num_tokens` tokens.

        The other operations check addresses as well; this does it anew, and before any key is written.
        """
        ...

    def write_kv(self, store: KVStore, layer: int, k: Tensor, v: Tensor, at: Slots) -> None:
        """Write k [N,H,D], v [N,H,Dv] to their slots, in the formats of the store (kv_formats.py)."""
        ...

    def attend(
        self,
        out: Tensor,
        q: Tensor,
        store: KVStore,
        layer: int,
        at: Slots,
        spec: LayerSpec,
        *,
        window: int | None = None,
        lse: Tensor | None = None,
    ) -> None:
        """Attend from q [N,Hq,D] to the stored keys and values, into out [N,Hq,Dv].

        A query with index i sees the keys with indices j <= i that lie within the model's window (from `window_start`
        of the addresses on or, if that is None, the latest spec.window) and, if the strategy gives a `window`, are
        among the latest `window` or in a sink slot. Tiles of keys are summed in float32, in an order that depends on
        indices alone. Rows of `out` for padding are not written. Keys and values that a query does not see never change
        its result, even if they are NaN or infinite.

        If `lse` [N, Hq] float32 is given, the logarithms of the sums of the exponentials of each query's scores are
        written to it: with them results over parts of the keys can be merged (Flash-Decoding, Dao et al. 2023). Scores
        are those of the keys as stored: without `LayerSpec.k_mean` if they are centered. A sink logit counts as a key.
        """
        ...

    def gather(self, store: KVStore, layer: int, at: Slots, row: int, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return K [S,H,D] and V [S,H,Dv] of a row's tokens with these indices, for tests, measurements and adapters.

        `indices` are [S], or [S, H] for a store of split heads. K and V have the dtype of their format, or float32 if
        they are quantized.
        """
        ...

    def copy_blocks(self, store: KVStore, src: list[int], dst: list[int]) -> None:
        """Copy block src[i] to block dst[i], all layers at once; no block may be in both lists.

        Raises ValueError if two of the blocks have pages in common.
        """
        ...

    def copy_tokens(self, store: KVStore, layer: int, src: Tensor, dst: Tensor) -> None:
        """Copy the keys and values of one layer from slots src [N] to slots dst [N], for strategies that drop tokens.

        All are read before any is written, so a slot may be in both. Slots are numbered block * store.block_size +
        offset, with block ids as in a block table, int64 on the store's device. With [N, H] instead of [N] each KV head
        of a block has slots of its own; blocks of split heads have one head. Vectors are copied bit for bit, their
        scales included. Raises ValueError before anything is written if a slot is outside of the store, if a head's
        slot is written twice, or if two of the blocks have pages in common.
        """
        ...

    def repeat_kv_heads(self, x: Tensor, groups: int) -> Tensor:
        """Repeat each KV head `groups` times for the query heads: x [S,H,D] -> [H * groups, S, D], dense and new.

        Head-major, for kernels without grouped-query attention: query head h reads KV head h // groups.
        """
        ...

    def repeat_kv_heads_step(self, mirror: Tensor, x: Tensor, start: int) -> None:
        """Repeat x [n,H,D] as `repeat_kv_heads` does, into columns start .. start + n - 1 of mirror [H * groups, P, D].

        Writes nothing else, so a caller that keeps a mirror (a copy of keys or values with repeated heads) moves only
        the new tokens in each step. Raises ValueError if there are no such columns, or if the mirror's heads are not a
        multiple of x's.
        """
        ...

    def select_blocks(self, out: Tensor, q: Tensor, summaries: Tensor, candidates: Tensor, counts: Tensor) -> None:
        """Select the blocks of keys that may matter most to q [S,Hq,D], into out [S,H,K] int32 (Quest).

        In each KV head row s selects counts[s, 1] of its first counts[s, 0] candidates [S,H,C] int32, which are numbers
        of blocks. `summaries` [blocks, 2 D] has the largest number of each dimension of a block's keys, then the
        smallest. Those with the largest bound, relu(q) . largest + min(q, 0) . smallest in float32, for any query of
        the head's group are written in the order of the candidates; of equal bounds the first. A NaN is the largest.
        Other columns of out keep what they have. (Tang et al. 2024, arXiv:2406.10774.)
        """
        ...

    def forward_layers(self, layers: DecoderLayers, x: Tensor, attention: Attention) -> Tensor:
        """Run all layers: x [N, d], embedded tokens -> the output of the last layer [N, d].

        Each layer is `qkv_proj_rope`, the attention's attend(), `o_proj_add_norm` and its feed-forward. The results
        have the same bits as the single operations called one by one.
        """
        ...


# ---------------------------------------------------------------- their names
# Members of Ops that compute nothing: they describe a backend, prepare, check arguments or commit launches.
NO_OPERATIONS = ("batch_invariant_head_dim", "block_formats", "prepare", "commit", "pack", "pack_layers", "check_slots")
OP_NAMES = tuple(name for name in vars(Ops) if not name.startswith("_") and name not in NO_OPERATIONS)
FORWARD_LAYERS = "forward_layers"
SINGLE_OPS = tuple(name for name in OP_NAMES if name != FORWARD_LAYERS)  # of which forward_layers consists
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of activations, keys and values
