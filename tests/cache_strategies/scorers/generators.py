"""Random numbers of the tests of scorers."""

from __future__ import annotations

import random

import torch


def new_generator() -> torch.Generator:
    """Return random numbers that are others in each run; the seed is printed."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)
