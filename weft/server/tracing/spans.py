"""A span of OpenTelemetry for each request that computes, sent to a collector (`weft-serve[otel]`).

Attributes have the usual names (`gen_ai.*`) and no text of a client. Spans are sent in batches from a thread of the
library's; when the collector does not take them, they are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from weft import __version__
from weft.base.errors import InvalidOption
from weft.server.http.sse import ERROR

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from weft.server.access_log import Record

CHAT, TEXT, EMBEDDINGS = "chat", "text_completion", "embeddings"
# By route. Others have no span.
OPERATIONS = {
    "/v1/chat/completions": CHAT, "/v1/responses": CHAT, "/v1/messages": CHAT, "/v1/fork": CHAT, "/api/chat": CHAT,
    "/api/v0/chat/completions": CHAT, "/v1/completions": TEXT, "/api/v0/completions": TEXT, "/completion": TEXT,
    "/completions": TEXT, "/infill": TEXT, "/generate": TEXT, "/api/generate": TEXT, "/v1/embeddings": EMBEDDINGS,
    "/api/v0/embeddings": EMBEDDINGS, "/api/embed": EMBEDDINGS, "/api/embeddings": EMBEDDINGS, "/v1/score": "score",
    "/score": "score", "/v1/rerank": "rerank", "/rerank": "rerank", "/v2/rerank": "rerank", "/classify": "classify",
}  # fmt: skip
# What a proxy or a client says of the trace that a request belongs to.
CONTEXT = ("traceparent", "tracestate")
ERRORS = 500
EXAMPLE = "http://127.0.0.1:4318/v1/traces"
NEEDED = "needs the libraries of OpenTelemetry; run: pip install 'weft-serve[otel]'"


class RequestSpans:
    """`clock` is the clock of the requests' records, and `wall` is Unix time, both in seconds."""

    def __init__(
        self, provider: TracerProvider, clock: Callable[[], float], wall: Callable[[], float] = time.time
    ) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("weft", __version__)
        self._context = TraceContextTextMapPropagator()
        self._clock = clock
        self._wall = wall

    def note(self, record: Record, route: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send the span of a request that has ended."""
        from opentelemetry.trace import SpanKind, StatusCode

        operation = OPERATIONS.get(route)
        if operation is None:
            return
        ended, now = self._wall(), self._clock()
        computed = record.generation
        span = self._tracer.start_span(
            operation if computed is None else f"{operation} {computed.model}",
            self._context.extract(carrier_of(headers)),
            SpanKind.SERVER,
            attributes_of(record, operation, route),
            start_time=nanoseconds(ended - (now - record.started)),
        )
        if has_failed(record):
            span.set_status(StatusCode.ERROR)
        if computed is not None and computed.first_token_seconds is not None:
            first = ended - (now - computed.first_token_seconds)
            span.add_event("gen_ai.first_token", timestamp=nanoseconds(first))
        span.end(nanoseconds(ended))


def send_to(endpoint: str, clock: Callable[[], float]) -> RequestSpans:
    """Return what sends spans to a collector, as OTLP over HTTP. Variables of OpenTelemetry say more (`OTEL_*`)."""
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname:
        raise InvalidOption("otlp_traces_endpoint", f"must be a URL such as {EXAMPLE}, got {endpoint!r}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise InvalidOption("otlp_traces_endpoint", NEEDED) from None
    # Variables win over these names.
    resource = Resource.create({"service.version": __version__})
    if str(resource.attributes.get("service.name")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "weft"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return RequestSpans(provider, clock)


def has_failed(record: Record) -> bool:
    """Return whether it is the server's fault that a request has no whole answer."""
    return record.end == ERROR or record.status is None or record.status >= ERRORS


def nanoseconds(seconds: float) -> int:
    return int(1e9 * seconds)


def carrier_of(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers that name a trace.

    >>> carrier_of([(b"host", b"a"), (b"traceparent", b"00-ab")])
    {'traceparent': '00-ab'}
    """
    names = {name.encode(): name for name in CONTEXT}
    return {names[name]: value.decode("latin-1") for name, value in headers if name in names}


def attributes_of(record: Record, operation: str, route: str) -> Mapping[str, Any]:
    """Return the attributes of a span. Those of answers are of the first, unless they are sums or lists."""
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "weft",
        "http.request.method": record.method,
        "http.route": route,
        "gen_ai.request.id": record.id,
    }
    if record.status is not None:
        found["http.response.status_code"] = record.status
    if has_failed(record):
        found["error.type"] = record.end or str(record.status)
    computed = record.generation
    if computed is None:
        return found
    used, first = computed.used(), computed.first_token_seconds
    found |= {
        "gen_ai.request.model": computed.model,
        "gen_ai.response.model": computed.model,
        "gen_ai.usage.input_tokens": used.prompt,
        "gen_ai.usage.cache_read.input_tokens": used.cached,
        "gen_ai.usage.output_tokens": used.generated,
        "gen_ai.latency.time_in_queue": computed.queued_seconds,
    }
    if first is not None:
        found["gen_ai.latency.time_to_first_token"] = first - record.started
    answers = computed.sequences
    reasons = [str(each.finish) for each in answers if each.finish is not None]
    if reasons:
        found["gen_ai.response.finish_reasons"] = reasons
    drafts = [each.report.drafts for each in answers]
    if any(each.proposed for each in drafts):
        found["weft.drafts.proposed"] = sum(each.proposed for each in drafts)
        found["weft.drafts.accepted"] = sum(each.accepted for each in drafts)
    if answers and operation in (CHAT, TEXT):
        found["gen_ai.response.id"] = computed.names[0]
        found |= asked_of(answers[0].request.params, len(answers))
    return found


def asked_of(params: Any, answers: int) -> dict[str, Any]:
    """Return the sampling parameters of a request that have names."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
    values = {f"gen_ai.request.{name}": getattr(params, name) for name in names}
    found = {name: value for name, value in values.items() if value is not None}
    return found if answers == 1 else found | {"gen_ai.request.choice.count": answers}
