"""Converts blocks of GGUF files, without a change of values, to integers with scales, which Metal kernels multiply."""

from __future__ import annotations

import torch

from kernels.weights.block_formats import BlockTensor
from kernels.weights.quantization import QuantizedTensor, from_symmetric, pack_numbers

SYMMETRIC_FORMATS = ("Q8_0", "Q4_0")


def to_quantized(weight: BlockTensor) -> QuantizedTensor:
    """Return a weight in Q8_0 or Q4_0 as integers: value = scale * (number - 2**(bits - 1)) in groups of 32.

    A block has a float16 scale and 32 numbers; Q4_0 has the first 16 of them in the low nibbles.
    """
    if weight.device.type == "meta":
        raise ValueError("linear: a weight on the device meta has no numbers")
    bits = weight.format.bits
    blocks = weight.blocks.unflatten(1, (-1, weight.format.nbytes))
    scale = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    numbers = blocks[..., 2:]
    numbers = numbers ^ 128 if bits == 8 else torch.cat((numbers & 15, numbers >> 4), -1)  # Q8_0 is signed
    return from_symmetric(pack_numbers(numbers.flatten(1), bits), scale, bits)
