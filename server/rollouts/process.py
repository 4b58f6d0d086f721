"""The process that controls roll-outs: receives the engine's records of requests, and sends how to divide them.

It does not end with the engine or the API workers: roll-outs go on when the engine has been restarted.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from time import monotonic
from typing import Any

import msgspec

from config.settings import Settings
from server.engine.ipc.answers import compute_answer
from server.engine.ipc.messages import (
    ControlRollout,
    FromEngine,
    Hello,
    RolloutAnswer,
    RolloutQuery,
    RolloutQuestion,
    RolloutSamples,
    StartRollout,
    ToEngine,
)
from server.engine.ipc.socket_client import EngineSocket
from server.processes.child_process import STOP_SIGNAL
from server.processes.heartbeat import Heartbeat
from server.rollouts.rollouts import Rollouts
from server.rollouts.start import choose_rollouts_file
from server.rollouts.store import RolloutStore

log = logging.getLogger(__name__)

UPDATE_SECONDS = 0.1  # between two looks at new samples, and whether a stage has lasted long enough


def run(settings: Settings, socket_path: str, heartbeat: Heartbeat) -> None:
    """Control the roll-outs of the engine at `socket_path` until STOP_SIGNAL has come and the engine has ended."""
    clock = ServingClock()
    rollouts = Rollouts(settings, RolloutStore(choose_rollouts_file(settings)), clock)
    rollouts.restore()
    try:
        asyncio.run(control(Controller(rollouts, clock), socket_path, heartbeat))
    finally:
        rollouts.close()


async def control(controller: Controller, socket_path: str | os.PathLike[str], heartbeat: Heartbeat) -> None:
    """Exchange messages with the engine until STOP_SIGNAL has come and the engine has ended."""
    socket = EngineSocket(socket_path, lambda event: _send(socket, controller.handle(event)), controller.disconnect)
    asyncio.get_running_loop().add_signal_handler(STOP_SIGNAL, socket.finish)
    connecting = asyncio.create_task(socket.stay_connected())
    while not connecting.done():
        heartbeat.beat()
        _send(socket, controller.update())
        await asyncio.wait([connecting], timeout=UPDATE_SECONDS)
    connecting.result()


def _send(socket: EngineSocket, messages: list[ToEngine]) -> None:
    if messages:
        socket.send(*messages)  # without a connection, `handle` sends all that matters again after the next Hello


class ServingClock:
    """A clock that stands still while no engine is connected: a stage lasts as long as it is served."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._counted = 0.0  # seconds until it was last stopped
        self._started: float | None = None  # None: it stands still

    @property
    def is_running(self) -> bool:
        return self._started is not None

    def __call__(self) -> float:
        return self._counted + (0.0 if self._started is None else self._clock() - self._started)

    def start(self) -> None:
        if self._started is None:
            self._started = self._clock()

    def stop(self) -> None:
        self._counted, self._started = self(), None


class Controller:
    """Turns messages from the engine into messages to it."""

    def __init__(self, rollouts: Rollouts, clock: ServingClock) -> None:
        """Control roll-outs, whose clock runs while an engine is connected."""
        self._rollouts = rollouts
        self._clock = clock
        self._sent = rollouts.list_splits()  # the splits that were sent last; before that, those of the start
        self._is_sent = False  # whether they were sent on this connection

    def handle(self, event: FromEngine) -> list[ToEngine]:
        """Return the answers to an event of the engine."""
        answers: list[ToEngine] = []
        match event:
            case Hello(board=board):
                self._rollouts.set_board(board)
                self._clock.start()
                self._is_sent = False
            case RolloutSamples(records, fidelities, unusable):
                self._rollouts.roll_back_unusable(unusable)
                self._rollouts.observe(fidelities, records)
            case RolloutQuestion(worker, query_id, query):
                answer = compute_answer(query_id, query, monotonic(), lambda: msgspec.json.encode(self._run(query)))
                answers = [RolloutAnswer(worker, answer)]
        return [*self._collect_splits(), *answers]  # what a command has changed holds before it is answered

    def disconnect(self) -> None:
        """Note that the engine has ended."""
        self._clock.stop()

    def update(self) -> list[ToEngine]:
        """Judge what has ended since the last time; return how to divide requests from now on, if that has changed."""
        if not self._clock.is_running:
            return []
        self._rollouts.update()
        return self._collect_splits()

    def _collect_splits(self) -> list[ToEngine]:
        """Return how to divide requests and which roll-outs were rolled back, if the engine does not know it yet."""
        splits = self._rollouts.list_splits()
        if self._is_sent and splits == self._sent:
            return []
        before, now = (
            [name for name, (state, _) in each.states.items() if state == "rolled_back"]
            for each in (self._sent, splits)
        )
        self._sent, self._is_sent = splits, True
        return [msgspec.structs.replace(splits, rolled_back=[name for name in now if name not in before])]

    def _run(self, query: RolloutQuery) -> dict[str, Any]:
        match query:
            case StartRollout(name, settings, by):
                return self._rollouts.start(name, settings, by)
            case ControlRollout(name, action, by):
                return self._rollouts.control(name, action, by)
            case "fidelity":
                return self._rollouts.describe_fidelity()
        return self._rollouts.describe()
