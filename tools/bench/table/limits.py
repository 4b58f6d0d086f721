"""Computes the best possible values of a row from the machine's memory bandwidth and FLOP/s. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench.table.goals import BenchmarkRow
from tools.bench.table.models import ModelShape

GIB = 1 << 30


@dataclass(frozen=True)
class Workload:
    """The properties of a workload that determine its limits."""

    streams: int
    prompt_tokens: int
    answer_tokens: int

    @property
    def mean_context(self) -> float:
        """The mean number of cached tokens of a stream in a decode step."""
        return self.prompt_tokens + self.answer_tokens / 2


WORKLOADS = {
    "a": Workload(1, 128, 128),
    "b": Workload(1, 2048, 64),
    "c8": Workload(8, 256, 128),
    "c16": Workload(16, 256, 128),
}


@dataclass(frozen=True)
class Speeds:
    """The speeds of this machine, measured with the engine's number of threads."""

    read_bandwidth: float  # bytes per second
    flops_per_second: float  # floating-point operations per second


def compute_limit(row: BenchmarkRow, speeds: Speeds, kv_bytes: int) -> float | None:
    """Return the best possible value of a row; None if there is no model of it. `kv_bytes`: the server's KV memory."""
    shape, work = row.shape, WORKLOADS.get(row.workload)
    match row.measure:
        case "peak":
            return (shape.weight_bytes(row.weights) + kv_bytes) / GIB
        case "slowdown":
            return compute_step_seconds(row, WORKLOADS["a"], speeds) / compute_step_seconds(row, WORKLOADS["b"], speeds)
        case "decode" | "output" if work is not None:
            return work.streams / compute_step_seconds(row, work, speeds)
        case "prefill" if work is not None:
            return work.prompt_tokens / compute_prompt_seconds(row, work, speeds)
        case "ttft" if work is not None:
            return 1e3 * compute_prompt_seconds(row, work, speeds)
    return None


def compute_step_seconds(row: BenchmarkRow, work: Workload, speeds: Speeds) -> float:
    """Return the least seconds of a decode step, which reads all weights, and the keys and values of every stream."""
    return (
        row.shape.weight_bytes(row.weights) + work.streams * work.mean_context * row.shape.kv_bytes_per_token
    ) / speeds.read_bandwidth


def compute_prompt_seconds(row: BenchmarkRow, work: Workload, speeds: Speeds) -> float:
    """Return the least seconds of a prefill: the time of its matrix products, or that to read all weights once."""
    read = row.shape.weight_bytes(row.weights) / speeds.read_bandwidth
    return max(read, 2 * work.prompt_tokens * count_layer_weights(row.shape) / speeds.flops_per_second)


def count_layer_weights(shape: ModelShape) -> int:
    """Return the number of weights in the layers' matrices, with which every token of a prompt is multiplied."""
    return sum(out * width for name, (out, width) in shape.matrices() if "layers" in name)
