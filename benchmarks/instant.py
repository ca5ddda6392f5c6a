"""Engine process without a model, for `benchmarks.http`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.servers.fake_engines import InstantEngine, fake_info
from weft.backends.backend import ModelInfo
from weft.base.options import Options
from weft.start.engine_process import main

PROGRAM = (sys.executable, str(Path(__file__).resolve()))
# The vocabulary size of the tests' tokenizer.
INFO = msgspec.structs.replace(fake_info(), vocab_size=259)


def load(options: Options, progress: bool) -> tuple[InstantEngine, ModelInfo]:
    """Return an instant engine. `options.model` is the number of seconds per step."""
    return InstantEngine(float(options.model or 0)), INFO


if __name__ == "__main__":
    main(load)
