"""Simulate the conversations of `benchmarks.tiers`, to see what host memory of any size could give. Needs no GPU.

    python -m benchmarks.turns [--host 0 16 24 1000] [--rows 32]

Nemotron-9B with 8 GiB on the device: 64 conversations, 1,500 tokens to begin with, six turns of 300 tokens with answers
of 150. Planner, memory and tiers are the engine's own; steps and copies take the time that they took on an H200: 36,000
prompt tokens per second, 5.6 ms for 11 decodes, 55 GB/s. `--host` are sizes in GiB. The last line is a bound: what is
left if every turn resumes at the end of the last answer, and copies take no time.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from weft.base.config import EngineConfig
from weft.base.grid import CELL, floor_to_grid
from weft.simulate.costs import CostModel, DeviceRates, cost_model
from weft.simulate.engine import SimulatedEngine
from weft.simulate.sessions import SimulatedSession
from weft.simulate.stepping import Simulated
from weft.simulate.text import Text, simulated_request
from weft.simulate.workloads import PER_SESSION

CONVERSATIONS, TURNS, BEGINNING, TURN, ANSWER = 64, 6, 1500, 300, 150
MEASURED = DeviceRates(flops=6.9e14, bytes=3.75e12, step_seconds=0.4e-3)


def measured() -> CostModel:
    return replace(cost_model("nemotron-nano-9b-v2"), rates=MEASURED)


def converse(host_gib: float, rows: int) -> tuple[float, int, int]:
    """Return the seconds of all turns, the prompt tokens, and how many of them were cached."""
    config = EngineConfig(
        memory_bytes=8 << 30,
        host_bytes=int(host_gib * (1 << 30)),
        max_sequences=rows,
        max_tokens_per_step=8192,
        max_length=8192,
    )
    engine = SimulatedEngine(measured(), config, stride=1)
    texts = [Text(CELL, [(PER_SESSION * each, BEGINNING)]) for each in range(CONVERSATIONS)]
    asked: list[Simulated] = []
    for turn in range(TURNS):
        for each, text in enumerate(texts):
            text.append(PER_SESSION * each + 2 * turn + 1, TURN)
            request = replace(simulated_request(text, PER_SESSION * each + 2 * turn + 2, ANSWER), boundaries=())
            asked.append(Simulated(len(asked), request, SimulatedSession(0.0, iter(())), engine.now))
            engine.accept(asked[-1])
        while not engine.idle:
            engine.step(None)
    cached = sum(0 if each.miss is None else each.miss.cached for each in asked)
    return engine.now, sum(each.ask.prompt for each in asked), cached


def most_cached() -> int:
    """Return how many prompt tokens all turns together can have cached."""
    lengths = (BEGINNING + turn * (TURN + ANSWER) for turn in range(1, TURNS))
    return CONVERSATIONS * sum(floor_to_grid(length - 1, CELL) for length in lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", type=float, nargs="+", default=[0.0, 16.0, 24.0, 1000.0])
    parser.add_argument("--rows", type=int, default=32)
    arguments = parser.parse_args()
    answers, first = CONVERSATIONS * TURNS * ANSWER, 0.0
    cost = measured()
    prompt_seconds = 2 * cost.active_parameters / cost.rates.flops
    for size in arguments.host:
        seconds, asked, cached = converse(size, arguments.rows)
        first = first or seconds
        rate = f"{answers / seconds:.0f} tokens/s in {seconds:.1f} s, x {first / seconds:.2f}"
        print(f"  {size:.0f} GiB of host memory: {rate}, hits {cached / asked:.3f}", flush=True)
    bound = seconds - (most_cached() - cached) * prompt_seconds
    print(f"  bound: {bound:.1f} s, x {first / bound:.2f}, hits {most_cached() / asked:.3f}")


if __name__ == "__main__":
    main()
