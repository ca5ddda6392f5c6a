"""Metrics of several models: those of each under a label `model`, and what became of its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from weft.server.metrics.registry import Metrics
from weft.server.metrics.vllm import VllmCollector

# Responses are those of the server: some are sent before their model is known.
HTTP = "weft_http_requests"
COUNTS = {
    "loads": ("weft_model_loads", "How often a model was loaded"),
    "failed_loads": ("weft_model_failed_loads", "Loads of a model that failed"),
    "unloads": ("weft_model_unloads", "How often a model was unloaded"),
    "crashes": ("weft_model_crashes", "How often the engine of a model ended on its own"),
}


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """The state of one model, and what has happened to it."""

    state: str
    running: int
    waiting: int
    counts: Mapping[str, int]


class ModelCollector:
    """`read` returns the counts of every model by its name, `states` are all that a model may be in."""

    def __init__(self, states: Iterable[str], read: Callable[[], Mapping[str, ModelCounts]]) -> None:
        self._states = tuple(states)
        self._read = read

    def collect(self) -> Iterator[Metric]:
        found = self._read()
        states = GaugeMetricFamily("weft_model_state", "1 for the state of a model", labels=["model", "state"])
        requests = GaugeMetricFamily(
            "weft_model_requests",
            "Requests for a model: running, and waiting until it is loaded",
            labels=["model", "is"],
        )
        for name, each in found.items():
            for state in self._states:
                states.add_metric([name, state], float(each.state == state))
            requests.add_metric([name, "running"], each.running)
            requests.add_metric([name, "waiting"], each.waiting)
        yield from (states, requests)
        for key, (metric, help) in COUNTS.items():
            family = CounterMetricFamily(metric, help, labels=["model"])
            for name, each in found.items():
                family.add_metric([name], each.counts[key])
            yield family


class LabelledCollector:
    """Joins the metrics of all models into one family for each name, with a label that says whose they are."""

    def __init__(self, models: Mapping[str, Metrics], loaded: Callable[[str], bool], vllm_names: bool) -> None:
        self._models = models
        self._loaded = loaded
        named = models if vllm_names else {}
        self._vllm = {name: VllmCollector(each, partial(str, name)) for name, each in named.items()}

    def collect(self) -> Iterator[Metric]:
        joined: dict[str, Metric] = {}
        for name, metrics in self._models.items():
            own = metrics.engine.collect() if self._loaded(name) else ()
            renamed = self._vllm[name].collect() if name in self._vllm else ()
            for family in chain(metrics.collect(), own, renamed):
                if family.name == HTTP:
                    continue
                whole = joined.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [labelled(sample, name) for sample in family.samples]
        yield from joined.values()


class HttpCollector:
    """The responses of the whole server."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return (family for family in self._metrics.collect() if family.name == HTTP)


def labelled(sample: Sample, model: str) -> Sample:
    return Sample(sample.name, {**sample.labels, "model": model}, sample.value)


def registry_of(*collectors: object) -> CollectorRegistry:
    registry = CollectorRegistry()
    for each in collectors:
        registry.register(each)  # type: ignore[arg-type]
    ProcessCollector(registry=registry)
    return registry
