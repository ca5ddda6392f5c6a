"""Metrics are there, mean what they say, and are the ones that the dashboard and the alerts ask for."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fences import ROOT
from tests.support.servers.fake_engines import fake_info
from tests.support.servers.http_server import Served, serving
from weft.base.errors import EngineStopped
from weft.server.metrics import registry as metrics_module
from weft.server.metrics.reference import reference
from weft.server.metrics.registry import Metrics
from weft.server.metrics.timings import Histogram
from weft.server.settings import ServerSettings

DEPLOY = ROOT / "deploy"
LONG = list(range(1, 200))
# Words of pages that look like metrics.
FILES = {"weft_training", "process_backend"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server that has met every kind of request."""
    with serving(ServerSettings(api_keys=("key",))) as found:
        found.ids(LONG)
        found.ids(LONG)
        found.complete("short", stream=False)
        found.complete(LONG, echo=True, logprobs=1)
        found.events("/v1/completions", {"prompt": "Once", "max_tokens": 5, "ignore_eos": True})
        found.complete("x", status=400, max_tokens=-1)
        found.client.get("/nowhere")
        found.client.get("/v1/models", headers={"authorization": "Bearer wrong"})
        found.client.get("/v1/models/other")
        yield found


def scrape(served: Served) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = served.client.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(samples: dict, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def names(text: str) -> set[str]:
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def test_metrics_need_the_key_and_are_text_for_prometheus(served) -> None:
    assert served.client.get("/metrics", headers={"authorization": ""}).status_code == 401
    response = served.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "# TYPE weft_time_to_first_token_seconds histogram" in response.text
    open_metrics = served.client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert open_metrics.text.endswith("# EOF\n")


def test_what_the_issue_of_metrics_asks_for_is_there(served) -> None:
    found = names(served.client.get("/metrics").text)
    wanted = {
        "weft_sequences_running", "weft_sequences_waiting", "weft_time_to_first_token_seconds_bucket",
        "weft_inter_token_seconds_bucket", "weft_request_seconds_bucket", "weft_queue_seconds_bucket",
        "weft_prompt_tokens_total", "weft_generated_tokens_total", "weft_cached_tokens_total", "weft_cache_hit_ratio",
        "weft_cache_misses_total", "weft_cache_lost_tokens_total", "weft_memory_units", "weft_captures_total",
        "weft_evictions_total", "weft_preemptions_total", "weft_aborts_total", "weft_http_requests_total",
        "weft_engine_up", "weft_model_info",
    }  # fmt: skip
    assert wanted <= found


def test_tokens_hits_and_misses_add_up(served) -> None:
    samples = scrape(served)
    assert value(samples, "weft_cached_tokens_total", source="device") == 192
    # Three prompts reach beyond a cell: cold, hit, and one whose scores were wanted.
    assert value(samples, "weft_cache_reusable_tokens_total") == 3 * 192
    assert value(samples, "weft_cache_misses_total", reason="never_computed") == 1
    assert value(samples, "weft_cache_misses_total", reason="scores_wanted") == 1
    assert value(samples, "weft_cache_misses_total", reason="below_grid") == 2
    assert value(samples, "weft_cache_lost_tokens_total", reason="scores_wanted") == 192
    assert value(samples, "weft_cache_hit_ratio") == pytest.approx(1 / 3)
    assert value(samples, "weft_request_prompt_tokens_sum") == value(samples, "weft_prompt_tokens_total") == 3 * 199 + 9
    assert value(samples, "weft_request_cached_tokens_sum") == 192
    assert value(samples, "weft_request_generated_tokens_sum") == value(samples, "weft_generated_tokens_total") > 0


def test_every_answer_is_timed(served) -> None:
    samples = scrape(served)
    ended = sum(count for (name, _), count in samples.items() if name == "weft_requests_total")
    for name in ("time_to_first_token", "request", "queue"):
        assert value(samples, f"weft_{name}_seconds_count") == ended == 5
    tokens = value(samples, "weft_generated_tokens_total")
    assert value(samples, "weft_inter_token_seconds_count") == tokens - ended
    assert value(samples, "weft_queue_seconds_sum") <= value(samples, "weft_time_to_first_token_seconds_sum")
    assert value(samples, "weft_time_to_first_token_seconds_sum") <= value(samples, "weft_request_seconds_sum")


def test_http_answers_are_counted_by_route_and_status_and_never_by_what_a_client_wrote(served) -> None:
    samples = scrape(served)
    counted = {
        (labels["route"], labels["status"]): count
        for (name, pairs), count in samples.items()
        if name == "weft_http_requests_total"
        for labels in [dict(pairs)]
    }
    assert counted["/v1/completions", "200"] == 5
    assert counted["/v1/completions", "400"] == 1
    assert counted["/v1/models", "401"] == 1
    assert counted["/v1/models/{name}", "404"] == 1
    assert not any("nowhere" in route for route, _ in counted)
    assert any(status == "404" for _, status in counted)


def test_memory_is_told_by_kind_and_use(served) -> None:
    samples = scrape(served)
    assert value(samples, "weft_memory_units", kind="page", use="live") == 0
    assert value(samples, "weft_memory_units", kind="state", use="cached") > 0
    used = sum(count for (name, _), count in samples.items() if name == "weft_memory_used_bytes")
    assert 0 < used <= value(samples, "weft_memory_limit_bytes")
    served.post("/flush_cache", {})
    flushed = scrape(served)
    assert sum(count for (name, _), count in flushed.items() if name == "weft_memory_used_bytes") == 0
    assert value(flushed, "weft_cache_cells") == 0
    assert value(flushed, "weft_captures_total", result="kept") > 0


def mentioned(text: str) -> set[str]:
    return set(re.findall(r"\b(?:weft|process)_[a-z0-9_]+\b", text))


@pytest.mark.parametrize("file", ["grafana-weft.json", "prometheus-alerts.yml"])
def test_dashboard_and_alerts_name_only_metrics_that_exist(served, file) -> None:
    exist = names(served.client.get("/metrics").text)
    asked = mentioned((DEPLOY / file).read_text())
    assert len(asked) > 8
    assert asked - exist == set()
    assert mentioned("rate(weft_no_such_total[5m])") - exist


def test_the_page_of_metrics_is_made_from_their_help_and_pages_name_no_other(served) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == reference(), "run python -m weft.server.metrics.reference > docs/metrics.md"
    exist = names(served.client.get("/metrics").text)
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exist}
    assert {name for name in families if name.startswith("weft_")} - mentioned(page) == set()
    known = mentioned(page) | {name.removesuffix("_total") for name in mentioned(page)} | exist | families | FILES
    for path in (ROOT / "docs").glob("*.md"):
        found = {name for name in mentioned(path.read_text()) if not name.endswith("_")}
        assert found - known == set(), path.name


