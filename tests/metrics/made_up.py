"""Metrics of a server that is not there: a registry that was told of every kind of event, behind HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from cache_strategies.base import Usage
from kernels.table import OPS
from server.api.health import OPENMETRICS
from server.engine.report import Admission, StepPart
from server.metrics.families import MISS, OUTCOME, WAIT
from server.metrics.registry import Metrics
from tests.engine.test_metrics import INSTANCES, record, step

USAGE = Usage(seats=2, tokens=50, reserved=600, used=300, idle=200, wasted=100, limit=1000)


def made_up_metrics() -> Metrics:
    """One operation fell back, and nothing else has happened."""
    return Metrics(INSTANCES, faulty_kernels=[OPS[0].name])


def happen(metrics: Metrics) -> None:
    """A step and some requests, the same for every strategy: of 10 tokens 6 are found, each outcome comes once."""
    every = dict.fromkeys(INSTANCES, 1)
    metrics.observe_step(
        step(
            parts=dict.fromkeys(INSTANCES, StepPart(3, 1, 40, 4)),
            preempted=every,
            failures=every,
            forked=every,
            evicted=every,
            running=dict.fromkeys(INSTANCES, 2),
            waiting={(name, wait): 3 for name in INSTANCES for wait in WAIT.values or ()},
            gaps={name: [0.02, 0.03] for name in INSTANCES},
            admitted=[
                Admission(name, 10, 6, reason, forked=False) for name in INSTANCES for reason in MISS.values or ()
            ],
        )
    )
    for name in INSTANCES:
        for outcome in OUTCOME.values or ():
            metrics.observe_request(record(name, outcome))


@contextmanager
def served(metrics: Metrics) -> Iterator[str]:
    """Its `host:port`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            openmetrics = OPENMETRICS in self.headers.get("Accept", "")
            body = metrics.exposition(dict.fromkeys(INSTANCES, USAGE), openmetrics=openmetrics)
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
