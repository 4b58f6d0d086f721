"""What a machine allows: the least that reading and multiplying take. Knows shapes of models; measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench.table.goals import Row
from tools.bench.table.models import Shape

GIB = 1 << 30


@dataclass(frozen=True)
class Work:
    """A workload, as far as it decides about limits."""

    streams: int
    prompt: int  # tokens
    answer: int

    @property
    def context(self) -> float:
        """Tokens that a step finds in a cache, on average."""
        return self.prompt + self.answer / 2


WORKS = {"a": Work(1, 128, 128), "b": Work(1, 2048, 64), "c8": Work(8, 256, 128), "c16": Work(16, 256, 128)}


@dataclass(frozen=True)
class Speeds:
    """Of this machine, in as many threads as the engine has."""

    read: float  # bytes a second
    products: float  # floating-point operations a second


def limit(row: Row, speeds: Speeds, kv_bytes: int) -> float | None:
    """The best value that a row could have; None: nobody knows. `kv_bytes`: the server's KV memory."""
    shape, work = row.shape, WORKS.get(row.workload)
    match row.measure:
        case "peak":
            return (shape.weight_bytes(row.weights) + kv_bytes) / GIB
        case "slowdown":
            return step_seconds(row, WORKS["a"], speeds) / step_seconds(row, WORKS["b"], speeds)
        case "decode" | "output" if work is not None:
            return work.streams / step_seconds(row, work, speeds)
        case "prefill" if work is not None:
            return work.prompt / prompt_seconds(row, work, speeds)
        case "ttft" if work is not None:
            return 1e3 * prompt_seconds(row, work, speeds)
    return None


def step_seconds(row: Row, work: Work, speeds: Speeds) -> float:
    """Of a step of decoding, in which all weights are read once, and the keys and values of every stream."""
    return (row.shape.weight_bytes(row.weights) + work.streams * work.context * row.shape.kv_bytes) / speeds.read


def prompt_seconds(row: Row, work: Work, speeds: Speeds) -> float:
    """Of one prompt: its products, and at least all weights once."""
    read = row.shape.weight_bytes(row.weights) / speeds.read
    return max(read, 2 * work.prompt * layer_numbers(row.shape) / speeds.products)


def layer_numbers(shape: Shape) -> int:
    """Numbers that every token of a prompt is multiplied with; the embedding only looks up."""
    return sum(out * width for name, (out, width) in shape.matrices() if "layers" in name)
