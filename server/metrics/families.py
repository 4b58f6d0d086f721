"""Every metric as a row of one table: its name, kind and labels, and what vLLM calls it.

The registry, docs/metrics.md and the tests go through FAMILIES, so that a metric joins them by its row. Names follow
vLLM's with our prefix, so that dashboards compare. A label takes values from a closed set, which no client can extend.

`python -m server.metrics.families` prints the table of docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

from prometheus_client import Counter, Gauge, Histogram, Info, Summary

from cache_strategies.base import Blocks, Miss
from config.settings import LONGEST_DRAFT
from server.engine.device import DeviceMemory
from server.engine.records import Outcome, Phase, Role, Wait

PREFIX = "kvmux_"
ENDINGS: Mapping[type, str] = {Counter: "_total", Info: "_info"}
PARTS: Mapping[type, tuple[str, ...]] = {Histogram: ("_bucket", "_sum", "_count"), Summary: ("_sum", "_count")}
M = TypeVar("M", Counter, Gauge, Histogram, Info, Summary)
Edges = tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Label:
    """A label and its values; None: they are known when the server starts."""

    name: str
    values: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class MetricFamily(Generic[M]):
    """One metric with all its label values."""

    kind: type[M]
    name: str  # without the prefix and the ending that its kind has
    help: str
    labels: tuple[Label, ...] = ()
    edges: Edges = ()  # of a histogram's buckets
    vllm: str | None = None  # its name there, without `vllm:`; None: there is none

    @property
    def exposed(self) -> str:
        """The name that Prometheus reads; the series of histograms and summaries have endings of their own."""
        return f"{PREFIX}{self.name}{ENDINGS.get(self.kind, '')}"

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series, as a query asks for them."""
        return tuple(self.exposed + part for part in PARTS.get(self.kind, ("",)))


def _as_vllm(kind: type[M], name: str, help: str, labels: tuple[Label, ...], edges: Edges = ()) -> MetricFamily[M]:
    """Return a family that vLLM has by the same name."""
    return MetricFamily(kind, name, help, labels, edges, vllm=f"{name}{ENDINGS.get(kind, '')}")


# ---------------------------------------------------------------- labels
STRATEGY = Label("strategy")  # instances
OUTCOME = Label("outcome", get_args(Outcome))
MISS = Label("reason", get_args(Miss))
WAIT = Label("reason", get_args(Wait))
KV_STATE = Label("state", ("used", "idle", "wasted"))
POOL_STATE = Label("state", ("held", "free", "untouched"))
DEVICE_STATE = Label("state", DeviceMemory._fields)
BLOCK_STATE = Label("state", Blocks._fields)
OP = Label("op")  # operations of the kernels
BACKEND = Label("backend")  # that computes the operation
PHASE = Label("phase", get_args(Phase))
ROLE = Label("role", get_args(Role))
STATUSES = (200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 431, 499, 500, 503, 504)
OTHER = "other"
CODE = Label("code", (*map(str, STATUSES), OTHER))
POSITION = Label("position", tuple(map(str, range(LONGEST_DRAFT))))  # in a draft
BY = (STRATEGY,)

# ---------------------------------------------------------------- edges: vLLM's, and finer ones below
# fmt: off
FIRST_TOKEN: Edges = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
PER_TOKEN: Edges = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
LATENCY: Edges = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
    7680,
)
BLOCK_AGE: Edges = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
)
TOKENS: Edges = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
# fmt: on
POWERS = tuple(2**n for n in range(15))

