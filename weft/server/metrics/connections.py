"""Connection metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from weft.server.http.connections import Connections

# Bounds that a new connection can meet; descriptors can run out before the other two.
BOUNDS = ("total", "address", "descriptors")


class ConnectionCollector:
    """Collects the metrics of a server's connections."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("weft_connections", "Open client connections", len(self._connections))
        yield GaugeMetricFamily("weft_connections_limit", "Maximum open connections", self._connections.bound)
        crowded = CounterMetricFamily(
            "weft_connections_crowded", "New connections that met a bound, by bound", labels=["bound"]
        )
        for bound in BOUNDS:
            crowded.add_metric([bound], self._connections.crowded[bound])
        yield crowded
