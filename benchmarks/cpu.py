"""Compare Weft with transformers and llama.cpp on the CPU: same weights, same prompts, greedy, one engine at a time.

    python -m benchmarks.cpu                                    about half an hour on two quiet cores
    python -m benchmarks.cpu --quick                            a few minutes: float32 only, less work
    python -m benchmarks.cpu --only weft,transformers --models lfm2,granite
    python -m benchmarks.cpu --single --precisions float32 --stored bfloat16     float32 from 16-bit checkpoints

Models have random weights and about 100M parameters. They are created once in ~/.cache/weft-benchmarks and converted
for llama.cpp by its own converter. The same run measures the memory's read rate and reports the tokens per second that
it would allow. Needs the extra `bench`; an engine that cannot run is skipped with the reason. Results are also written
to benchmarks/results/ as JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.checkpoints import FAMILIES, checkpoint, parameters_of
from benchmarks.peers.gguf import Unavailable, gguf
from benchmarks.peers.memory import read_rate
from benchmarks.peers.table import agreements, bounds, machine, summary, table
from benchmarks.peers.work import Job, Work

ENGINES = ("weft", "transformers", "llama.cpp")
PRECISIONS = {"float32": 4, "bfloat16": 2}  # bytes per weight
DRIVERS = {"weft": "with_weft", "transformers": "with_transformers", "llama.cpp": "with_llama_cpp"}
CACHE = Path.home() / ".cache" / "weft-benchmarks"
RESULTS = Path(__file__).parent / "results"
LIMIT_SECONDS = 900
BUSY_LOAD = 0.5
QUICK = Work(single_repeats=2, single_answer=64, requests=8, answer=32, crowd_repeats=1)


def main() -> int:
    arguments = _arguments()
    work = QUICK if arguments.quick else Work()
    if arguments.single:
        work = replace(work, crowd_repeats=0)
    report: dict[str, Any] = {"machine": machine(arguments.threads), "work": asdict(work), "runs": []}
    print(report["machine"], flush=True)
    if os.getloadavg()[0] > BUSY_LOAD:
        print("warning: the machine is busy; every engine loses much time when its threads wait for each other")
    reasons = {name: why for name in arguments.only if (why := _why_not(name, arguments.cache))}
    for name, why in reasons.items():
        print(f"{name}: skipped, because {why}", flush=True)
    engines = [name for name in arguments.only if name not in reasons]
    rates = [read_rate(arguments.threads)]
    for model in arguments.models:
        folder = checkpoint(model, arguments.cache, arguments.stored)
        parameters = parameters_of(folder)
        print(f"\n{model}: {parameters / 1e6:.0f}M parameters", flush=True)
        for precision in arguments.precisions:
            rows = _alternate(engines, folder, precision, arguments, work)
            size = parameters * PRECISIONS[precision]
            report["runs"].append({"model": model, "precision": precision, "weight_bytes": size, "engines": rows})
    rates.append(read_rate(arguments.threads))
    report["read_rates"] = rates
    _print_report(report["runs"], rates)
    return _save(report)


def _alternate(
    engines: list[str], folder: Path, precision: str, arguments: argparse.Namespace, work: Work
) -> dict[str, dict[str, Any]]:
    """Run the engines alternately for several rounds, so that a slow minute of a shared machine affects all of them."""
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(arguments.rounds):
        for name in engines:
            found = _run(name, folder, precision, arguments, work)
            if name not in rows:
                rows[name] = found
            elif "skipped" not in found and "skipped" not in rows[name]:
                rows[name]["single"] += found["single"]
                rows[name]["crowd"] += found["crowd"]
    return rows


def _print_report(runs: list[dict[str, Any]], rates: list[dict[str, float]]) -> None:
    # Other work on the machine can only lower a measured rate, so take the highest.
    rate, way = max((rate, way) for measured in rates for way, rate in measured.items())
    print("\n" + table(runs) + f"\n\nmemory read rate: up to {rate / 1e9:.1f} GB/s ({way})\n" + bounds(runs, rate))
    print(agreements(runs) + "\n" + summary(runs))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="float32 only, fewer repetitions, eight concurrent requests"
    )
    parser.add_argument("--single", action="store_true", help="skip the concurrent requests")
    parser.add_argument("--only", type=_choice(ENGINES), default=list(ENGINES), help=_list_of(ENGINES))
    parser.add_argument(
        "--models", type=_choice(FAMILIES), default=["lfm2", "granite", "qwen35"], help=_list_of(FAMILIES)
    )
    parser.add_argument("--precisions", type=_choice(PRECISIONS), help=_list_of(PRECISIONS))
    parser.add_argument("--rounds", type=int, default=2, help="how often each engine runs")
    parser.add_argument(
        "--stored",
        choices=list(PRECISIONS),
        default="float32",
        help="dtype of the checkpoints, independent of --precisions",
    )
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for the models and the converter")
    arguments = parser.parse_args()
    arguments.precisions = arguments.precisions or (["float32"] if arguments.quick else list(PRECISIONS))
    return arguments


def _list_of(names: Iterable[str]) -> str:
    return f"comma-separated list of {', '.join(names)}"


def _choice(known: Any) -> Any:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
        return names

    return parse


def _why_not(engine: str, cache: Path) -> str | None:
    """Return why an engine cannot run, or None if it can."""
    package = {"weft": "weft", "transformers": "transformers", "llama.cpp": "xllamacpp"}[engine]
    if importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed (pip install 'weft-serve[bench]')"
    if engine != "llama.cpp":
        return None
    from benchmarks.peers.gguf import converter

    try:
        converter(cache)
    except Unavailable as error:
        return str(error)
    return None


def _run(engine: str, folder: Path, precision: str, arguments: argparse.Namespace, work: Work) -> dict[str, Any]:
    """Run one engine in a separate process; return its result, or the reason it has none."""
    begun = time.perf_counter()
    print(f"  {precision:8}  {engine:12}  ", end="", flush=True)
    try:
        converted = str(gguf(folder, precision, arguments.cache)) if engine == "llama.cpp" else None
        result = _measure(Job(engine, str(folder), converted, precision, arguments.threads, work))
    except Unavailable as error:
        print(f"skipped, because {error}", flush=True)
        return {"skipped": str(error)}
    rates = " ".join(f"{rate:.1f}" for rate in result["single"])
    crowd = " ".join(f"{rate:.1f}" for rate in result["crowd"])
    print(f"alone {rates}   crowd {crowd}   ({time.perf_counter() - begun:.0f} s)", flush=True)
    return result


def _measure(job: Job) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        given, target, log = Path(folder) / "job.json", Path(folder) / "result.json", Path(folder) / "log.txt"
        job.write(given)
        command = [sys.executable, "-m", f"benchmarks.peers.{DRIVERS[job.engine]}", str(given), str(target)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false"}
        with log.open("w") as sink:
            try:
                subprocess.run(command, env=environment, stdout=sink, stderr=sink, check=False, timeout=LIMIT_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise Unavailable(f"it took longer than {LIMIT_SECONDS} s") from error
        if not target.exists():
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise Unavailable("it failed: " + (lines[-1][:300] if lines else "without output"))
        return json.loads(target.read_text())


def _save(report: dict[str, Any]) -> int:
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"cpu-{time.strftime('%Y%m%d-%H%M%S')}.json"
    target.write_text(json.dumps(report, indent=1))
    print(f"\nsaved to {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
