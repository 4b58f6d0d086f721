"""Engines for tests: one that checks its books after every step, one that takes its time, and one with a fault.

In the first every so often a step fails when all has been computed; it is repeated, and nobody may notice.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from torch import Tensor

from config.settings import Settings
from server.engine import main as engine
from server.engine.batch import Batch, StrategyError
from server.engine.build import Engine
from server.engine.core import Core, StepResult
from server.engine.scheduler import Scheduled

FAILS_EVERY = 7  # steps
FATAL_SEED = 13
LONG_STEP = 0.4  # seconds


class FailingCore(Core):
    """Every so often a step fails when all has been computed."""

    def _forward(self, scheduled: Sequence[Scheduled]) -> tuple[Batch, Tensor]:
        computed = super()._forward(scheduled)
        if next(_steps) % FAILS_EVERY == 0:
            raise StrategyError(scheduled[-1].request.cache.name, ValueError("broken on purpose"))
        return computed


class CheckedCore(FailingCore):
    """Trusts no step: after each the books must add up, or the process ends."""

    def step(self) -> StepResult:
        result = super().step()
        for cache in self.caches.values():
            cache.check_integrity()
        self.arena.check_integrity()
        return result


_steps = itertools.count(1)


class SlowCore(Core):
    """So slow that whatever happens outside happens within a step."""

    def step(self) -> StepResult:
        result = super().step()
        if result.report.parts:
            time.sleep(LONG_STEP)
        return result


class FaultyCore(Core):
    """Some requests are too much for their strategy."""

    def _forward(self, scheduled: Sequence[Scheduled]) -> tuple[Batch, Tensor]:
        for each in scheduled:
            if each.request.sampling.seed == FATAL_SEED:
                raise StrategyError(each.request.cache.name, ValueError("broken on purpose"))
        return super()._forward(scheduled)


def run(
    settings: Settings, socket_path: str, status: Connection, restarts: int, core: type[Core] = CheckedCore
) -> None:
    """The engine's process."""
    build = engine.build_engine

    def build_with_core(settings: Settings) -> Engine:
        built = build(settings)
        built.core.__class__ = core
        return built

    engine.build_engine = build_with_core
    engine.run(settings, socket_path, status, restarts)


def run_slowly(settings: Settings, socket_path: str, status: Connection, restarts: int) -> None:
    run(settings, socket_path, status, restarts, SlowCore)


def run_faultily(settings: Settings, socket_path: str, status: Connection, restarts: int) -> None:
    run(settings, socket_path, status, restarts, FaultyCore)
