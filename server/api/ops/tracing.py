"""Makes OpenTelemetry's spans of ended requests for generation: the request, and in it queue, prefill and decode.

Attributes have the names of OpenTelemetry's conventions for generative AI, or else vLLM's; none contains a prompt or a
text. Only this module imports OpenTelemetry's SDK (the optional extra `otel`), and only if spans are switched on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from config.errors import SettingsError
from server.api.openai.generation import Generation
from server.api.ops.request_log import EndedRequest
from server.version import get_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat", "/v1/responses": "chat"}
SHUTDOWN_TIMEOUT = 2.0  # seconds to send the remaining spans when the process ends
PROVIDER = "kvmux"


def make_tracing(endpoint: str | None) -> Tracing | None:
    """Return a Tracing that sends spans to `endpoint` as OTLP over HTTP, in a thread; None without an endpoint.

    OpenTelemetry's environment variables set everything else. Raises SettingsError when the packages are missing.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise SettingsError("otlp_traces_endpoint needs OpenTelemetry: pip install 'kvmux[otel]'") from None
    named = Resource(
        {"service.name": PROVIDER, "service.version": get_version(), "service.instance.id": str(os.getpid())}
    )
    resource = Resource.create().merge(named).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(endpoint))))
    return Tracing(provider)


def traces_url(endpoint: str) -> str:
    """Return the URL that spans are sent to: `endpoint`, with the usual path /v1/traces if it has no path."""
    return endpoint.rstrip("/") + "/v1/traces" if urlsplit(endpoint).path in ("", "/") else endpoint


class Tracing:
    """Records OpenTelemetry spans of requests that have ended."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("kvmux", get_version())
        self._propagator = TraceContextTextMapPropagator()
        self._set_span_in_context = trace.set_span_in_context
        self._server_kind, self._error_status = trace.SpanKind.SERVER, trace.Status(trace.StatusCode.ERROR)

    def record(self, ended: EndedRequest) -> str | None:
        """Record the spans of a request; return the trace's id, or None for requests that generate nothing."""
        if ended.route not in OPERATIONS or ended.method != "POST":
            return None
        operation, generation, error = OPERATIONS[ended.route], ended.generation, ended.error
        epoch = time.time() - time.monotonic()  # computed once: each span ends exactly when the next begins

        def nanoseconds(moment: float) -> int:
            return int((epoch + moment) * 1e9)

        span = self._tracer.start_span(
            operation if generation is None else f"{operation} {generation.job.model}",
            context=self._propagator.extract(ended.headers),
            kind=self._server_kind,
            start_time=nanoseconds(ended.start_time),
            attributes=_drop_none({"gen_ai.operation.name": operation} | http_attributes(ended)),
        )
        if error is not None and error.status_code >= 500:
            span.set_status(self._error_status)
        if generation is not None and span.is_recording():
            span.set_attributes(_drop_none(generation_attributes(ended, generation)))
            for name, (start, end) in ended.phases.items():
                part = self._tracer.start_span(
                    name, context=self._set_span_in_context(span), start_time=nanoseconds(start)
                )
                part.end(nanoseconds(end))
        span.end(nanoseconds(ended.end_time))
        trace_id = span.get_span_context().trace_id
        return f"{trace_id:032x}" if trace_id else None

    def close(self) -> None:
        """Send the remaining spans to the collector; wait for it SHUTDOWN_TIMEOUT seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        closing.start()
        closing.join(SHUTDOWN_TIMEOUT)


def http_attributes(ended: EndedRequest) -> dict[str, Any]:
    error = ended.error
    return {
        "gen_ai.provider.name": PROVIDER,
        "http.request.method": ended.method,
        "http.route": ended.route,
        "http.response.status_code": ended.status,
        "error.type": None if error is None else error.code or str(error.status_code),
        "kvmux.request_id": ended.request_id,
    }


def generation_attributes(ended: EndedRequest, generation: Generation[Any]) -> dict[str, Any]:
    """Return a generation's span attributes: strategy and times of the choice admitted first, token counts of all."""
    job, admitted = generation.job, generation.first_admitted
    sampling = job.submits[0].sampling
    return {
        "gen_ai.request.model": job.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": job.choices_per_prompt,
        "gen_ai.response.id": job.id,
        "gen_ai.response.model": job.model,
        "gen_ai.response.finish_reasons": ended.finish_reasons,
        "gen_ai.usage.input_tokens": generation.prompt_tokens,
        "gen_ai.usage.output_tokens": generation.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": generation.cached_tokens,
        "gen_ai.latency.time_in_queue": None if admitted is None else admitted.queue_seconds,
        "gen_ai.latency.time_to_first_token": ended.first_token_seconds,
        "gen_ai.latency.e2e": ended.total_seconds,
        "kvmux.strategy": None if admitted is None else admitted.instance,
        "kvmux.strategy.reason": None if admitted is None else admitted.reason,
        "kvmux.miss": None if admitted is None else admitted.miss,
        "kvmux.preemptions": generation.preemptions,
    }


def _drop_none(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
