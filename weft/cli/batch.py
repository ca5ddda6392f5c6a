"""`weft batch`: answers a JSONL file of requests in OpenAI's form, with a model in this process."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weft.base.errors import OptionError
from weft.base.options import Options
from weft.cli.options import argument

if TYPE_CHECKING:
    from weft.server.batches.journal import BatchProgress

ABOUT = "answer a JSONL file of requests without a server; run it again to continue"


@dataclass(frozen=True, kw_only=True)
class BatchOptions(Options):
    """Options of `weft batch`: two files, then the engine's options."""

    source: str | None = argument("file with one request a line, as for OpenAI's batches")
    target: str | None = argument("file for the answers; those that it already has are kept")


def run(options: BatchOptions) -> int:
    from weft.server.batches.lines import InvalidBatch
    from weft.server.settings import Limits, ServerSettings
    from weft.start.batch import answer_file
    from weft.start.launch import LaunchSettings, serving_engines

    source, target = files_of(options)
    # Nothing waits in front of a batch, so it may fill the queue.
    settings = ServerSettings(limits=Limits(batch_lines=10_000_000, open_sequences=1 << 20))
    logging.getLogger("weft").setLevel(logging.WARNING)
    try:
        done = answer_file(serving_engines(options, settings, LaunchSettings()), settings, source, target, show)
    except InvalidBatch as error:
        raise OptionError(f"{source} is no batch: {error}") from None
    print(file=sys.stderr)
    if done.done < done.total:
        print(f"stopped after {done.done} of {done.total} requests; run the command again to continue", file=sys.stderr)
        return 1
    return 0


def files_of(options: BatchOptions) -> tuple[Path, Path]:
    if options.source is None or options.target is None:
        raise OptionError("two files must be given: weft batch requests.jsonl answers.jsonl")
    source, target = Path(options.source), Path(options.target)
    if not source.is_file():
        raise OptionError(f"{source} is not a file")
    if target.exists() and (not target.is_file() or target.samefile(source)):
        raise OptionError(f"{target} must be another file than the requests")
    if not target.absolute().parent.is_dir():
        raise OptionError(f"{target.absolute().parent} must be a folder that exists")
    return source, target


def show(progress: BatchProgress) -> None:
    print(f"\r{summary(progress)}", end="", file=sys.stderr, flush=True)


def summary(progress: BatchProgress) -> str:
    """Return the state of a batch as a line.

    >>> from weft.server.batches.journal import BatchProgress
    >>> summary(BatchProgress(total=10, completed=3, failed=1, prompt=200, cached=50, generated=30))
    '4 of 10 requests, 1 failed; 50 of 200 prompt tokens cached (25%), 30 generated'
    """
    share = progress.cached / progress.prompt if progress.prompt else 0.0
    cached = f"{progress.cached} of {progress.prompt} prompt tokens cached ({share:.0%})"
    counts = f"{progress.done} of {progress.total} requests, {progress.failed} failed"
    return f"{counts}; {cached}, {progress.generated} generated"
