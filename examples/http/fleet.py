"""A fleet on one machine: two engines behind one address: `python examples/http/fleet.py`.

It starts `weft serve --replicas 2`, asks several questions behind two shared prompts, and shows how many
tokens each engine reused: the router sends prompts with a common beginning to the engine that has it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from typing import Any

COMMAND = [sys.executable, "-m", "weft", "serve", "--replicas", "2", "--port", "0", "--memory", "128MiB"]
PROMPTS = [f"{name} keeps a journal of every day at the mill. " * 12 for name in ("Ada", "Bea")]


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer) if path != "/metrics" else answer.read().decode()


def main(arguments: list[str] | None = None) -> tuple[list[int], dict[str, float]]:
    """Return the cached tokens of each question, and those that each engine reused."""
    server = subprocess.Popen([*COMMAND, *(arguments or [])], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = next(line.strip() for line in server.stdout if line.startswith("http"))
        cached = []
        for number in range(6):
            body = {"model": "weft-small", "prompt": f"{PROMPTS[number % 2]}Day {number}:", "max_tokens": 8}
            usage = ask(url, "/v1/completions", body)["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        saved = re.findall(
            r'^weft_replica_saved_tokens_total{replica="(\d+)"} (\S+)$', ask(url, "/metrics"), re.MULTILINE
        )
        return cached, {name: float(tokens) for name, tokens in saved}
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    print(*main(sys.argv[1:]))
