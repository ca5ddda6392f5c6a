"""Usage of each key, for Prometheus. Labels are names that the operator gave, so there are as many as keys."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from weft.server.access.auth import Keys


class KeyCollector:
    """Reads the accounts on every scrape. A removed key no longer has numbers."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("weft_key_requests", "Requests by key", labels=["key"])
        tokens = CounterMetricFamily("weft_key_tokens", "Tokens by key and kind", labels=["key", "kind"])
        limited = CounterMetricFamily("weft_key_limited", "Requests over a key's limit", labels=["key", "limit"])
        for tenant in self._keys.tenants:
            name, account = str(tenant.name), tenant.account
            requests.add_metric([name], account.requests)
            for kind, count in account.tokens.items():
                tokens.add_metric([name, kind], count)
            for kind, count in account.limited.items():
                limited.add_metric([name, kind], count)
        yield from (requests, tokens, limited)
