"""A server of OpenAI's routes that needs no model: streams five tokens, or does what the model's name says.

With ignore_eos it streams as many as it is asked for. Names that end in busy, failing, breaking, odd or slow refuse,
report an error in mid-stream, cut the connection, send what is no chunk, or take their time. "tiny:paged" is listed as
kvmux lists a strategy.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKENS = 5
PROMPT_TOKENS = 7  # of any text, and of each message
CACHED_TOKENS = 3
CONTEXT = 2048
SLOW = 0.02  # seconds from token to token
VOCABULARY = range(300, 900)  # between the ids that /tokenize finds


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: StubServer

    def _may(self) -> bool:
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self._answer(401, {"error": {"message": "no such key"}})
            return False
        return True

    def do_GET(self) -> None:
        if not self._may():
            return
        answers = {"/v1/models": {"object": "list", "data": [self._listed(name) for name in self.server.models]}}
        answers["/version"] = {"version": "0.0"}
        path = self.path.partition("?")[0]
        self._answer(200 if path in answers else 404, answers.get(path, {}))

    def _listed(self, name: str) -> dict[str, Any]:
        model, _, strategy = name.partition(":")
        listed = {"id": name, "owned_by": "stub", "max_model_len": self.server.contexts.get(model, self.server.context)}
        return listed | (
            {"kv_cache": {"instance": strategy, "kind": strategy}} if strategy and model in self.server.models else {}
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            ids = self.server.ids if "prompt" in body else []
            return self._answer(200 if self.server.tokenizes else 404, {"tokens": ids})
        if not self._may():
            return
        try:
            self._complete(body)
        except OSError:
            self.server.hung_up += 1
            raise
        finally:
            self.server.saw(self.path, body)

    def _complete(self, body: dict[str, Any]) -> None:
        model = body["model"]
        if model.endswith("busy"):
            self._answer(429, {"error": {"message": "too many requests wait"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        tokens = body["max_tokens"] if body.get("ignore_eos") else TOKENS
        for number in range(tokens):
            self._send({"choices": [self._piece(number)], "usage": None})
            time.sleep(SLOW if model.endswith("slow") else 0)
        if model.endswith("breaking"):
            self.close_connection = True
            return
        if model.endswith("failing"):
            self._send({"error": {"message": "the engine is gone"}})
        self._send({"choices": [self._piece(tokens, "", "length")], "usage": None})
        if model.endswith("odd"):
            self._send({"choices": None, "usage": {"prompt_tokens": "7"}})
        self._send({"choices": [], "usage": self._usage(body, tokens)})
        self._send_text("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _piece(self, number: int, text: str = " word\u2028", reason: str | None = None) -> dict[str, Any]:
        if not self.path.endswith("/chat/completions"):
            return {"text": text, "finish_reason": reason}
        role = {"role": "assistant"} if not number else {}
        return {"delta": role | {"content": text}, "finish_reason": reason}

    def _usage(self, body: dict[str, Any], tokens: int) -> dict[str, Any]:
        prompt = body.get("prompt", "")
        length = len(prompt) if isinstance(prompt, list) else PROMPT_TOKENS * len(body.get("messages", [prompt]))
        cached = {"prompt_tokens_details": {"cached_tokens": CACHED_TOKENS}} if self.server.tells_cached else {}
        return {"prompt_tokens": length, "completion_tokens": tokens, **cached}

    def _send(self, chunk: dict[str, Any]) -> None:
        self._send_text(f": ping\n\ndata: {json.dumps(chunk, ensure_ascii=False)}\n\n")

    def _send_text(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class StubServer(ThreadingHTTPServer):
    """A stub server on a free port. `seen` has the paths and bodies of the requests that it has answered."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, models: list[str], *, tokenizes: bool = True, tells_cached: bool = True, key: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = models
        self.tokenizes, self.tells_cached, self.key = tokenizes, tells_cached, key
        self.context: Any = CONTEXT
        self.ids: Any = [VOCABULARY[0], VOCABULARY[-1], 500]  # of any text
        self.contexts: dict[str, int] = {}  # of models that have another one
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.hung_up = 0  # clients who did not read to the end
        self._changed = threading.Condition()

    def saw(self, path: str, body: dict[str, Any]) -> None:
        with self._changed:
            self.seen.append((path, body))
            self._changed.notify_all()

    def wait_until(self, enough: Any, seconds: float = 60) -> bool:
        """Wait until `enough(seen)`."""
        with self._changed:
            return self._changed.wait_for(lambda: enough(self.seen), seconds)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body in self.seen]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients hang up at the end of the load


@contextmanager
def running_stub(*models: str, **what: Any) -> Iterator[StubServer]:
    """Yield a running stub server."""
    with StubServer(list(models), **what) as stub:
        thread = threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield stub
        finally:
            stub.shutdown()
            thread.join()
