"""Compare single GPU kernels with the minimum time to move their bytes, and with other implementations.

    python -m benchmarks.kernels                        all operations
    python -m benchmarks.kernels ssd moe --quick

Every `benchmarks/kernel_<operation>.py` lists its cases: a name, a call, the bytes that the call must move, and calls
of other implementations. A call is captured as a CUDA graph where possible, to leave out launch overhead. Times are
medians, with the caches flushed before each run. The floor is the bytes divided by the bandwidth of a copy in the same
run.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.floors import copy_bandwidth, recorded, seconds_of
from benchmarks.gpu import arguments_of, keep, machine, run

# Name, call, bytes it must move, and calls of other implementations.
Case = tuple[str, Callable[[], Any], float, dict[str, Callable[[], Any]]]


def operations() -> list[str]:
    """Return the names of all operations that have cases.

    >>> all(name.isidentifier() for name in operations())
    True
    """
    return sorted(file.stem.removeprefix("kernel_") for file in Path(__file__).parent.glob("kernel_*.py"))


def main() -> int:
    return run(arguments_of("kernels", __doc__, limit_seconds=180, models=operations()), measure, show)


def measure(operation: str, arguments: argparse.Namespace) -> dict[str, Any]:
    cases = importlib.import_module(f"benchmarks.kernel_{operation}").cases()
    found: dict[str, Any] = {"machine": machine(arguments.device), "cases": []}
    try:
        for case in cases:
            found["cases"].append(measure_case(case, 7 if arguments.quick else 25))
            keep(found, arguments)
    except Exception as error:  # creating a case failed: keep the results so far
        found["error"] = short(error)
    return found


def short(error: Exception) -> str:
    return traceback.format_exception_only(error)[-1].strip()[-200:]


def measure_case(case: Case, repeats: int) -> dict[str, Any]:
    name, call, floor_bytes, peers = case
    floor = floor_bytes / copy_bandwidth()
    found: dict[str, Any] = {"name": name, "floor_seconds": floor, "peers": {}}
    for who, each in {"": call, **peers}.items():
        try:
            seconds: float | str = seconds_of(recorded(each), repeats=repeats)
        except Exception as error:  # a failed case must not stop the others
            seconds = short(error)
        if who:
            found["peers"][who] = seconds
        else:
            found["seconds"] = seconds
    return found


def show(operation: str, found: dict[str, Any]) -> None:
    print(f"  {found['machine']['device']}, copy {found['machine']['copy_bytes_per_second'] / 1e12:.2f} TB/s")
    print(f"  {'':44} {'µs':>9} {'÷ floor':>8}   others, and their time over ours")
    for case in found["cases"]:
        own = case["seconds"]
        if isinstance(own, str):
            print(f"  {case['name']:44} {own}")
            own = float("nan")
        others = ", ".join(f"{who} {_formatted(seconds, own)}" for who, seconds in case["peers"].items())
        print(f"  {case['name']:44} {own * 1e6:>9.1f} {own / case['floor_seconds']:>8.2f}   {others}")


def _formatted(seconds: float | str, own: float) -> str:
    """Format the time of another implementation and its ratio to ours, or the error message.

    >>> _formatted(3e-6, 2e-6), _formatted("RuntimeError: no", 2e-6)
    ('3.0 µs (1.50)', 'RuntimeError: no')
    """
    return seconds if isinstance(seconds, str) else f"{seconds * 1e6:.1f} µs ({seconds / own:.2f})"


if __name__ == "__main__":
    sys.exit(main())
