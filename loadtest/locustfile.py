"""Users of an OpenAI-compatible server, for locust: they complete texts, chat, and hang up, under all its strategies.

locust -f loadtest/locustfile.py                  # users of all kinds
locust -f loadtest/locustfile.py Chat Cancel      # only users of the kinds Chat and Cancel

To locust's report they add rows for TTFT (milliseconds to the first token), ITL (milliseconds between tokens) and
tok/s. `kvmux bench` measures with exact lengths; add a kind of user here for a load like that of your own clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from time import perf_counter
from typing import Any

import gevent  # type: ignore[import-untyped]
from locust import FastHttpUser, events, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS, ResponseContextManager

from loadtest import listing
from loadtest.listing import ListingError, parse_weights, read_listing, select_models
from loadtest.prompts import make_prompt
from loadtest.stream import Reply, StreamError, format_http_error, read_reply

TURNS = 4  # of a chat
MEAN_PAUSE = 1.0  # seconds between the turns of a chat
MAX_PIECES = 8  # of an answer, after which a Cancel user has closed the connection


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_options(parser: LocustArgumentParser) -> None:
    def add(flag: str, default: Any, help: str, **how: Any) -> None:
        variable = "LOCUST_" + flag.strip("-").replace("-", "_").upper()
        parser.add_argument(flag, type=type(default), default=default, help=help, **{"env_var": variable, **how})

    add("--models", "", "model names, separated by commas; default: the first that the server lists")
    add("--strategies", "", "strategies with weights, such as 'paged=3,contiguous=1'; default: all, equally often")
    add("--prompt-words", 64, "number of words of a prompt")
    add("--max-tokens", 64, "maximum number of tokens of an answer")
    add("--api-key", "", "API key to send as a bearer token", env_var="OPENAI_API_KEY", is_secret=True)


class Client(FastHttpUser):
    """A user that sends requests and reads each answer to its end, or to a given number of pieces."""

    abstract = True
    network_timeout = 600.0  # seconds to wait for a response; long, as a request may queue
    models: dict[str, float]  # relative probability of each model name, such as "tiny:paged"

    def on_start(self) -> None:
        assert self.environment.runner is not None
        self.options: Any = self.environment.parsed_options
        self.random = Random()
        self.headers = {"Authorization": f"Bearer {self.options.api_key}"} if self.options.api_key else {}
        with self.client.get(
            listing.PATH, params=listing.PARAMS, headers=self.headers, catch_response=True
        ) as response:
            try:
                if response.status_code == 200:
                    weights = parse_weights(self.options.strategies)
                    listings = [read_listing(response.content, model) for model in self.options.models.split(",")]
                    self.models = {
                        name: weight for each in listings for name, weight in select_models(each, weights).items()
                    }
                    return
                response.failure(_format_failure(response))
            except (ListingError, ValueError) as error:
                response.failure(f"cannot choose a model: {error}")
        gevent.spawn(self.environment.runner.quit)
        raise gevent.GreenletExit  # ends this user as if locust had stopped it

    def choose_model(self) -> str:
        return self.random.choices(list(self.models), list(self.models.values()))[0]

    def draw_prompt(self) -> str:
        return make_prompt(self.random, self.options.prompt_words)

    def send(self, path: str, model: str, body: dict[str, Any], max_pieces: int | None = None) -> Reply | None:
        """Send a request and report its times to locust; return the answer, or None if the request failed.

        After `max_pieces` pieces of the answer, if given, the connection is closed.
        """
        body = {"model": model, "temperature": 0.0, "max_tokens": self.options.max_tokens, **body}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        send_time = perf_counter()
        with self.client.post(
            path, json=body, headers=self.headers, name=model, stream=True, catch_response=True
        ) as response:
            if response.status_code != 200:
                response.failure(_format_failure(response))
                return None
            try:
                reply = read_reply(_iter_lines(response), max_pieces=max_pieces)
            except (StreamError, *FAILURE_EXCEPTIONS) as error:
                response.failure(str(error) or type(error).__name__)
                return None
            finally:
                response.stream.release()  # closes the connection if the answer has not ended
            if reply.end_time is None:
                response.request_meta["request_type"] = "CANCEL"
            response.request_meta["response_time"] = (perf_counter() - send_time) * 1000
            response.request_meta["response_length"] = reply.completion_tokens or len(reply.arrival_times)
        if reply.arrival_times:  # empty if the answer has no text, as its first token ended it
            self._report("TTFT", model, (reply.arrival_times[0] - send_time) * 1000, reply.prompt_tokens)
        for gap in reply.gaps():
            self._report("ITL", model, gap * 1000, 1)
        if (speed := reply.compute_tokens_per_second()) is not None:
            self._report("tok/s", model, speed, reply.completion_tokens)
        return reply

    def _report(self, what: str, row: str, figure: float, tokens: int) -> None:
        self.environment.events.request.fire(
            request_type=what, name=row, response_time=figure, response_length=tokens, exception=None, context={}
        )


def _iter_lines(response: ResponseContextManager) -> Iterator[bytes]:
    """Yield each line of a response's stream as soon as it has arrived."""
    while line := response.stream.readline(b"\n"):
        yield line


def _format_failure(response: ResponseContextManager) -> str:
    if not response.status_code:
        return str(getattr(response, "error", "no answer"))
    return format_http_error(response.status_code, response.text or "")


# ---------------------------------------------------------------- the users
class Completion(Client):
    """A user that sends a text to be completed, reads the whole answer, and sends the next text without a pause."""

    weight = 3

    @task
    def complete_text(self) -> None:
        self.send("/v1/completions", self.choose_model(), {"prompt": self.draw_prompt()})


class Chat(Client):
    """A user that sends the conversation so far with a new message, reads the answer, and pauses."""

    weight = 3

    def wait_time(self) -> float:
        return self.random.expovariate(1 / MEAN_PAUSE)

    @task
    def hold_chat(self) -> None:
        model, messages = self.choose_model(), list[dict[str, str]]()
        for _ in range(TURNS):
            messages.append({"role": "user", "content": self.draw_prompt()})
            reply = self.send("/v1/chat/completions", model, {"messages": messages})
            if reply is None:
                return
            messages.append({"role": "assistant", "content": reply.text})
            gevent.sleep(self.wait_time())


class Cancel(Client):
    """A user that reads a few pieces of the answer, and closes the connection."""

    @task
    def ask_and_leave(self) -> None:
        max_pieces = self.random.randint(1, MAX_PIECES)
        self.send("/v1/completions", self.choose_model(), {"prompt": self.draw_prompt()}, max_pieces)
