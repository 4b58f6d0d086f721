"""Load for any server with OpenAI's /v1/completions: streamed answers, prompts of mixed lengths, times by model.

Speaks HTTP only and knows nothing of the server's inside. See README.md for what it reports.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from time import perf_counter
from typing import Any

import gevent  # type: ignore[import-untyped]
from locust import FastHttpUser, events, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS, ResponseContextManager

from loadtest.prompts import prompt
from loadtest.stream import Reply, StreamError, read_reply

PATH = "/v1/completions"


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _options(parser: LocustArgumentParser) -> None:
    add = parser.add_argument
    add("--models", env_var="LOCUST_MODELS", default="", help="comma-separated; default: what the server lists")
    add("--prompt-words", env_var="LOCUST_PROMPT_WORDS", default="8,64,256", help="lengths, each as often as the other")
    add("--shared-words", env_var="LOCUST_SHARED_WORDS", type=int, default=0, help="words that begin every prompt")
    add("--max-tokens", env_var="LOCUST_MAX_TOKENS", type=int, default=64, help="length of an answer, at most")
    add("--temperature", env_var="LOCUST_TEMPERATURE", type=float, default=0.0, help="0 is greedy")
    add("--body", env_var="LOCUST_BODY", default="{}", help="JSON for every request: '{\"ignore_eos\": true}'")
    add("--api-key", env_var="OPENAI_API_KEY", default="", help="sent as a bearer token", is_secret=True)


class Client(FastHttpUser):
    """One client: sends a request, reads the whole answer, sends the next."""

    network_timeout = 600.0  # a request may wait long for its first token
    connection_timeout = 10.0

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self.random = Random()
        self.headers = {"Accept-Encoding": "identity"}
        if options.api_key:
            self.headers["Authorization"] = f"Bearer {options.api_key}"
        self.lengths = [int(words) for words in options.prompt_words.split(",")]
        self.body = {
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **json.loads(options.body),
        }
        self.models = options.models.split(",") if options.models else self._listed_models()

    def _listed_models(self) -> list[str]:
        with self.client.get("/v1/models", headers=self.headers, catch_response=True) as response:
            if response.status_code == 200:
                return choose_models([model["id"] for model in response.json()["data"]])
            response.failure(f"cannot list the models: {_reason(response)}")
        assert self.environment.runner is not None
        gevent.spawn(self.environment.runner.quit)  # there is nothing to ask for
        gevent.sleep(60)  # until it stops this client
        return []

    @task
    def complete(self) -> None:
        model = self.random.choice(self.models)
        words = prompt(self.random, self.random.choice(self.lengths), self.environment.parsed_options.shared_words)
        body = {"model": model, "prompt": words, **self.body}
        sent = perf_counter()
        with self.client.post(
            PATH, json=body, headers=self.headers, name=model, stream=True, catch_response=True
        ) as response:
            if response.status_code != 200:
                response.failure(_reason(response))
                return
            try:
                reply = read_reply(_lines(response))
            except (StreamError, *FAILURE_EXCEPTIONS) as error:
                response.failure(str(error) or type(error).__name__)
                return
            response.request_meta["response_time"] = (perf_counter() - sent) * 1000  # of the whole answer
            response.request_meta["response_length"] = reply.completion_tokens
        self._report(model, sent, reply)

    def _report(self, model: str, sent: float, reply: Reply) -> None:
        if reply.arrivals:  # the first token may have been the end of the text
            self._fire("TTFT", model, reply.arrivals[0] - sent, reply.prompt_tokens)
        for gap in reply.gaps():
            self._fire("ITL", model, gap, 1)

    def _fire(self, what: str, model: str, seconds: float, tokens: int) -> None:
        self.environment.events.request.fire(
            request_type=what,
            name=model,
            response_time=seconds * 1000,
            response_length=tokens,
            exception=None,
            context={},
        )


def choose_models(listed: list[str]) -> list[str]:
    """Where a server lists a model under several strategies ("tiny", "tiny:paged", ...) these, otherwise the first."""
    return [name for name in listed if ":" in name] or listed[:1]


def _lines(response: ResponseContextManager) -> Iterator[bytes]:
    """Each line as soon as it has arrived."""
    while line := response.stream.readline(b"\n"):
        yield line


def _reason(response: ResponseContextManager) -> str:
    """Why a request failed, in a few words that are the same for all alike."""
    if not response.status_code:
        return str(getattr(response, "error", "no answer"))
    try:
        answer: Any = json.loads(response.text or "")
        return f"HTTP {response.status_code}: {answer['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
