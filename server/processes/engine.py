"""The engine's process: builds the engine, its socket and its metrics, and runs its loop until STOP_SIGNAL."""

from __future__ import annotations

import signal

from config.errors import SettingsError
from config.settings import Settings
from server.engine.build import Engine, build_engine
from server.engine.info import compute_fingerprint, summarize_engine
from server.engine.ipc.messages import BoardBounds, Hello, Strategy
from server.engine.ipc.server import EngineServer
from server.engine.live.routing import find_block_naming
from server.engine.loop import Loop
from server.engine.profiling.capture import Capture
from server.evaluation.board.bounds import read_board_bounds
from server.metrics.registry import Metrics
from server.processes.child_process import STOP_SIGNAL
from server.processes.heartbeat import EngineStatus
from server.processes.linux import return_freed_memory


def run(settings: Settings, socket_path: str, status: EngineStatus, restarts: int = 0) -> None:
    """Serve until STOP_SIGNAL. Send {"ready": summary} or {"error": message} to `status`, then heartbeats.

    `restarts` is the number of engines that ran before this one.
    """
    try:
        engine = build_engine(settings, calls=status.calls, disabled=status.disabled)
        board = read_board_bounds(engine, is_restart=restarts > 0)
        capture = Capture.begin(settings.metal_capture_steps, engine.device)
    except SettingsError as error:
        status.send({"error": str(error)})
        return
    engine.rollouts.is_expected = status.has_rollouts
    engine.rollouts.start_controller = lambda: status.send({"needs": "rollouts"})
    with capture, EngineServer(socket_path, make_hello(engine, board)) as server:
        loop = Loop(engine, server, Metrics, restarts, status.beat, capture.count_step)
        signal.signal(STOP_SIGNAL, lambda *_: loop.stop())
        status.send({"ready": summarize_engine(engine)})
        return_freed_memory()
        loop.run()


def make_hello(engine: Engine, board: BoardBounds | None = None) -> Hello:
    """Return the first message of an engine on each connection: what it serves."""
    return Hello(
        engine.model_name,
        list(engine.aliases),
        engine.max_seq_len,
        engine.core.model.info.vocab_size,
        [_describe_strategy(engine, name) for name in engine.settings.strategies],
        compute_fingerprint(engine),
        dict(engine.core.model.weight_formats),
        board,
    )


def _describe_strategy(engine: Engine, name: str) -> Strategy:
    """Return an instance's description, also of one that is disabled."""
    kind, instance = engine.settings.strategies[name].kind, engine.core.instances.get(name)
    if instance is None:
        return Strategy(name, kind)
    naming = find_block_naming(instance)
    block_size, root = (0, b"") if naming is None else naming
    return Strategy(name, kind, instance.contract.unbounded, block_size, root)
