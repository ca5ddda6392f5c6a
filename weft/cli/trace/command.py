"""`weft trace`: options, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.base.errors import InvalidOption
from weft.base.options import option
from weft.cli.options import argument

ABOUT = "write what a server's requests and steps do to a file for trace viewers (Perfetto)"


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Options of `weft trace`."""

    url: str = argument(
        "URL of a server of Weft's; unix:PATH for a Unix socket; default: http://127.0.0.1:8000",
        default="http://127.0.0.1:8000",
    )
    api_key: str | None = option(
        None, "key of the server; better: WEFT_API_KEY; the admin key shows all requests, and the engine's steps"
    )
    out: str = option("trace.json", "file to write", metavar="PATH")
    seconds: float = option(0.0, "end after this time; 0: when it is interrupted, or with the server")

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise InvalidOption("seconds", f"must not be negative, got {self.seconds}")


def run(options: TraceOptions) -> int:
    import asyncio

    from weft.cli.trace.listening import listen
    from weft.cli.trace.spans import TraceSpans

    spans = TraceSpans()
    asyncio.run(listen(options.url, options.api_key, Path(options.out), options.seconds, spans))
    lost = f", {spans.lost} lost" if spans.lost else ""
    print(
        f"{spans.events} events and {spans.steps} steps{lost} are in {options.out}; open it at https://ui.perfetto.dev"
    )
    return 0
