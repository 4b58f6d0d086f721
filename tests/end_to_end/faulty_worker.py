"""An API process with a fault: one word is too much for its tokenizer."""

from __future__ import annotations

import socket

from config.settings import Settings
from server.api.worker import serve_worker
from server.processes.heartbeat import WorkerHandles
from server.text.processes.messages import Call, Encode, Encoded
from server.text.processes.sandbox import SandboxedTokenizer

FATAL_WORD = "explode"  # no prompt may have it, and the exception quotes the whole prompt


def run(settings: Settings, socket_path: str, listener: socket.socket, ties: WorkerHandles) -> None:
    answer = SandboxedTokenizer.answer

    async def faulty(self: SandboxedTokenizer, call: Call) -> Encoded:
        if isinstance(call, Encode) and FATAL_WORD in call.text:
            raise ValueError(f"cannot stand {call.text!r}")
        return await answer(self, call)

    SandboxedTokenizer.answer = faulty  # type: ignore[method-assign]
    serve_worker(settings, socket_path, listener, ties)
