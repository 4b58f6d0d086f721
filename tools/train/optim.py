"""Muon, after Keller Jordan's "Muon: An optimizer for hidden layers in neural networks" (2024).

Each update of a matrix is made near-orthogonal, so that all its directions learn at the same rate. Use it for the
matrices of the layers only, and AdamW for embeddings and norms.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic polynomial: singular values become about 1 in five steps
_STEPS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices (N, rows, columns) made near-orthogonal by Newton-Schulz iteration."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    orthogonal: Tensor = x.mT if tall else x
    return orthogonal


class Muon(torch.optim.Optimizer):
    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            by_shape: defaultdict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self._update(parameters, group)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update all matrices of one shape as a batch."""
        directions = orthogonalize(torch.stack([self._nesterov(p, group["momentum"]) for p in parameters]))
        gain = 0.2 * math.sqrt(max(parameters[0].shape))  # matches the size of AdamW's updates (arXiv 2502.16982)
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.mul_(1 - group["lr"] * group["decay"])
            parameter.add_(direction, alpha=-group["lr"] * gain)

    def _nesterov(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        average: Tensor = state["momentum"]
        average.lerp_(parameter.grad, 1 - momentum)
        direction: Tensor = parameter.grad.lerp(average, momentum)
        return direction
