"""The base class of locust users: chooses a strategy, sends requests, reads streams, reports times.

To locust's report it adds rows for TTFT (milliseconds to the first token), ITL (milliseconds between tokens) and tok/s.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from random import Random
from time import perf_counter
from typing import Any

import gevent  # type: ignore[import-untyped]
from locust import FastHttpUser, events
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS, ResponseContextManager
from locust.env import Environment
from msgspec.json import decode

from loadtest import listing
from loadtest.listing import ListingError, parse_weights, read_listing, select_models
from loadtest.stream import Reply, StreamError, format_http_error, read_reply

CONTEXT = 4096  # length of the model's context in tokens, if the server does not report it


def make_option_type(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Return an argparse type that accepts each text for which `parse` raises no ValueError.

    The value stays a text, as locust's web page needs it.
    """

    def check(text: str) -> str:
        try:
            parse(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r}: {error}") from None
        return text

    return check


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_options(parser: LocustArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--models",
        env_var="LOCUST_MODELS",
        default="",
        help="model names, separated by commas; default: the first that the server lists",
    )
    add(
        "--strategies",
        env_var="LOCUST_STRATEGIES",
        type=make_option_type(parse_weights),
        default="",
        help="strategies with weights, such as 'paged=3,contiguous=1'; default: all listed ones, equally often",
    )
    add(
        "--rows",
        env_var="LOCUST_ROWS",
        default="strategy",
        choices=list(ROW_NAMES),
        help="what has a row of its own in the report: each strategy, each class of users, or each pair of both",
    )
    add(
        "--temperature",
        env_var="LOCUST_TEMPERATURE",
        type=float,
        default=0.0,
        help="temperature of sampling; 0: greedy",
    )
    add(
        "--body",
        env_var="LOCUST_BODY",
        type=make_option_type(parse_json_object),
        default="{}",
        help="JSON object with fields to add to every request",
    )
    add("--api-key", env_var="OPENAI_API_KEY", default="", help="API key to send as a bearer token", is_secret=True)


def parse_json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError if the text is something else."""
    return decode(text, type=dict[str, Any])


# Names of the rows in locust's report, by value of the option --rows.
ROW_NAMES = {"strategy": "{model}", "class": "{kind}", "both": "{model} {kind}"}


class Client(FastHttpUser):
    """A locust user that sends requests and reads each answer to its end, or to a given number of pieces."""

    abstract = True
    network_timeout = 600.0  # seconds to wait for a response; long, as a request may queue
    connection_timeout = 10.0
    models: dict[str, float]  # relative probability of each model name in choose_model()
    max_model_len = CONTEXT  # maximum number of tokens of prompt and answer together that fits into every model

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        options: Any = environment.parsed_options
        self.options = options
        self.random = Random()
        self.headers = {"Accept-Encoding": "identity"}
        if options.api_key:
            self.headers["Authorization"] = f"Bearer {options.api_key}"
        self.body = {
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **parse_json_object(options.body),
        }

    def on_start(self) -> None:
        self.models = self._fetch_models()

    def _fetch_models(self) -> dict[str, float]:
        """Return the weight of each model name to request. End the load test if the server lists no suitable model."""
        with self.client.get(
            listing.PATH, params=listing.PARAMS, headers=self.headers, catch_response=True
        ) as response:
            try:
                if response.status_code != 200:
                    raise ListingError(_format_failure(response))
                weights = parse_weights(self.options.strategies)
                listings = [read_listing(response.content, model) for model in self.options.models.split(",")]
                self.max_model_len = min(each.max_model_len or CONTEXT for each in listings)
                return {name: weight for each in listings for name, weight in select_models(each, weights).items()}
            except (ListingError, ValueError) as error:
                response.failure(f"cannot choose a model: {error}")
        assert self.environment.runner is not None
        gevent.spawn(self.environment.runner.quit)
        raise gevent.GreenletExit  # ends this user as if locust had stopped it

    def choose_model(self) -> str:
        """Return a random model name such as "tiny:paged"; its probability is proportional to its weight."""
        return self.random.choices(list(self.models), list(self.models.values()))[0]

    def send_request(self, path: str, model: str, body: dict[str, Any], max_pieces: int | None = None) -> Reply | None:
        """Send a request and report its times to locust; return the answer, or None if the request failed.

        After `max_pieces` pieces of the answer, if given, the connection is closed.
        """
        row = ROW_NAMES[self.options.rows].format(model=model, kind=type(self).__name__)
        body = {"model": model, **body, **self.body}
        send_time = perf_counter()
        with self.client.post(
            path, json=body, headers=self.headers, name=row, stream=True, catch_response=True
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
            # milliseconds from sending the request to the end of the answer
            response.request_meta["response_time"] = (perf_counter() - send_time) * 1000
            response.request_meta["response_length"] = reply.completion_tokens or len(reply.arrival_times)
        self._report(row, send_time, reply)
        return reply

    def _report(self, row: str, send_time: float, reply: Reply) -> None:
        if reply.arrival_times:  # empty if the answer has no text, as its first token ended it
            self._fire("TTFT", row, (reply.arrival_times[0] - send_time) * 1000, reply.prompt_tokens)
        for gap in reply.gaps():
            self._fire("ITL", row, gap * 1000, 1)
        if (speed := reply.compute_tokens_per_second()) is not None:
            self._fire("tok/s", row, speed, reply.completion_tokens)

    def _fire(self, what: str, row: str, figure: float, tokens: int) -> None:
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
