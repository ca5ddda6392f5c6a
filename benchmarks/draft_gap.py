"""Measure the host's part of a step with drafts, without a device.

    python -m benchmarks.draft_gap
    python -m benchmarks.draft_gap --profile 32

The host verifies, settles, proposes, plans, and fills the inputs of the recorded step. If the next step waits for what
was accepted, the device waits for all this, from a landing to the next launch: that is `gap`, and `launch` the part of
it that fills the inputs. If it follows without that (way `follow`), there is no gap as long as the device takes longer
for a step than the host, which takes `step`; that includes what is done while the device computes in any case. The
device is a fake that returns at once. Every row has 3 drafts, from a script or from the suffixes of a text that repeats
itself; each is accepted by a chance of 0.81 if those before it were. All are processor time, so other programs disturb
them little.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from benchmarks.drafts import STEADY, ScriptedDrafting
from benchmarks.planner import SPEC, prompt
from weft.base.config import EngineConfig
from weft.base.plan import Landing, Plan
from weft.base.sampling import SamplingParams
from weft.device.store import Store
from weft.drafting.policy.choosing import Drafting
from weft.drafting.policy.costs import NEEDED
from weft.engine.assembly import PlannedStep
from weft.engine.device import Capabilities, Device
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.kernels.choosing import everywhere
from weft.runner.cuda.inputs import DecodeInputs
from weft.runner.cuda.padding import StepInputs
from weft.runner.cuda.recorded import buckets, step_sizes

ROWS = (1, 8, 32, 128)
DRAFTS = len(STEADY)
LONGEST = 4096
PERIOD = 50  # of the answers whose suffixes are drafts
DRAFT_SPEC = replace(SPEC, draft_room=7)


class FillingDevice(Device):
    """Fills the inputs of recorded steps in host memory, computes nothing, and notes when it lands and launches."""

    def __init__(self, seats: int) -> None:
        operations, cells = everywhere("plain"), LONGEST // DRAFT_SPEC.cell
        where = (cells, DRAFT_SPEC, Store(DRAFT_SPEC, 64 << 20, "cpu", 1).scratch, "cpu", operations)
        self.rows = buckets(seats)
        self.decodes = DecodeInputs(seats, *where)
        self.longer = [StepInputs(size, seats, *where) for size in step_sizes(seats, DRAFT_SPEC.draft_room)]
        self.landed_at = 0.0
        # Seconds from the last landing to the beginning of a launch, and to its end, of steps with drafts.
        self.planning: list[float] = []
        self.waiting: list[float] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(builds_on_flight=self.builds_on_flight)

    def builds_on_flight(self, decodes: int, drafting: int, tokens: int) -> bool:
        return True

    def launch(self, plan: Plan) -> Plan:
        began = time.thread_time()
        if len(plan.tokens) == plan.rows:
            self.decodes.fill(plan, next(rows for rows in self.rows if rows >= plan.rows))
            return plan
        decodes = plan.decode_rows
        shape = (decodes, plan.rows - decodes, len(plan.tokens) - decodes, plan.sample_count)
        inputs = next((inputs for inputs in self.longer if inputs.size.holds(*shape)), None)
        if inputs is not None:
            inputs.fill(plan)
        if len(plan.drafts.counts):
            self.planning.append(began - self.landed_at)
            self.waiting.append(time.thread_time() - self.landed_at)
        return plan

    def land(self, flight: Plan) -> Landing:
        rows, _ = flight.samples
        offset = np.arange(len(rows)) - np.searchsorted(rows, rows)
        tokens = ((flight.start[rows] + offset + 1) % PERIOD).astype(np.int32)
        self.landed_at = time.thread_time()
        return Landing(tokens, None, None)


class ChancingEngine(Engine):
    """Accepts drafts by chance."""

    random = Random(1)

    def verify(self, step: PlannedStep, landing: Landing) -> dict[int, int]:
        # What the real one costs is part of the measurement.
        super().verify(step, landing)
        found = {}
        for row, proposal in step.drafts.items():
            chances = STEADY[: len(proposal.tokens)]
            wrong = (place for place, chance in enumerate(chances) if self.random.random() >= chance)
            found[row] = next(wrong, len(chances))
        return found


class EveryRow(Drafting):
    """Suffixes of every row, whatever they cost. `following`: steps do not wait for each other."""

    following = False

    def plans_ahead(self, known: float, unknown: float, lost: float) -> bool:
        return self.following

    def choose(self, proposals: Any, rows: int, most: int) -> list[int]:
        # What the choice costs is part of the measurement.
        super().choose(proposals, rows, most)
        return [len(proposal.worth) for proposal in proposals]


def drafting_engine(rows: int, scripted: bool, following: bool = False) -> tuple[Engine, FillingDevice]:
    """Return an engine whose `rows` rows decode, all with drafts."""
    device = FillingDevice(rows)
    config = EngineConfig(
        memory_bytes=1 << 30, max_sequences=rows, max_tokens_per_step=8192, max_length=LONGEST, depth=1
    )
    drafting = ScriptedDrafting(STEADY, True) if scripted else EveryRow(DRAFTS)
    drafting.following = following
    # Without knowing such steps, no row drafts.
    for _ in range(NEEDED):
        drafting.costs.observe(rows, 0, 1.0)
    engine = ChancingEngine(DRAFT_SPEC, device, config, drafting=drafting)
    random = np.random.default_rng(0)
    for _ in range(rows):
        text = prompt(random, 100 + int(random.integers(64)))
        engine.add(Request(text, SamplingParams(max_tokens=LONGEST - 200, temperature=0)))
    while len(engine.planner.queue) or engine.planner.prefilling:
        engine.step()
    for _ in range(60):
        engine.step()
    return engine, device


def time_steps(rows: int, scripted: bool, following: bool, steps: int = 300) -> dict[str, float]:
    """Return median microseconds: from landing to launch, the launch, and all of a step."""
    engine, device = drafting_engine(rows, scripted, following)
    gc.collect()
    device.planning.clear()
    device.waiting.clear()
    taken = []
    for _ in range(steps):
        began = time.thread_time()
        engine.step()
        taken.append(time.thread_time() - began)
    assert len(device.waiting) > 0.5 * steps, f"only {len(device.waiting)} of {steps} steps have drafts"
    waiting, planning = statistics.median(device.waiting), statistics.median(device.planning)
    return {"gap": waiting * 1e6, "launch": (waiting - planning) * 1e6, "step": statistics.median(taken) * 1e6}


def profile(rows: int, scripted: bool, steps: int = 300) -> None:
    """Print the functions that take the most time in a step with drafts."""
    engine, _ = drafting_engine(rows, scripted)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        engine.step()
    profiler.disable()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--profile",
        type=int,
        metavar="ROWS",
        help="print which functions a step of this number of rows spends its time in",
    )
    arguments = parser.parse_args()
    if arguments.profile:
        profile(arguments.profile, scripted=True)
        return
    print(f"{'drafts':>8} {'way':>8} {'rows':>6} {'gap':>9} {'launch':>9} {'step':>9}   median microseconds")
    for scripted, following in ((True, False), (True, True), (False, False)):
        for rows in ROWS:
            found = time_steps(rows, scripted, following)
            name, way = "script" if scripted else "suffix", "follow" if following else "wait"
            gap = "-" if following else f"{found['gap']:.0f}"
            print(f"{name:>8} {way:>8} {rows:>6} {gap:>9} {found['launch']:>9.0f} {found['step']:>9.0f}")


if __name__ == "__main__":
    main()
