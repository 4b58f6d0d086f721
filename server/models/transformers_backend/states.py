"""Layers with recurrent states in transformers' code: found by running a model, and called for one row at a time.

transformers' code of such a layer takes one text (rows that are packed, as those of a step are, would leak into each
other), and keeps its states in the cache that it is given. Here it gets a cache whose tensors are a slot of the
instance's own store, so states are read and written where the engine keeps them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache

from kernels.ops import AttentionSlice
from kernels.states import NO_SLOT, StateSpec, StateTensor
from server.models.errors import ModelError
from server.models.transformers_backend.attention import RowPart, running_step

CACHE = "cache"  # the argument by which a layer gets its cache, and
HIDDEN_STATES = "hidden_states"  # its input


def split_rows(slices: Sequence[AttentionSlice], *, one_by_one: bool = False) -> list[RowPart] | None:
    """Return the parts of a step's rows between whose ends states are stored; None if nothing is kept of the step.

    With `one_by_one` the parts that go on from states have one token each.
    """
    if any(each.states is None for each in slices) or not slices:
        return None
    parts = [part for each in slices for part in _split_slice(each)]
    return [token for part in parts for token in _split_tokens(part)] if one_by_one else parts


def _split_slice(rows: AttentionSlice) -> Iterator[RowPart]:
    states = rows.states
    assert states is not None
    kept: dict[int, dict[int, int]] = {}  # by row, then by the number of its tokens: slots
    for row, num_tokens, slot in states.keep.tolist():
        kept.setdefault(row, {})[num_tokens] = slot
    starts = [rows.tokens.start + each for each in states.q_start.tolist()]
    each_row = zip(pairwise(starts), states.read.tolist(), states.write.tolist(), strict=True)
    for row, ((begin, end), read, write) in enumerate(each_row):
        slots = {begin + num_tokens: slot for num_tokens, slot in kept.get(row, {}).items()}
        slots[end] = write
        for stop in sorted(slots):
            yield RowPart(slice(begin, stop), states.store, read, slots[stop])
            begin, read = stop, slots[stop]


def _split_tokens(part: RowPart) -> Iterator[RowPart]:
    """Yield a part token by token, unless it is the first of its text."""
    if part.read == NO_SLOT:
        yield part
        return
    read = part.read
    for token in range(part.tokens.start, part.tokens.stop):
        yield part._replace(tokens=slice(token, token + 1), read=read)
        read = part.write


class LayerStates(NamedTuple):
    """What one layer keeps of a text, as transformers' cache has it."""

    number: int  # of the layer, as transformers counts
    conv: Sequence[StateTensor]  # last inputs of its convolutions
    recurrent: Sequence[StateTensor | None]  # None: that one has none

    @property
    def spec(self) -> StateSpec:
        """The tensors in the order in which a slot has them."""
        return [*self.conv, *(each for each in self.recurrent if each is not None)]


class StateLayer(nn.Module):
    """A layer with recurrent states that computes the rows of a step one by one."""

    def __init__(self, layer: nn.Module, states: LayerStates, number: int) -> None:
        """Compute with `layer`, which is the state layer `number` of the model."""
        super().__init__()
        self.layer = layer
        self._states, self._number = states, number
        self._signature = inspect.signature(layer.forward)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute hidden states [1, N, d] of a step's tokens -> [1, N, d]."""
        parts = running_step.get().row_parts
        if parts is None:
            whole: Tensor = self.layer(*args, **kwargs)
            return whole
        bound = self._signature.bind(*args, **kwargs)
        x = bound.arguments[HIDDEN_STATES]
        outputs = []
        for part in parts:
            bound.arguments |= {HIDDEN_STATES: x[:, part.tokens], CACHE: self._open_cache(part)}
            outputs.append(self.layer(*bound.args, **bound.kwargs))
        return torch.cat(outputs, dim=1)

    def _open_cache(self, part: RowPart) -> Cache:
        """Return a cache that has one text's states before a part of its row, and keeps those after it in `write`."""
        tensors = iter(part.store.tensors(self._number))
        states = self._states
        no_layer: Any = None
        kept = cache_utils.LinearAttentionLayer(number_of_states=len(states.conv))
        for i, conv in enumerate(states.conv):
            kept.conv_states[i] = _move_state(next(tensors), part)
            kept.conv_kernel_size[i] = conv.shape[-1]
            kept.is_conv_states_initialized[i] = True
            kept.has_previous_state[i] = part.read != NO_SLOT
        for i, recurrent in enumerate(states.recurrent):
            if recurrent is not None:
                kept.recurrent_states[i] = _move_state(next(tensors), part)
                kept.is_recurrent_states_initialized[i] = True
        return Cache(layers=[no_layer] * states.number + [kept])


