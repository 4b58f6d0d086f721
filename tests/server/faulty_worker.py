"""An API process with a fault: one word is too much for its tokenizer."""

from __future__ import annotations

import socket

from config.settings import Settings
from server.api.worker import serve_worker
from server.text.tokenizer import Tokenizer

FATAL_WORD = "explode"  # no prompt may have it, and the exception quotes the whole prompt


def run(settings: Settings, socket_path: str, listener: socket.socket) -> None:
    encode = Tokenizer._encode

    def faulty(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        if FATAL_WORD in text:
            raise ValueError(f"cannot stand {text!r}")
        return encode(self, text, add_special_tokens)

    Tokenizer._encode = faulty  # type: ignore[method-assign]
    serve_worker(settings, socket_path, listener)
