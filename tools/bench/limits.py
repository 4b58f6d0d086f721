"""Computes the best possible values of a row from the machine's memory bandwidth and FLOP/s. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

from server.engine.device import WEIGHT_FORMATS
from tools.bench.goals import BenchmarkRow
from tools.bench.long_contexts import compute_read_bytes
from tools.bench.models import ModelShape

GIB = 1 << 30


@dataclass(frozen=True)
class Workload:
    """The properties of a workload that determine its limits."""

    streams: int
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int = 0  # found in a cache, before the prompt's own tokens

    @property
    def mean_context(self) -> float:
        """The mean number of cached tokens of a stream in a decode step."""
        return self.cached_tokens + self.prompt_tokens + self.answer_tokens / 2


WORKLOADS = {
    "a": Workload(1, 128, 128),
    "b": Workload(1, 2048, 64),
    "c8": Workload(8, 256, 128),
    "c16": Workload(16, 256, 128),
    "e1": Workload(1, 16_384, 64),
    "e8": Workload(8, 4096, 64),
    "e16": Workload(16, 4096, 160),
    "f": Workload(1, 8448, 8),
    "g": Workload(128, 512, 64),
}
WARM_WORKLOADS = {"f": Workload(1, 256, 8, cached_tokens=8192)}  # of the phase "warm"


@dataclass(frozen=True)
class Speeds:
    """The speeds of this machine, measured with the engine's number of threads."""

    read_bandwidth: float  # bytes per second
    flops_per_second: float  # floating-point operations per second


def compute_limit(row: BenchmarkRow, speeds: Speeds, kv_bytes: int) -> float | None:
    """Return the best possible value of a row; None if there is no model of it. `kv_bytes`: the server's KV memory."""
    shape, work = row.shape, get_workload(row)
    match row.measure:
        case "peak":
            return (shape.weight_bytes(row.weights) + kv_bytes) / GIB
        case "slowdown":
            return compute_step_seconds(row, WORKLOADS["a"], speeds) / compute_step_seconds(row, WORKLOADS["b"], speeds)
        case "decode" | "output" if work is not None:
            return work.streams / compute_step_seconds(row, work, speeds)
        case "step" if work is not None:
            return 1e3 * compute_step_seconds(row, work, speeds)
        case "prefill" if work is not None:
            return work.prompt_tokens / compute_prompt_seconds(row, work, speeds)
        case "ttft" if work is not None:
            return 1e3 * compute_prompt_seconds(row, work, speeds)
    return None


def get_workload(row: BenchmarkRow) -> Workload | None:
    """Return the properties of a row's workload; None if there is no model of it."""
    return (WARM_WORKLOADS if row.phase == "warm" else WORKLOADS).get(row.workload)


def compute_step_seconds(row: BenchmarkRow, work: Workload, speeds: Speeds) -> float:
    """Return the least seconds of a decode step.

    It reads all weights once, and of every stream the keys and values that its strategy reads. With many streams its
    matrix products take longer; they are not counted for quantized weights, which may be multiplied as integers.
    """
    per_stream = compute_read_bytes(row.strategy, row.shape, work.mean_context)
    read = (row.shape.weight_bytes(row.weights) + work.streams * per_stream) / speeds.read_bandwidth
    if row.weights in WEIGHT_FORMATS:
        return read
    all_weights = sum(out * width for _, (out, width) in row.shape.matrices())
    return max(read, 2 * work.streams * all_weights / speeds.flops_per_second)


def compute_prompt_seconds(row: BenchmarkRow, work: Workload, speeds: Speeds) -> float:
    """Return the least seconds of a prefill: the time of its products and attention, or of reading all weights once."""
    read = row.shape.weight_bytes(row.weights) / speeds.read_bandwidth
    products = 2 * work.prompt_tokens * count_layer_weights(row.shape)
    # a query and a key, and a weight and a value, are each 2 operations for each dimension; the mask halves the square
    seen = work.prompt_tokens * (work.cached_tokens + work.prompt_tokens / 2)
    attention = 4 * seen * row.shape.layers * row.shape.hidden_size
    return max(read, (products + attention) / speeds.flops_per_second)


def count_layer_weights(shape: ModelShape) -> int:
    """Return the number of weights in the layers' matrices, with which every token of a prompt is multiplied."""
    return sum(out * width for name, (out, width) in shape.matrices() if "layers" in name)
