"""vLLM's small routes, and metrics under its names: Weft's own numbers, and no more work per token. Tiny model."""

from __future__ import annotations

import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fences import ROOT
from tests.support.servers.held_steps import HeldSteps, wait_until
from tests.support.servers.http_server import Served, posted, serving
from weft import __version__
from weft.cli.serve import ServeOptions, settings_of
from weft.server.metrics import vllm as vllm_metrics
from weft.server.metrics.timings import Histogram
from weft.server.settings import ServerSettings

LONG = list(range(1, 200))


@pytest.fixture(scope="module")
def served():
    with serving(ServerSettings(model_name="tiny", vllm_metrics=True)) as server:
        server.ids(LONG)
        server.ids(LONG)
        yield server


def samples(served: Served) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(served.client.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_version_and_ping_answer_as_vllms(served: Served):
    assert served.client.get("/version").json() == {"version": __version__}
    assert served.client.get("/ping").status_code == served.client.post("/ping").status_code == 200
    assert served.client.head("/ping").status_code == 200


def test_load_counts_requests_in_progress(monkeypatch: pytest.MonkeyPatch):
    held = HeldSteps(monkeypatch)
    with serving(ServerSettings(), max_sequences=2) as server:
        assert server.client.get("/load").json() == {"server_load": 0}
        held.hold()
        with posted(server, "/v1/completions", {"prompt": "x", "max_tokens": 50, "n": 2, "stream": True}):
            wait_until(lambda: server.client.get("/load").json() == {"server_load": 1})
        wait_until(lambda: server.client.get("/load").json() == {"server_load": 0})
        held.release()


def test_load_is_for_the_admin():
    with serving(ServerSettings(api_keys=("a", "b"), admin_key="admin")) as server:
        found = {key: httpx.get(server.url + "/load", headers={"x-api-key": key}).status_code for key in ("a", "admin")}
    assert found == {"a": 403, "admin": 200}


def test_each_name_has_the_value_of_its_own(served: Served):
    found = samples(served)
    for ours, theirs in vllm_metrics.NAMES.items():
        same = {
            name.removeprefix(ours) for name in found if re.fullmatch(rf"{ours}(_total|_count|_sum|_bucket)?", name)
        }
        assert same, ours
        for suffix in same:
            wanted = [
                value for labels, value in found[ours + suffix] if labels.get("reason") not in ("refused", "other")
            ]
            assert [value for _, value in found[theirs + suffix]] == wanted
            for labels, _ in found[theirs + suffix]:
                assert (labels["model_name"], labels["engine"]) == ("tiny", "0")
                assert labels.keys() - {"model_name", "engine"} <= {"le", "finished_reason"}
    assert found["vllm:prefix_cache_queries_total"][0][1] == found["weft_prompt_tokens_total"][0][1] == 2 * len(LONG)
    assert found["vllm:prefix_cache_hits_total"][0][1] >= 128
    [(_, usage)] = found["vllm:kv_cache_usage_perc"]
    assert 0 <= usage < 1
    assert {labels["finished_reason"] for labels, _ in found["vllm:request_success_total"]} == set(
        vllm_metrics.SUCCESSES
    )


def test_memory_that_is_only_cached_is_not_in_use(served: Served):
    found = samples(served)
    assert sum(value for labels, value in found["weft_memory_used_bytes"] if labels["use"] == "cached") > 0
    [(_, usage)] = found["vllm:kv_cache_usage_perc"]
    live = sum(value for labels, value in found["weft_memory_used_bytes"] if labels["use"] == "live")
    assert usage == pytest.approx(live / found["weft_memory_limit_bytes"][0][1])


def test_the_names_are_an_option_and_cost_nothing_per_token(monkeypatch: pytest.MonkeyPatch):
    assert not settings_of(ServeOptions(model="tiny")).vllm_metrics
    assert settings_of(ServeOptions(model="tiny", vllm_metrics=True)).vllm_metrics
    counts = []
    observe = Histogram.observe

    def counted(self, value, times=1):
        counts[-1] += 1
        observe(self, value, times)

    monkeypatch.setattr(Histogram, "observe", counted)
    for wanted in (False, True):
        counts.append(0)
        with serving(ServerSettings(vllm_metrics=wanted), max_sequences=1) as server:
            server.complete("x", max_tokens=1, ignore_eos=True)
            assert ("vllm:num_requests_running" in samples(server)) is wanted
    assert counts[0] == counts[1] > 0


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "metrics.md").read_text()
    section = page[page.index("## Names of vLLM") :]
    for ours, theirs in [*vllm_metrics.NAMES.items(), ("weft_prompt_tokens", vllm_metrics.QUERIES)]:
        row = next(line for line in section.splitlines() if re.search(rf"`{theirs}(_total)?[`{{]", line))
        assert re.search(rf"`{ours}(_total)?[`{{]", row), row
    assert f"`{vllm_metrics.USAGE}`" in section
