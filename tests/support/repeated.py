"""Run the suite many times and list what failed: quiet, beside two busy processes, and on one core, in turns.

python -m tests.support.repeated 10            # other arguments go to pytest
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.support.fences import ROOT

BUSY = [sys.executable, "-c", "while True: pass"]


@contextmanager
def beside_busy_processes(count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen(BUSY))
            stack.callback(process.kill)
        yield


@contextmanager
def on_one_core() -> Iterator[None]:
    """What this process starts inherits it."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


WAYS = {
    "quiet": lambda: beside_busy_processes(0),
    "beside two busy processes": lambda: beside_busy_processes(2),
    "on one core": on_one_core,
}


def failed(output: str) -> list[str]:
    """Return the tests that a run of pytest lists as failed, without its reasons.

    >>> failed("FAILED tests/test_a.py::test_b[1] - assert 1 == 2\\nERROR tests/test_c.py\\n1 failed")
    ['tests/test_a.py::test_b[1]', 'tests/test_c.py']
    """
    words = ("FAILED ", "ERROR ")
    return [line.split(" ", 1)[1].split(" - ")[0] for line in output.splitlines() if line.startswith(words)]


def main(times: int, arguments: list[str]) -> int:
    found: Counter[str] = Counter()
    for number in range(times):
        name, way = list(WAYS.items())[number % len(WAYS)]
        began = time.monotonic()
        with way():
            command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *arguments]
            run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        listed = failed(run.stdout)
        found.update(listed)
        last = (run.stdout.strip().splitlines() or [run.stderr.strip()])[-1]
        print(
            f"{number + 1:3} {name:25} {time.monotonic() - began:6.0f} s  {last}", *listed, sep="\n      ", flush=True
        )
        # A run that could not begin lists nothing.
        found["a run that ended otherwise"] += run.returncode != 0 and not listed
    print(*(f"{count} of {times}: {test}" for test, count in found.most_common() if count), sep="\n")
    return int(found.total() > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