# ---------------------------------------------------------------- requests
REQUESTS = MetricFamily(
    Counter,
    "requests",
    "Requests that left the engine, by how they ended; error: their strategy or the model failed, or time was up.",
    (STRATEGY, OUTCOME),
    vllm="request_success_total",
)
PROMPT_TOKENS = _as_vllm(Counter, "prompt_tokens", "Prompt tokens of requests that were admitted.", BY)
CACHED_TOKENS = _as_vllm(
    Counter,
    "prompt_tokens_cached",
    "Prompt tokens that were not computed: found in the cache, or taken over from another choice.",
    BY,
)
GENERATION_TOKENS = _as_vllm(Counter, "generation_tokens", "Tokens generated.", BY)
PREFIX_QUERIES = _as_vllm(Counter, "prefix_cache_queries", "Prompt tokens looked up in the cache, once a request.", BY)
PREFIX_HITS = _as_vllm(Counter, "prefix_cache_hits", "Prompt tokens found in the cache.", BY)
PREFIX_MISSES = MetricFamily(
    Counter, "prefix_cache_misses", "Prompt tokens not found in the cache, by reason.", (STRATEGY, MISS)
)
E2E_LATENCY = _as_vllm(
    Histogram, "e2e_request_latency_seconds", "Time from a request's arrival to its end.", BY, LATENCY
)
QUEUE_TIME = _as_vllm(
    Histogram, "request_queue_time_seconds", "Time from a request's arrival to its seat.", BY, LATENCY
)
PREFILL_TIME = _as_vllm(
    Histogram, "request_prefill_time_seconds", "Time from a request's seat to its first token.", BY, LATENCY
)
DECODE_TIME = _as_vllm(
    Histogram, "request_decode_time_seconds", "Time from a request's first token to its last.", BY, LATENCY
)
FIRST_TOKEN_TIME = _as_vllm(
    Histogram, "time_to_first_token_seconds", "Time from a request's arrival to its first token.", BY, FIRST_TOKEN
)
INTER_TOKEN_LATENCY = _as_vllm(
    Histogram, "inter_token_latency_seconds", "Time between two tokens of a request.", BY, PER_TOKEN
)
REQUEST_PROMPT_TOKENS = _as_vllm(
    Histogram, "request_prompt_tokens", "Prompt tokens of a request that was admitted, when it leaves.", BY, TOKENS
)
REQUEST_GENERATION_TOKENS = _as_vllm(
    Histogram,
    "request_generation_tokens",
    "Tokens generated for a request that was admitted, when it leaves.",
    BY,
    TOKENS,
)
TIME_PER_TOKEN = _as_vllm(
    Histogram, "request_time_per_output_token_seconds", "Time between two tokens, the mean of a request.", BY, PER_TOKEN
)

# ---------------------------------------------------------------- the engine
RUNNING = _as_vllm(Gauge, "num_requests_running", "Requests with a seat.", BY)
WAITING = _as_vllm(
    Gauge,
    "num_requests_waiting",
    "Requests without a seat, by what they wait for: a seat, memory, the prompt that a sibling computes, their turn.",
    (STRATEGY, WAIT),
)
PREEMPTIONS = _as_vllm(Counter, "num_preemptions", "Seats taken to make room.", BY)
FAILURES = MetricFamily(Counter, "strategy_failures", "Exceptions in a strategy's code.", BY)
FORKS = MetricFamily(
    Counter, "forks", "Choices that took over the prompt of the first of `n`; they look nothing up.", BY
)
DRAFTS = _as_vllm(
    Counter, "spec_decode_num_drafts", "Drafts, guesses at a request's next tokens, that were verified.", BY
)
DRAFT_TOKENS = _as_vllm(Counter, "spec_decode_num_draft_tokens", "Tokens of these drafts.", BY)
ACCEPTED_TOKENS = _as_vllm(
    Counter, "spec_decode_num_accepted_tokens", "Tokens of drafts that came true: each saves a step of its request.", BY
)
ACCEPTED_PER_POSITION = _as_vllm(
    Counter,
    "spec_decode_num_accepted_tokens_per_pos",
    "Tokens of drafts that came true, by their position in the draft, from 0.",
    (STRATEGY, POSITION),
)
STEPS = MetricFamily(Counter, "steps", "Forward passes; a step serves all strategies.")
STEP_SECONDS = MetricFamily(
    Histogram, "step_seconds", "Time of a step: scheduling, a forward pass, sampling.", (), PER_TOKEN
)
STEP_ROWS = MetricFamily(Histogram, "step_rows", "Sequences in a step.", (), POWERS)
STEP_TOKENS = MetricFamily(Histogram, "step_tokens", "Tokens in a step.", (), POWERS, vllm="iteration_tokens_total")
KERNEL_SECONDS = MetricFamily(
    Summary,
    "kernel_seconds",
    "Time of an operation in a step, all calls together; measured in one step of 61, by what the step's rows do.",
    (OP, BACKEND, PHASE),
)
TIMED_STEP_SECONDS = MetricFamily(
    Summary,
    "timed_step_seconds",
    "Time of the steps in which kernel_seconds is measured; what no operation took is Python and small tensors.",
    (PHASE,),
)
KERNEL_FALLBACK = MetricFamily(
    Gauge, "kernel_fallback", "1: the operation failed its check at start, and plain torch computes it.", (OP,)
)

