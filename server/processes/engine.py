"""The engine's process: builds the engine, its socket and its metrics, and runs its loop until STOP_SIGNAL."""

from __future__ import annotations

import signal

from config.errors import SettingsError
from config.settings import Settings
from server.engine.build import build_engine
from server.engine.info import compute_fingerprint, summarize_engine
from server.engine.ipc.messages import Hello, Strategy
from server.engine.ipc.server import EngineServer
from server.engine.loop import Loop
from server.engine.profiling.capture import Capture
from server.metrics.registry import Metrics
from server.processes.child_process import STOP_SIGNAL
from server.processes.heartbeat import EngineStatus


def run(settings: Settings, socket_path: str, status: EngineStatus, restarts: int = 0) -> None:
    """Serve until STOP_SIGNAL. Send {"ready": summary} or {"error": message} to `status`, then heartbeats.

    `restarts` is the number of engines that ran before this one.
    """
    try:
        engine = build_engine(settings, gradual=True, calls=status.calls, disabled=status.disabled)
        capture = Capture.begin(settings.metal_capture_steps, engine.device)
    except SettingsError as error:
        status.send({"error": str(error)})
        return
    hello = Hello(
        engine.model_name,
        list(engine.aliases),
        engine.max_seq_len,
        engine.core.model.info.vocab_size,
        [  # disabled ones, too
            Strategy(name, each.kind, name in engine.core.caches and engine.core.caches[name].contract.unbounded)
            for name, each in settings.strategies.items()
        ],
        compute_fingerprint(engine),
    )
    with capture, EngineServer(socket_path, hello) as server:
        loop = Loop(engine, server, Metrics, restarts, status.beat, capture.count_step)
        signal.signal(STOP_SIGNAL, lambda *_: loop.stop())
        status.send({"ready": summarize_engine(engine)})
        loop.run()
