"""Metrics for Prometheus: what the front measures where streams are read, and what the engine reports.

Every server has its own registry; nothing is global. The front's half costs a microsecond per token. The engine's half
is one snapshot per scrape; `docs/operate.md` explains how to read it, `docs/metrics.md` lists it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft import __version__
from weft.backends.backend import Backend
from weft.base.errors import EngineStopped
from weft.server.metrics import timings
from weft.server.metrics.timings import Histogram

STATS_SECONDS = 5.0
# "refused": the engine did not accept it.
FINISHES = ("stop", "length", "abort", "error", "refused")
OTHER = "other"


class Metrics:
    """The counters of one server. Routes use `meter`; the layer that sends statuses uses `answered`."""

    def __init__(self) -> None:
        self.first_token = Histogram(
            "weft_time_to_first_token_seconds",
            "Time from submission to the first token, without the network",
            timings.FIRST_TOKEN_SECONDS,
        )
        self.inter_token = Histogram(
            "weft_inter_token_seconds",
            "Time between tokens of a sequence, as they reach the server; tokens that arrive together share it",
            timings.TOKEN_SECONDS,
        )
        self.request = Histogram(
            "weft_request_seconds", "Time from submission to the last token", timings.REQUEST_SECONDS
        )
        self.queue = Histogram("weft_queue_seconds", "Time in the queue before the first step", timings.QUEUE_SECONDS)
        self.prompt = Histogram("weft_request_prompt_tokens", "Prompt tokens of a request", timings.TOKENS)
        self.cached = Histogram("weft_request_cached_tokens", "Reused prompt tokens of a request", timings.TOKENS)
        self.completion = Histogram("weft_request_generated_tokens", "Generated tokens of a request", timings.TOKENS)
        self.open = 0
        self.finished: Counter[str] = Counter()
        self.http: Counter[tuple[str, str, str]] = Counter()
        self.registry = CollectorRegistry()
        self.engine = EngineCollector()
        self.registry.register(self)
        self.registry.register(self.engine)
        ProcessCollector(registry=self.registry)

    def meter(self) -> Meter:
        """Return a meter for one sequence. Call its `started` when the request is submitted to the engine."""
        return Meter(self)

    def answered(self, method: str, route: str, status: int) -> None:
        """Count an HTTP response. `route` must come from a fixed list, never from the client."""
        self.http[method if method in ("GET", "POST") else OTHER, route, str(status)] += 1

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        return self.first_token, self.inter_token, self.request, self.queue, self.prompt, self.cached, self.completion

    def collect(self) -> Iterator[Metric]:
        for histogram in self.histograms:
            yield histogram.family()
        yield GaugeMetricFamily("weft_requests_open", "Sequences that are not finished; n=4 makes four", self.open)
        finished = CounterMetricFamily(
            "weft_requests",
            "Finished sequences: stop, length, abort (the client left or aborted), error, refused",
            labels=["reason"],
        )
        for reason in (*FINISHES, OTHER):
            finished.add_metric([reason], self.finished[reason])
        yield finished
        http = CounterMetricFamily(
            "weft_http_requests",
            "HTTP responses; status 499: the client disconnected before its response",
            labels=["method", "route", "status"],
        )
        for labels, count in sorted(self.http.items()):
            http.add_metric(list(labels), count)
        yield http

    async def render(self, backend: Backend, accept: str = "") -> Response:
        """Return the page that Prometheus scrapes."""
        await self.engine.refresh(backend)
        return rendered(self.registry, accept)


def rendered(registry: CollectorRegistry, accept: str) -> Response:
    """Return all metrics of a registry in an accepted format."""
    encode, content_type = choose_encoder(accept)
    return Response(encode(registry), headers={"content-type": content_type, "cache-control": "no-store"})


class Meter:
    """Measures one sequence where its stream is read. Call `finished` in any case; only its first call counts.

    `token(n)` takes n tokens that arrived together: they share the time since the last arrival evenly.
    """

    __slots__ = ("_last", "_metrics", "_started", "ended_seconds", "first_token_seconds")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._started: float | None = None
        self._last = 0.0
        # Arrival of the first token, on the clock of `perf_counter`.
        self.first_token_seconds: float | None = None
        self.ended_seconds: float | None = None

    def started(self) -> None:
        self._started = self._last = perf_counter()
        self._metrics.open += 1

    def first_token(self) -> None:
        now = perf_counter()
        self._metrics.first_token.observe(now - self._last)
        self._last = self.first_token_seconds = now

    def token(self, count: int = 1) -> None:
        if self.first_token_seconds is None:
            self.first_token()
            count -= 1
        if count > 0:
            now = perf_counter()
            self._metrics.inter_token.observe((now - self._last) / count, count)
            self._last = now

    def finished(self, reason: str, prompt: int, cached: int, completion: int, queued_seconds: float = 0.0) -> None:
        if self._started is None:
            return
        metrics = self._metrics
        metrics.open -= 1
        metrics.finished[reason if reason in FINISHES else OTHER] += 1
        self.ended_seconds = perf_counter()
        metrics.request.observe(self.ended_seconds - self._started)
        metrics.queue.observe(queued_seconds)
        metrics.prompt.observe(prompt)
        metrics.cached.observe(cached)
        metrics.completion.observe(completion)
        self._started = None


# name in `Backend.stats()`: name of the metric, help
GAUGES = {
    "running": ("weft_sequences_running", "Sequences that are running"),
    "waiting": ("weft_sequences_waiting", "Sequences in the queue"),
    "leases": ("weft_leases", "Sequences that hold memory of pages and states"),
    "cells": ("weft_cache_cells", "Pieces of 64 tokens (cells) in the cache"),
    "resume_points": ("weft_cache_resume_points", "Positions in the cache from which a sequence can resume"),
    "slabs": ("weft_memory_slabs", "Equal pieces (slabs) into which the memory buffer is cut"),
    "slabs_used": ("weft_memory_slabs_used", "Pieces of the memory buffer in use, by running sequences or the cache"),
}
COUNTERS = {
    "steps": ("weft_steps", "Planned steps"),
    "shortened_steps": ("weft_shortened_steps", "Steps whose prompt chunks --max-step-ms made shorter"),
    "step_seconds": ("weft_step_seconds", "Time in engine steps"),
    "planning_seconds": ("weft_planning_seconds", "Time in planning, as part of the steps"),
    "tokens_in": ("weft_prompt_tokens", "Tokens of accepted prompts"),
    "tokens_out": ("weft_generated_tokens", "Generated tokens"),
    "requests": ("weft_sequences_accepted", "Sequences that the engine accepted"),
    "refused": ("weft_sequences_refused", "Sequences that the engine refused"),
    "aborts": ("weft_aborts", "Sequences aborted by their client or because it disconnected"),
    "preemptions": ("weft_preemptions", "Running sequences preempted for lack of memory"),
    "lookups": ("weft_cache_lookups", "Requests looked up in the cache; a preempted request counts once"),
    "reusable_tokens": (
        "weft_cache_reusable_tokens",
        "Prompt tokens in whole cells of 64: what a perfect cache could reuse",
    ),
    "resumed_tokens": (
        "weft_resumed_tokens",
        "Tokens that preempted sequences found again in the cache; not counted as hits",
    ),
}
BY_REASON = {
    "misses": ("weft_cache_misses", "Lookups that reused less than all whole cells of 64 tokens, by reason"),
    "lost_tokens": ("weft_cache_lost_tokens", "Prompt tokens in whole cells of 64 that had to be computed, by reason"),
}
# Of retained prefixes: name in their stats: name of the metric, help
RETAINED = {
    "count": ("weft_retained_prefixes", "Places in the cache that requests retain"),
    "tokens": ("weft_retained_tokens", "Tokens of retained prefixes"),
    "bytes": ("weft_retained_bytes", "Bytes that retained prefixes hold"),
    "host_bytes": ("weft_retained_host_bytes", "Bytes of them that have moved to host memory"),
}
DRAFTERS = ("suffix", "prediction", "grammar", "habit", "mtp", "model")
# Why a sequence does not draft.
NOT_DRAFTED = ("request",)
# metric: help, label, {value of the label: name in the stats}
GROUPED = {
    "weft_cached_tokens": ("Reused prompt tokens", "source", {"device": "cached_tokens"}),
    "weft_captures": (
        "States for later requests: kept, or skipped for lack of memory",
        "result",
        {"kept": "captures_kept", "skipped": "captures_skipped"},
    ),
    "weft_evictions": (
        "Evicted pages and resume points, flushes included",
        "kind",
        {"page": "evicted_pages", "resume_point": "evicted_points"},
    ),
}

# Of each replica of a fleet: name in its facts: name of the metric, help
REPLICA_GAUGES = {
    "up": ("weft_replica_up", "1 while a replica takes requests"),
    "ejected": ("weft_replica_ejected", "1 while a replica is ejected because it failed or does not answer"),
    "open": ("weft_replica_requests_open", "Open requests of a replica"),
}
REPLICA_COUNTERS = {
    "ejections": ("weft_replica_ejections", "How often a replica was ejected"),
    "failures": ("weft_replica_failures", "Requests that a replica failed"),
    "retries": ("weft_replica_retries", "Requests that left a replica for another one before their first token"),
    "saved_tokens": ("weft_replica_saved_tokens", "Prompt tokens that a replica reused"),
}

# Of each memory tier below the device's: name in its stats: name of the metric, help
TIER_GAUGES = {
    "limit_bytes": ("weft_tier_limit_bytes", "Size of a memory tier below the device's"),
    "used_bytes": ("weft_tier_used_bytes", "Bytes in use in a tier"),
    "cells": ("weft_tier_cells", "Pieces of 64 tokens (cells) in a tier"),
    "resume_points": ("weft_tier_resume_points", "Positions in a tier from which a sequence can resume"),
    "erasing_bytes": ("weft_tier_erasing_bytes", "Bytes of dropped prefixes that are still to be overwritten"),
    "load_bytes_per_second": ("weft_tier_load_rate_bytes", "Measured bytes per second of loads from a tier"),
    "prefill_tokens_per_second": ("weft_tier_prefill_rate", "Measured tokens per second that loads compete with"),
}
TIER_COUNTERS = {
    "saved_bytes": ("weft_tier_saved_bytes", "Bytes copied to a tier"),
    "loaded_bytes": ("weft_tier_loaded_bytes", "Bytes copied from a tier"),
    "saved_seconds": ("weft_tier_saved_seconds", "Time of copies to a tier"),
    "loaded_seconds": ("weft_tier_loaded_seconds", "Time of copies from a tier"),
    "loaded_tokens": ("weft_tier_loaded_tokens", "Cached prompt tokens that were loaded from a tier"),
    "evicted_pages": ("weft_tier_evicted_pages", "Pages evicted from a tier"),
    "evicted_points": ("weft_tier_evicted_points", "Resume points evicted from a tier"),
    "unsaved": ("weft_tier_unsaved", "Prefixes that were evicted, or found no room, before they were saved"),
    "unworthy": (
        "weft_tier_unworthy",
        "Resume points not copied to a tier, because such points are seldom wanted",
    ),
    "failures": ("weft_tier_failures", "Copies that failed: damaged data, or a read, write or sync that failed"),
    "cancelled_loads": ("weft_tier_cancelled_loads", "Loads that were no longer wanted or found no memory"),
}

# Of prefixes that are sent between engines: name in the stats: name of the metric, help
TRANSFER_GAUGES = {
    "sending": ("weft_transfers_sending", "Prefixes on their way to decode engines"),
    "receiving": ("weft_transfers_receiving", "Prefixes on their way from prefill engines"),
}
TRANSFER_COUNTERS = {
    "sent_bytes": ("weft_transfer_sent_bytes", "Bytes of prefixes sent to decode engines"),
    "sent_prefixes": ("weft_transfer_sent_prefixes", "Prefixes that were sent whole"),
    "send_seconds": ("weft_transfer_send_seconds", "Time that prefixes took to send"),
    "exposed_seconds": ("weft_transfer_exposed_seconds", "Time of transfers after their prompt was computed"),
    "received_bytes": ("weft_transfer_received_bytes", "Bytes of prefixes that have arrived"),
    "received_prefixes": ("weft_transfer_received_prefixes", "Prefixes that have arrived whole"),
    "refused": ("weft_transfer_refused", "Prefixes refused because there was no memory for them"),
    "failed": ("weft_transfer_failed", "Prefixes that were not sent, or only in part"),
}


class EngineCollector:
    """Exports the engine's snapshot as metrics. Without an engine it exports only that fact."""

    def __init__(self) -> None:
        self._stats: Mapping[str, Any] = {}
        self._info: dict[str, str] = {}
        self._weights: Mapping[str, Any] = {}
        self._taken = perf_counter()
        self._up = False

    async def refresh(self, backend: Backend) -> None:
        """Take a snapshot. If a long step delays it, the last one remains, and its age shows that."""
        try:
            self._stats = await asyncio.wait_for(backend.stats(), STATS_SECONDS)
        except TimeoutError:
            self._up = backend.healthy
            return
        except EngineStopped:
            self._up, self._stats = False, {}
            return
        info = backend.info
        self._info = {"model": info.name, "architecture": info.architecture, "dtype": info.dtype}
        self._info["version"] = __version__
        if "replicas" not in self._stats:
            self._info["role"] = info.settings.get("role", "both")
        self._weights = info.settings.get("weights", {})
        self._taken, self._up = perf_counter(), backend.healthy

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        yield GaugeMetricFamily("weft_engine_up", "1 while the engine runs and accepts requests", float(self._up))
        if not stats:
            return
        yield InfoMetricFamily("weft_model", "The served model", self._info)
        age = perf_counter() - self._taken
        yield GaugeMetricFamily("weft_engine_stats_age_seconds", "Age of the engine's numbers on this page", age)
        yield from _weights(self._weights)
        for key, (name, help) in GAUGES.items():
            if key in stats:
                yield GaugeMetricFamily(name, help, stats[key])
        for key, (name, help) in COUNTERS.items():
            if key in stats:
                yield CounterMetricFamily(name, help, stats[key])
        yield from self._labelled(stats)
        yield from _drafts(stats.get("drafts", {}))
        yield from _retained(stats.get("retained", {}))
        yield from _prompt_files(stats.get("files", {}))
        yield from self._memory(stats)
        if "tiers" in stats:
            yield from self._tiers(stats)
        yield from _transfers(stats.get("transfers", {}))
        yield from _replicas(stats.get("replicas", {}))

    def _labelled(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        for key, (name, help) in BY_REASON.items():
            family = CounterMetricFamily(name, help, labels=["reason"])
            for reason, count in stats.get(key, {}).items():
                if reason != "nothing_more":
                    family.add_metric([reason], count)
            yield family
        for name, (help, label, parts) in GROUPED.items():
            family = CounterMetricFamily(name, help, labels=[label])
            for value, key in parts.items():
                family.add_metric([value], stats.get(key, 0))
            yield family
        asked = stats.get("reusable_tokens", 0)
        ratio = stats.get("cached_tokens", 0) / asked if asked else 0.0
        yield GaugeMetricFamily("weft_cache_hit_ratio", "Reused share of reusable prompt tokens since the start", ratio)

    def _tiers(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        tiers: Mapping[str, Mapping[str, float]] = stats.get("tiers", {})
        for key, (name, help) in TIER_GAUGES.items():
            gauge = GaugeMetricFamily(name, help, labels=["tier"])
            for tier, values in tiers.items():
                gauge.add_metric([tier], values[key])
            yield gauge
        for key, (name, help) in TIER_COUNTERS.items():
            counter = CounterMetricFamily(name, help, labels=["tier"])
            for tier, values in tiers.items():
                counter.add_metric([tier], values[key])
            yield counter

    def _memory(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        labels = ["kind", "use"]
        units = GaugeMetricFamily(
            "weft_memory_units",
            "Pages, window pages, states and tails in use; live: by a running sequence, cached: by the cache alone",
            labels=labels,
        )
        sizes = GaugeMetricFamily("weft_memory_used_bytes", "The same, in bytes", labels=labels)
        for kind, uses in stats.get("units", {}).items():
            for use, count in uses.items():
                units.add_metric([kind, use], count)
                sizes.add_metric([kind, use], count * stats["unit_bytes"][kind])
        yield units
        yield sizes
        limit = stats.get("slabs", 0) * stats.get("slab_bytes", 0)
        yield GaugeMetricFamily(
            "weft_memory_limit_bytes", "Size of the buffer for pages, window pages, states and tails", limit
        )


def _weights(facts: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield what weights take. The names of formats are the code's own, so the number of labels is bounded."""
    if not facts:
        return
    sizes = GaugeMetricFamily(
        "weft_weights_bytes", "Bytes of weights, by the format they are stored in", labels=["format"]
    )
    for format, size in facts["bytes"].items():
        sizes.add_metric([format], size)
    yield sizes
    floor = (
        "Bytes of weights that one token of one sequence reads: divided by the memory's rate, the least time it takes"
    )
    yield GaugeMetricFamily("weft_weights_decode_bytes", floor, facts["decode_bytes"])


def _retained(values: Mapping[str, int]) -> Iterator[Metric]:
    for key, (name, help) in RETAINED.items() if values else ():
        yield GaugeMetricFamily(name, help, values[key])
    events = CounterMetricFamily(
        "weft_retentions",
        "Retained prefixes, by what happened to them; moved: to host memory; over_share, given_up: lost too early",
        labels=["event"],
    )
    for event, count in values.items():
        if event not in RETAINED:
            events.add_metric([event], count)
    yield events


def _prompt_files(values: Mapping[str, int]) -> Iterator[Metric]:
    if not values:
        return
    files = CounterMetricFamily(
        "weft_prompt_files",
        "Prompts saved to files and loaded from them; unsaved: not written; refused: not loaded, signatures aside",
        labels=["result"],
    )
    for result in ("saved", "unsaved", "loaded", "refused"):
        files.add_metric([result], values[result])
    yield files
    tokens = CounterMetricFamily(
        "weft_prompt_file_tokens", "Tokens loaded from files, and those of them that were verified", labels=["kind"]
    )
    for kind in ("loaded", "verified"):
        tokens.add_metric([kind], values[f"{kind}_tokens"])
    yield tokens


def _transfers(values: Mapping[str, float]) -> Iterator[Metric]:
    for key, (name, help) in TRANSFER_GAUGES.items():
        if key in values:
            yield GaugeMetricFamily(name, help, values[key])
    for key, (name, help) in TRANSFER_COUNTERS.items():
        if key in values:
            yield CounterMetricFamily(name, help, values[key])


def _replicas(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """Yield the facts of each replica. Its name comes from the operator, so the number of labels is bounded."""
    if facts:
        roles = GaugeMetricFamily("weft_replica_info", "1, with the role of a replica", labels=["replica", "role"])
        for replica, values in facts.items():
            roles.add_metric([replica, values.get("role") or "unknown"], 1)
        yield roles
    for kind, table in ((GaugeMetricFamily, REPLICA_GAUGES), (CounterMetricFamily, REPLICA_COUNTERS)):
        for key, (name, help) in table.items() if facts else ():
            family = kind(name, help, labels=["replica"])
            for replica, values in facts.items():
                family.add_metric([replica], values[key])
            yield family


def _drafts(counts: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
    """Yield the counts of drafts. Series that every engine may have begin at 0."""
    labels = ["drafter", "position", "result"]
    tokens = CounterMetricFamily(
        "weft_draft_tokens", "Verified drafts, by drafter and by their position in the step", labels=labels
    )
    zeros = {f"{drafter} 1": 0 for drafter in DRAFTERS}
    for name, proposed in (zeros | dict(counts.get("proposed", {}))).items():
        drafter, _, position = name.rpartition(" ")
        accepted = counts.get("accepted", {}).get(name, 0)
        tokens.add_metric([drafter, position, "accepted"], accepted)
        tokens.add_metric([drafter, position, "refused"], proposed - accepted)
    yield tokens
    others = CounterMetricFamily("weft_not_drafted", "Sequences that do not draft, by reason", labels=["reason"])
    for reason, count in (dict.fromkeys(NOT_DRAFTED, 0) | dict(counts.get("not_drafted", {}))).items():
        others.add_metric([reason], count)
    yield others


def routes(render: Callable[[str], Awaitable[Response]]) -> list[Route]:
    """Return the routes, to be mounted behind the keys. `render` returns the page in an accepted format."""

    async def show(request: Request) -> Response:
        return await render(request.headers.get("accept", ""))

    return [Route("/metrics", show, methods=["GET"])]
