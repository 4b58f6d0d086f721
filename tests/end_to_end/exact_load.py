"""A load of requests under exact strategies, each of which must be answered as its prompt was answered before."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any, NamedTuple

import httpx

from tests.end_to_end.server_process import PATIENCE, Server

STREAMS = 3  # requests at once
PAUSE = 0.05  # seconds after a request that was refused


def make_prompts(count: int, length: int) -> list[list[int]]:
    """Return prompts of token ids; the first third of all is the same."""
    draw = random.Random(0)
    common = [draw.randrange(2, 300) for _ in range(length // 3)]
    return [common + [draw.randrange(2, 300) for _ in range(length - len(common))] for _ in range(count)]


class Answer(NamedTuple):
    """An answer to a request for a completion."""

    text: str  # of all choices together
    code: str | None = None  # of its error
    message: str = ""


class CompletionClient:
    """Asks a server for completions; threads may share it, as making an HTTP client takes long."""

    def __init__(self, server: Server) -> None:
        self._http = httpx.Client(base_url=server.url, timeout=PATIENCE)
        self._model = server.model

    def complete(self, **body: Any) -> Answer:
        """Return the answer to a request; greedy, without an end token."""
        body = {"model": self._model, "temperature": 0, "ignore_eos": True} | body
        if body.get("stream"):
            return self._stream(body)
        answer = self._http.post("/v1/completions", json=body).json()
        if "error" in answer:
            return Answer("", answer["error"]["code"], answer["error"]["message"])
        return Answer("".join(choice["text"] for choice in answer["choices"]))

    def _stream(self, body: dict[str, Any]) -> Answer:
        text = ""
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                error = json.loads(answer.read())["error"]
                return Answer("", error["code"], error["message"])
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return Answer(text, event["error"]["code"], event["error"]["message"])
                    text += "".join(choice["text"] for choice in event["choices"])
        return Answer(text)

    def close(self) -> None:
        self._http.close()


class ExactLoad:
    """Requests that run all the time, some of them streamed; what goes wrong is noted."""

    def __init__(self, client: CompletionClient, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Learn what each prompt is answered with."""
        self._client, self._max_tokens = client, max_tokens
        self._expected = [(prompt, self._ask(prompt).text) for prompt in prompts]
        self._stop = Event()
        self.allowed: Collection[str] = ()  # codes of errors that a request may end with
        self.num_right = 0
        self.wrong: list[str] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(STREAMS) as pool:
            streams = [pool.submit(self._run, i) for i in range(STREAMS)]
            try:
                yield
            finally:
                self._stop.set()
                for stream in streams:
                    stream.result(PATIENCE)

    def assert_goes_on(self) -> None:
        """Wait until requests that began after this call have been answered, and assert that no answer was wrong."""
        target, deadline = self.num_right + 2 * STREAMS, time.monotonic() + PATIENCE
        while self.num_right < target and not self.wrong:
            assert time.monotonic() < deadline, "exact requests are not answered"
            time.sleep(0.01)
        assert not self.wrong, self.wrong[0]

    def _run(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._stop.is_set():
            prompt, expected = draw.choice(self._expected)
            text, code, _ = self._ask(prompt, stream=draw.random() < 0.5)
            if code is not None and code in self.allowed:
                if not expected.startswith(text):
                    self.wrong.append(f"{text!r} instead of {expected!r} before an interruption")
                time.sleep(PAUSE)
            elif code is not None or text != expected:
                self.wrong.append(f"{text!r}, {code} instead of {expected!r}")
            else:
                self.num_right += 1

    def _ask(self, prompt: Sequence[int], stream: bool = False) -> Answer:
        return self._client.complete(prompt=prompt, max_tokens=self._max_tokens, stream=stream)
