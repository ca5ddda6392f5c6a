"""`weft bench`: turns options into a report. Starts no server."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.base.errors import OptionError
from weft.cli.bench.options import BenchOptions

if TYPE_CHECKING:
    from weft.cli.bench.measures import MeasuredRequest
    from weft.cli.bench.workloads import BenchSession
    from weft.cli.client import Client

ABOUT = "benchmark any OpenAI-compatible server under a chosen load"


def run(options: BenchOptions) -> int:
    import asyncio

    from weft.cli.bench.measures import report
    from weft.cli.bench.workloads import WORKLOADS

    sessions = list(WORKLOADS[options.workload](options))
    if not sessions:
        raise OptionError("the workload has no requests; check --prompts and --trace")
    found = asyncio.run(measure(sessions, options))
    print(report(found))
    if options.json is not None:
        write(options, found)
    return 0 if found["completed"] else 1


async def measure(sessions: Sequence[BenchSession], options: BenchOptions) -> dict[str, Any]:
    from weft.cli.bench.load import send_all
    from weft.cli.bench.measures import summary
    from weft.cli.client import Client

    client = Client(options.url, options.api_key, options.timeout_seconds)
    try:
        model = options.model or (await client.get("/v1/models"))["data"][0]["id"]
        await warm_up(client, model, options)
        total = sum(len(session.turns) for session in sessions)
        with Bar(total, options.progress) as bar:
            measured, duration = await send_all(client, model, sessions, options, bar.tell)
    finally:
        await client.close()
    return summary(measured, duration) | {"model": model}


async def warm_up(client: Client, model: str, options: BenchOptions) -> None:
    from weft.cli.bench.load import PATHS, ask, body_of
    from weft.cli.bench.workloads import BenchTurn, draw

    for number in range(options.warmup):
        turn = BenchTurn(draw(f"{options.seed} warmup {number}", 32, options.vocabulary), 2)
        request = await ask(client, PATHS[options.shape], body_of(model, [], turn, options))
        if request.error is not None:
            raise OptionError(f"the first request failed: {request.error}")


def write(options: BenchOptions, found: dict[str, Any]) -> None:
    # Never write the key to a file.
    asked = {name: value for name, value in asdict(options).items() if name != "api_key"}
    try:
        Path(str(options.json)).write_text(json.dumps({"options": asked, **found}, indent=2) + "\n")
    except OSError as error:
        raise OptionError(f"cannot write json {options.json}: {error.strerror}") from None


class Bar:
    """Progress bar on a terminal: requests done, tokens per second, failures."""

    def __init__(self, total: int, shown: bool) -> None:
        from tqdm import tqdm

        self._tokens = self._failed = 0
        self._bar = tqdm(total=total, unit="request", disable=None if shown else True, leave=False, file=sys.stderr)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *ignored: object) -> None:
        self._bar.close()

    def tell(self, request: MeasuredRequest) -> None:
        self._tokens += request.tokens
        self._failed += request.error is not None
        self._bar.update()
        if not self._bar.disable:
            pace = self._tokens / max(1e-9, self._bar.format_dict["elapsed"])
            self._bar.set_postfix_str(f"{pace:.0f} tok/s, {self._failed} failed", refresh=False)
