"""The words that models, strategies and kernels share: a layer, attention, where keys lie, the operations.

Declares, implements nothing; `reference.py` is what every operation means. Shapes use these letters: N tokens of a step
(or of one strategy's slice of it), B rows, R seats, M blocks of the longest seat, Hq / H query / KV heads, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels.layer import AttentionWeights, DecoderLayer, Factor, GatedWeights, Stack
    from kernels.memory import Joined
    from kernels.quantised import Quantised
    from kernels.store import KVStore


class LayerSpec(NamedTuple):
    """Facts of the MODEL about the attention of one layer; a strategy may keep less, never see more."""

    num_kv_heads: int
    num_q_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None  # a query sees itself and the window - 1 tokens before it; None: all
    scale: float = 1.0  # of the scores
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sink_logits: Tensor | None = None  # [Hq], learned: one more logit in the softmax, with no value
    rotate: Callable[[Tensor, Tensor], Tensor] | None = None  # (x [N,H,D], delta [N]) -> RoPE moved on by delta
    kv_from: int | None = None  # layer whose K and V this one reads; None: its own


class Packed(ABC):
    """A weight [out, in] in the order in which a backend reads it: made by its `Ops.packed`, multiplied by it alone."""

    shape: torch.Size  # of the weight
    nbytes: int
    device: torch.device
    format: str  # what its numbers are kept in: "bfloat16", "int4"
    quantised: bool  # for `quantised_linear`, not for `linear`

    @abstractmethod
    def rows(self, which: Tensor) -> Tensor:
        """Return the values [n, in] of the rows `which` [n] int64, new."""


class Attention(Protocol):
    """All that a model sees of caches, batches and requests."""

    positions: Tensor  # [N] int64, absolute; the model applies RoPE at these, always
    logit_index: Tensor  # [K] int64, rows of the hidden state that go through lm_head

    @property
    def stored(self) -> Sequence[tuple[slice, Stored]] | None:
        """Where all keys lie, by slices of the N tokens; None: only attend() knows.

        attend() then does no more than `write_kv` and `attend` there, and a backend may do it in its place.
        """
        ...

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Enter k [N,H,D] and v [N,H,Dv] into the caches, and attend from q [N,Hq,D] -> [N,Hq,Dv]."""
        ...


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Slots:
    """Where one strategy's keys of one step lie: the contract between strategies and kernels.

    Token position p of a seat lies in slot(p) = p if p < sinks else sinks + (p - sinks) % ring (ring 0: slot(p) = p),
    that is in block table[seat, slot // block_size] at slot % block_size. Tensors are int32 on the device, and their
    addresses stay the same from step to step.
    """

    table: Tensor  # [R, M] block ids; rows are never copied, kernels go through row_seat
    block_size: int  # slots of a block
    row_seat: Tensor  # [B] row of the table
    q_start: Tensor  # [B + 1] offsets into the N tokens; decode rows (one token) stand first
    start: Tensor  # [B] position of the row's first token; < 0: padding, nothing is written or read
    kept: Tensor  # [B] slots in use before this step, for backends that read slots in order
    num_decode: int  # rows of one token; this and the next two are for a backend to choose a kernel and its split
    max_q: int  # longest row
    max_kv: int  # longest text, this step included
    sinks: int = 0
    ring: int = 0

    @property
    def num_rows(self) -> int:
        return self.start.shape[0]

    def slot(self, position: Tensor) -> Tensor:
        """Return the slots of positions (>= 0), of any shape."""
        if not self.ring:
            return position
        behind = self.sinks + (position - self.sinks) % self.ring
        return behind.where(position >= self.sinks, position)


class Stored(NamedTuple):
    """The place of the keys of all layers."""

    store: KVStore
    at: Slots
    window: int | None  # as `attend` takes it


