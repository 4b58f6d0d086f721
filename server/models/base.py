"""What the engine asks of a model, whoever computes it. Knows no weights and no cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.ops import Attention, LayerSpec
from server.models.config import Facts


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

    @property
    def weight_format(self) -> str:
        """What most weights are kept in: "float32", "int4"."""
        ...

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        """ids [N] int64 -> logits [K, V] of the rows `attention.logit_index`, in the model's dtype or float32."""
        ...
