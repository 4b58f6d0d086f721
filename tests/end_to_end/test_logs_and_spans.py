"""What a real server tells of its requests, in its log and in spans; and that it tells nobody what was said."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from server.processes.supervisor import Targets
from tests.end_to_end.server_process import PATIENCE, Server, eventually, serving

MARK = "xylophone"  # in everything that is sent
LONG = {"max_tokens": 1500, "ignore_eos": True, "stream": True}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

BAD: dict[str, dict[str, Any] | str] = {  # by request id, with the paths they go to
    "type": {"prompt": MARK, "max_tokens": MARK},
    "nested": {"prompt": [[MARK, {MARK: MARK}]], "logit_bias": {MARK: 1}, "stop": [MARK] * 9, "seed": [MARK]},
    "name": {"prompt": MARK, MARK: MARK, f"{MARK} is long": {MARK: 1}},
    "long": {"prompt": MARK * 9000},
    "model": {"prompt": MARK, "model": MARK},
    "strategy": {"prompt": MARK, "kv_cache": MARK},
    "json": f'{{"prompt": "{MARK}',
    "no-object": f'["{MARK}"]',
    "number": f'{{"prompt": {MARK}}}',
    "chat-role": {"messages": [{"role": MARK, "content": MARK}], "chat_template_kwargs": {"messages": MARK}},
    "chat-content": {"messages": [{"role": "user", "content": [{"type": MARK, MARK: MARK}], MARK: MARK}]},
    "chat-tools": {"messages": [{"role": "user", "content": MARK}], "tools": [MARK], "response_format": {"type": MARK}},
}


@dataclass
class Collector:
    """An OTLP collector."""

    url: str = ""
    bodies: list[bytes] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        requests = [ExportTraceServiceRequest.FromString(body) for body in list(self.bodies)]
        return [s for r in requests for of in r.resource_spans for scope in of.scope_spans for s in scope.spans]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.bodies.append(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield collector
        server.shutdown()
        thread.join()


@dataclass
class Told:
    """What a server told until it was stopped."""

    log: list[dict[str, Any]]
    text: str
    bodies: list[bytes]
    spans: list[Span]

    def of(self, request_id: str) -> dict[str, Any]:
        """The one line of a request."""
        (line,) = [line for line in self.log if line.get("request_id") == request_id]
        return line


@pytest.fixture(scope="module")
def told() -> Iterator[Told]:
    with collecting() as collector, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        environment.setenv("NO_PROXY", "127.0.0.1")
        flags = ["--log-format", "json", "--log-level", "debug", "--otlp-traces-endpoint", collector.url]
        flags += ["--dtype", "float32", "--threads", "1", "--kv-memory", "64MiB"]
        targets = Targets("tests.end_to_end.checked_engine:run_faultily", "tests.end_to_end.faulty_worker:run")
        with serving(*flags, targets=targets) as server:
            ask_everything(server)
            eventually(lambda: server.metric("kvmux_num_requests_running") == 0)
            server.process.terminate()
            server.process.wait(PATIENCE)
            text = server.output.read_text()
        yield Told([json.loads(line) for line in text.splitlines()], text, collector.bodies, collector.spans)


def ask_everything(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:

        def post(name: str, body: dict[str, Any] | str, **headers: str) -> httpx.Response:
            path = "/v1/chat/completions" if name.startswith("chat") else "/v1/completions"
            headers = {"x-request-id": name, "content-type": "application/json"} | headers
            content = body if isinstance(body, str) else json.dumps({"model": "tiny"} | body)
            return http.post(path, content=content, headers=headers)

        prompt = f"Tell me of a {MARK} once more. " * 10
        good = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        assert post("good", good, traceparent=f"00-{TRACE}-{PARENT}-01").status_code == 200
        assert post("again", good | {"stream": True, "kv_cache": "paged"}).status_code == 200
        assert post("three", good | {"n": 3, "temperature": 1, "request_id": "of-mine"}).status_code == 200
        assert post("chat", {"messages": [{"role": "user", "content": prompt}], "max_tokens": 3}).status_code == 200
        for name, body in BAD.items():
            assert post(name, body).status_code in (400, 404), name
        assert post("broken-strategy", good | {"seed": 13}).status_code == 500
        assert post("broken-worker", good | {"prompt": f"{MARK} explode"}).status_code == 500
        hang_up(http, "leaves", prompt)
        http.get(f"/{MARK[:3]}", headers={"x-request-id": "nowhere"})
        http.get("/v1/models", headers={"x-request-id": "fine"})


def hang_up(http: httpx.Client, name: str, prompt: str) -> None:
    """After the first piece of a stream."""
    body = {"model": "tiny", "prompt": prompt} | LONG
    with http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": name}) as response:
        next(response.iter_lines())


# ---------------------------------------------------------------- the log
def test_every_line_of_every_process_is_an_object(told: Told) -> None:
    assert {line["process"] for line in told.log} == {"kvmux", "worker-0", "engine"}
    for line in told.log:
        assert {"time", "level", "logger", "process", "message"} <= line.keys()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    (ready,) = [line for line in told.log if "url" in line]
    assert ready["model"] == "tiny"
    assert ready["url"].startswith("http://127.0.0.1:")


def test_nothing_of_what_was_said_is_told(told: Told) -> None:
    """Not in debug's lines, not in a traceback, not in a span."""
    assert any(line["level"] == "DEBUG" for line in told.log)
    assert MARK not in told.text
    assert told.bodies
    assert not any(MARK.encode() in body for body in told.bodies)


