"""Stored responses and forks, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from weft.server.stored.answers import StoredAnswers


class StoredCollector:
    def __init__(self, stored: StoredAnswers) -> None:
        self._stored = stored

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("weft_stored_answers", "Stored responses and forks of all keys", len(self._stored))
        yield GaugeMetricFamily("weft_stored_answers_bytes", "Bytes of stored answers", self._stored.held_bytes)
