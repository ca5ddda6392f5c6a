"""`weft simulate`: replays traffic against the real planner and memory, on a device that only keeps time."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import TYPE_CHECKING

from weft.base.errors import InvalidOption, OptionError
from weft.base.options import STATE_DTYPES, memory_bytes, option

if TYPE_CHECKING:
    from weft.simulate.found import Found
    from weft.simulate.setup import SimulationSetup
    from weft.simulate.stepping import Simulated

ABOUT = "replay traffic against the planner and memory alone, and report what a cache would save"
# The same names as in weft.simulate.workloads and .routing, weft.memory.eviction and .captures; a test compares.
KINDS = (
    "lmsys",
    "sharegpt",
    "coding",
    "compacting",
    "tools",
    "system-prompts",
    "retrieval",
    "best-of-n",
    "tree-search",
    "unique",
    "scan",
)
EVICTIONS = ("value", "lru", "flops")
ROUTERS = ("round-robin", "hash", "prefix", "state")
REASONS = ("junction", "popular", "boundaries", "regular", "answers", "candidates")


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The traffic, the model, the amount of memory, and the cache's policies."""

    workload: str = option("sharegpt", "synthetic traffic to replay if no trace is given", KINDS)
    trace: str | None = option(None, "trace file in Mooncake's format; may be compressed (.gz)")
    requests: int = option(2000, "approximate number of requests; for a trace, the maximum, 0: all")
    rate: float = option(0.0, "sessions per second; 0: the workload's own rate")
    trace_speed: float = option(1.0, "speed-up factor of the trace's arrivals")
    seed: int = option(0, "seed of the synthetic traffic")
    model: str = option(
        "qwen3-next-mini", "name of a packaged configuration (as for --weights dummy), or a path with a config.json"
    )
    state_dtype: str = option("float32", "data type of states", STATE_DTYPES)
    memory: str = option("10%", "size of the cache: bytes such as 40GiB, or a share of the working set such as 10%")
    host_memory: str | None = option(
        None, "host memory below it, for what it evicts: bytes or a share of the working set; none by default"
    )
    disk_size: str | None = option(None, "a file below that: bytes or a share of the working set; none by default")
    host_rate: float = option(55.0, "GB/s of copies between the device and host memory, each way")
    disk_read_rate: float = option(3.5, "GB/s of reads from the file")
    disk_write_rate: float = option(2.3, "GB/s of writes to the file")
    eviction: tuple[str, ...] = option((), "eviction policy: value (default), lru or flops; may be repeated")
    without: tuple[str, ...] = option((), f"do not keep states for this reason: {', '.join(REASONS)}; may be repeated")
    capture_every: int = option(0, "distance in tokens between the states to keep; 0: derived from the size of a state")
    alpha: float = option(-1.0, "weight of work against recency for flops; negative: tuned on the first requests")
    replicas: int = option(1, "engines behind a router; each has an equal part of --memory")
    router: tuple[str, ...] = option(
        (),
        "which replica gets a request: state (default; the shortest expected time to the first token, by the resume "
        "points that each holds), prefix (the same, by pages without states), hash (of the first cells) or "
        "round-robin; "
        "may be repeated",
    )
    cache: bool = option(True, "reuse the cached prefixes of earlier requests")
    max_sequences: int = option(64, "sequences that run at once; others wait")
    max_tokens_per_step: int = option(8192, "tokens computed in one step; longer prompts are split into chunks")
    max_length: int = option(200_000, "maximum tokens of prompt plus answer; longer requests are refused")
    stride: int = option(64, "tokens that decodes may take at once while nothing else happens; 1: as in the engine")
    oracle: bool = option(True, "also report what an unbounded cache would reuse; needs memory for all cells seen")
    calibrate: str | None = option(None, "take the device's speed from this result of `weft bench --json`")
    explain: bool = option(False, "rank the reasons for misses by cost, and report what was kept and hit")
    json: str | None = option(None, "also write all results to this file")
    plot: str | None = option(None, "also plot memory over time to this file (SVG)")
    progress: bool = option(True, "show a progress bar on a terminal")

    def __post_init__(self) -> None:
        for each in fields(self):
            value, choices = getattr(self, each.name), each.metadata["choices"]
            if choices and value not in choices:
                raise InvalidOption(each.name, f"must be one of {', '.join(choices)}, got {value!r}")
        for name, known in (("eviction", EVICTIONS), ("without", REASONS), ("router", ROUTERS)):
            for value in getattr(self, name):
                if value not in known:
                    raise InvalidOption(name, f"must be one of {', '.join(known)}, got {value!r}")
        least = {"requests": 0, "rate": 0, "capture_every": 0, "max_sequences": 1, "max_tokens_per_step": 1}
        for name, low in (least | {"max_length": 1, "stride": 1, "replicas": 1}).items():
            if not getattr(self, name) >= low:
                raise InvalidOption(name, f"must be at least {low}, got {getattr(self, name)}")
        if self.router and self.replicas == 1:
            raise InvalidOption("router", f"{self.router[0]} needs several replicas; set --replicas to at least 2")
        for name in ("trace_speed", "host_rate", "disk_read_rate", "disk_write_rate"):
            if not getattr(self, name) > 0:
                raise InvalidOption(name, f"must be positive, got {getattr(self, name)}")
        if self.trace is None and not self.requests:
            raise InvalidOption("requests", "must be at least 1 unless --trace is given")
        for name in ("memory", "host_memory", "disk_size"):
            read_memory(getattr(self, name), name)


