"""What a machine allows: the least that reading and multiplying take. Knows shapes of models; measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench.table.goals import BenchmarkRow
from tools.bench.table.models import ModelShape

GIB = 1 << 30


@dataclass(frozen=True)
class Workload:
    """A workload, as far as it decides about limits."""

    streams: int
    prompt_tokens: int
    answer_tokens: int

    @property
    def mean_context(self) -> float:
        """Tokens that a step finds in a cache, on average."""
        return self.prompt_tokens + self.answer_tokens / 2


WORKLOADS = {
    "a": Workload(1, 128, 128),
    "b": Workload(1, 2048, 64),
    "c8": Workload(8, 256, 128),
    "c16": Workload(16, 256, 128),
}


@dataclass(frozen=True)
class Speeds:
    """The speeds of this machine, in as many threads as the engine has."""

    read_bandwidth: float  # bytes a second
    flops_per_second: float  # floating-point operations a second


def compute_limit(row: BenchmarkRow, speeds: Speeds, kv_bytes: int) -> float | None:
    """Return the best value that a row could have; None if unknown. `kv_bytes`: the server's KV memory."""
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
    """Return the seconds of a decode step, which reads all weights once, and the keys and values of every stream."""
    return (
        row.shape.weight_bytes(row.weights) + work.streams * work.mean_context * row.shape.kv_bytes_per_token
    ) / speeds.read_bandwidth


def compute_prompt_seconds(row: BenchmarkRow, work: Workload, speeds: Speeds) -> float:
    """Return the seconds of one prompt: its products, and at least all weights once."""
    read = row.shape.weight_bytes(row.weights) / speeds.read_bandwidth
    return max(read, 2 * work.prompt_tokens * count_layer_weights(row.shape) / speeds.flops_per_second)


def count_layer_weights(shape: ModelShape) -> int:
    """Return the number of weights that every token of a prompt is multiplied with; the embedding only looks up."""
    return sum(out * width for name, (out, width) in shape.matrices() if "layers" in name)
