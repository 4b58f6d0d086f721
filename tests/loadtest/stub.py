"""A server of /v1/completions that needs no model: streams five tokens, or does what the model's name says."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKENS = 5


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Stub

    def do_GET(self) -> None:
        self._answer(200, {"object": "list", "data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            self._complete(body)
        finally:
            self.server.saw(body)

    def _complete(self, body: dict[str, Any]) -> None:
        if body["model"].endswith("busy"):
            self._answer(429, {"error": {"message": "too many requests wait"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(TOKENS):
            self._send({"choices": [{"text": " word", "finish_reason": None}], "usage": None})
        if body["model"].endswith("breaking"):
            self.close_connection = True
            return
        if body["model"].endswith("failing"):
            self._send({"error": {"message": "the engine is gone"}})
        self._send({"choices": [{"text": "", "finish_reason": "length"}], "usage": None})
        self._send({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": TOKENS}})
        self._send_text("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, chunk: dict[str, Any]) -> None:
        self._send_text(f": ping\n\ndata: {json.dumps(chunk)}\n\n")

    def _send_text(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Stub(ThreadingHTTPServer):
    """Listens on a free port of this machine. `seen` are the bodies of the requests; `enough` is set by the 20th."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, models: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = models
        self.seen: list[dict[str, Any]] = []
        self.enough = threading.Event()

    def saw(self, body: dict[str, Any]) -> None:
        self.seen.append(body)
        if len(self.seen) >= 20:
            self.enough.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients hang up at the end of the load
