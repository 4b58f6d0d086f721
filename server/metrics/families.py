"""Every metric as a row of one table: its name, kind and labels, and vLLM's name for it.

The registry, docs/reference/metrics.md and the tests go through FAMILIES, so that a new metric needs only a row. Names
are vLLM's with our prefix, so that dashboards can be compared. A label has a fixed set of values, to which no
client can add.

`python -m server.metrics.families` prints the table of docs/reference/metrics.md.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, get_args

from prometheus_client import Counter, Gauge, Histogram, Info, Summary

from cache_strategies.types import Blocks, Miss
from config.settings import MAX_DRAFT_TOKENS
from server.metrics.metric_family import Buckets, Label, MetricFamily, format_table, make_vllm_family
from server.records import ConstraintName, ConstraintRefusal, DeviceMemory, KVTokens, Outcome, Phase, Role, WaitReason

# ---------------------------------------------------------------- labels
STRATEGY = Label("strategy")  # a strategy instance
FALLBACK = Label("fallback")  # a strategy instance that serves requests in place of `strategy`
OUTCOME = Label("outcome", get_args(Outcome))
MISS_REASON = Label("reason", get_args(Miss))
WAIT_REASON = Label("reason", get_args(WaitReason))
KV_STATE = Label("state", ("used", "idle", "wasted"))
KV_TOKEN_STATE = Label("state", KVTokens._fields)
POOL_STATE = Label("state", ("held", "warm", "cold"))
DEVICE_STATE = Label("state", DeviceMemory._fields)
BLOCK_STATE = Label("state", Blocks._fields)
OP = Label("op")  # name of an operation in `kernels.ops.Ops`
BACKEND = Label("backend")  # backend that computes the operation
PHASE = Label("phase", get_args(Phase))
ROLE = Label("role", get_args(Role))
SERVED, CANDIDATE = Label("served"), Label("candidate")  # strategy instances whose logits were compared
SHADOW_RESULT = Label("result", ("complete", "room", "failed"))  # how a comparison ended
ROLLOUT = Label("rollout")  # name of a roll-out
ROLLOUT_STATE = Label("state", ("shadow", "canary", "paused", "complete", "rolled_back", "aborted"))
STATUSES = (200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 431, 499, 500, 503, 504)
OTHER = "other"
CODE = Label("code", (*map(str, STATUSES), OTHER))
POSITION = Label("position", tuple(map(str, range(MAX_DRAFT_TOKENS))))  # index of a token in its draft
CONSTRAINT = Label("kind", get_args(ConstraintName))  # what constrains a text
CONSTRAINT_REFUSAL = Label("reason", get_args(ConstraintRefusal))
BY_STRATEGY = (STRATEGY,)
BY_PAIR = (SERVED, CANDIDATE)

# ---------------------------------------------------------------- kinds
counter, gauge, info = partial(MetricFamily, Counter), partial(MetricFamily, Gauge), partial(MetricFamily, Info)
histogram, summary = partial(MetricFamily, Histogram), partial(MetricFamily, Summary)
vllm_counter, vllm_gauge = partial(make_vllm_family, Counter), partial(make_vllm_family, Gauge)
vllm_histogram = partial(make_vllm_family, Histogram)

# ---------------------------------------------------------------- buckets
# The upper bounds of the buckets of histograms: vLLM's where it has the metric, and finer ones below them.
# fmt: off
FIRST_TOKEN: Buckets = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
PER_TOKEN: Buckets = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
LATENCY: Buckets = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
    7680,
)
BLOCK_AGE: Buckets = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
)
COMPACTION: Buckets = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
TOKEN_COUNT: Buckets = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
)
GRAMMAR_STEP: Buckets = (
    1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1,
)
GRAMMAR_COMPILE: Buckets = (
    1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10,
)
KL: Buckets = (
    1e-6, 1e-5, 3e-5, 1e-4, 3e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10,
)
# fmt: on
POWER_OF_TWO = tuple(2**n for n in range(15))

# ---------------------------------------------------------------- requests
REQUESTS = counter(
    "requests",
    "Requests that left the engine, by how they ended; error: their strategy or the model failed, or they timed out.",
    (STRATEGY, OUTCOME),
    vllm_name="request_success_total",
)
PROMPT_TOKENS = vllm_counter("prompt_tokens", "Prompt tokens of requests that were admitted.", BY_STRATEGY)
CACHED_TOKENS = vllm_counter(
    "prompt_tokens_cached",
    "Prompt tokens that were not computed: found in the cache, or taken over from another choice.",
    BY_STRATEGY,
)
GENERATION_TOKENS = vllm_counter("generation_tokens", "Tokens generated.", BY_STRATEGY)
PREFIX_QUERIES = vllm_counter(
    "prefix_cache_queries", "Prompt tokens looked up in the cache, once a request.", BY_STRATEGY
)
PREFIX_HITS = vllm_counter("prefix_cache_hits", "Prompt tokens found in the cache.", BY_STRATEGY)
PREFIX_MISSES = counter(
    "prefix_cache_misses", "Prompt tokens not found in the cache, by reason.", (STRATEGY, MISS_REASON)
)
RECOMPUTED_TOKENS = counter(
    "recomputed_tokens",
    "Prompt tokens that were cached and computed again, from the last checkpoint of recurrent states on.",
    BY_STRATEGY,
)
E2E_LATENCY = vllm_histogram(
    "e2e_request_latency_seconds", "Time from a request's arrival to its end.", BY_STRATEGY, LATENCY
)
QUEUE_TIME = vllm_histogram(
    "request_queue_time_seconds", "Time from a request's arrival to its seat.", BY_STRATEGY, LATENCY
)
PREFILL_TIME = vllm_histogram(
    "request_prefill_time_seconds", "Time from a request's seat to its first token.", BY_STRATEGY, LATENCY
)
DECODE_TIME = vllm_histogram(
    "request_decode_time_seconds", "Time from a request's first token to its last.", BY_STRATEGY, LATENCY
)
FIRST_TOKEN_TIME = vllm_histogram(
    "time_to_first_token_seconds", "Time from a request's arrival to its first token.", BY_STRATEGY, FIRST_TOKEN
)
INTER_TOKEN_LATENCY = vllm_histogram(
    "inter_token_latency_seconds", "Time between two tokens of a request.", BY_STRATEGY, PER_TOKEN
)
REQUEST_PROMPT_TOKENS = vllm_histogram(
    "request_prompt_tokens", "Prompt tokens of a request that was admitted, when it leaves.", BY_STRATEGY, TOKEN_COUNT
)
REQUEST_GENERATION_TOKENS = vllm_histogram(
    "request_generation_tokens",
    "Tokens generated for a request that was admitted, when it leaves.",
    BY_STRATEGY,
    TOKEN_COUNT,
)
TIME_PER_TOKEN = vllm_histogram(
    "request_time_per_output_token_seconds", "Time between two tokens, the mean of a request.", BY_STRATEGY, PER_TOKEN
)

# ---------------------------------------------------------------- the engine
RUNNING = vllm_gauge("num_requests_running", "Requests with a seat.", BY_STRATEGY)
WAITING = vllm_gauge(
    "num_requests_waiting",
    "Requests without a seat, by what they wait for: a seat, memory, the prompt that a sibling computes, their turn.",
    (STRATEGY, WAIT_REASON),
)
PREEMPTIONS = vllm_counter("num_preemptions", "Seats taken to make room.", BY_STRATEGY)
FAILURES = counter(
    "strategy_failures", "Faults of a strategy: exceptions, wrong results, calls left undone.", BY_STRATEGY
)
QUARANTINED = gauge(
    "strategy_quarantined", "1 while a strategy gets no requests after repeated faults, else 0.", BY_STRATEGY
)
DISABLED = gauge(
    "strategy_disabled",
    "1 from when a call of a strategy did not return until the server is started again, else 0.",
    BY_STRATEGY,
)
FALLBACK_REQUESTS = counter(
    "fallback_requests",
    "Requests for which a strategy was chosen and which its fallback served, when they leave.",
    (STRATEGY, FALLBACK),
)
FORKS = counter(
    "forks",
    "Choices (`n` > 1) that share the prompt of the first one, and are not looked up in the cache.",
    BY_STRATEGY,
)
DRAFTS = vllm_counter("spec_decode_num_drafts", "Drafts of a request's next tokens that were verified.", BY_STRATEGY)
DRAFT_TOKENS = vllm_counter("spec_decode_num_draft_tokens", "Tokens of these drafts.", BY_STRATEGY)
ACCEPTED_TOKENS = vllm_counter(
    "spec_decode_num_accepted_tokens", "Draft tokens that were accepted: each saves a step of its request.", BY_STRATEGY
)
ACCEPTED_PER_POSITION = vllm_counter(
    "spec_decode_num_accepted_tokens_per_pos",
    "Draft tokens that were accepted, by their position in the draft, from 0.",
    (STRATEGY, POSITION),
)
STEPS = counter("steps", "Forward passes; a step serves all strategies.")
STEP_SECONDS = histogram("step_seconds", "Time of a step: scheduling, a forward pass, sampling.", (), PER_TOKEN)
STEP_ROWS = histogram("step_rows", "Sequences in a step.", (), POWER_OF_TWO)
STEP_TOKENS = histogram("step_tokens", "Tokens in a step.", (), POWER_OF_TWO, vllm_name="iteration_tokens_total")
KERNEL_SECONDS = summary(
    "kernel_seconds",
    "Time of an operation in a step, all calls together, by phase of the step; measured in one step of 61.",
    (OP, BACKEND, PHASE),
)
TIMED_STEP_SECONDS = summary(
    "timed_step_seconds",
    "Time of the steps in which kernel_seconds is measured; what operations do not take is Python and small tensors.",
    (PHASE,),
)
KERNEL_FALLBACK = gauge(
    "kernel_fallback", "1: the operation failed its check at start, and plain torch computes it.", (OP,)
)

# ---------------------------------------------------------------- structured output
CONSTRAINED_REQUESTS = counter(
    "constrained_requests", "HTTP requests whose texts are constrained, by what does so.", (CONSTRAINT,)
)
REFUSED_CONSTRAINTS = counter(
    "constraint_refusals",
    "Requests that ended because of their constraint: invalid (or not supported), too large, its check took too "
    "long or too much memory, crashed or was impossible at the moment; failed: while the text was written.",
    (CONSTRAINT_REFUSAL,),
)
GRAMMAR_COMPILE_SECONDS = histogram(
    "grammar_compile_seconds",
    "Time in which the engine compiled a grammar, beside its steps; of the first one with the table of all tokens.",
    (),
    GRAMMAR_COMPILE,
)
GRAMMAR_LOOKUPS = counter(
    "grammar_cache_queries", "Requests (each choice of n) that got a compiled grammar from the engine's cache."
)
GRAMMAR_HITS = counter(
    "grammar_cache_hits", "Requests among these whose grammar had been compiled for another request."
)
GRAMMAR_STEP_SECONDS = histogram(
    "grammar_step_seconds",
    "CPU time of all grammars of a step together: masks, and following tokens and drafts; only steps that have some.",
    (),
    GRAMMAR_STEP,
)

# ---------------------------------------------------------------- the server
ENGINE_RESTARTS = counter("engine_restarts", "Engines that were started because the one before had died.")
RESPONSES = counter(
    "http_responses",
    "HTTP responses by status, as API processes report within a second; 499: the client left before there was one.",
    (CODE,),
)
BUILD = info("build", "Versions of the server and of the libraries it runs on.")
SETTINGS = info("settings", "Settings in effect, `auto` and defaults resolved; GET /v1/settings has all of them.")
STRATEGIES = info("strategy", "Kind and options of a strategy.", BY_STRATEGY)

# ---------------------------------------------------------------- memory
KV_BYTES = gauge(
    "kv_cache_bytes",
    "KV memory reserved: used, idle (cached, in no running sequence), wasted (held and empty).",
    (STRATEGY, KV_STATE),
)
KV_TOKENS = gauge(
    "kv_cache_tokens",
    "Tokens of running sequences: dropped, if the model would use their keys for the next token and the strategy has "
    "given them up (the mean over all KV heads), else kept.",
    (STRATEGY, KV_TOKEN_STATE),
)
KV_DROPPED = counter(
    "kv_cache_dropped_tokens",
    "Tokens whose keys had been dropped when their request left; of requests without an error.",
    BY_STRATEGY,
)
KV_BUDGET = gauge(
    "kv_cache_budget_tokens",
    "Tokens that a strategy keeps of a text of max_seq_len tokens; without a budget, all of them.",
    BY_STRATEGY,
)
KV_COMPACTIONS = counter(
    "kv_cache_compactions", "Compactions: a strategy dropped keys of one sequence after a step.", BY_STRATEGY
)
KV_COMPACTION_SECONDS = histogram(
    "kv_cache_compaction_seconds", "Time of a compaction, within a step.", BY_STRATEGY, COMPACTION
)
KV_COMPACTED = counter(
    "kv_cache_compacted_tokens",
    "Tokens that compactions dropped (the mean over all KV heads); again if a sequence is computed again.",
    BY_STRATEGY,
)
KV_LIMIT = gauge("kv_cache_limit_bytes", "KV memory that a strategy may hold.", BY_STRATEGY)
KV_FLOOR = gauge("kv_cache_floor_bytes", "KV memory that no other strategy may take.", BY_STRATEGY)
KV_POOL = gauge(
    "kv_cache_pool_bytes",
    "KV memory of the server: held by a strategy; warm: free, and provided by the system already; cold: free, and "
    "taken from the system when it is needed.",
    (POOL_STATE,),
)
KV_BLOCKS = gauge(
    "kv_cache_blocks",
    "Blocks: in_use by sequences that run (of these shared by several, pending: promised by one that computes them), "
    "pinned, idle.",
    (STRATEGY, BLOCK_STATE),
)
KV_COPIES = counter(
    "kv_cache_copied_blocks",
    "Blocks copied because a sequence was about to write into a shared one (copy on write).",
    BY_STRATEGY,
)
KV_USAGE = gauge(
    "kv_cache_usage_ratio",
    "KV memory used, as a share of the limit, 0 to 1.",
    BY_STRATEGY,
    vllm_name="kv_cache_usage_perc",
)
CHECKPOINT_BYTES = gauge(
    "kv_cache_checkpoint_bytes",
    "Checkpoints of recurrent states, from which later texts go on; used or idle, as kv_cache_bytes counts them.",
    BY_STRATEGY,
)
KV_EVICTED = counter("kv_cache_evicted_bytes", "Idle KV memory that was evicted to make room.", BY_STRATEGY)
BLOCK_LIFETIME = vllm_histogram(
    "kv_block_lifetime_seconds", "Of an evicted block: time since it was filled.", BY_STRATEGY, BLOCK_AGE
)
BLOCK_IDLE = vllm_histogram(
    "kv_block_idle_before_evict_seconds", "Of an evicted block: time since its last use.", BY_STRATEGY, BLOCK_AGE
)
BLOCK_REUSE_GAP = vllm_histogram(
    "kv_block_reuse_gap_seconds", "Of an idle block that was found: time since its last use.", BY_STRATEGY, BLOCK_AGE
)
PROCESS_MEMORY = gauge(
    "process_resident_memory_bytes", "Resident memory of the server's processes; shared memory counts in each.", (ROLE,)
)
DEVICE_MEMORY = gauge(
    "device_memory_bytes",
    "Memory of the device, all processes together; for a CPU the machine's, or its container's.",
    (DEVICE_STATE,),
)

# ---------------------------------------------------------------- shadows and roll-outs
SHADOW_KL = histogram(
    "shadow_kl_nats",
    "KL divergence KL(served || candidate) of each output token that was also computed under a candidate.",
    BY_PAIR,
    KL,
)
SHADOW_TOKENS = counter("shadow_tokens", "Output tokens compared with a candidate.", BY_PAIR)
SHADOW_AGREED = counter(
    "shadow_top1_tokens",
    "Compared tokens for which the instance that served and the candidate have the same likeliest token.",
    BY_PAIR,
)
SHADOW_TOP1 = gauge(
    "shadow_top1_ratio",
    "Share of compared tokens with the same likeliest token, 0 to 1, since the engine's start; NaN: none was compared.",
    BY_PAIR,
)
SHADOW_REQUESTS = counter(
    "shadow_requests",
    "Requests that also ran under a candidate, by result; room: given up for other requests; failed: by the candidate.",
    (SERVED, CANDIDATE, SHADOW_RESULT),
)
SHADOW_COMPUTED = counter(
    "shadow_computed_tokens", "Tokens computed for shadows, which other metrics leave out.", BY_STRATEGY
)
ROLLOUT_CURRENT = gauge(
    "rollout_state", "1 for the state that a roll-out is in, 0 for the others.", (ROLLOUT, ROLLOUT_STATE)
)
ROLLOUT_SHARE = gauge(
    "rollout_share", "Share of the requests that the candidate of a roll-out serves, 0 to 1.", (ROLLOUT,)
)
ROLLBACKS = counter("rollout_rollbacks", "Roll-outs that a guard rolled back, since the engine's start.", (ROLLOUT,))

FAMILIES: tuple[MetricFamily[Any], ...] = tuple(
    family for family in list(globals().values()) if isinstance(family, MetricFamily)
)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m server.metrics.families", description=__doc__).parse_args()
    print(format_table(FAMILIES))