def test_the_dashboard_is_whole() -> None:
    board = json.loads((DEPLOY / "grafana-weft.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all(target["expr"].count("(") == target["expr"].count(")") for p in panels for target in p["targets"])
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in board["panels"]]
    cells = [(x + i, y + j) for x, y, w, h in places for i in range(w) for j in range(h)]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert all(x + w <= 24 for x, _, w, _ in places)


def test_tokens_that_arrive_together_share_their_time(monkeypatch) -> None:
    metrics = Metrics()
    meter = metrics.meter()
    monkeypatch.setattr(metrics_module, "perf_counter", iter([10.0, 10.5, 11.7, 12.0]).__next__)
    meter.started()
    meter.token()
    meter.token(4)
    meter.finished("stop", 7, 4, 5, 0.25)
    assert (metrics.first_token.sum, sum(metrics.first_token.counts)) == (0.5, 1)
    assert (metrics.inter_token.sum, sum(metrics.inter_token.counts)) == (pytest.approx(1.2), 4)
    assert metrics.inter_token.counts[metrics.inter_token.bounds.index(0.5)] == 4
    assert metrics.request.sum == 2.0
    assert metrics.queue.sum == 0.25
    assert metrics.open == 0


def test_an_end_is_counted_once_and_only_after_a_start() -> None:
    metrics = Metrics()
    meter = metrics.meter()
    meter.finished("stop", 1, 0, 0)
    assert sum(metrics.finished.values()) == 0
    meter.started()
    assert metrics.open == 1
    meter.finished("length", 1, 0, 1)
    meter.finished("abort", 1, 0, 1)
    meter = metrics.meter()
    meter.started()
    meter.finished("<script>", 1, 0, 1)
    assert metrics.finished == {"length": 1, "other": 1}
    assert metrics.open == 0


def test_buckets_are_cumulative_and_end_with_everything() -> None:
    histogram = Histogram("h", "help", (1.0, 2.0))
    for number in (0.5, 1.0, 1.5, 99.0):
        histogram.observe(number)
    samples = histogram.family().samples
    assert [(s.labels.get("le"), s.value) for s in samples if s.name == "h_bucket"] == [
        ("1.0", 2),
        ("2.0", 3),
        ("+Inf", 4),
    ]
    assert {s.name: s.value for s in samples if s.name != "h_bucket"} == {"h_count": 4, "h_sum": 102.0}


class Dying:
    """A backend whose engine answers, dawdles, or is gone."""

    info = fake_info()

    def __init__(self) -> None:
        self.healthy = True
        self.ready = asyncio.Event()
        self.ready.set()

    async def stats(self) -> dict[str, object]:
        await self.ready.wait()
        if not self.healthy:
            raise EngineStopped("gone")
        return {"running": 3, "waiting": 0, "reusable_tokens": 0}


def test_a_dead_engine_is_told_and_its_numbers_are_not_kept(monkeypatch) -> None:
    metrics, backend = Metrics(), Dying()

    def page() -> str:
        return bytes(asyncio.run(metrics.render(backend)).body).decode()

    assert "weft_engine_up 1.0" in page()
    assert "weft_sequences_running 3.0" in page()
    backend.healthy = False
    assert "weft_engine_up 0.0" in page()
    assert "weft_sequences_running" not in page()


def test_an_engine_in_a_long_step_does_not_hold_the_page_up(monkeypatch) -> None:
    metrics, backend = Metrics(), Dying()
    asyncio.run(metrics.render(backend))
    backend.ready.clear()
    monkeypatch.setattr(metrics_module, "STATS_SECONDS", 0.05)
    text = bytes(asyncio.run(metrics.render(backend)).body).decode()
    assert "weft_sequences_running 3.0" in text
    age = next(float(line.split()[1]) for line in text.splitlines() if line.startswith("weft_engine_stats_age"))
    assert age >= 0.05


def test_two_servers_in_one_process_share_no_numbers() -> None:
    one, two = Metrics(), Metrics()
    one.answered("GET", "/health", 200)
    one.meter().started()
    assert two.open == 0
    assert not two.http


def test_a_measured_token_costs_little() -> None:
    meter = Metrics().meter()
    meter.started()
    best = min(_seconds_of(meter) for _ in range(5))
    assert best < 20e-6, f"{best * 1e6:.1f} µs a token"


def _seconds_of(meter: object, count: int = 2000) -> float:
    began = time.thread_time()
    for _ in range(count):
        meter.token()
    return (time.thread_time() - began) / count
