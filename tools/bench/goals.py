"""The rows that `make bench` measures, each with its goal and the figures of other servers. Data only.

Peers were measured on PEERS_MACHINE on PEERS_DATE, over HTTP unless noted, one server at a time, with the same
workloads and models. On other machines these figures do not apply: there, compare with the machine's limit, or with
transformers, which is measured in the same run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tools.bench.models import LLAMA, QWEN, ModelShape
from tools.bench.runner import Row

PEERS_MACHINE = "two x86-64 cores with AVX-512, AVX512-BF16, VNNI and AMX, which read 30 GB/s"
PEERS_DATE = "2026-11-20"

DEFAULT_STRATEGY, MIXED = "paged", "mixed"  # values of `strategy`; "mixed" spreads requests over all strategies
TRANSFORMERS = "transformers"  # a value of `strategy`: transformers in a separate process, without a server
RowGroup = Literal[
    "decode",
    "prefill",
    "batch",
    "prefix",
    "start",
    "memory",
    "strategies",
    "transformers",
    "e1",
    "e8",
    "e16",
    "f",
    "g",
]
LONG_CONTEXTS: frozenset[RowGroup] = frozenset({"e1", "e8", "e16", "f", "g"})  # share a server with more KV memory
Measure = Literal["decode", "prefill", "ttft", "output", "step", "ready", "peak", "slowdown", "mixing"]
UNITS: Mapping[Measure, str] = {
    "decode": "tokens/s",
    "prefill": "tokens/s",
    "ttft": "ms",
    "output": "tokens/s",
    "step": "ms",  # the median time between two tokens of a stream while all streams decode
    "ready": "s",
    "peak": "GiB",
    "slowdown": "of the speed after 128",
    "mixing": "of their mean",
}
LOWER_IS_BETTER = frozenset({"ttft", "step", "ready", "peak"})


@dataclass(frozen=True)
class BenchmarkRow:
    """A row of the table: a figure to measure, with its goal and the figures of peers."""

    what: str  # the work, as the table shows it
    shape: ModelShape
    group: RowGroup
    measure: Measure
    goal: float | None = None
    weights: str = "auto"  # the value of --weights; auto: bfloat16
    workload: str = "a"  # the value of --workload of `kvmux bench`
    phase: str | None = None
    strategy: str = DEFAULT_STRATEGY
    peers: Mapping[str, float] = field(default_factory=dict)

    @property
    def has_long_context(self) -> bool:
        """Return whether the row is measured with the settings of long_contexts.toml."""
        return self.group in LONG_CONTEXTS

    def describe(self) -> Row:
        """Return the row of the report."""
        lower = self.measure in LOWER_IS_BETTER
        return Row(self.what, UNITS[self.measure], lower, self.goal, peers=self.peers)


OPENVINO_IN_PROCESS = "OpenVINO (in process)"


def make_transformers_row(what: str, shape: ModelShape, measure: Measure, workload: str = "a") -> BenchmarkRow:
    named = f"{what}, transformers (in process)"
    return BenchmarkRow(named, shape, "transformers", measure, workload=workload, strategy=TRANSFORMERS)


def make_long_row(
    what: str, group: RowGroup, measure: Measure, goal: float | None = None, phase: str | None = None
) -> BenchmarkRow:
    """Return a row whose workload has the name of its group."""
    return BenchmarkRow(what, QWEN, group, measure, goal, workload=group, phase=phase)


E8_STEP = make_long_row("8 at once after 4,096, between two tokens", "e8", "step", goal=48)
LONG_ROWS = (
    make_long_row("1 stream after 16,384", "e1", "decode"),
    E8_STEP,
    *(
        replace(E8_STEP, what=f"8 at once after 4,096, {name}, between two tokens", goal=None, strategy=name)
        for name in ("int8", "residual", "compressed", "quest", "streaming", "sliding_window")
    ),
    make_long_row("8 at once after 4,096", "e8", "output"),
    make_long_row("16 at once after 4,096, between two tokens", "e16", "step"),
    make_long_row("16 at once after 4,096", "e16", "output"),
    make_long_row("prefill of 8,448", "f", "prefill", phase="cold"),
    make_long_row("first token, 256 after 8,192 found", "f", "ttft", phase="warm"),
    make_long_row("128 at once after 512", "g", "output"),
)

ROWS = (
    BenchmarkRow(
        "1 stream, bfloat16",
        QWEN,
        "decode",
        "decode",
        goal=27,
        peers={OPENVINO_IN_PROCESS: 22.6, "vLLM": 18.8, "llama.cpp": 17.2, "transformers": 11.5},
    ),
    make_transformers_row("1 stream, bfloat16", QWEN, "decode"),
    BenchmarkRow(
        "1 stream, int8",
        QWEN,
        "decode",
        "decode",
        goal=49,
        weights="int8",
        peers={"llama.cpp q8_0": 38.5, "OpenVINO": 23.8},
    ),
    BenchmarkRow("1 stream, int4", QWEN, "decode", "decode", goal=82, weights="int4", peers={"llama.cpp q4_0": 64}),
    BenchmarkRow(
        "first token after 128",
        QWEN,
        "prefill",
        "ttft",
        goal=80,
        peers={"OpenVINO int8": 120, "vLLM": 127, "llama.cpp": 184},
    ),
    make_transformers_row("first token after 128", QWEN, "ttft"),
    BenchmarkRow(
        "prefill of 2,048",
        QWEN,
        "prefill",
        "prefill",
        goal=2300,
        workload="b",
        peers={"vLLM": 1640, "OpenVINO": 1340, "transformers": 925, "llama.cpp": 499},
    ),
    make_transformers_row("prefill of 2,048", QWEN, "prefill", workload="b"),
    BenchmarkRow(
        "1 stream after 2,048",
        QWEN,
        "decode",
        "slowdown",
        goal=0.95,
        workload="b",
        peers={"vLLM": 0.96, "llama.cpp": 0.8},
    ),
    BenchmarkRow(
        "8 at once",
        QWEN,
        "batch",
        "output",
        goal=180,
        workload="c8",
        peers={"vLLM": 127, "OpenVINO": 125, "llama.cpp q4_0": 95, "transformers": 57},
    ),
    BenchmarkRow(
        "16 at once",
        QWEN,
        "batch",
        "output",
        goal=300,
        workload="c16",
        peers={OPENVINO_IN_PROCESS: 194, "vLLM": 190, "llama.cpp q8_0": 91},
    ),
    BenchmarkRow(
        "first token, 1,024 shared, cold",
        QWEN,
        "prefix",
        "ttft",
        goal=700,
        workload="d",
        phase="cold",
        peers={"vLLM": 925, "transformers": 2391, "OpenVINO": 4180},
    ),
    BenchmarkRow(
        "first token, 1,024 shared, warm",
        QWEN,
        "prefix",
        "ttft",
        goal=150,
        workload="d",
        phase="warm",
        peers={"vLLM": 345, "OpenVINO": 456},
    ),
    BenchmarkRow("start to ready", QWEN, "start", "ready", goal=3, peers={"llama.cpp": 1.0, "vLLM": 98}),
    BenchmarkRow(
        "peak memory, 0.5 GiB of it for KV",
        QWEN,
        "memory",
        "peak",
        goal=2.0,
        peers={"llama.cpp": 1.7, "OpenVINO": 2.4, "vLLM": 6.0, "transformers": 13.3},
    ),
    BenchmarkRow(
        "1 stream",
        LLAMA,
        "decode",
        "decode",
        goal=1000,
        peers={"llama.cpp q8_0": 904, OPENVINO_IN_PROCESS: 797, "llama.cpp": 524, "vLLM": 285},
    ),
    make_transformers_row("1 stream", LLAMA, "decode"),
    BenchmarkRow("1 stream, int8", LLAMA, "decode", "decode", weights="int8", peers={"llama.cpp q8_0": 904}),
    BenchmarkRow(
        "16 at once",
        LLAMA,
        "batch",
        "output",
        goal=4000,
        workload="c16",
        peers={OPENVINO_IN_PROCESS: 5076, "vLLM": 2126, "llama.cpp q8_0": 893, "llama.cpp": 843},
    ),
    *(
        BenchmarkRow(f"8 at once, {name}", shape, "strategies", "output", workload="c8", strategy=name)
        for shape in (QWEN, LLAMA)
        for name in (DEFAULT_STRATEGY, "contiguous", "sliding_window", MIXED)
    ),
    *(
        BenchmarkRow(
            "8 at once, mixed against each alone", shape, "strategies", "mixing", 0.9, workload="c8", strategy=MIXED
        )
        for shape in (QWEN, LLAMA)
    ),
    *LONG_ROWS,
)