def read_memory(value: str | None, name: str = "memory") -> int | float:
    """Parse bytes, or a share of the working set; None is none.

    >>> read_memory("2GiB"), read_memory("10%"), read_memory(None)
    (2147483648, 0.1, 0)
    """
    if value is None:
        return 0
    if not value.endswith("%"):
        found = memory_bytes(value, name)
        if found is None:
            raise InvalidOption(name, "must be bytes such as 40GiB or a share such as 10%; auto needs a real machine")
        return found
    try:
        share = float(value[:-1]) / 100
    except ValueError:
        share = 0.0
    if not share > 0:
        raise InvalidOption(name, f"must be bytes such as 40GiB or a share such as 10%, got {value!r}")
    return share


def run(options: SimulateOptions) -> int:
    from weft.simulate.plots import memory_course
    from weft.simulate.report import explained, table, write

    rows: dict[str, Found] = {}
    routers = options.router or ("state",)
    for eviction, router in product(options.eviction or ("value",), routers):
        name = eviction if options.replicas == 1 else router if len(options.eviction) < 2 else f"{router}, {eviction}"
        rows[name] = _simulate(setup_of(options, eviction, router), options.progress)
    print(table(rows))
    if options.explain:
        for name, found in rows.items():
            print("\n" + explained(found, name if len(rows) > 1 else None))
    if options.json is not None:
        write(options.json, options, rows)
    if options.plot is not None:
        first = next(iter(rows.values()))
        write_text("plot", options.plot, memory_course(first.course, "Memory in use"))
    return 0 if all(found.requests for found in rows.values()) else 1


def setup_of(options: SimulateOptions, eviction: str, router: str = "state") -> SimulationSetup:
    from weft.memory.captures import CaptureReasons
    from weft.simulate.costs import TierRates, calibrated, cost_model
    from weft.simulate.setup import SimulationSetup, Traffic

    cost = cost_model(options.model, options.state_dtype)
    if options.calibrate is not None:
        cost = calibrated(cost, options.calibrate)
    rates = TierRates(1e9 * options.host_rate, 1e9 * options.disk_read_rate, 1e9 * options.disk_write_rate)
    cost = replace(cost, tiers=rates)
    traffic = Traffic(
        options.workload, options.requests, options.seed, options.rate or None, options.trace, options.trace_speed
    )
    return SimulationSetup(
        traffic,
        cost,
        read_memory(options.memory),
        eviction,
        CaptureReasons(**dict.fromkeys(options.without, False)),
        options.capture_every,
        options.max_sequences,
        options.max_tokens_per_step,
        options.max_length,
        options.stride,
        options.oracle,
        None if options.alpha < 0 else options.alpha,
        options.cache,
        options.replicas,
        router,
        host_memory=read_memory(options.host_memory, "host_memory"),
        disk=read_memory(options.disk_size, "disk_size"),
    )


def _simulate(setup: SimulationSetup, progress: bool) -> Found:
    from tqdm import tqdm

    from weft.simulate.setup import run as run_setup

    shown = None if progress else True
    with tqdm(total=setup.traffic.requests or None, unit="request", disable=shown, leave=False, file=sys.stderr) as bar:

        def tell(_: Simulated) -> None:
            bar.update()

        return run_setup(setup, tell)


def write_text(name: str, path: str, text: str) -> None:
    from pathlib import Path

    try:
        Path(path).write_text(text)
    except OSError as error:
        raise OptionError(f"cannot write {name} {path}: {error.strerror}") from None
