"""expected_attention: keeps the keys that future queries are expected to attend to.

Queries before their rotation (RoPE) are modelled as a normal distribution, whose mean and covariance are those of all
queries of the text so far. With the rotation averaged over the next positions, the weight that a key gets is known in
closed form: the mean of exp(q k) is exp(mean k + k covariance k / 2). It is multiplied by the norm of the value. Needs
the queries since the boundary before, and a layer that can rotate them; keeps their number, mean and covariance. A
softcap and learned sinks are left out of the expectation.

After Devoto et al., "Expected attention: KV cache compression by estimating attention from future queries distribution"
(2025, arXiv:2510.00636).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from cache_strategies.scorers.base import Past, Scorer, ScorerOptions
from config.errors import SettingsError
from kernels.types import LayerSpec

KEYS_AT_ONCE = 512  # bounds the memory of products, which should stay in a CPU's cache
ROTATED_AT_ONCE = 32  # positions; all models have tables of RoPE for more
Rotate = Callable[[Tensor, Tensor], Tensor]


class ExpectedAttentionOptions(ScorerOptions):
    """Options of expected_attention."""

    num_future_positions: int = Field(
        512, ge=1, le=65536, description="positions after the text over which the rotation of queries is averaged"
    )
    sinks: int = Field(
        4, ge=0, le=65536, description="first tokens of a text, which are kept; their queries are left out of the mean"
    )
    use_covariance: bool = Field(True, description="use the covariance of queries; without it, scoring is cheaper")
    use_vnorm: bool = Field(True, description="multiply the expected weight by the norm of the value")
    epsilon: float = Field(0.0, ge=0, le=1, description="added to the expected weight before it is multiplied")


class QueryStatistics(NamedTuple):
    """The queries of a text before their rotation: their number, mean and covariance. All float32."""

    num_queries: Tensor  # [1]
    mean: Tensor  # [Hq, D]
    covariance: Tensor | None  # [Hq, D, D]; None: not used


class ExpectedAttention(Scorer):
    """Scores a key by its expected attention weight in the next tokens' queries, times the norm of its value."""

    options_type = ExpectedAttentionOptions
    options: ExpectedAttentionOptions
    num_queries = None

    def __init__(self, options: ExpectedAttentionOptions) -> None:
        super().__init__(options)
        self._mean_rotations: dict[Rotate, Tensor] = {}  # those of the next positions, counted from the last token

    def check_layers(self, layers: Sequence[LayerSpec]) -> None:
        if any(spec.rotate is None for spec in layers):
            raise SettingsError(
                "scorer 'expected_attention' must undo the rotation of queries (RoPE), for which this model's layers "
                "have no function; use the scorer 'keydiff' or 'snapkv' instead"
            )

    def score(self, past: Past) -> Tensor:
        options = self.options
        statistics = self._update_statistics(past)
        is_sink = past.positions < options.sinks
        logits = self._compute_expected_logits(past, statistics).masked_fill_(is_sink[:, None], -torch.inf)
        scores = logits.softmax(dim=-1).mean(dim=1)
        if options.use_vnorm:
            norms = torch.linalg.vector_norm(past.stored_values, dim=-1, dtype=torch.float32)
            scores = (scores + options.epsilon) * norms
        past.state.update({name: x for name, x in statistics._asdict().items() if x is not None})
        return scores.masked_fill(is_sink, torch.inf)

    def _update_statistics(self, past: Past) -> QueryStatistics:
        """Return the statistics of all queries of the text so far: those of the state and the latest ones."""
        first = max(self.options.sinks - (past.length - len(past.queries)), 0)  # queries before it are those of sinks
        queries = past.unrotate(past.queries[first:], past.query_positions[first:]).transpose(0, 1)  # [Hq, T, D]
        known = past.state.get("num_queries")
        num_known = 0.0 if known is None else float(known)
        num_latest = queries.shape[1]
        total = max(num_known + num_latest, 1.0)
        share = num_latest / total
        # Means and covariances are merged as Chan et al. (1979) do: no large numbers are subtracted from each other.
        latest_mean = queries.mean(dim=1) if num_latest else torch.zeros_like(past.queries[0])
        mean = past.state["mean"] if known is not None else torch.zeros_like(latest_mean)
        difference = latest_mean - mean
        covariance = None
        if self.options.use_covariance:
            centered = queries - latest_mean[:, None]
            covariance = centered.transpose(1, 2) @ centered / total
            if known is not None:
                covariance += past.state["covariance"] * (num_known / total)
                covariance += difference[:, :, None] * difference[:, None, :] * (share * num_known / total)
        num_queries = torch.full((1,), num_known + num_latest, device=mean.device)
        return QueryStatistics(num_queries, mean + difference * share, covariance)

    def _compute_expected_logits(self, past: Past, statistics: QueryStatistics) -> Tensor:
        """Return the logarithm of each key's expected weight before the division by the sum, [H, G, S]."""
        H, G, scale = past.spec.num_kv_heads, past.num_groups, past.spec.scale
        rotation = self._compute_mean_rotation(past)  # [D, D], multiplied from the right
        mean = (statistics.mean @ rotation * scale).unflatten(0, (H, G))  # [H, G, D]
        logits: Tensor = mean @ past.keys.transpose(1, 2)
        if statistics.covariance is not None:
            covariance = rotation.T @ statistics.covariance @ rotation * (scale * scale / 2)
            _add_quadratic_forms(logits, covariance, past.stored_keys.to(past.product_dtype))
        return logits

    def _compute_mean_rotation(self, past: Past) -> Tensor:
        """Return the mean of the rotations to the positions after the text; row vectors are multiplied by it."""
        rotate = past.spec.rotate
        assert rotate is not None, "check_layers has refused the layer"
        D, device = past.spec.head_dim, past.positions.device
        if rotate not in self._mean_rotations:
            self._mean_rotations[rotate] = _average_rotations(rotate, self.options.num_future_positions, D, device)
        last = torch.tensor([past.length - 1], device=device)
        return rotate(self._mean_rotations[rotate][None], last).squeeze(0)


