"""Loads a server cell by cell with the client of `kvmux bench`, and reads the figures of each from Prometheus."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import httpx

from loadtest.bench.client import open_client, read_server_info, send_completion
from loadtest.bench.figures import Figures
from loadtest.bench.types import Outcome
from tools.comparison.figures import Interval, read_figures
from tools.comparison.plan import Cell, Plan
from tools.comparison.results import CellResult
from tools.prometheus import Prometheus

SCRAPE_INTERVAL = "250ms"
NOT_SUPPORTED = 409  # HTTP status of a strategy that keeps nothing to clear
REQUESTS_PER_CLIENT = 2  # at least: the second request of a client finds what the first one left
WARM_UP_TOKENS = 4  # of each answer before a load is measured


@dataclass(frozen=True)
class CellMeter:
    """Measures cells on a running server that a running Prometheus scrapes, and no other server."""

    admin: httpx.Client  # of the server, with the token of its administration
    prometheus: Prometheus
    plan: Plan

    def measure(self, cell: Cell) -> CellResult:
        """Load the server and return the figures. Raises ServerError or httpx.HTTPError if it cannot be measured."""
        self._clear_cache(cell.strategy)
        salt = self.plan.make_salt(cell)
        # a few unmeasured requests with other prompts, so that no strategy pays for what comes first
        self._load(cell, f"{salt}/warm-up", 1, 0.0, WARM_UP_TOKENS)
        begin = time.time()
        outcomes = self._load(cell, salt, REQUESTS_PER_CLIENT, self.plan.seconds, self.plan.max_tokens)
        end = time.time()
        figures = Figures()
        figures.add_round(outcomes)
        interval = Interval(begin, end, figures.round_seconds[0])
        found = read_figures(self.prometheus, cell.strategy, interval)
        return CellResult(interval.seconds, found, len(outcomes), figures.error_counts)

    def _load(self, cell: Cell, salt: str, least: int, seconds: float, max_tokens: int) -> list[Outcome]:
        """Load the server, and wait until Prometheus has counted all requests that were served: /metrics is late."""
        self.prometheus.wait(lambda: self._count_served(cell) is not None, "the metrics of the server")
        before = self._count_served(cell) or 0
        outcomes = asyncio.run(self._send(cell, salt, least, seconds, max_tokens))
        served = sum(each.error is None for each in outcomes)
        self.prometheus.wait(lambda: (self._count_served(cell) or 0) >= before + served, "the metrics of all requests")
        return outcomes

    def _count_served(self, cell: Cell) -> float | None:
        """Return how many requests of a cell's strategy have ended well; None if Prometheus does not know it now."""
        series = f'strategy="{cell.strategy}",outcome=~"stop|length"'
        found = self.prometheus.query(f"sum(kvmux_requests_total{{{series}}})")
        return found[0][1] if found else None

    def _clear_cache(self, strategy: str) -> None:
        """Remove what earlier cells have left in the cache, so that no cell has to evict it."""
        answer = self.admin.post(f"/v1/kv_cache/{strategy}/clear", json={})
        if answer.status_code != NOT_SUPPORTED:
            answer.raise_for_status()

    async def _send(self, cell: Cell, salt: str, least: int, seconds: float, max_tokens: int) -> list[Outcome]:
        """Let each client send requests in turn, at least `least` and for `seconds`; return all outcomes."""
        async with open_client(str(self.admin.base_url)) as client:
            server = await read_server_info(client)
            requests = self.plan.make_requests(server.vocabulary, cell.load, salt)
            outcomes: list[Outcome] = []
            end = time.monotonic() + seconds

            async def send_all() -> None:
                sent = 0
                while sent < least or time.monotonic() < end:
                    request = next(requests)._replace(max_tokens=max_tokens)
                    body = {"kv_cache": cell.strategy}
                    outcomes.append(await send_completion(client, server.listing.model, request, body))
                    sent += 1

            await asyncio.gather(*(send_all() for _ in range(cell.load.batch)))
            return outcomes
