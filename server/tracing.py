"""One OpenTelemetry span per request, sent by OTLP over HTTP: an optional extra, imported only where it is asked for.

A span is made when its request has ended, of what the Record holds, and put into a bounded queue; a thread of the SDK
sends what is there every few seconds. So nothing ever waits for the receiver: where it is down, spans are dropped.

Attributes have the names of OpenTelemetry's conventions for HTTP and generative AI; queue and first token, for which
these have metrics only, have vLLM's. OTEL_* variables of the SDK (service name, sampler, headers, batches) apply.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping
from typing import Any

from server.record import Record
from server.start import StartError
from server.version import VERSION

MISSING = "--otlp-traces-endpoint: OpenTelemetry's SDK is not installed; install it with: pip install -e '.[otel]'"
OPERATIONS = {
    "chat": "chat",
    "responses": "chat",
    "messages": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}
"""What the conventions call an endpoint's work."""
CARRIED = ("traceparent", "tracestate")
"""Headers in which a caller says of what trace its request is a part (W3C Trace Context)."""
CLOSE_SECONDS = 1.0
"""For the spans of the last seconds, at the end of the process."""


class Tracer:
    """Sends spans until it is closed; closes itself at the end of the process."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: the whole URL, such as http://127.0.0.1:4318/v1/traces. Raises StartError without the extra."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise StartError(MISSING) from None
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        own = {"service.version": VERSION}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            own["service.name"] = "octavo"
        # Never the global provider: other libraries would add spans, with texts of failures in them.
        self._provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("octavo", VERSION)
        self._kind, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)
        self._extract = TraceContextTextMapPropagator().extract
        atexit.register(self.close)

    def send(self, record: Record, headers: Mapping[str, str]) -> None:
        """The span of a request that has ended; it continues the trace that `headers` name."""
        carrier = {name: headers[name] for name in CARRIED if name in headers}
        operation = OPERATIONS.get(record.endpoint or "")
        name = f"{operation} {record.model}" if operation else f"{record.method} {record.route or ''}".rstrip()
        span = self._tracer.start_span(
            name,
            context=self._extract(carrier) if carrier else None,
            kind=self._kind,
            attributes=attributes(record),
            start_time=record.began_ns,
        )
        if record.status >= 500 or record.error is not None:
            span.set_status(self._failed)
        span.end(record.began_ns + int(record.duration_ms * 1e6))

    def close(self) -> None:
        """Send what is left, for at most CLOSE_SECONDS: the SDK would wait for a receiver that is down."""
        atexit.unregister(self.close)
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(CLOSE_SECONDS)
        if last.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # ends its retries


def attributes(record: Record) -> dict[str, Any]:
    """What a span says of its request; nothing that is not known."""
    params = record.params
    values: dict[str, Any] = {
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "http.route": record.route,
        "url.path": record.path,
        "octavo.key": record.key,
        "error.type": record.error or (str(record.status) if record.status >= 500 else None),
        "gen_ai.request.id": record.id,
        "gen_ai.request.model": record.model,
    }
    operation = OPERATIONS.get(record.endpoint or "")
    if operation:
        values |= {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "octavo",
            "gen_ai.response.model": record.model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "gen_ai.response.finish_reasons": record.finish_reasons or None,
            "gen_ai.latency.time_in_queue": _seconds(record.queue_ms),
            "gen_ai.latency.time_to_first_token": _seconds(record.ttft_ms),
            "gen_ai.latency.e2e": _seconds(record.duration_ms),
        }
    if params is not None and params.pooling is None:
        values |= {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k or None,
            "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
            "gen_ai.request.presence_penalty": params.presence_penalty or None,
            "gen_ai.request.choice.count": record.choices if record.choices > 1 else None,
        }
    return {name: value for name, value in values.items() if value is not None}


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