def _add_quadratic_forms(logits: Tensor, matrices: Tensor, keys: Tensor) -> None:
    """Add k M k to logits [H, G, S], for keys k [H, S, D] and the matrix M of each query head [H * G, D, D].

    Products are computed in the dtype of the keys, for a few keys at a time, whose products share their memory.
    """
    H, G, S = logits.shape
    rows = matrices.to(keys.dtype).unflatten(0, (H, G)).flatten(1, 2)  # a group's matrices below each other
    step = min(KEYS_AT_ONCE, S)
    buffer = torch.empty(rows.shape[1] * H * step, device=keys.device)
    product_buffer = buffer if keys.dtype is torch.float32 else torch.empty_like(buffer, dtype=keys.dtype)
    for start in range(0, S, step):
        part = keys[:, start : start + step].transpose(1, 2).contiguous()  # [H, D, n]
        size = rows.shape[1] * H * part.shape[2]
        products, wide = (x[:size].view(H, -1, part.shape[2]) for x in (product_buffer, buffer))
        torch.bmm(rows, part, out=products)
        wide = wide.copy_(products).unflatten(1, (G, -1))  # [H, G, D, n]
        logits[..., start : start + step] += wide.mul_(part[:, None].float()).sum(dim=2)


def _average_rotations(rotate: Rotate, num_positions: int, D: int, device: torch.device) -> Tensor:
    """Return the mean of the rotations by 1, 2, ... `num_positions` positions, [D, D] float32, for row vectors.

    Rotations by many positions are products of those by few, as a model's tables may be too short for them. They are
    multiplied in float64 on the host, as mps has none.
    """
    step = min(num_positions, ROTATED_AT_ONCE)
    basis = torch.eye(D, device=device).expand(step, D, D).contiguous()
    rotations = rotate(basis, torch.arange(1, step + 1, device=device)).cpu().double()  # [step, D, D]
    total = torch.zeros_like(rotations[0])
    turn = torch.eye(D, dtype=torch.float64)
    for start in range(0, num_positions, step):
        total += rotations[: num_positions - start].sum(dim=0) @ turn
        turn = turn @ rotations[-1]
    return (total / num_positions).float().to(device)
