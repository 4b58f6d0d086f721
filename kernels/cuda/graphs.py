"""Replays decode steps as CUDA graphs: the host starts hundreds of launches at once, in the time of one.

A graph repeats its launches with the same arguments, so what differs from step to step must be in tensors that stay
where they are. That holds for the addresses of keys (`kernels.types.Slots`); activations and positions are copied. Each
number of rows has a graph of its own, and sequences may grow to the next power of two before another is needed.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.cuda.backend import CudaOps
from kernels.metal.attention import SPLIT
from kernels.metal.library import Kernels
from kernels.ops import Attention, AttentionSlice, DecoderLayers, KVLocation, Ops
from kernels.types import Slots

log = logging.getLogger(__name__)
MAX_GRAPHS = 64  # that are kept

# Returns the result of a call, whose tensors stay where they are, and a function that repeats its launches. The call's
# result is not computed before that.
Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


class CudaGraphs:
    """Captures calls in CUDA graphs, which share the memory of their intermediate results: one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch's handle of that memory

    def __call__(self, call: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Implement `Capture`. Raises RuntimeError if the call waits for the GPU."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()  # compiles kernels and allocates what stays, neither of which a graph can do
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = call()
        self._pool = graph.pool()
        return out, graph.replay


class GraphOps(CudaOps):
    """The operations on an NVIDIA GPU, which compute the layers of a decode step by a graph from its second time on."""

    def __init__(self, kernels: Kernels, capture: Capture) -> None:
        super().__init__(kernels)
        self._make_ops, self._capture = partial(CudaOps, kernels), capture
        self._graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()  # None: the step came once
        self._has_failed = False

    def forward_layers(self, layers: DecoderLayers, x: Tensor, attention: Attention) -> Tensor:
        key = None if self._has_failed else _make_key(layers, x, attention.slices)
        if key is None:
            return super().forward_layers(layers, x, attention)
        is_new = key not in self._graphs
        graph = self._graphs.setdefault(key, None)
        self._graphs.move_to_end(key)
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        if graph is None and not is_new:
            graph = self._graphs[key] = self._make_graph(layers, x, attention)
        if graph is None:
            return super().forward_layers(layers, x, attention)
        return graph.run(x, attention.positions)

    def _make_graph(self, layers: DecoderLayers, x: Tensor, attention: Attention) -> _Graph | None:
        """Return the graph of a step; None if the step cannot be captured, and no further one will be tried."""
        try:
            return _Graph(self._make_ops(), layers, x, attention, self._capture)
        except RuntimeError as error:
            log.warning("decode steps are not captured in CUDA graphs, and so are slower: %s", error)
            self._has_failed = True
            self._graphs.clear()
            return None


class _Graph:
    """The launches of a step, and all tensors that they use; its operations have scratch memory of their own."""

    def __init__(self, ops: CudaOps, layers: DecoderLayers, x: Tensor, attention: Attention, capture: Capture) -> None:
        self._x = x.clone()
        self._attention = _StaticAttention(ops, layers, attention)
        self._out, self._replay = capture(lambda: ops.forward_layers(layers, self._x, self._attention))

    def run(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the output of the layers for other activations x [N, d] at the positions [N]."""
        self._x.copy_(x)
        self._attention.positions.copy_(positions)
        self._replay()
        return self._out.clone()  # the next step overwrites it


class _StaticAttention:
    """Implements `kernels.ops.Attention` for a step that is captured."""

    def __init__(self, ops: Ops, layers: DecoderLayers, attention: Attention) -> None:
        self.positions, self.logit_index = attention.positions.clone(), attention.logit_index
        self.slices = [
            each._replace(kv_locations=[_reserve(location) for location in each.kv_locations])
            for each in attention.slices
        ]
        self._ops, self._specs = ops, [layer.spec for layer in layers.layers]

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the keys and values of a layer and compute its attention, one slice of the tokens after the other."""
        out, spec = q.new_empty((*q.shape[:2], v.shape[2])), self._specs[layer_idx]
        for each in self.slices:
            tokens, location = each.tokens, each.kv_locations[layer_idx]
            assert location is not None
            store, at, window = location
            self._ops.write_kv(store, layer_idx, k[tokens], v[tokens], at)
            self._ops.attend(out[tokens], q[tokens], store, layer_idx, at, spec, window=window)
        return out


def _reserve(location: KVLocation | None) -> KVLocation:
    """Return a location whose sequences may grow to the longest that its graph serves."""
    assert location is not None
    return location._replace(at=replace(location.at, max_kv=_round_up(location.at)))


def _round_up(at: Slots) -> int:
    """Return the largest number of keys that the graph for these addresses serves."""
    most = at.table.shape[1] * at.block_size
    rounded = max(SPLIT, 1 << (at.max_kv - 1).bit_length())
    return rounded if at.ring else min(rounded, most)


def _make_key(layers: DecoderLayers, x: Tensor, slices: Sequence[AttentionSlice]) -> Hashable | None:
    """Return what steps with the same graph have in common; None if a graph cannot compute the step."""
    parts: list[Hashable] = []
    for each in slices:
        unique = {id(location): location for location in each.kv_locations}  # mostly all layers have the same
        if each.query_tap is not None or each.states is not None:
            return None
        numbers = {key: number for number, key in enumerate(unique)}
        parts += [each.tokens.start, each.tokens.stop, *(numbers[id(location)] for location in each.kv_locations)]
        for location in unique.values():
            if location is None or not _is_static(location.at):
                return None
            store, at, window = location
            pointers = (tensor.data_ptr() for tensor in (at.table, at.table_row, at.q_start, at.start))
            parts += [id(store), window, at.block_size, at.sinks, at.ring, _round_up(at), *pointers]
    return (id(layers), x.shape, x.dtype, *parts) if parts else None


def _is_static(at: Slots) -> bool:
    """Return whether these are rows of one token whose addresses were checked on the host and stay where they are."""
    return at.num_decode == at.num_rows and at.num_tokens is not None and at.window_start is None
