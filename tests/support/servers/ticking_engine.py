"""An engine process whose clock ticks: run as a program with the number of a file descriptor, as the product's is."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from tests.support.clocks import Ticks
from weft.start.engine_process import load_engine, main

PROGRAM = (sys.executable, str(Path(__file__).resolve()))

if __name__ == "__main__":
    main(partial(load_engine, now=Ticks()))
