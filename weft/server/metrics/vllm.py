"""Metrics under vLLM's names, for dashboards and autoscalers that exist. Derived from Weft's own at every scrape.

The table has only metrics with the same meaning in both. Bounds of histograms are Weft's, which quantiles do not mind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from weft.server.metrics.registry import Metrics

# Weft's name: vLLM's. docs/metrics.md has the same table.
NAMES = {
    "weft_sequences_running": "vllm:num_requests_running",
    "weft_sequences_waiting": "vllm:num_requests_waiting",
    "weft_preemptions": "vllm:num_preemptions",
    "weft_prompt_tokens": "vllm:prompt_tokens",
    "weft_generated_tokens": "vllm:generation_tokens",
    "weft_cached_tokens": "vllm:prefix_cache_hits",
    "weft_requests": "vllm:request_success",
    "weft_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "weft_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "weft_request_seconds": "vllm:e2e_request_latency_seconds",
    "weft_queue_seconds": "vllm:request_queue_time_seconds",
    "weft_request_prompt_tokens": "vllm:request_prompt_tokens",
    "weft_request_generated_tokens": "vllm:request_generation_tokens",
}
# Derived from Weft's metrics on the right.
QUERIES = "vllm:prefix_cache_queries"  # weft_prompt_tokens
USAGE = "vllm:kv_cache_usage_perc"  # weft_memory_used_bytes, weft_memory_limit_bytes
# Labels that have another name there; those with no name do not exist there.
LABELS = {"reason": "finished_reason", "source": None}
# Ways to end that vLLM counts as successes.
SUCCESSES = ("stop", "length", "abort", "error")


class VllmCollector:
    """Renames what the other collectors of a server export. `model` returns the served name."""

    def __init__(self, metrics: Metrics, model: Callable[[], str]) -> None:
        self._metrics = metrics
        self._model = model

    def collect(self) -> Iterator[Metric]:
        labels = {"model_name": self._model(), "engine": "0"}
        found = {family.name: family for family in chain(self._metrics.collect(), self._metrics.engine.collect())}
        for ours, theirs in NAMES.items():
            if ours in found:
                yield renamed(found[ours], theirs, labels)
        if "weft_prompt_tokens" in found:
            yield renamed(found["weft_prompt_tokens"], QUERIES, labels)
            usage = GaugeMetricFamily(USAGE, "Share of the memory that running sequences hold", labels=list(labels))
            usage.add_metric(list(labels.values()), live_share(found))
            yield usage


def renamed(family: Metric, name: str, labels: dict[str, str]) -> Metric:
    """Return a family under another name, with these labels added."""
    found = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        if sample.labels.get("reason", "stop") in SUCCESSES:
            kept = {LABELS.get(key, key): value for key, value in sample.labels.items()}
            own = {key: value for key, value in kept.items() if key is not None}
            found.samples.append(Sample(name + sample.name.removeprefix(family.name), labels | own, sample.value))
    return found


def live_share(found: dict[str, Metric]) -> float:
    """Return the share of the memory that running sequences hold; the rest is free, or only cached."""
    used, limit = found["weft_memory_used_bytes"], found["weft_memory_limit_bytes"].samples[0].value
    live = sum(sample.value for sample in used.samples if sample.labels["use"] == "live")
    return live / limit if limit else 0.0