def test_a_request_that_ended_well(told: Told) -> None:
    line = told.of("good")
    known = {
        "level": "INFO",
        "process": "worker-0",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "outcome": "length",
        "model": "tiny",
        "choices": 1,
        "strategy": "paged",
        "reason": "default",
        "cached_tokens": 0,
        "miss": "cold",
        "generated_tokens": 5,
        "preemptions": 0,
        "trace_id": TRACE,
    }
    assert line | known == line
    assert line["prompt_tokens"] > 32
    assert line["completion_id"].startswith("cmpl-")
    assert 0 < line["queue_ms"] + line["prefill_ms"] <= line["first_token_ms"] + 0.1
    assert line["first_token_ms"] < line["total_ms"]
    assert line["message"].startswith("POST /v1/completions 200, length, paged, ")
    assert line["message"].endswith(" ms [good]")


def test_what_was_cached_and_why(told: Told) -> None:
    line = told.of("again")
    assert line["reason"] == "request"
    assert line["cached_tokens"] >= 32
    assert line.get("miss") in ("short", None)


def test_choices_are_counted_together(told: Told) -> None:
    line = told.of("three")
    assert line["completion_id"] == "cmpl-of-mine"
    assert (line["choices"], line["generated_tokens"]) == (3, 15)


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_of_a_client(told: Told, name: str) -> None:
    line = told.of(name)
    assert line["level"] == "INFO"
    assert line["status"] in (400, 404)
    assert line["error"]
    assert "exception" not in line


def test_fields_are_named_but_not_those_that_are_none(told: Told) -> None:
    assert told.of("type")["error"] == "max_tokens: int_type"
    assert told.of("name")["error"] == "the body: extra_forbidden; the body: extra_forbidden"
    assert "code" not in told.of("name")
    assert told.of("long")["code"] == "context_length_exceeded"
    assert told.of("nowhere") | {"status": 404, "code": "unknown_url", "path": "/xyl"} == told.of("nowhere")


def test_a_failing_strategy(told: Told) -> None:
    line = told.of("broken-strategy")
    assert (line["level"], line["status"], line["outcome"]) == ("ERROR", 500, "error")
    assert line["code"] == "strategy_failed"
    assert "exception" not in line
    (fault,) = [each for each in told.log if "broken on purpose" in each.get("exception", "")]
    assert (fault["process"], fault["logger"]) == ("engine", "server.engine.instance")
    (given_up,) = [each for each in told.log if "its requests end with an error" in each["message"]]
    assert (given_up["process"], "exception" in given_up) == ("engine", False), "the traceback is logged once"


def test_an_unexpected_exception_has_a_traceback_and_no_message(told: Told) -> None:
    line = told.of("broken-worker")
    assert (line["level"], line["status"]) == ("ERROR", 500)
    assert "in create_completion" in line["exception"]
    assert line["exception"].endswith("ValueError")
    assert len([each for each in told.log if "ValueError" in each.get("exception", "")]) == 2, "one of the engine"


def test_a_client_that_leaves(told: Told) -> None:
    line = told.of("leaves")
    assert line["outcome"] == "cancelled"
    assert 0 < line["generated_tokens"] < 1500


def test_the_document_has_every_field(told: Told) -> None:
    document = (Path(__file__).parents[2] / "docs" / "operations" / "logs.md").read_text()
    named = set(re.findall(r"`(\w+)`", document))
    for line in told.log:
        assert line.keys() <= named, line


def test_what_goes_well_beside_generation_is_not_told(told: Told) -> None:
    assert not [line for line in told.log if line.get("request_id") == "fine"]


# ---------------------------------------------------------------- spans
def attributes(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_spans_arrive(told: Told) -> None:
    (whole,) = [s for s in told.spans if s.trace_id.hex() == TRACE and s.kind == Span.SPAN_KIND_SERVER]
    assert whole.name == "text_completion tiny"
    assert whole.parent_span_id.hex() == PARENT
    known = attributes(whole)
    assert known["kvmux.strategy"] == "paged"
    assert known["gen_ai.usage.output_tokens"] == 5
    parts = [s for s in told.spans if s.parent_span_id == whole.span_id]
    assert [part.name for part in parts] == ["queue", "prefill", "decode"]
    assert whole.start_time_unix_nano <= parts[0].start_time_unix_nano
    assert parts[-1].end_time_unix_nano == whole.end_time_unix_nano


def test_every_request_for_generation_has_a_span(told: Told) -> None:
    of = {attributes(s)["kvmux.request_id"]: s for s in told.spans if s.kind == Span.SPAN_KIND_SERVER}
    assert of.keys() == {"good", "again", "three", "chat", "broken-strategy", "broken-worker", "leaves", *BAD}
    assert attributes(of["broken-strategy"])["error.type"] == "strategy_failed"
