"""Spans of requests, as OpenTelemetry's exporter for tests gets them.

Over the wire: tests/end_to_end/test_logs_and_spans.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from config.errors import SettingsError
from server.api.ops.tracing import Tracing, make_tracing, traces_url
from server.engine.ipc.messages import Admitted, Submit, Tokens
from tests.api.conftest import running_api
from tests.api.fake_engine import FakeEngine, fails, generates
from tests.api.payloads import VALID_REQUEST, Encode
from tests.patience import PATIENCE

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Spans:
    """An API process with a fake engine, and the spans it makes."""

    def __init__(self, http: httpx.Client, engine: FakeEngine, exporter: InMemorySpanExporter) -> None:
        self._http, self.engine, self._exporter = http, engine, exporter

    def of(self, path: str = "/v1/completions", sampled: bool = True, **body: object) -> dict[str, ReadableSpan]:
        """Those of one request by name: the server's is `whole`."""
        self._exporter.clear()
        flags = "01" if sampled else "00"
        self._http.post(path, json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-{flags}"})
        deadline = time.monotonic() + (5 if sampled else 0.1)
        while time.monotonic() < deadline:
            spans = self._exporter.get_finished_spans()
            if any(span.kind is SpanKind.SERVER for span in spans):
                return {"whole" if span.kind is SpanKind.SERVER else span.name: span for span in spans}
            time.sleep(0.005)
        return {}


@pytest.fixture(scope="module")
def traced(encode: Encode) -> Iterator[Spans]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.api.app.make_tracing", lambda _: Tracing(provider))
        with (
            running_api() as api,
            FakeEngine(api.socket_path, generates([])) as engine,
            httpx.Client(base_url=api.url, timeout=PATIENCE) as http,
        ):
            api.await_ready()
            yield Spans(http, engine, exporter)


def known(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_request_and_its_parts(traced: Spans, encode: Encode) -> None:
    def script(submit: Submit) -> list[list[Any]]:
        name = submit.request_id
        return [[Admitted(name, "paged", "default", 3, "short", 0.0)], [Tokens(name, encode("hi"), "length")]]

    traced.engine.begin_again(script)
    spans = traced.of(**VALID_REQUEST, max_tokens=7, temperature=0.5, top_p=0.25)
    assert list(spans) == ["queue", "prefill", "decode", "whole"]
    whole = spans.pop("whole")
    assert whole.name == "text_completion tiny"
    assert whole.parent is not None
    assert (f"{whole.parent.trace_id:032x}", f"{whole.parent.span_id:016x}") == (TRACE, PARENT)
    result = known(whole)
    assert result.pop("gen_ai.response.id").startswith("cmpl-")
    assert result.pop("kvmux.request_id")
    assert 0 < result.pop("gen_ai.latency.time_to_first_token") <= result.pop("gen_ai.latency.e2e")
    assert result == {
        "gen_ai.provider.name": "kvmux",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 1,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.latency.time_in_queue": 0.0,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "kvmux.strategy": "paged",
        "kvmux.strategy.reason": "default",
        "kvmux.miss": "short",
        "kvmux.preemptions": 0,
    }
    for part in spans.values():
        assert part.parent is not None
        assert part.parent.span_id == whole.context.span_id
    queue, prefill, decode = spans.values()
    assert whole.start_time is not None
    assert queue.start_time is not None
    assert whole.start_time <= queue.start_time
    assert (queue.end_time, prefill.end_time, decode.end_time) == (
        prefill.start_time,
        decode.start_time,
        whole.end_time,
    )


def test_parts_lie_within_the_request_whatever_times_the_engine_sends(traced: Spans, encode: Encode) -> None:
    def script(submit: Submit) -> list[list[Any]]:
        name = submit.request_id
        return [[Admitted(name, "paged", "default", 0, None, 99.0)], [Tokens(name, encode("hi"), "length")]]

    traced.engine.begin_again(script)
    spans = traced.of(**VALID_REQUEST)
    assert spans["prefill"].start_time == spans["prefill"].end_time == spans["decode"].start_time
    assert spans["decode"].end_time == spans["whole"].end_time


def test_a_chat(traced: Spans, encode: Encode) -> None:
    traced.engine.begin_again(generates(encode("hi")))
    messages = [{"role": "user", "content": "hello"}]
    whole = traced.of("/v1/chat/completions", model="tiny", messages=messages, stream=True)["whole"]
    assert whole.name == "chat tiny"
    assert known(whole)["gen_ai.response.finish_reasons"] == ("length",)


def test_a_request_that_the_engine_fails(traced: Spans) -> None:
    traced.engine.begin_again(fails(500, "no", "strategy_failed"))
    spans = traced.of(**VALID_REQUEST)
    assert list(spans) == ["queue", "whole"]
    assert spans["whole"].status.status_code is StatusCode.ERROR
    assert known(spans["whole"])["error.type"] == "strategy_failed"


def test_a_mistake_of_the_client_is_no_error_of_the_server(traced: Spans) -> None:
    spans = traced.of(prompt=5)
    assert list(spans) == ["whole"]
    assert spans["whole"].name == "text_completion"
    assert spans["whole"].status.status_code is StatusCode.UNSET
    assert known(spans["whole"])["error.type"] == "400"


def test_what_the_client_does_not_sample_is_left_out(traced: Spans, encode: Encode) -> None:
    traced.engine.begin_again(generates(encode("hi")))
    assert traced.of(sampled=False, **VALID_REQUEST) == {}


def test_other_requests_have_none(traced: Spans) -> None:
    assert make_tracing(None) is None
    traced._http.get("/health")
    traced._http.post("/tokenize", json=VALID_REQUEST)
    assert "whole" in traced.of(prompt=5)
    assert len(traced._exporter.get_finished_spans()) == 1


def test_without_the_packages_the_error_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"^otlp_traces_endpoint needs OpenTelemetry: pip install 'kvmux\[otel\]'$"):
        make_tracing("http://127.0.0.1:4318")


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/v1/traces", "https://c/v1/traces"),
        ("https://c/of/mine", "https://c/of/mine"),
    ],
)
def test_where_spans_go(given: str, used: str) -> None:
    assert traces_url(given) == used
