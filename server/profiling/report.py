"""Formats a profile as tables and as JSON. Does not depend on how the figures were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from config.tables import format_table
from server.profiling.steps import Steps


@dataclass(frozen=True)
class MachineLimits:
    """The speed limits of this machine, measured by the same `kvmux profile` as the steps."""

    bandwidth: float  # bytes per second that the engine's threads can read from memory
    products: float  # floating-point operations per second in large matrix products
    threads: int


@dataclass(frozen=True)
class Part:
    """A line of a profile's table: an operation, or another part of a step."""

    what: str
    seconds: float
    calls: int | None = None  # number of calls of the operation in a step
    bytes: int | None = None  # number of bytes that the operation must read and write in a step


@dataclass(frozen=True)
class StepProfile:
    """The measurements of one kind of step (decoding n sequences, or prefill), and the machine's limits."""

    steps: Steps
    limits: MachineLimits

    @property
    def parts(self) -> list[Part]:
        """Operations, then other parts of a step, each with the longest first."""
        steps = self.steps
        taken = sorted(steps.seconds.items(), key=lambda each: -each[1])
        operations = [Part(name, t, steps.calls[name], steps.bytes[name]) for name, t in taken if name in steps.calls]
        rest = [Part(name, t) for name, t in taken if name not in steps.calls]
        return [*operations, *rest]

    @property
    def num_bytes(self) -> int:
        return sum(self.steps.bytes.values())

    @property
    def memory_seconds(self) -> float:
        """The least seconds in which this machine can read the bytes that a step must read."""
        return self.num_bytes / self.limits.bandwidth

    @property
    def product_seconds(self) -> float | None:
        """Least seconds for the matrix products; None if unknown, or for decoding, as reading memory takes longer."""
        steps = self.steps
        return None if steps.flops is None or steps.sequences else steps.flops / self.limits.products

    @property
    def min_seconds(self) -> float:
        return max(self.memory_seconds, self.product_seconds or 0.0)

    def __str__(self) -> str:
        steps = self.steps
        if not steps.sequences:
            return f"{steps.tokens:,} tokens of a prompt"
        many = "sequences" if steps.sequences > 1 else "sequence"
        return f"{steps.sequences} {many} of {steps.tokens:,} tokens"


def as_text(model: Mapping[str, Any], profiles: Sequence[StepProfile], note: str) -> str:
    """Return a description of what was profiled, and a table for each kind of step, in GitHub's Markdown."""
    limits = profiles[0].limits
    what = f"{model['model']}, {model['dtype']}, weights in {model['weights']}, {model['kv_cache']}, {model['kernels']}"
    machine = (
        f"threads: {limits.threads}; they read {limits.bandwidth / 1e9:.1f} GB/s, and compute "
        f"{limits.products / 1e12:.2f} TFLOP/s in large products"
    )
    head = "\n".join(filter(None, [what, machine, note]))
    return "\n\n".join([head, *(_format_table(each) for each in profiles)])


def _format_table(profile: StepProfile) -> str:
    total = profile.steps.total
    lines = [
        *((part.what, part.seconds, _format_traffic(part)) for part in profile.parts),
        ("all", total, ("", f"{profile.num_bytes / 1e6:,.1f}", "")),
        ("the least for reading", profile.memory_seconds, ("", "", "")),
        ("the least for products", profile.product_seconds, ("", "", "")),
    ]
    rows = [(name, f"{s * 1e3:.3f}", f"{s / total:.1%}", *traffic) for name, s, traffic in lines if s is not None]
    return format_table([str(profile)], ["ms a step", "share", "calls", "MB", "GB/s"], rows)


def _format_traffic(part: Part) -> tuple[str, str, str]:
    if part.calls is None or part.bytes is None:
        return "", "", ""
    return str(part.calls), f"{part.bytes / 1e6:,.1f}", f"{part.bytes / part.seconds / 1e9:.1f}"


def as_json(model: Mapping[str, Any], profiles: Sequence[StepProfile], busy: float) -> dict[str, Any]:
    """Return the profile as JSON; `busy` is the share of all processors that other processes used."""
    return {
        "model": dict(model),
        "limits": vars(profiles[0].limits),
        "used_by_others": busy,
        "steps": [_make_profile_json(each) for each in profiles],
    }


def _make_profile_json(profile: StepProfile) -> dict[str, Any]:
    steps = profile.steps
    return {
        "sequences": steps.sequences,
        "tokens": steps.tokens,
        "seconds": profile.steps.total,
        "bytes": profile.num_bytes,
        "products": steps.flops,
        "least_seconds": {"reading": profile.memory_seconds, "products": profile.product_seconds},
        "of_the_limit": profile.min_seconds / profile.steps.total,
        "parts": [vars(part) | {"share": part.seconds / profile.steps.total} for part in profile.parts],
    }
