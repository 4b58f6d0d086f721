"""The interface between the engine and a model (`Model`), and `forward_step`, which is the same for every model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from kernels.ops import Attention
from kernels.states import StateSpec
from kernels.types import LayerSpec
from server.models.config import ModelInfo
from server.records import WeightUsage


class Model(Protocol):
    """A model, which computes a step's N tokens, of any number of sequences, and the logits after K of them."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def impl(self) -> Literal["lean", "transformers"]:
        """Return which code computes the model: "lean" (this project's decoder) or "transformers"."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations, keys and values."""
        ...

    @property
    def layer_specs(self) -> Sequence[LayerSpec]:
        """The attention parameters of every layer, from first to last."""
        ...

    @property
    def state_specs(self) -> Sequence[StateSpec]:
        """Return what each layer with recurrent states keeps of a text, from first to last; empty if there is none."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def weight_bytes(self) -> int:
        """The size of all weights in bytes; tied weights count once."""
        ...

    @property
    def weight_formats(self) -> Mapping[str, WeightUsage]:
        """How many weights there are in each format, such as "float32" or "Q4_K", that with most of them first."""
        ...

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        """Compute logits [K, V] of ids [N] int64, for rows `attention.logit_index`, in the model's dtype or float32."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings [N, d] of ids [N] int64."""
        ...

    def count_flops(self, num_tokens: int, num_logits: int) -> int | None:
        """Return the number of floating-point operations of a step's matrix products with weights; None: unknown."""
        ...

    def forward_step(self, token_embedding: Tensor, current_pos: int, cache: SequenceCache) -> Tensor:
        """Compute one token of one sequence, as `ForwardStepMixin.forward_step` does."""
        ...


class SequenceCache(Protocol):
    """The keys and values of one sequence, as `forward_step` uses them."""

    @property
    def position(self) -> int:
        """The position of the next token, for RoPE: the number of tokens so far, unless the cache counts anew."""
        ...

    def begin(self, num_tokens: int) -> Attention:
        """Return the attention for the next `num_tokens` tokens; commit() then adds them to the cache."""
        ...

    def commit(self) -> None: ...


class ForwardStepMixin(ABC):
    """Implements `Model.forward_step` for models that can compute tokens from their embeddings."""

    state_specs: Sequence[StateSpec] = ()

    @abstractmethod
    def forward_embedded(self, x: Tensor, attention: Attention) -> Tensor:
        """Compute logits [K, V] from embeddings x [N, d], as `forward` does from ids."""

    def forward_step(self, token_embedding: Tensor, current_pos: int, cache: SequenceCache) -> Tensor:
        """Compute a token of a sequence: its embedding [1, 1, d_model] -> the logits [1, 1, V] of the next token.

        Mechanism: the token's query attends over the keys of all tokens before it, which `cache` kept from their own
        steps, and over its own; only its own key and value are computed, at RoPE position `current_pos`, and they enter
        the cache. So a step costs one pass over the weights and one over the cached keys and values; nothing is
        recomputed, and nothing is allocated that grows with the text.

        This is the batched forward with a batch of one. Raises ValueError if the cache's next position is another one.
        """
        if current_pos != cache.position:
            raise ValueError(f"current_pos is {current_pos}, but the cache's next token has position {cache.position}")
        logits = self.forward_embedded(token_embedding.reshape(1, -1), cache.begin(1))
        cache.commit()
        return logits.view(1, 1, -1)
