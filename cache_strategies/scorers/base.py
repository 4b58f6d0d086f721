"""The interface of a scorer, which says how much each key of a sequence matters, and what it may look at (`Past`).

A scorer is one method, `score`. The strategy `compressed` does the rest: it calls it at every boundary of a text, keeps
the keys with the highest scores in each KV head, moves them together and frees the memory of the others. A scorer knows
neither memory nor requests.

Letters in shapes: S keys of a head, H / Hq KV heads / query heads, D head dim, T latest queries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from kernels.device import fast_half_dtypes
from kernels.types import LayerSpec

WEIGHTS_AT_ONCE = 1 << 19  # attention weights that are computed at a time; they should fit into a CPU's cache
_fast_half_dtypes = cache(fast_half_dtypes)


class ScorerOptions(BaseModel):
    """Base class of a scorer's options, as given in the settings. Unknown options are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def check_kernel_size(size: int) -> int:
    """Return the size of a pooling kernel. Raises ValueError if it is even, as a kernel has a middle."""
    if size % 2 == 0:
        raise ValueError(f"must be an odd number, such as {size + 1}")
    return size


class Past:
    """What one layer holds of one sequence at a boundary of its text. All tensors are read only.

    Keys are those that earlier boundaries left, and all keys since. In each head they ascend by position; heads may
    hold keys of other positions, but equally many.
    """

    def __init__(
        self,
        layer_idx: int,
        spec: LayerSpec,
        length: int,
        num_new: int,
        positions: Tensor,
        load_keys: Callable[[], Tensor],
        load_values: Callable[[], Tensor],
        queries: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        key_state: dict[str, Tensor] | None = None,
        first_head: int = 0,
        num_kept: int | None = None,
    ) -> None:
        """Describe a layer; the functions return its keys [S,H,D] and values [S,H,Dv], of any dtype."""
        self.layer_idx = layer_idx
        self.first_head = first_head  # number of the first of the H heads in its layer
        self.spec = spec  # with the numbers of these heads
        self.length = length  # number of tokens of the text up to the boundary
        self.num_new = num_new  # the last `num_new` keys have come since the boundary before: they are in all heads
        self.positions = positions  # [H, S] int64
        # Number of the S keys that will stay of each head; with `by_head`, its mean over the heads
        self.num_kept = positions.shape[1] if num_kept is None else min(num_kept, positions.shape[1])
        self._load_keys = load_keys
        self._load_values = load_values
        self._queries = queries
        # Tensors of any shape that the scorer keeps from one boundary to the next, by name. Assign new tensors: forks
        # of a sequence share the old ones.
        self.state: dict[str, Tensor] = {} if state is None else state
        # As `state`, for tensors with a number for each key, [H, S]: what was kept of them at the boundary before is in
        # the first S - num_new columns; new keys have 0.
        self.key_state: dict[str, Tensor] = {} if key_state is None else key_state

    @cached_property
    def stored_keys(self) -> Tensor:
        """The keys [H, S, D] in the dtype of their memory (float32 if that is int8), as `keys` without a copy."""
        return self._load_keys().transpose(0, 1)

    @cached_property
    def keys(self) -> Tensor:
        """The keys [H, S, D] float32, rotated by RoPE at their positions."""
        return self.stored_keys.float()

    @cached_property
    def stored_values(self) -> Tensor:
        """The values [H, S, Dv] in the dtype of their memory (float32 if that is int8), as `values` without a copy."""
        return self._load_values().transpose(0, 1)

    @cached_property
    def values(self) -> Tensor:
        """The values [H, S, Dv] float32."""
        return self.stored_values.float()

    @cached_property
    def queries(self) -> Tensor:
        """The queries [T, Hq, D] float32 of the latest T tokens, rotated by RoPE; T is at most `Scorer.num_queries`."""
        assert self._queries is not None, "a scorer that reads queries sets num_queries"
        return self._queries.float()

    @property
    def num_groups(self) -> int:
        """The number of query heads that share a KV head."""
        return self.spec.num_q_heads // self.spec.num_kv_heads

    @property
    def query_positions(self) -> Tensor:
        """The positions [T] of the latest queries, ascending."""
        return torch.arange(self.length - len(self.queries), self.length, device=self.positions.device)

    @property
    def sink_logits(self) -> Tensor | None:
        """The learned sinks by KV head, [H, G] float32; None if the layer has none."""
        sinks = self.spec.sink_logits
        return None if sinks is None else sinks.float().view(self.spec.num_kv_heads, self.num_groups)

    def is_latest(self, num_tokens: int) -> Tensor:
        """Return which keys belong to the latest `num_tokens` tokens of the text, [H, S] bool."""
        return self.positions >= self.length - num_tokens

    @cached_property
    def product_dtype(self) -> torch.dtype:
        """The dtype in which large products of keys are computed: float32, or bfloat16 if that is as good and faster.

        It is bfloat16 if keys and queries are stored in it. Sums are in float32 then, and rounded once: by as much as
        the keys were.
        """
        stored = {self.stored_keys.dtype, self.stored_keys.dtype if self._queries is None else self._queries.dtype}
        is_fast = self.stored_keys.device.type != "cpu" or torch.bfloat16 in _fast_half_dtypes()
        return torch.bfloat16 if stored == {torch.bfloat16} and is_fast else torch.float32

    def group_queries(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the queries [start:stop] of the latest T by KV head, [H, G, t, D] float32, for G heads of each."""
        queries = self.queries[start:stop]
        T, _, D = queries.shape
        return queries.transpose(0, 1).reshape(self.spec.num_kv_heads, self.num_groups, T, D)

    def attention_scores(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the latest queries' scores before the softmax, [H, G, T, S] float32; keys out of sight have -inf.

        With `start` and `stop`, return only those of the queries [start:stop] of the latest T, to need less memory.
        """
        queries = self.group_queries(start, stop)
        scores = (queries.flatten(1, 2) * self.spec.scale) @ self.keys.transpose(1, 2)
        scores = scores.view(*queries.shape[:3], -1)
        self._cap_and_mask(scores, start)
        return scores

    def _cap_and_mask(self, scores: Tensor, start: int) -> None:
        """Apply the softcap to products [H, G, t, S] of the queries from `start` on, and hide keys out of sight."""
        if self.spec.softcap is not None:
            scores.div_(self.spec.softcap).tanh_().mul_(self.spec.softcap)
        query_positions = self.query_positions[start : start + scores.shape[2], None]
        if self.spec.window is not None:
            positions = self.positions[:, None, None, :]
            scores.masked_fill_(positions <= query_positions - self.spec.window, -torch.inf)
        # at most the keys of the latest T tokens are later than a query, as positions ascend
        first = max(scores.shape[3] - len(self.queries), 0)
        scores[..., first:].masked_fill_(self.positions[:, None, None, first:] > query_positions, -torch.inf)

    def attention_weights(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the latest queries' attention weights [H, G, T, S] float32, learned sinks included in the sum.

        A query that sees no key (the kept ones are later than it, or outside its window) has weights of 0. `start` and
        `stop` are those of `attention_scores`.
        """
        return self._normalize(self.attention_scores(start, stop))

    def _normalize(self, scores: Tensor) -> Tensor:
        """Return the weights of scores [H, G, t, S], which are overwritten."""
        weights = softmax(scores, self.sink_logits)
        is_own_key_kept = len(self.queries) <= self.num_new
        return weights if is_own_key_kept else weights.nan_to_num_(0.0)

    def sum_attention_weights(self) -> Tensor:
        """Return the attention weights of the latest queries [H, S] float32, summed over them and a group's heads.

        Products are computed in `product_dtype`. A few queries at a time keep the weights in a CPU's
        cache; they share their memory, as new memory is slow.
        """
        (H, S), T, G = self.positions.shape, len(self.queries), self.num_groups
        dtype, device = self.product_dtype, self.positions.device
        queries, keys = self.group_queries().to(dtype), self.stored_keys.to(dtype).transpose(1, 2)
        step = min(max(WEIGHTS_AT_ONCE // (H * G * S), 1), T)
        buffer = torch.empty(H * G * step * S, device=device)
        product_buffer = buffer if dtype is torch.float32 else torch.empty_like(buffer, dtype=dtype)
        total = torch.zeros(H, S, device=device)
        for start in range(0, T, step):
            part = queries[:, :, start : start + step].flatten(1, 2)  # [H, G * t, D]
            products, scores = (x[: part.shape[1] * H * S].view(H, -1, S) for x in (product_buffer, buffer))
            torch.baddbmm(keys.new_zeros(()), part, keys, beta=0, alpha=self.spec.scale, out=products)
            scores = scores.copy_(products).unflatten(1, (G, -1))
            self._cap_and_mask(scores, start)
            total += self._normalize(scores).sum(dim=(1, 2))
        return total

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x [n, heads, D], rotated by RoPE at `positions` [n], as it was before the rotation (RoPE)."""
        assert self.spec.rotate is not None, "the layer cannot rotate; see Scorer.check_layers"
        return self.spec.rotate(x, -positions)


def softmax(scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Return the softmax of scores [..., T, S] over S, which are overwritten.

    `sinks` [...] are additional logits in it, with no key.
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1, out=scores)
    column = sinks[..., None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]


class Scorer(ABC):
    """Scores the keys of one layer of one sequence. One object serves all sequences and layers of an instance."""

    # Its option `sinks`, if it has one, is that of the strategy unless `scorer_options` sets it.
    options_type: ClassVar[type[ScorerOptions]] = ScorerOptions
    # How many of the latest queries `score` looks at; None: all since the boundary before. Queries take memory while a
    # text comes near to a boundary.
    num_queries: int | None = 0

    def __init__(self, options: Any) -> None:
        """Take over the options, of `options_type`."""
        self.options = options

    def check_layers(self, layers: Sequence[LayerSpec]) -> None:  # noqa: B027, most scorers can serve all
        """Raise SettingsError if the scorer cannot serve a model's layers."""

    @abstractmethod
    def score(self, past: Past) -> Tensor:
        """Return how much each key of a layer matters, [H, S] float: keys with higher scores are kept.

        Called at a boundary, for each layer. Infinity marks keys that a method always keeps; NaN counts as the highest
        score. The result must depend on `past` alone, so that a text that is computed again keeps the same keys; a call
        that raises is repeated once, with the same `past`, so assign state last.
        """
