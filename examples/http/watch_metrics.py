"""What a dashboard shows of a server, read from /metrics: `python examples/http/watch_metrics.py [URL]`.

For Prometheus and Grafana with a dashboard and alerts, run `docker compose -f deploy/compose.yaml up`.
"""

from __future__ import annotations

import re
import sys
import urllib.request

SAMPLE = re.compile(r"^(\w+)(?:{([^}]*)})? (\S+)$", re.MULTILINE)


def totals(text: str) -> dict[str, float]:
    """Return the sum of each metric over its labels."""
    found: dict[str, float] = {}
    for name, _, value in SAMPLE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def main(url: str = "http://127.0.0.1:8000") -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        found = totals(answer.read().decode())
    prompt, cached = found["weft_prompt_tokens_total"], found["weft_cached_tokens_total"]
    return {
        "running": found["weft_sequences_running"],
        "waiting": found["weft_sequences_waiting"],
        "share of prompt tokens cached": cached / prompt if prompt else 0.0,
    }


if __name__ == "__main__":
    for name, value in main(*sys.argv[1:]).items():
        print(f"{name}: {value:g}")
