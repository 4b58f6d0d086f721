"""The dashboards as tables of panels. A panel maps legends to queries, in PromQL (`promql.py`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import Histogram

from server.metrics import families as f
from server.metrics.metric_family import Label, MetricFamily
from tools.dashboards.panels import Graph, InfoTable, Rows, Stat, build_dashboard
from tools.dashboards.promql import make_legend, max_by, mean, product, quantile, rate, ratio, ratio_to_all, sum_by

# ---------------------------------------------------------------- Grafana's units
SECONDS, BYTES, SHARE, NUMBER = "s", "bytes", "percentunit", "short"
BYTES_A_SECOND, REQUESTS_A_SECOND, TOKENS_A_SECOND, TIMES_A_SECOND = "Bps", "reqps", "si:tok/s", "ops"

STRATEGY = make_legend(f.STRATEGY)
FAILED, WASTED, IDLE = {f.OUTCOME: "error"}, {f.KV_STATE: "wasted"}, {f.KV_STATE: "idle"}
median, p95, p99 = (partial(quantile, share) for share in (0.5, 0.95, 0.99))


def each(query: Callable[..., str], family: MetricFamily[Any], *labels: Label, **more: Any) -> dict[str, str]:
    """Return a query that has a line for each value of the labels."""
    return {make_legend(*labels): query(family, *labels, **more)}


def by_strategy(query: Callable[..., str], family: MetricFamily[Any], **more: Any) -> dict[str, str]:
    """Return a query that has a line for each strategy."""
    return each(query, family, f.STRATEGY, **more)


def percentiles(family: MetricFamily[Histogram]) -> dict[str, str]:
    """Return the queries of three percentiles of a histogram."""
    return {"p50": median(family), "p95": p95(family), "p99": p99(family)}


def hit_rate(*by: Label) -> str:
    """Return the query for the prefix cache hit rate: hits / queries, in tokens, by the labels `by`."""
    return ratio(rate(f.PREFIX_HITS, *by), rate(f.PREFIX_QUERIES, *by))


OVERVIEW: Rows = {
    "Now": [
        Stat("Requests", REQUESTS_A_SECOND, rate(f.REQUESTS)),
        Stat("Generated tokens", TOKENS_A_SECOND, rate(f.GENERATION_TOKENS)),
        Stat("TTFT, p95", SECONDS, p95(f.FIRST_TOKEN_TIME)),
        Stat("Running requests", NUMBER, sum_by(f.RUNNING)),
        Stat("Waiting requests", NUMBER, sum_by(f.WAITING)),
        Stat("Prefix hit rate", SHARE, hit_rate()),
        Stat("Max KV usage", SHARE, max_by(f.KV_USAGE), red_from=0.95),
        Stat("Error rate", SHARE, ratio(rate(f.REQUESTS, where=FAILED), rate(f.REQUESTS)), red_from=0.01),
    ],
    "Traffic": [
        Graph("Finished requests by outcome", REQUESTS_A_SECOND, each(rate, f.REQUESTS, f.OUTCOME), stacked=True),
        Graph(
            "Tokens",
            TOKENS_A_SECOND,
            {
                "generated": rate(f.GENERATION_TOKENS),
                "prompt": rate(f.PROMPT_TOKENS),
                "prompt, cached": rate(f.CACHED_TOKENS),
            },
        ),
        Graph(
            "Running and waiting requests",
            NUMBER,
            {
                "running": sum_by(f.RUNNING),
                f"waiting: {make_legend(f.WAIT_REASON)}": sum_by(f.WAITING, f.WAIT_REASON),
            },
            stacked=True,
        ),
    ],
    "Latency": [
        Graph("Time to first token", SECONDS, percentiles(f.FIRST_TOKEN_TIME)),
        Graph("Inter-token latency", SECONDS, percentiles(f.INTER_TOKEN_LATENCY)),
        Graph("End-to-end latency", SECONDS, percentiles(f.E2E_LATENCY)),
    ],
    "Cache and errors": [
        Graph("Prefix cache hit rate", SHARE, {"all": hit_rate()}, width=6),
        Graph("KV cache usage, share of the limit", SHARE, by_strategy(max_by, f.KV_USAGE), width=6),
        Graph(
            "HTTP responses by status",
            REQUESTS_A_SECOND,
            {make_legend(f.CODE): f"{rate(f.RESPONSES, f.CODE)} > 0"},
            stacked=True,
            width=6,
        ),
        Graph(
            "Errors",
            REQUESTS_A_SECOND,
            {"failed requests": rate(f.REQUESTS, where=FAILED), "faults of strategies": rate(f.FAILURES)},
            width=6,
        ),
    ],
}

ACCEPTED, DRAFTS = rate(f.ACCEPTED_TOKENS, f.STRATEGY), rate(f.DRAFTS, f.STRATEGY)
COMPACTING = rate(f.KV_COMPACTION_SECONDS, f.STRATEGY, part="_sum")
STRATEGIES: Rows = {
    "Latency": [
        Graph("Time to first token, p95", SECONDS, by_strategy(p95, f.FIRST_TOKEN_TIME), width=6),
        Graph("Inter-token latency, p95", SECONDS, by_strategy(p95, f.INTER_TOKEN_LATENCY), width=6),
        Graph("Time per output token, mean", SECONDS, by_strategy(mean, f.TIME_PER_TOKEN), width=6),
        Graph("End-to-end latency, p95", SECONDS, by_strategy(p95, f.E2E_LATENCY), width=6),
        Graph("Queue time, p95", SECONDS, by_strategy(p95, f.QUEUE_TIME)),
        Graph("Prefill time, p95", SECONDS, by_strategy(p95, f.PREFILL_TIME)),
        Graph("Decode time, p95", SECONDS, by_strategy(p95, f.DECODE_TIME)),
    ],
    "Throughput": [
        Graph("Requests", REQUESTS_A_SECOND, by_strategy(rate, f.REQUESTS), width=6),
        Graph("Forked sequences (n > 1)", REQUESTS_A_SECOND, by_strategy(rate, f.FORKS), width=6),
        Graph("Generated tokens", TOKENS_A_SECOND, by_strategy(rate, f.GENERATION_TOKENS), width=6),
        Graph("Prompt tokens", TOKENS_A_SECOND, by_strategy(rate, f.PROMPT_TOKENS), width=6),
        Graph("Running requests", NUMBER, by_strategy(sum_by, f.RUNNING), width=6),
        Graph("Waiting requests", NUMBER, by_strategy(sum_by, f.WAITING), width=6),
        Graph("Prompt tokens per request, mean", NUMBER, by_strategy(mean, f.REQUEST_PROMPT_TOKENS), width=6),
        Graph("Generated tokens per request, mean", NUMBER, by_strategy(mean, f.REQUEST_GENERATION_TOKENS), width=6),
    ],
    "Cache and memory": [
        Graph("Prefix cache hit rate", SHARE, {STRATEGY: hit_rate(f.STRATEGY)}),
        Graph("KV memory in use", BYTES, by_strategy(sum_by, f.KV_BYTES, where={f.KV_STATE: "used"})),
        Graph("KV cache usage, share of the limit", SHARE, by_strategy(max_by, f.KV_USAGE)),
        Graph("Kept and dropped tokens", NUMBER, each(sum_by, f.KV_TOKENS, f.STRATEGY, f.KV_TOKEN_STATE), width=12),
        Graph("Dropped tokens of requests that left", TOKENS_A_SECOND, by_strategy(rate, f.KV_DROPPED), width=12),
    ],
    "Budgets and compactions": [
        Graph(
            "Kept tokens, and the budgets of running sequences",
            NUMBER,
            {
                f"{STRATEGY} kept": sum_by(f.KV_TOKENS, f.STRATEGY, where={f.KV_TOKEN_STATE: "kept"}),
                f"{STRATEGY} budgets": product(sum_by(f.RUNNING, f.STRATEGY), max_by(f.KV_BUDGET, f.STRATEGY)),
            },
            note="A budget is that of a text of max_seq_len tokens. Until the next compaction more are kept.",
            width=12,
        ),
        Graph(
            "Time of a compaction, p50 and p99",
            SECONDS,
            {
                f"{STRATEGY} p50": median(f.KV_COMPACTION_SECONDS, f.STRATEGY),
                f"{STRATEGY} p99": p99(f.KV_COMPACTION_SECONDS, f.STRATEGY),
            },
            width=12,
        ),
        Graph("Compactions", TIMES_A_SECOND, by_strategy(rate, f.KV_COMPACTIONS)),
        Graph("Tokens dropped by compactions", TOKENS_A_SECOND, by_strategy(rate, f.KV_COMPACTED)),
        Graph(
            "Share of the steps' time that compactions take",
            SHARE,
            {STRATEGY: ratio_to_all(COMPACTING, rate(f.STEP_SECONDS, part="_sum"))},
        ),
    ],
    "Speculative decoding": [
        Graph("Accepted tokens per draft, mean", NUMBER, {STRATEGY: ratio(ACCEPTED, DRAFTS)}, width=6),
        Graph(
            "Acceptance rate of draft tokens",
            SHARE,
            {STRATEGY: ratio(ACCEPTED, rate(f.DRAFT_TOKENS, f.STRATEGY))},
            width=6,
        ),
        Graph("Draft tokens", TOKENS_A_SECOND, by_strategy(rate, f.DRAFT_TOKENS), width=6),
        Graph(
            "Acceptance rate by position",
            SHARE,
            {make_legend(f.POSITION): ratio_to_all(rate(f.ACCEPTED_PER_POSITION, f.POSITION), rate(f.DRAFTS))},
            width=6,
        ),
    ],
    "Preemptions and errors": [
        Graph("Preemptions", TIMES_A_SECOND, by_strategy(rate, f.PREEMPTIONS), width=6),
        Graph("Faults of strategies", TIMES_A_SECOND, by_strategy(rate, f.FAILURES), width=6),
        Graph(
            "In quarantine or disabled after faults",
            NUMBER,
            {
                f"{STRATEGY} in quarantine": max_by(f.QUARANTINED, f.STRATEGY),
                f"{STRATEGY} disabled": max_by(f.DISABLED, f.STRATEGY),
            },
            width=6,
        ),
        Graph("Failed requests", REQUESTS_A_SECOND, by_strategy(rate, f.REQUESTS, where=FAILED), width=6),
        Graph(
            "Requests that fallbacks served",
            REQUESTS_A_SECOND,
            each(rate, f.FALLBACK_REQUESTS, f.STRATEGY, f.FALLBACK),
            width=6,
        ),
    ],
    "Instances": [InfoTable("Strategy instances", f.STRATEGIES, width=24, height=5)],
}

MISS_REASONS = (
    "cold: not cached before; short: less than a block; evicted: cached before, but evicted; "
    "window: the strategy's window cannot be reused; busy: in use, and the strategy does not share; "
    "salt: cached only with another salt; bypass: not looked up, by setting or request."
)
WASTED_SHARE = ratio(sum_by(f.KV_BYTES, f.STRATEGY, where=WASTED), sum_by(f.KV_BYTES, f.STRATEGY))
MEMORY: Rows = {
    "Prefix cache": [
        Graph("Prefix cache hit rate", SHARE, {STRATEGY: hit_rate(f.STRATEGY)}),
        Graph(
            "Prefix cache queries and hits",
            TOKENS_A_SECOND,
            {"queries": rate(f.PREFIX_QUERIES), "hits": rate(f.PREFIX_HITS)},
        ),
        Graph(
            "Prefix cache misses by reason",
            TOKENS_A_SECOND,
            each(rate, f.PREFIX_MISSES, f.MISS_REASON),
            stacked=True,
            note=MISS_REASONS,
        ),
    ],
    "KV memory": [
        Graph("KV memory of the device", BYTES, each(sum_by, f.KV_POOL, f.POOL_STATE), stacked=True),
        Graph("KV memory by strategy", BYTES, by_strategy(sum_by, f.KV_BYTES), stacked=True),
        Graph("KV memory by state", BYTES, each(sum_by, f.KV_BYTES, f.KV_STATE), stacked=True),
        Graph("KV cache usage, share of the limit", SHARE, by_strategy(max_by, f.KV_USAGE)),
        Graph("Wasted share of KV memory", SHARE, {STRATEGY: WASTED_SHARE}),
        Graph("Idle KV memory", BYTES, by_strategy(sum_by, f.KV_BYTES, where=IDLE)),
        Graph(
            "Memory limits and floors",
            BYTES,
            {
                f"{STRATEGY} limit": sum_by(f.KV_LIMIT, f.STRATEGY),
                f"{STRATEGY} floor": sum_by(f.KV_FLOOR, f.STRATEGY),
            },
        ),
        Graph("Blocks by state", NUMBER, each(sum_by, f.KV_BLOCKS, f.BLOCK_STATE)),
        Graph("Copy-on-write", TIMES_A_SECOND, by_strategy(rate, f.KV_COPIES)),
    ],
    "Eviction": [
        Graph("Evicted bytes", BYTES_A_SECOND, by_strategy(rate, f.KV_EVICTED), width=6),
        Graph("Lifetime of evicted blocks, median", SECONDS, by_strategy(median, f.BLOCK_LIFETIME), width=6),
        Graph("Idle time before eviction, median", SECONDS, by_strategy(median, f.BLOCK_IDLE), width=6),
        Graph("Idle time before reuse, median", SECONDS, by_strategy(median, f.BLOCK_REUSE_GAP), width=6),
    ],
    "Recurrent states": [
        Graph("Checkpoints", BYTES, by_strategy(sum_by, f.CHECKPOINT_BYTES)),
        Graph("Tokens computed again", TOKENS_A_SECOND, by_strategy(rate, f.RECOMPUTED_TOKENS)),
    ],
}

TIMED, IN_KERNELS = rate(f.TIMED_STEP_SECONDS, part="_count"), rate(f.KERNEL_SECONDS, part="_sum")
BY_OPERATION = ratio_to_all(rate(f.KERNEL_SECONDS, f.OP, part="_sum"), TIMED)
OTHER = ratio(f"({rate(f.TIMED_STEP_SECONDS, part='_sum')} - {IN_KERNELS})", TIMED)
ENGINE: Rows = {
    "Steps": [
        Graph("Steps", TIMES_A_SECOND, {"steps": rate(f.STEPS)}),
        Graph(
            "Step time",
            SECONDS,
            {"mean": mean(f.STEP_SECONDS), "p50": median(f.STEP_SECONDS), "p95": p95(f.STEP_SECONDS)},
        ),
        Graph(
            "Batch size of a step, mean",
            NUMBER,
            {"sequences": mean(f.STEP_ROWS), "tokens": mean(f.STEP_TOKENS)},
        ),
    ],
    "Kernels (sampled steps)": [
        Graph(
            "Step time by operation",
            SECONDS,
            {make_legend(f.OP): f"{BY_OPERATION} > 0", "other": OTHER},
            stacked=True,
            width=12,
        ),
        Graph("Step time by phase", SECONDS, each(mean, f.TIMED_STEP_SECONDS, f.PHASE), width=6),
        Stat(
            "Fallback operations",
            NUMBER,
            f"{max_by(f.KERNEL_FALLBACK, f.OP)} > 0",
            legend=make_legend(f.OP),
            red_from=1,
            no_value="none",
            width=6,
        ),
    ],
    "Structured output": [
        Graph(
            "Constrained requests",
            REQUESTS_A_SECOND,
            each(rate, f.CONSTRAINED_REQUESTS, f.CONSTRAINT),
            stacked=True,
            width=6,
        ),
        Graph(
            "Refused constraints",
            REQUESTS_A_SECOND,
            each(rate, f.REFUSED_CONSTRAINTS, f.CONSTRAINT_REFUSAL),
            stacked=True,
            width=6,
        ),
        Graph(
            "Time of grammars",
            SECONDS,
            {
                "in a step, mean": mean(f.GRAMMAR_STEP_SECONDS),
                "in a step, p95": p95(f.GRAMMAR_STEP_SECONDS),
                "to compile one, mean": mean(f.GRAMMAR_COMPILE_SECONDS),
                "to compile one, p95": p95(f.GRAMMAR_COMPILE_SECONDS),
            },
            width=6,
        ),
        Graph(
            "Grammars compiled before",
            SHARE,
            {"hit rate": ratio(rate(f.GRAMMAR_HITS), rate(f.GRAMMAR_LOOKUPS))},
            width=6,
        ),
    ],
    "Processes and device": [
        Graph("Process memory", BYTES, each(sum_by, f.PROCESS_MEMORY, f.ROLE), stacked=True, width=9),
        Graph("Device memory", BYTES, each(sum_by, f.DEVICE_MEMORY, f.DEVICE_STATE), stacked=True, width=9),
        Stat("Engine restarts", NUMBER, sum_by(f.ENGINE_RESTARTS), red_from=1, width=6),
    ],
    "Build and settings": [
        InfoTable("Build", f.BUILD, height=9),
        InfoTable("Settings", f.SETTINGS, height=9),
    ],
}

AGREED = ratio(rate(f.SHADOW_AGREED, *f.BY_PAIR), rate(f.SHADOW_TOKENS, *f.BY_PAIR))
FIDELITY: Rows = {
    "Fidelity": [
        Graph("KL divergence per token, mean (nats)", NUMBER, each(mean, f.SHADOW_KL, *f.BY_PAIR)),
        Graph("KL divergence per token, 99th percentile (nats)", NUMBER, each(p99, f.SHADOW_KL, *f.BY_PAIR)),
        Graph("Tokens with the same likeliest token", SHARE, {make_legend(*f.BY_PAIR): AGREED}),
        Graph("The same, since the engine's start", SHARE, each(max_by, f.SHADOW_TOP1, *f.BY_PAIR)),
        Graph("Compared tokens", TOKENS_A_SECOND, each(rate, f.SHADOW_TOKENS, *f.BY_PAIR)),
        Graph("Tokens computed for shadows", TOKENS_A_SECOND, by_strategy(rate, f.SHADOW_COMPUTED)),
        Graph(
            "Compared requests by result",
            REQUESTS_A_SECOND,
            each(rate, f.SHADOW_REQUESTS, f.SHADOW_RESULT),
            stacked=True,
        ),
    ],
    "Roll-outs": [
        Graph("Requests served by the candidate", SHARE, each(max_by, f.ROLLOUT_SHARE, f.ROLLOUT)),
        Graph("State", NUMBER, each(max_by, f.ROLLOUT_CURRENT, f.ROLLOUT, f.ROLLOUT_STATE)),
        Graph("Roll-backs", TIMES_A_SECOND, each(rate, f.ROLLBACKS, f.ROLLOUT)),
    ],
}


def build_dashboards() -> list[Dashboard]:
    return [
        build_dashboard(
            "overview", "overview", "Requests, tokens, latency and memory of all strategies together.", OVERVIEW
        ),
        build_dashboard(
            "strategies",
            "strategies",
            "Strategy instances compared: latency, throughput, hit rate, memory, budgets, speculative decoding "
            "and errors.",
            STRATEGIES,
        ),
        build_dashboard(
            "memory",
            "memory and hit rate",
            "Prefix cache hits and misses, KV memory by strategy and state, and evictions.",
            MEMORY,
        ),
        build_dashboard(
            "engine",
            "kernels and engine",
            "Engine steps, the time of each kernel operation, memory of processes and devices.",
            ENGINE,
        ),
        build_dashboard(
            "fidelity",
            "fidelity and roll-outs",
            "How far candidate instances are from those that serve, token by token, and the stages of roll-outs.",
            FIDELITY,
        ),
    ]
