"""Spans of OpenTelemetry: a collector on a socket gets one for each request that computes, and no text."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.support.servers.held_steps import SECONDS, wait_until
from tests.support.servers.http_server import Served, serving
from weft.base.errors import InvalidOption
from weft.server.app import ROUTES
from weft.server.settings import ServerSettings
from weft.server.tracing.spans import OPERATIONS, send_to

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "a secret in a prompt"


class Collector:
    """`spans` are those that arrived, `resources` what they say of the server."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.raw = b""
        taker = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                taker.take(body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *ignored: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, body: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(attributes(group.resource))
            self.spans += [span for scope in group.scope_spans for span in scope.spans]
        self.raw += body

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def found(self, count: int) -> list[Span]:
        wait_until(lambda: len(self.spans) >= count)
        return self.spans


def attributes(source: Any) -> dict[str, Any]:
    found = {}
    for each in source.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@pytest.fixture(autouse=True)
def without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")


@contextmanager
def collected() -> Iterator[tuple[Served, Collector]]:
    collector = Collector()
    try:
        with serving(ServerSettings(trusted_hosts=(), otlp_traces_endpoint=collector.url)) as served:
            yield served, collector
    finally:
        collector.close()


def test_a_request_has_a_span_with_the_usual_attributes() -> None:
    with collected() as (served, collector):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "job-7"}
        body = {"prompt": SECRET, "max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "n": 2, "stop": ["secret"]}
        answer = served.client.post("/v1/completions", json=body, headers=headers).json()
        [span] = collector.found(1)
        name = served.client.get("/v1/models").json()["data"][0]["id"]
        assert span.name == f"text_completion {name}"
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert span.kind == Span.SPAN_KIND_SERVER
        facts = attributes(span)
        assert facts["gen_ai.latency.time_to_first_token"] >= facts["gen_ai.latency.time_in_queue"] >= 0
        assert facts.items() >= {
            "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "weft", "http.route": "/v1/completions",
            "gen_ai.request.model": name, "gen_ai.response.model": name, "gen_ai.response.id": answer["id"],
            "gen_ai.request.id": "job-7", "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.5,
            "gen_ai.request.choice.count": 2, "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
            "gen_ai.usage.cache_read.input_tokens": 0, "gen_ai.usage.output_tokens": 10,
            "http.response.status_code": 200,
        }.items()  # fmt: skip
        assert facts["gen_ai.response.finish_reasons"] == ["length", "length"]
        [first] = span.events
        assert span.start_time_unix_nano < first.time_unix_nano <= span.end_time_unix_nano
        assert collector.resources[0]["service.name"] == "weft"
        assert SECRET.encode() not in collector.raw
        assert b"secret" not in collector.raw


def test_streams_chats_and_vectors_have_spans_and_other_routes_none() -> None:
    with collected() as (served, collector):
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "stream": True}
        served.client.post("/v1/chat/completions", json=chat).raise_for_status()
        served.client.get("/health")
        served.client.get("/v1/models")
        served.client.post("/tokenize", json={"prompt": "a"}).raise_for_status()
        served.client.post("/v1/embeddings", json={"input": ["a", "b c"]})
        served.client.post("/v1/completions", json={"prompt": 5})
        chatted, embedded, refused = collector.found(3)
    facts = [attributes(each) for each in (chatted, embedded, refused)]
    assert [each["gen_ai.operation.name"] for each in facts] == ["chat", "embeddings", "text_completion"]
    assert len(chatted.trace_id) == 16
    assert not chatted.parent_span_id
    # What a client did wrong is no error of the server's.
    assert refused.status.code == Status.STATUS_CODE_UNSET
    assert (facts[2]["http.response.status_code"], "gen_ai.usage.input_tokens" in facts[2]) == (400, False)


def test_an_error_of_the_server_is_one_of_the_span(monkeypatch: pytest.MonkeyPatch) -> None:
    with collected() as (served, collector):

        def fail(*ignored: object) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr("weft.server.front.Front.generate", fail)
        assert served.client.post("/v1/completions", json={"prompt": "a"}).status_code == 500
        [span] = collector.found(1)
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert attributes(span)["error.type"] == "500"


@pytest.mark.parametrize("header", ["00-zz", "x" * 8000, f"00-{'0' * 32}-{PARENT}-01", ""])
def test_a_broken_trace_of_a_client_begins_a_new_one(header: str) -> None:
    with collected() as (served, collector):
        served.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"traceparent": header})
        [span] = collector.found(1)
    assert any(span.trace_id)
    assert not span.parent_span_id


def test_a_collector_that_is_not_there_costs_no_answer() -> None:
    collector = Collector()
    collector.close()
    with serving(ServerSettings(trusted_hosts=(), otlp_traces_endpoint=collector.url)) as served:
        assert served.complete("a", max_tokens=2)["usage"]["completion_tokens"] <= 2


def test_routes_with_spans_are_routes() -> None:
    assert set(OPERATIONS) <= {path for path, method, _ in ROUTES if method == "POST"}


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://a/b", "http://", "grpc://a"])
def test_what_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidOption, match="must be a URL such as"):
        send_to(endpoint, lambda: 0.0)


def test_without_the_libraries_the_error_says_what_to_install() -> None:
    code = """
import sys
sys.modules["opentelemetry.sdk.trace"] = None
from weft.base.errors import InvalidOption
from weft.server.tracing.spans import send_to
try:
    send_to("http://127.0.0.1:4318/v1/traces", lambda: 0.0)
except InvalidOption as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert "pip install 'weft-serve[otel]'" in found.stdout, found


def test_without_a_collector_nothing_of_it_is_imported() -> None:
    code = "import sys; import weft.server.app; print([each for each in sys.modules if 'opentelemetry' in each])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert found.stdout == "[]\n", found
