"""An engine whose steps fail and one of whose operations is broken; it writes its records of requests to a file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
from torch import Tensor

from config.settings import Settings
from kernels import backends as loading
from kernels.device import KernelsMissing
from kernels.ops import Ops
from server.engine.core import Core
from server.engine.results import StepResult
from server.processes.heartbeat import EngineStatus
from tests.end_to_end import checked_engine

STEP_SECONDS = 0.01  # so that Prometheus, which asks twice a second, sees requests run on any machine


class RecordingCore(Core):
    """Takes its time, and writes a line of JSON for each request that left, into the file that RECORDS names."""

    def step(self) -> StepResult:
        result = super().step()
        if result.report.rows:
            time.sleep(STEP_SECONDS)
        with open(os.environ["RECORDS"], "ab") as file:
            file.writelines(msgspec.json.encode(record) + b"\n" for record in result.finished)
        return result


class OpsWithoutNorms:
    """Operations of which one does not work."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def rms_norm(self, *_: object) -> Tensor:
        raise RuntimeError("broken on purpose")


def run(settings: Settings, socket_path: str, status: EngineStatus, restarts: int) -> None:
    """The engine's process."""
    name, (device, load) = next((name, how) for name, how in loading.BACKENDS.items() if not _missing(how[1]))
    loading.BACKENDS = {name: (device, lambda: OpsWithoutNorms(load()))}  # type: ignore[dict-item,return-value]
    checked_engine.run(settings, socket_path, status, restarts, RecordingCore)


def _missing(load: Callable[[], Ops]) -> bool:
    try:
        load()
    except KernelsMissing:
        return True
    return False