class Ops(Protocol):
    """The operations of models and strategies. Every backend must agree with `reference.py`, and may inherit from it.

    Tensors may be views with strides of their own; only their last dimension is dense. Arguments that do not fit each
    other raise ValueError before any memory is read (`arguments.py`). What is NaN or infinite stays in its row.
    """

    def prepare(self, layers: Sequence[LayerSpec], dtype: torch.dtype, stored: torch.dtype) -> None:
        """Make ready what these layers' attention will need, in `dtype` over keys that are `stored` in another.

        Some kernels are compiled, and nobody's request is to wait for that.
        """
        ...

    def packed(self, weight: Factor | Joined) -> Factor:
        """Return the weight [out, in] as this backend multiplies it fastest, for `linear` or `quantised_linear`.

        Made once, when a model is loaded; the weight itself where that is as good. Nothing of its values is lost.
        """
        ...

    def stacked(self, layers: Sequence[DecoderLayer], dtype: torch.dtype) -> Stack:
        """Return the layers of a model with activations of a dtype, for `run_layers`.

        Made once, as `packed` weights.
        """
        ...

    def linear(self, x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None) -> Tensor:
        """Multiply x [N, in] by weight [out, in] and add bias [out] -> [N, out] in x's dtype.

        Multiplied in the dtype of weight and bias.
        """
        ...

    def quantised_linear(self, x: Tensor, weight: Quantised | Packed, bias: Tensor | None = None) -> Tensor:
        """Multiply x [N, in] by a weight [out, in] of 8 or 4 bits a number and add bias [out] -> [N, out] in x's dtype.

        Values of the weight are those of `kernels.quantised.dequantise`. Products are summed in float32; or x is
        rounded to whole numbers of 8 bits first, where the largest of a group of columns becomes 127 or -127, and a
        group's products are summed exactly (as llama.cpp does).
        """
        ...

    def enter_attention(
        self, layer: AttentionWeights, x: Tensor, added: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Add x [N, d] and what is still to be added -> the sum, and of its norm q [N,Hq,D], k [N,H,D], v [N,H,D].

        q and k at their positions [N] int64. The bits are those of the operations one by one.
        """
        ...

    def leave_attention(self, layer: AttentionWeights, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Add to x [N, d] the projection of attention's output, mixed [N, Hq * D]; return the sum and its norm."""
        ...

    def feed_forward(self, weights: GatedWeights, h: Tensor) -> Tensor:
        """Compute what the layer adds to h [N, d] -> [N, d]: down(activation(gate) * up)."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Divide x [N, d] by its root mean square, times weight [d] -> [N, d] (Zhang & Sennrich 2019).

        Normalised in float32, and rounded to x's dtype before the weight is applied (Llama), or after if the weight
        is float32 (Gemma).
        """
        ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add x + delta, rounded to their dtype; return the sum and its `rms_norm`; all [N, d]."""
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [N,H,D]; cos, sin [P, D/2] float32, halves paired (Su et al. 2021, GPT-NeoX layout)."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute silu(first half) * second half of gate_up [N, 2 f] -> [N, f] (SwiGLU, Shazeer 2020)."""
        ...

    def sample(self, logits: Tensor, how: Tensor) -> Tensor:
        """Draw a token of each row of logits [K, V] -> [K] int64, as `how` [K, 5] says; -1 where they are not numbers.

        `how` is float64 in the host's memory, a `kernels.sampling.Drawing` a row: temperature (0: the first of the
        largest), top-k, top-p, min-p (0, 1 and 0: all stay), and noise in [0, 1), which falls into the token's stretch
        of the cumulated probabilities. No numbers are those of a row with NaN, or whose largest is infinite.
        """
        ...

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise x [..., D] -> int8 [..., D] and scale [...] float32: the largest number becomes 127 or -127.

        Halves are rounded to even. A vector of zeros has the scale 0.
        """
        ...

    def dequantise(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return the values of x int8 [..., D], scale [...] -> float32 [..., D]."""
        ...

    def write_kv(self, store: KVStore, layer: int, k: Tensor, v: Tensor, at: Slots) -> None:
        """Write k [N,H,D], v [N,H,Dv] to their slots; to a store of int8 as `quantise` says."""
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
    ) -> None:
        """Attend from q [N,Hq,D] to the stored keys and values, into out [N,Hq,Dv].

        A query at position i sees the keys at j <= i that lie within the model's spec.window and, if the strategy
        gives a `window`, within that or in a sink slot. Tiles of keys are summed in float32, in an order fixed by
        position alone. Rows of `out` that belong to padding are left as they are. Keys and values that a query does
        not see do not touch its result, whatever they are, NaN and infinite too.
        """
        ...

    def gather(self, store: KVStore, layer: int, at: Slots, row: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return K [S,H,D] and V [S,H,Dv] of a row at positions [S], for tests, measurements and adapters.

        In the store's dtype; float32 if that is int8.
        """
        ...

    def copy_blocks(self, store: KVStore, src: list[int], dst: list[int]) -> None:
        """Copy block src[i] to block dst[i], all layers at once; no dst may be a src."""
        ...

    def repeat_kv_heads(self, x: Tensor, groups: int) -> Tensor:
        """Repeat each KV head `groups` times for the query heads: x [S,H,D] -> [H * groups, S, D], dense and new.

        Head-major, as kernels want it that know no grouped heads: query head h reads what was KV head h // groups.
        """
        ...

    def repeat_kv_heads_step(self, mirror: Tensor, x: Tensor, start: int) -> None:
        """Repeat x [n,H,D] as `repeat_kv_heads`, into columns start .. start + n of mirror [H * groups, P, D].

        Nothing else of the mirror is touched: whoever keeps one moves what is new, and not the whole text once more.
        Raises if there are no such columns, or the mirror's heads are no multiple of x's.
        """
        ...

    def run_layers(self, stack: Stack, x: Tensor, attention: Attention) -> Tensor:
        """Run all layers: x [N, d], embedded tokens -> the output of the last layer [N, d].

        Each layer is `enter_attention`, the attention's attend(), `leave_attention` and its feed-forward; the bits are
        those of the operations one by one.
        """
        ...
