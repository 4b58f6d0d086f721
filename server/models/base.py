"""What the engine asks of a model, whoever computes it. Knows no config file, no weights, no cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.ops import Attention, LayerSpec


class Facts(NamedTuple):
    """What is known of a model before its weights are read."""

    vocab_size: int
    max_positions: int
    eos_ids: frozenset[int]
    dtype: str  # of the checkpoint: "float32", "bfloat16", "float16"


class Model(Protocol):
    """N tokens of any sequences go in, logits of the K wanted ones come out."""

    @property
    def facts(self) -> Facts: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, keys and values."""
        ...

    @property
    def specs(self) -> Sequence[LayerSpec]:
        """Of every layer."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def weight_bytes(self) -> int:
        """Of all distinct weights."""
        ...

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        """ids [N] int64 -> logits [K, V] float32 of the rows `attention.logit_index`."""
        ...
