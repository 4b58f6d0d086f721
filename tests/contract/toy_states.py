"""Two layers with recurrent states that say which text they are of, and what computes them token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.states import States, StateTensor

MULTIPLIER, MODULUS, TAPS = 1_000_003, (1 << 31) - 1, 3
LAYERS = [
    [StateTensor((1,), torch.int64)],  # a number that depends on all tokens and on their order
    [StateTensor((TAPS, 2), torch.float32), StateTensor((3,), torch.int32)],  # the last tokens; the number of tokens
]


def expect(tokens: Sequence[int]) -> list[Tensor]:
    """Return the states of both layers after some tokens."""
    number = 0
    for token in tokens:
        number = (number * MULTIPLIER + token + 1) % MODULUS
    last = [0.0] * TAPS + [float(token) for token in tokens]
    taps = torch.tensor([[token, -token] for token in last[len(last) - TAPS :]])
    return [torch.tensor([number]), taps, torch.full((3,), len(tokens), dtype=torch.int32)]


def run(states: States, ids: Tensor) -> Iterator[list[list[Tensor]]]:
    """Compute the states of a slice's tokens, as `States` says; yield those before each row and after its tokens."""
    tensors = [tensor for layer in range(len(LAYERS)) for tensor in states.store.tensors(layer)]
    assert not {*states.read.tolist()} & {*states.write.tolist()}, "a row overwrites states that another one reads"
    ends = states.q_start.tolist()
    slots = zip(states.read.tolist(), states.write.tolist(), strict=True)
    # All states are read before any is written, as a kernel may compute the rows in any order
    begun = [[torch.zeros_like(t[0]) if read < 0 else t[read].clone() for t in tensors] for read, _ in slots]
    for row, ((number, taps, count), write) in enumerate(zip(begun, states.write.tolist(), strict=True)):
        kept = {places: slot for each, places, slot in states.keep.tolist() if each == row}
        found = [[number.clone(), taps.clone(), count.clone()]]
        for places, token in enumerate(ids[ends[row] : ends[row + 1]].tolist(), 1):
            number.copy_((number * MULTIPLIER + token + 1) % MODULUS)
            taps.copy_(torch.cat([taps[1:], torch.tensor([[float(token), -float(token)]])]))
            count += 1
            found.append([number.clone(), taps.clone(), count.clone()])
            if places in kept:
                _store(tensors, kept[places], (number, taps, count))
        _store(tensors, write, (number, taps, count))
        yield found


def _store(tensors: Sequence[Tensor], slot: int, values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor[slot] = value
