"""Spans as a receiver of OTLP over HTTP gets them; without a receiver, or without the extra, nothing suffers."""

from __future__ import annotations

import gzip
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from model.tokenizer import Tokenizer
from server.start import StartError
from server.tracing import CLOSE_SECONDS, Tracer
from tests.server.running import COMPLETIONS, MODEL, Running, running

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Receiver:
    """What has come so far."""

    url: str = ""
    resources: list[dict[str, Any]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def take(self, request: ExportTraceServiceRequest) -> None:
        for group in request.resource_spans:
            self.resources.append(attributes_of(group.resource))
            self.spans += [span for scope in group.scope_spans for span in scope.spans]


def attributes_of(holder: Any) -> dict[str, Any]:
    return {pair.key: plain(pair.value) for pair in holder.attributes}


def plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(entry) for entry in value.array_value.values]
    return getattr(value, str(kind))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    got = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            got.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        got.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        yield got
        server.shutdown()
        thread.join()


def closed(server: Running) -> None:
    """All spans are sent, those of requests whose answers have just come too."""
    tracer = server.service.tracer
    assert tracer is not None
    server.wait(lambda: server.service.admission.requests == 0)
    server.call(lambda: None)
    tracer.close()


def test_a_span_per_request(smol: Tokenizer, receiver: Receiver) -> None:
    with running(smol, otlp_traces_endpoint=receiver.url) as server:
        began = time.time_ns()
        body = {"prompt": "Once upon", "max_tokens": 3, "temperature": 0.5, "ignore_eos": True, "stream": True}
        server.post(COMPLETIONS, body, traceparent=f"00-{TRACE}-{PARENT}-01", **{"x-request-id": "mine"})
        server.chat(model="alias", n=2)
        server.post("/v1/embeddings", {"input": "x"})
        server.client.get("/version")
        server.client.get("/health")
        server.client.get("/metrics")
        closed(server)
        first, second, *_ = server.engine.submits()
    spans = {span.name: span for span in receiver.spans}
    names = {f"text_completion {MODEL}", "chat alias", f"embeddings {MODEL}", "GET /version"}
    assert (set(spans), len(receiver.spans)) == (names, 4)
    assert receiver.resources[0]["service.name"] == "octavo"
    completion = spans[f"text_completion {MODEL}"]
    assert (completion.trace_id.hex(), completion.parent_span_id.hex()) == (TRACE, PARENT)
    assert completion.kind == Span.SPAN_KIND_SERVER
    assert began <= completion.start_time_unix_nano < completion.end_time_unix_nano <= time.time_ns()
    told = attributes_of(completion)
    seconds = [told.pop(f"gen_ai.latency.{name}") for name in ("time_in_queue", "time_to_first_token", "e2e")]
    assert 0 <= seconds[0] <= seconds[1] <= seconds[2] < 5
    assert told == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": COMPLETIONS,
        "url.path": COMPLETIONS,
        "gen_ai.request.id": "mine",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": len(first.prompt_ids),
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
    }
    chat = attributes_of(spans["chat alias"])
    assert spans["chat alias"].parent_span_id == b""
    assert (chat["gen_ai.request.model"], chat["gen_ai.request.choice.count"]) == ("alias", 2)
    assert chat["gen_ai.usage.input_tokens"] == len(second.prompt_ids)
    assert chat["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert attributes_of(spans[f"embeddings {MODEL}"])["gen_ai.operation.name"] == "embeddings"


def test_failures_and_nothing_private(smol: Tokenizer, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret at /some/path")

    with running(smol, otlp_traces_endpoint=receiver.url, api_key=["very-secret"]) as server:
        key = {"x-api-key": "very-secret"}
        server.engine.fail_with = "no more diary"
        server.post(COMPLETIONS, {"prompt": "my diary", "stream": True}, **key)
        server.post(COMPLETIONS, {"prompt": "my diary", "temperature": 9}, **key)
        monkeypatch.setattr("server.sampling.Sampling.params", broken)
        server.post(COMPLETIONS, {"prompt": "my diary"}, traceparent="garbage", **key)
        closed(server)
    # A stream's span may end after the next request has come.
    spans = {attributes_of(span).get("http.response.status_code"): span for span in receiver.spans}
    in_stream, refused, broke = spans[200], spans[400], spans[500]
    assert in_stream.status.code == broke.status.code == Status.STATUS_CODE_ERROR
    assert refused.status.code == Status.STATUS_CODE_UNSET
    assert attributes_of(in_stream)["error.type"] == "engine_error"
    assert attributes_of(refused)["http.response.status_code"] == 400
    assert attributes_of(broke)["error.type"] == "500"
    everything = " ".join(map(str, receiver.spans))
    for word in ("diary", "secret", "garbage"):
        assert word not in everything


def test_a_receiver_that_is_down_costs_nothing(smol: Tokenizer) -> None:
    """One that refuses, and one that accepts and says nothing: what waits for it is a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as sock:
        ports = [silent.getsockname()[1], sock.getsockname()[1]]
        sock.close()
        for port in ports:
            with running(smol, otlp_traces_endpoint=f"http://127.0.0.1:{port}/v1/traces") as server:
                began = time.monotonic()
                for _ in range(20):
                    assert server.complete().status_code == 200
                assert time.monotonic() - began < 5
                began = time.monotonic()
                closed(server)
                assert time.monotonic() - began < CLOSE_SECONDS + 2


def test_without_the_extra_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(StartError, match=r"--otlp-traces-endpoint: .* pip install -e '\.\[otel\]'"):
        Tracer("http://127.0.0.1:1/v1/traces")
