"""Measure what host memory below a GPU costs the planning thread, without a GPU: seconds, copies and calls.

    python -m benchmarks.tier_costs
    python -m benchmarks.tier_costs --profile       # where the time goes, by function

The memory has the sizes of LFM2-1.2B, whose states are so small that every cell is a resume point: the worst case for
bookkeeping. 128 prompts of 2,048 random tokens are answered with 64 tokens each, first with memory for all of them,
then with a quarter of that. The device is a fake whose steps and copies take no time, so all measured time is Weft's
own work on the host. Each case runs with and without host memory, alternating; medians are shown.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from benchmarks.planner import InstantDevice
from weft.base.config import EngineConfig
from weft.base.copies import CopyPlan
from weft.base.sampling import SamplingParams
from weft.engine.device import Capabilities, DeviceTiers
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.spec import AttentionMemory, MemorySpec, Part, RecurrentMemory

CONV = RecurrentMemory((Part("conv", (2, 2048), "bfloat16"),), (Part("conv", (2048,), "bfloat16"),), conv_width=3)
SPEC = MemorySpec((CONV,) * 10 + (AttentionMemory(8, 64, "bfloat16"),) * 6)
PROMPTS, LENGTH, ANSWER, ROWS = 128, 2048, 64, 64
ROOMY, SHORT, HOST = 8 << 30, 1 << 30, 48 << 30


@dataclass
class InstantCopies(InstantDevice):
    """Copies land when they are first asked for, at the rate that was measured on an H200."""

    load_bytes_per_second: float | None = 55e9
    plans: int = 0
    runs: int = 0
    copied_bytes: int = 0
    polls: int = 0
    seconds_of: dict[int, float] = field(default_factory=dict)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(tiers=cast(DeviceTiers, self))

    def copy(self, plan: CopyPlan) -> CopyPlan:
        self.plans += 1
        self.runs += sum(1 for _ in plan.runs())
        self.copied_bytes += plan.size_bytes
        return plan

    def copied(self, ticket: CopyPlan, wait: bool) -> float | None:
        self.polls += 1
        return ticket.size_bytes / 55e9

    def close(self) -> None:
        pass


@dataclass
class Found:
    seconds: float
    steps: int
    device: InstantCopies


def serve(memory_bytes: int, host_bytes: int, profile: cProfile.Profile | None = None) -> Found:
    config = EngineConfig(
        memory_bytes=memory_bytes,
        host_bytes=host_bytes,
        max_sequences=ROWS,
        max_tokens_per_step=8192,
        max_length=4096,
        depth=1,
    )
    device = InstantCopies()
    engine = Engine(SPEC, device, config)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 60_000, LENGTH).astype(np.int32) for _ in range(PROMPTS)]
    for prompt in prompts:
        engine.add(Request(prompt, SamplingParams(max_tokens=ANSWER, ignore_eos=True)))
    if profile is not None:
        profile.enable()
    began, left = time.process_time(), PROMPTS
    while left:
        left -= sum(output.finish is not None for output in engine.step())
    seconds = time.process_time() - began
    if profile is not None:
        profile.disable()
    return Found(seconds, engine.planner.number, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="print where the time goes, with host memory")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(
        f"{'memory':>8} {'tiers':>6} {'seconds':>9} {'µs a step':>10} {'plans':>7} {'copies':>8} {'GB':>6} {'polls':>7}"
    )
    for name, memory in (("roomy", ROOMY), ("short", SHORT)):
        found = {host: [serve(memory, host) for _ in range(arguments.repeats)] for host in (0, HOST)}
        for host, runs in found.items():
            seconds, device = statistics.median(run.seconds for run in runs), runs[0].device
            print(
                f"{name:>8} {'on' if host else 'off':>6} {seconds:>9.3f} {seconds / runs[0].steps * 1e6:>10.0f} "
                f"{device.plans:>7} {device.runs:>8} {device.copied_bytes / 1e9:>6.2f} {device.polls:>7}"
            )
    if arguments.profile:
        profile = cProfile.Profile()
        serve(SHORT, HOST, profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
