"""The layers of a decoder, as `Ops` computes with them. Data only; names in checkpoints others know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from torch import Tensor

from kernels.ops import LayerSpec, Ops, Packed
from kernels.quantised import Quantised

Factor = Tensor | Quantised | Packed  # [out, in]
Tables = tuple[Tensor, Tensor]  # cos and sin [P, turning / 2] float32
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, eq=False, slots=True)
class AttentionWeights:
    """The weights around attention: a norm and the projections before it, the projection and a norm after it.

    None: the model has no such thing. q, k and v are one matrix.
    """

    norm: Tensor  # [d]
    qkv: Factor
    qkv_bias: Tensor | None
    qk_norm: Tables | None  # [D] of queries, [D] of keys
    tables: Tables | None  # of RoPE; narrower than D / 2: the dimensions beyond stay
    q_heads: int
    kv_heads: int
    o: Factor
    o_bias: Tensor | None
    post_norm: Tensor | None  # [d], of what is added
    next_norm: Tensor  # [d], before the feed-forward
    eps: float  # of all these norms

    def packed(self, ops: Ops) -> AttentionWeights:
        """Return the same weights as a backend multiplies them fastest."""
        return replace(self, qkv=ops.packed(self.qkv), o=ops.packed(self.o))

    def tensors(self) -> Iterator[Factor]:
        """Yield the weights; tables are not among them."""
        for weight in (self.norm, self.qkv, self.qkv_bias, self.o, self.o_bias, self.post_norm, self.next_norm):
            if weight is not None:
                yield weight
        yield from self.qk_norm or ()


class FeedForward(Protocol):
    """The part of a layer after attention."""

    def __call__(self, ops: Ops, h: Tensor) -> Tensor:
        """Return what the layer adds to h [N, d] -> [N, d]."""
        ...

    def packed(self, ops: Ops) -> FeedForward:
        """Return the same weights as a backend multiplies them fastest."""
        ...

    def tensors(self) -> Iterator[Factor]:
        """Yield the weights."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class GatedWeights:
    """A gated feed-forward (Shazeer 2020): gate and up are one matrix [2 f, d], down is [d, f]."""

    gate_up: Factor
    gate_up_bias: Tensor | None
    down: Factor
    down_bias: Tensor | None
    activation: Activation

    def __call__(self, ops: Ops, h: Tensor) -> Tensor:
        return ops.feed_forward(self, h)

    def packed(self, ops: Ops) -> GatedWeights:
        """Return the same weights as a backend multiplies them fastest."""
        return replace(self, gate_up=ops.packed(self.gate_up), down=ops.packed(self.down))

    def tensors(self) -> Iterator[Factor]:
        for weight in (self.gate_up, self.gate_up_bias, self.down, self.down_bias):
            if weight is not None:
                yield weight


@dataclass(frozen=True, eq=False, slots=True)
class DecoderLayer:
    """Attention and a feed-forward after it, each of which adds to its input."""

    spec: LayerSpec
    attention: AttentionWeights
    feed_forward: FeedForward
    post_norm: Tensor | None  # [d], of what the feed-forward adds; None: the model has no such norm

    def __post_init__(self) -> None:
        """Raise ValueError unless the weights have the heads that attention has."""
        heads = self.attention.q_heads, self.attention.kv_heads
        if heads != (self.spec.num_q_heads, self.spec.num_kv_heads):
            raise ValueError(f"weights for {heads[0]} query heads and {heads[1]} of keys do not fit {self.spec}")

    def packed(self, ops: Ops) -> DecoderLayer:
        """Return the same layer, with weights as a backend multiplies them fastest."""
        return replace(self, attention=self.attention.packed(ops), feed_forward=self.feed_forward.packed(ops))

    def tensors(self) -> Iterator[Factor]:
        """Yield the weights."""
        yield from self.attention.tensors()
        yield from self.feed_forward.tensors()
        if self.post_norm is not None:
            yield self.post_norm


class Stack:
    """All layers of a model, in order: made by `Ops.stacked`, for its `run_layers` alone."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self.layers = layers

    def took(self) -> Mapping[str, float] | None:
        """Return the seconds, by name, of the operations that the last call did by itself; None if it called `Ops`."""
        return None