ENGINE_RESTARTS = MetricFamily(Counter, "engine_restarts", "Engines that were started because the one before had died.")
RESPONSES = MetricFamily(
    Counter,
    "http_responses",
    "HTTP responses by status, as API processes tell within a second; 499: the client left before there was one.",
    (CODE,),
)
BUILD = MetricFamily(Info, "build", "Versions of what runs.")
SETTINGS = MetricFamily(
    Info, "settings", "Settings that hold, `auto` and defaults filled in; GET /v1/settings has them all."
)
STRATEGIES = MetricFamily(Info, "strategy", "Kind and options of a strategy.", BY)

# ---------------------------------------------------------------- memory
KV_BYTES = MetricFamily(
    Gauge,
    "kv_cache_bytes",
    "KV memory reserved: used, idle (kept for whoever comes again), wasted (held and empty).",
    (STRATEGY, KV_STATE),
)
KV_LIMIT = MetricFamily(Gauge, "kv_cache_limit_bytes", "KV memory that a strategy may hold.", BY)
KV_FLOOR = MetricFamily(Gauge, "kv_cache_floor_bytes", "KV memory that nobody but the strategy may take.", BY)
KV_POOL = MetricFamily(
    Gauge,
    "kv_cache_pool_bytes",
    "KV memory of the server: held by some strategy, free, or untouched: for a while after the start, not there yet.",
    (POOL_STATE,),
)
KV_BLOCKS = MetricFamily(
    Gauge,
    "kv_cache_blocks",
    "Blocks: in_use by sequences that run (of these shared by several, pending: promised by one that computes them), "
    "pinned, idle.",
    (STRATEGY, BLOCK_STATE),
)
KV_COPIES = MetricFamily(
    Counter, "kv_cache_copied_blocks", "Blocks copied because somebody wrote into a shared one (copy on write).", BY
)
KV_USAGE = MetricFamily(
    Gauge, "kv_cache_usage_ratio", "KV memory used, as a share of the limit, 0 to 1.", BY, vllm="kv_cache_usage_perc"
)
KV_EVICTED = MetricFamily(Counter, "kv_cache_evicted_bytes", "Idle KV memory that had to make room.", BY)
BLOCK_LIFETIME = _as_vllm(
    Histogram, "kv_block_lifetime_seconds", "Of an evicted block: time since it was given its text.", BY, BLOCK_AGE
)
BLOCK_IDLE = _as_vllm(
    Histogram, "kv_block_idle_before_evict_seconds", "Of an evicted block: time since its last use.", BY, BLOCK_AGE
)
BLOCK_REUSE_GAP = _as_vllm(
    Histogram,
    "kv_block_reuse_gap_seconds",
    "Of an idle block that was found: time since its last use.",
    BY,
    BLOCK_AGE,
)
PROCESS_MEMORY = MetricFamily(
    Gauge,
    "process_resident_memory_bytes",
    "Resident memory of the server's processes; what they share counts in each.",
    (ROLE,),
)
DEVICE_MEMORY = MetricFamily(
    Gauge,
    "device_memory_bytes",
    "Memory of the device, whoever uses it; of a CPU, the machine's or its container's.",
    (DEVICE_STATE,),
)

FAMILIES: tuple[MetricFamily[Any], ...] = tuple(
    family for family in list(globals().values()) if isinstance(family, MetricFamily)
)


def table() -> str:
    """Return the table of all metrics in Markdown, with the names that vLLM has for them."""
    lines = ["| name | type | | vLLM's |", "|---|---|---|---|"]
    for family in FAMILIES:
        labels = "{" + ", ".join(label.name for label in family.labels) + "}" if family.labels else ""
        kind, theirs = family.kind.__name__.lower(), f"`{family.vllm}`" if family.vllm else ""
        lines.append(f"| `{family.exposed}{labels}` | {kind} | {family.help} | {theirs} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
