"""All device calls of an engine's process are made in one thread: on a Mac a second thread would crash it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from config.settings import Settings
from server.engine import core
from server.engine.device import device_memory
from server.engine.ipc.messages import Clear, Inspect, SamplingParams, Submit, Tokens
from server.engine.ipc.socket_client import SocketClient
from server.processes import engine as engine_process
from server.processes.child_process import STOP_SIGNAL
from tests.engine.emulated_mps import MPS, DeviceUse
from tests.engine.engine_driver import Driver
from tests.engine.expected_tokens import Reference, random_prompt

SAMPLINGS = {
    "greedy": SamplingParams(6, temperature=0.0, ignore_eos=True),
    "drawn": SamplingParams(6, top_p=0.9, seed=1, ignore_eos=True, frequency_penalty=0.3),
    "scored": SamplingParams(6, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=2),
}


class Worker(threading.Thread):
    """A stand-in for an API worker: sends every kind of query, then stops the engine."""

    def __init__(self, socket_path: str) -> None:
        super().__init__(name="worker")
        self.tokens: dict[str, list[int]] = {}
        self.answers: dict[str, bytes] = {}
        self._path = socket_path

    def run(self) -> None:
        try:
            asyncio.run(asyncio.wait_for(self._ask(), 60))
        finally:
            os.kill(os.getpid(), STOP_SIGNAL)

    async def _ask(self) -> None:
        async with SocketClient(self._path) as client:
            while client.hello is None:
                await asyncio.sleep(0.01)
            submits = [Submit(name, random_prompt(20), sampling) for name, sampling in SAMPLINGS.items()]
            async with client.stream(submits) as stream:
                async for event in stream:
                    if isinstance(event, Tokens):
                        self.tokens.setdefault(event.request_id, []).extend(event.tokens)
            for what in ("kv_cache", "settings", "metrics"):
                self.answers[what] = await client.query(what)  # type: ignore[arg-type]
            for command in (Inspect("paged"), Clear("paged", None)):
                self.answers[type(command).__name__] = await client.query(command)


class Status:
    """A stand-in for the supervisor's end of the pipe."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.calls, self.disabled, self.has_rollouts = None, dict[str, str](), False

    def send(self, message: dict[str, Any]) -> None:
        self.told.append(message)

    def beat(self) -> None:
        pass


@pytest.fixture
def _signals() -> Iterator[None]:
    before = signal.signal(STOP_SIGNAL, signal.SIG_IGN)  # until the engine listens to it
    yield
    signal.signal(STOP_SIGNAL, before)


@pytest.mark.usefixtures("_signals")
def test_whatever_is_asked_of_an_engine_one_thread_does_it(
    tiny: Path, reference: Reference, mps: DeviceUse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(core, "TIMING_INTERVAL", 2)
    worker, status = Worker(str(tmp_path / "socket")), Status()
    worker.start()
    engine_process.run(Settings(model=str(tiny), device="mps", dtype="float32"), str(tmp_path / "socket"), status)  # type: ignore[arg-type]
    worker.join()
    assert status.told[0]["ready"]["device"] == "mps"
    assert worker.tokens["greedy"] == worker.tokens["scored"] == reference.greedy(random_prompt(20), 6)
    assert len(worker.tokens["drawn"]) == 6
    assert worker.answers.keys() == {"kv_cache", "settings", "metrics", "Inspect", "Clear"}
    assert b"kvmux_kernel_seconds" in worker.answers["metrics"]
    assert mps.threads == {threading.get_ident()}


def test_another_thread_would_be_seen(tiny: Path, mps: DeviceUse) -> None:
    driver = Driver(tiny, device="mps")
    memory = driver.core.memory.list_regions("paged")[0].memory
    for reach in (
        lambda: memory[:8].sum(),
        lambda: memory.tolist(),
        lambda: device_memory(MPS),
    ):
        mps.threads.clear()
        thread = threading.Thread(target=reach)
        thread.start()
        thread.join()
        assert mps.threads == {thread.ident}
