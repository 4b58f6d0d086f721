"""Engines for tests: one that checks its books after every step, one that takes its time, and one with a fault.

In the first every so often a step fails when all has been computed; it is repeated, and nobody may notice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cache_strategies.errors import StrategyError
from config.settings import Settings
from server.engine.build import Engine
from server.engine.core import Core
from server.engine.model_runner import ModelRunner, StepOutput
from server.engine.results import StepResult
from server.engine.scheduling.step import Scheduled
from server.processes import engine
from server.processes.heartbeat import EngineStatus

FAILS_EVERY = 7  # steps
FAILS_ELSEWHERE_EVERY = 11  # steps
FATAL_SEED = 13
LONG_STEP = 0.4  # seconds


class FailingRunner(ModelRunner):
    """Every so often a step fails when all has been computed: in a strategy, or anywhere for steps of several rows."""

    _steps = 0

    def execute(self, scheduled: Sequence[Scheduled]) -> StepOutput:
        output = super().execute(scheduled)
        self._steps += 1
        if self._steps % FAILS_EVERY == 0:
            raise make_fault(scheduled[-1]) from ValueError("broken on purpose")
        if self._steps % FAILS_ELSEWHERE_EVERY == 0 and len(scheduled) > 1:
            raise RuntimeError("broken on purpose")
        return output


class CheckedCore(Core):
    """Trusts no step: after each the books must add up, or the process ends."""

    def step(self) -> StepResult:
        result = super().step()
        self.check_integrity()
        return result


class SlowCore(Core):
    """So slow that whatever happens outside happens within a step."""

    def step(self) -> StepResult:
        result = super().step()
        if result.report.parts:
            time.sleep(LONG_STEP)
        return result


def make_fault(scheduled: Scheduled) -> StrategyError:
    """Return a fault of a row's strategy, which is counted as such."""
    return scheduled.request.instance.make_fault("attend", "broken on purpose", ValueError("broken on purpose"))


class FaultyRunner(ModelRunner):
    """Some requests are too much for their strategy."""

    def execute(self, scheduled: Sequence[Scheduled]) -> StepOutput:
        for each in scheduled:
            if each.request.sampling.seed == FATAL_SEED:
                raise make_fault(each) from ValueError("broken on purpose")
        return super().execute(scheduled)


def run(
    settings: Settings,
    socket_path: str,
    status: EngineStatus,
    restarts: int,
    core: type[Core] = CheckedCore,
    runner: type[ModelRunner] = FailingRunner,
) -> None:
    """The engine's process."""
    build = engine.build_engine

    def build_with_faults(settings: Settings, **options: Any) -> Engine:
        built = build(settings, **options)
        built.core.__class__ = core
        built.core.runner.__class__ = runner
        return built

    engine.build_engine = build_with_faults
    engine.run(settings, socket_path, status, restarts)


def run_slowly(settings: Settings, socket_path: str, status: EngineStatus, restarts: int) -> None:
    run(settings, socket_path, status, restarts, SlowCore, ModelRunner)


def run_faultily(settings: Settings, socket_path: str, status: EngineStatus, restarts: int) -> None:
    run(settings, socket_path, status, restarts, Core, FaultyRunner)
