"""What the engine needs of a model of any implementation; and one token's step, alike for all. Knows no weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from kernels.ops import Attention
from kernels.types import LayerSpec
from server.models.config import ModelInfo


class Model(Protocol):
    """N tokens of any sequences go in, logits of the K wanted ones come out."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def impl(self) -> Literal["lean", "transformers"]:
        """What computes it: the decoder of this project, or transformers."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, keys and values."""
        ...

    @property
    def layer_specs(self) -> Sequence[LayerSpec]:
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
        """Compute logits [K, V] of ids [N] int64, for rows `attention.logit_index`, in the model's dtype or float32."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Embed ids [N] int64 -> [N, d]."""
        ...

    def count_flops(self, num_tokens: int, num_logits: int) -> int | None:
        """Return the floating-point operations of multiplying with the weights in a step; None: not known."""
        ...

    def forward_step(self, token_embedding: Tensor, current_pos: int, cache: SequenceCache) -> Tensor:
        """Compute one token of one sequence, as `Stepwise.forward_step` does."""
        ...


class SequenceCache(Protocol):
    """The keys and values of one sequence: what `forward_step` needs of a cache."""

    @property
    def length(self) -> int:
        """Tokens entered so far."""
        ...

    def begin(self, num_tokens: int) -> Attention:
        """Return attention for the next tokens; they have entered after commit() was called."""
        ...

    def commit(self) -> None: ...


class Stepwise(ABC):
    """A model that computes embedded tokens computes one of them at a time, too."""

    @abstractmethod
    def forward_embedded(self, x: Tensor, attention: Attention) -> Tensor:
        """Compute logits [K, V] of x [N, d]: `forward` for tokens that are embedded already."""

    def forward_step(self, token_embedding: Tensor, current_pos: int, cache: SequenceCache) -> Tensor:
        """Compute a token of a sequence: its embedding [1, 1, d_model] -> the logits [1, 1, V] of the next token.

        Mechanism: the token's query attends over the keys of all tokens before it, which `cache` kept from their own
        steps, and over its own; only its own key and value are computed, at RoPE position `current_pos`, and they enter
        the cache. So a step costs one pass over the weights and one over the cached keys, whatever came before; nothing
        is recomputed, and nothing is allocated that grows with the text.

        This is the batched forward with a batch of one. Raises ValueError if the cache does not stand at `current_pos`:
        it would hold other keys than the caller thinks.
        """
        if current_pos != cache.length:
            raise ValueError(f"current_pos is {current_pos}, but the cache holds {cache.length} tokens")
        logits = self.forward_embedded(token_embedding.reshape(1, -1), cache.begin(1))
        cache.commit()
        return logits.view(1, 1, -1)
