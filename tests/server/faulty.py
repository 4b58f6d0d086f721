"""`python -m tests.server.faulty serve ...`: kvmux with faults, of the engine and of the API process.

Imports nothing of the engine: the program's other processes import this module too.
"""

from __future__ import annotations

import socket

from config.settings import Settings
from server.api.worker import serve_worker
from server.text.tokenizer import Tokenizer
from tests.server.checked import main

FATAL_WORD = "explode"  # no prompt may have it, and the exception quotes the whole prompt


def worker(settings: Settings, socket_path: str, listener: socket.socket) -> None:
    encode = Tokenizer._encode

    def faulty(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        if FATAL_WORD in text:
            raise ValueError(f"cannot stand {text!r}")
        return encode(self, text, add_special_tokens)

    Tokenizer._encode = faulty  # type: ignore[method-assign]
    serve_worker(settings, socket_path, listener)


if __name__ == "__main__":
    main(engine="tests.server.checked_engine:run_faultily", worker="tests.server.faulty:worker")