def _move_state(slots: Tensor, part: RowPart) -> Tensor:
    """Return the slot of the states after a part, [1, ...], with the states before it in it."""
    written = slots[part.write]
    if part.read == NO_SLOT:
        written.zero_()
    elif part.read != part.write:
        written.copy_(slots[part.read])
    return written[None]


# ---------------------------------------------------------------- which layers have states
def make_cache(model: Any) -> DynamicCache | None:
    """Return transformers' cache for a model with state layers; None if it has no such layers."""
    if not hasattr(Cache, "get_conv_state"):  # transformers before 5.24, whose layers ask their cache in other ways
        return None
    try:
        made = DynamicCache(config=model.config)
    except Exception:  # layers of a kind for which transformers has no cache
        return None
    return made if any(_has_states(layer) for layer in made.layers) else None


def _has_states(layer: object) -> bool:
    return isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin)


class StateLayerFinder:
    """Watches a run of a model with transformers' own cache, to see which modules keep states in it."""

    def __init__(self, model: nn.Module, cache: DynamicCache) -> None:
        self._cache = cache
        self._found: dict[int, tuple[nn.Module, str]] = {}  # by layer: the parent of its module, and the name in it
        parents = ((parent, name, child) for parent in model.modules() for name, child in parent.named_children())
        self._hooks = [
            child.register_forward_hook(self._make_hook(parent, name, index))
            for parent, name, child in parents
            if isinstance(index := getattr(child, "layer_idx", None), int)
        ]

    def _make_hook(self, parent: nn.Module, name: str, index: int) -> Any:
        def see(*_: Any) -> None:
            """Note the innermost module after which a layer has states: hooks of inner modules are called first."""
            layer: Any = self._cache.layers[index]
            if index not in self._found and _has_states(layer) and any(layer.has_previous_state.values()):
                self._found[index] = parent, name

        return see

    def replace_layers(self) -> list[StateSpec]:
        """Replace the modules that were found by StateLayers; return what each keeps of a text.

        Raises ModelError if a layer that should keep states did not.
        """
        for hook in self._hooks:
            hook.remove()
        expected = [i for i, layer in enumerate(self._cache.layers) if _has_states(layer)]
        if lacking := [i for i in expected if i not in self._found]:
            raise ModelError(
                f"layers {', '.join(map(str, lacking))} keep their states otherwise than transformers' cache does"
            )
        specs = []
        for number, index in enumerate(expected):
            parent, name = self._found[index]
            states = _describe_states(index, self._cache.layers[index])
            setattr(parent, name, StateLayer(getattr(parent, name), states, number))
            specs.append(states.spec)
        return specs


def _describe_states(index: int, layer: Any) -> LayerStates:
    """Return the shapes of what a layer of transformers' cache, which a text was computed with, keeps."""

    def describe(tensors: Mapping[int, Tensor | None]) -> list[StateTensor | None]:
        found = (tensors[i] for i in range(layer.number_of_states))
        return [None if each is None else StateTensor(each.shape[1:], each.dtype) for each in found]

    conv = describe(layer.conv_states)
    assert all(each is not None for each in conv)
    return LayerStates(index, [each for each in conv if each is not None], describe(layer.recurrent_states))
