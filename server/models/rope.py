"""Rotary position embedding: frequencies and tables for every RoPE scaling that models use.

Each formula follows the paper that it names; angles are computed in float64 (float32 is off by 2e-3 rad at position
1e5). Knows no model and no cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from server.models.config import Rope
from server.models.errors import ModelError


def compute_rope_tables(rope: Rope, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cos and sin tables, each [positions, dim / 2] float32, for texts of up to `positions` tokens."""
    frequencies, amplitude = compute_frequencies(rope, positions)
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return (angle.cos() * amplitude).float().to(device), (angle.sin() * amplitude).float().to(device)


def compute_frequencies(rope: Rope, positions: int) -> tuple[Tensor, float]:
    """Return frequencies [dim / 2] float64 in radians per position, and the factor by which cos and sin are multiplied.

    Raises ModelError for invalid parameters of the RoPE scaling.
    """
    try:
        frequencies, amplitude = _ROPE_INIT_FUNCTIONS[rope.scaling](rope, positions)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"{rope.file}: RoPE scaling {rope.scaling!r} has no valid value: {error}") from None
    if not (frequencies.isfinite().all() and math.isfinite(amplitude)):
        raise ModelError(f"{rope.file}: RoPE scaling {rope.scaling!r} gives frequencies that are not finite")
    return frequencies, amplitude


def _compute_inv_freq(theta: float, dim: int) -> Tensor:
    """Return the frequencies theta ** -(i / dim) for i = 0, 2, ... (Su et al. 2021)."""
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _default(rope: Rope, positions: int) -> tuple[Tensor, float]:
    return _compute_inv_freq(rope.theta, rope.dim), 1.0


def _linear(rope: Rope, positions: int) -> tuple[Tensor, float]:
    """Scale linearly: divide positions, so that they stay below the trained context length (Chen et al. 2023)."""
    return _compute_inv_freq(rope.theta, rope.dim) / rope.parameters["factor"], 1.0


def _dynamic(rope: Rope, positions: int) -> tuple[Tensor, float]:
    """Scale NTK-aware: theta depends on the text's length. The longest text sets it, as cached keys cannot change."""
    reach = max(positions, rope.max_positions) / rope.max_positions
    factor = rope.parameters["factor"]
    stretched = rope.theta * (factor * reach - (factor - 1)) ** (rope.dim / (rope.dim - 2))
    return _compute_inv_freq(stretched, rope.dim), 1.0


def _llama3(rope: Rope, positions: int) -> tuple[Tensor, float]:
    """Scale as Llama 3.1: low frequencies are divided, high ones stay, those between are interpolated."""
    p = rope.parameters
    plain = _compute_inv_freq(rope.theta, rope.dim)
    # Number of full rotations of each frequency within the training context
    turns = p["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / p["factor"], 1.0


def _yarn(rope: Rope, positions: int) -> tuple[Tensor, float]:
    """Scale as YaRN (Peng et al. 2023): divide the frequencies with few rotations in the training context.

    cos and sin are to be multiplied by the second result.
    """
    p, dim = rope.parameters, rope.dim
    trained = p["original_max_position_embeddings"]
    factor = p.get("factor") or rope.max_positions / trained

    def find_correction_dim(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = find_correction_dim(p.get("beta_fast") or 32), find_correction_dim(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    divided = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    plain = _compute_inv_freq(rope.theta, dim)
    return (1 - divided) * plain + divided * plain / factor, _yarn_attention_factor(p, factor)


def _yarn_attention_factor(p: Mapping[str, float], factor: float) -> float:
    def get_mscale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

    if p.get("attention_factor") is not None:
        return p["attention_factor"]
    if p.get("mscale") and p.get("mscale_all_dim"):
        return get_mscale(p["mscale"]) / get_mscale(p["mscale_all_dim"])
    return get_mscale(1)


def _longrope(rope: Rope, positions: int) -> tuple[Tensor, float]:
    """Scale as LongRoPE (Ding et al. 2024): divide each frequency by its factor, from short_factor or long_factor.

    The length of the longest text chooses the set of factors for all texts: keys rotated with one set do not match
    queries rotated with the other.
    """
    p = rope.parameters
    trained = p["original_max_position_embeddings"]
    factors = torch.tensor(p["long_factor"] if positions > trained else p["short_factor"], dtype=torch.float64)
    if len(factors) != rope.dim // 2:
        raise ModelError(
            f"{rope.file}: RoPE scaling 'longrope' has {len(factors)} factors for {rope.dim // 2} frequencies"
        )
    factor = p.get("factor") or rope.max_positions / trained
    amplitude = p.get("attention_factor")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return _compute_inv_freq(rope.theta, rope.dim) / factors, amplitude


_ROPE_INIT_FUNCTIONS: Mapping[str, Callable[[Rope, int], tuple[Tensor, float]]] = {  # for each of config.ROPE_SCALINGS
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
