"""Results of NVIDIA's Python bindings, whose functions return a status before everything else."""

from __future__ import annotations

from typing import Any


def get_result(library: str, result: tuple[Any, ...]) -> Any:
    """Return what a function of a library returned beside its status. Raises RuntimeError if it failed."""
    status, *values = result
    if status != type(status)(0):
        raise RuntimeError(f"{library}: {status.name}")
    return values[0] if values else None
