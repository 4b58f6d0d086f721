"""An HTTP server of /metrics alone, whose metrics have counted every kind of event."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, get_args

from cache_strategies.types import BlockEvents, Blocks, CacheUsage
from kernels.ops import OP_NAMES
from server.api.ops.monitoring import OPENMETRICS
from server.metrics.families import MISS_REASON, OUTCOME, WAIT_REASON
from server.metrics.registry import Metrics
from server.records import (
    Admission,
    Compaction,
    ConstraintName,
    ConstraintRefusal,
    DeviceMemory,
    DraftRecord,
    GrammarEvents,
    KVTokens,
    StepPart,
)
from tests.metrics.fake_metrics import (
    INSTANCES,
    PAIR,
    exposition,
    fake_record,
    fake_shadow,
    fake_state,
    fake_step,
    new_metrics,
)

BUSY = fake_state(
    running=dict.fromkeys(INSTANCES, 2),
    waiting={(name, wait): 3 for name in INSTANCES for wait in WAIT_REASON.values or ()},
    usage=dict.fromkeys(INSTANCES, CacheUsage(2, 50, reserved=600, used=300, idle=200, wasted=100, limit=1000)),
    tokens=dict.fromkeys(INSTANCES, KVTokens(kept=70, dropped=30)),
    budget_tokens=dict.fromkeys(INSTANCES, 40),
    blocks=dict.fromkeys(INSTANCES, Blocks(in_use=5, shared=2, pending=1, pinned=1, idle=3)),
    floor_bytes=dict.fromkeys(INSTANCES, 400),
    pool_held=1200,
    pool_cold=0,
    pool_warm=800,
    device_memory=DeviceMemory(used=5000, free=3000),
    rollouts={"int8": ("canary", 0.1)},
    shadow_pairs=[(PAIR["served"], PAIR["candidate"])],
    process_memory={"engine": 2000, "api": 1000, "supervisor": 500},
)


def new_busy_metrics(**settings: Any) -> Metrics:
    """Return metrics of which one operation fell back to the reference; nothing is counted yet."""
    return new_metrics(fallback_ops=[OP_NAMES[0]], restarts=1, **settings)


def observe_everything(metrics: Metrics) -> None:
    """Observe a step and requests, the same for every strategy: of 10 tokens 6 are found, each outcome comes once.

    Of two drafts of 3 tokens one comes true, and a third of the other. Half of the step's time is its operations'.
    """
    every = dict.fromkeys(INSTANCES, 1)
    metrics.observe_step(
        fake_step(
            parts=dict.fromkeys(INSTANCES, StepPart(3, 1, 40)),
            preemptions=every,
            failures=every,
            forks=every,
            drafts={name: [DraftRecord(3, 3), DraftRecord(3, 1)] for name in INSTANCES},
            evicted_bytes=every,
            compactions={name: [Compaction(0.0015, 30), Compaction(0.008, 10)] for name in INSTANCES},
            inter_token_seconds={name: [0.02, 0.03] for name in INSTANCES},
            admissions=[
                Admission(name, 10, 6, reason, forked=False)
                for name in INSTANCES
                for reason in MISS_REASON.values or ()
            ],
            block_events=dict.fromkeys(INSTANCES, BlockEvents(1, (40.0,), (20.0,), (3.0,))),
            shadows=[
                fake_shadow([0.001, 0.02], [True, False], ended_early=early) for early in (None, "room", "failed")
            ],
            shadow_tokens=every,
            rollbacks=["int8"],
            grammars=GrammarEvents(0.0001, [0.002, 0.03], lookups=4, hits=3, failures=1),
            op_seconds=dict.fromkeys(OP_NAMES, 0.01 / len(OP_NAMES)),
        )
    )
    for name in INSTANCES:
        for outcome in OUTCOME.values or ():
            metrics.observe_request(fake_record(name, outcome))
    metrics.observe_responses({200: 6, 429: 1})
    metrics.observe_constraints(
        dict.fromkeys(get_args(ConstraintName), 1), dict.fromkeys(get_args(ConstraintRefusal), 1)
    )


@contextmanager
def serve_metrics(metrics: Metrics) -> Iterator[str]:
    """Serve these metrics until the block ends; yield `host:port`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            openmetrics = OPENMETRICS in self.headers.get("Accept", "")
            body = exposition(metrics, BUSY, openmetrics=openmetrics)
            self.send_response(200)
            self.send_header("Content-Type", f"{OPENMETRICS}; version=1.0.0" if openmetrics else "text/plain")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield "{}:{}".format(*server.server_address)
        finally:
            server.shutdown()
            thread.join()
