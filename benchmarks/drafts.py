"""Measure verification of drafts with scripted acceptance on a GPU.

    python -m benchmarks.drafts                          Nemotron-Nano-9B-v2 and Qwen3.5-9B, 3 drafts a row
    python -m benchmarks.drafts qwen3.5-9b --rows 32 128 --only falling never

With random weights, no draft would be right. So acceptance is scripted, as in published benchmarks: drafts are any
tokens, and each is accepted with a fixed probability if those before it were, whatever the model says; host and device
read the same script. With 0.81, three drafts give 3.0 tokens a step on average, the free one included. The time of a
step is that of real drafts; the drafter costs nothing. Compared are: no drafts; 3 drafts in every row, where a step
waits for the landing of the one before it, as drafts from the host need it, and where it follows before that, as drafts
from the device could; up to 7 drafts chosen by the engine, whose acceptance falls from 0.7 to 0.1; and drafts that are
never accepted, chosen by the engine. `idle` is the share of the time in which the GPU waits between two recorded
steps. Rates are those while all rows decode.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import (
    Ask,
    Attempts,
    arguments_of,
    begin,
    fresh,
    keep,
    machine,
    random_prompt,
    run,
    start,
    warm_up,
    without_flashinfer,
)
from weft import LLM
from weft.base.plan import Landing
from weft.engine.assembly import PlannedStep
from weft.engine.loop import Engine
from weft.kernels.following import DraftSamples
from weft.runner.cuda import recorded
from weft.runner.cuda.runner import CudaRunner
from weft.speculate.costs import FreeDrafts
from weft.speculate.drafting import Acceptance, Drafting, Proposal, SequenceDrafts
from weft.speculate.suffix import SharedTexts

MODELS = ("nemotron-nano-9b-v2", "qwen3.5-9b")
BATCHES = (1, 8, 32, 128)
PROMPT = 128
# Tokens of the answers that are measured, and of those that warm up ways with nothing to learn.
ANSWER, WARM_ANSWER = 192, 24
STEADY = (0.81,) * 3
FALLING = (0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
NEVER = (0.0,) * 7
# By name: chances of drafts, whether all are taken, and whether steps follow each other without a wait.
WAYS = {
    "three waiting": (STEADY, True, False),
    "three": (STEADY, True, True),
    "falling": (FALLING, False, True),
    "never": (NEVER, False, True),
}
# Sizes of steps that are kept of each way: the most frequent.
SIZES = 5
# Rows of a seat after which its script begins again.
SCRIPTED = 1024


def main() -> int:
    options = arguments_of("drafts", __doc__, limit_seconds=240, models=MODELS, rows=BATCHES, parts=tuple(WAYS))
    return run(options, measure, show)


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    attempts = Attempts()
    found: dict[str, Any] = {"machine": machine(arguments.device), "errors": attempts.errors}
    batches = [rows for rows in arguments.rows if rows <= 8 or not arguments.quick]
    script = Script(max(batches), arguments.device)
    # Before steps are recorded. Those with prompts are not measured.
    script.lead_device()
    recorded.PROMPT_TOKENS = recorded.PROMPT_TOKENS[:1]
    with without_flashinfer():
        llm = start(model, arguments, draft="suffix", max_sequences=max(batches), max_length=1024)
    warm_up(llm)
    found["rows"] = []
    for rows in batches:
        with attempts.part(f"{rows} rows"):
            each = {"rows": rows} | measure_rows(llm, rows, script, arguments.only)
            found["rows"].append(each)
            print(line_of(each), flush=True)
        keep(found, arguments)
    return found


# scripted acceptance --------------------------------------------------------------------------------------------------


class Script:
    """How many drafts of each row are right, by seat and by the rows with drafts that it had before.

    The device reads the same numbers as the host, in place of `verify_drafts`.
    """

    def __init__(self, seats: int, device: str) -> None:
        self.right = np.zeros((seats + 1, SCRIPTED), np.int32)
        self.rows = np.zeros(seats + 1, np.int64)
        self.device_right = torch.zeros(seats + 1, SCRIPTED, dtype=torch.int32, device=device)
        self.device_rows = torch.zeros(seats + 1, dtype=torch.int64, device=device)

    def lead_device(self) -> None:
        """Let devices that are created from now on read the script."""
        # Triton is not installed on machines without a GPU.
        following = import_module(f"weft.kernels.{self.device_rows.device.type}.following")
        following.verify_drafts = self.verify_drafts

    def begin(self, chances: Sequence[float]) -> None:
        """Write the script anew."""
        random = np.random.default_rng(1)
        accepted = random.random((*self.right.shape, len(chances))) < np.array(chances)
        self.right[:] = np.cumprod(accepted, axis=2).sum(2)
        self.device_right.copy_(torch.from_numpy(self.right))
        self.device_rows.zero_()
        self.rows[:] = 0

    def read(self, seat: int) -> int:
        """Return how many drafts of a seat's next row are right."""
        self.rows[seat] += 1
        return int(self.right[seat, (self.rows[seat] - 1) % SCRIPTED])

    def verify_drafts(self, tokens: Tensor, inputs: Tensor, rows: DraftSamples, board: Tensor, refused: Tensor) -> None:
        seat, has_drafts = rows.seat.long(), rows.count > 0
        right = torch.minimum(self.device_right[seat, self.device_rows[seat] % SCRIPTED], rows.count)
        board[seat] = torch.where(has_drafts, tokens[rows.sample + right].to(board.dtype), board[seat])
        refused[seat] = torch.where(has_drafts, (rows.count - right).to(refused.dtype), refused[seat])
        self.device_rows[seat] += has_drafts.long()


class IdleClock:
    """Measures on a GPU how long it waits between two recorded steps, and counts steps. On other devices, nothing.

    Steps that are not recorded are part of the wait. `sizes` counts steps by their rows and tokens.
    """

    def __init__(self, device: Any) -> None:
        self.events: list[torch.cuda.Event] = []
        self.sizes: Counter[tuple[int, int]] = Counter()
        self.idle = 0.0
        self.device: CudaRunner | None = None
        if not isinstance(device, CudaRunner) or device.device.type != "cuda":
            return
        self.device, self.launch, self.replay = device, device.launch, device.recorded._replay
        device.launch, device.recorded._replay = self.timed_launch, self.timed_replay  # type: ignore[method-assign]

    def record(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append(event)

    def timed_replay(self, *step: Any) -> Any:
        self.record()
        return self.replay(*step)

    def timed_launch(self, plan: Any) -> Any:
        flight = self.launch(plan)
        self.sizes[plan.rows, len(plan.tokens)] += 1
        if len(self.events) % 2:
            self.record()
        return flight

    def stop(self) -> None:
        """Stop measuring: `idle` is the share of time between steps."""
        if self.device is None:
            return
        self.device.launch, self.device.recorded._replay = self.launch, self.replay  # type: ignore[method-assign]
        torch.cuda.synchronize()
        if len(self.events) > 1:
            gaps = zip(self.events[1::2], self.events[2::2])
            waited = sum(end.elapsed_time(begin) for end, begin in gaps)
            self.idle = waited / self.events[0].elapsed_time(self.events[-1])


class ScriptedDrafts(SequenceDrafts):
    """Any tokens, as many as there are chances. The engine learns their acceptance, from that of a grammar on."""

    def __init__(
        self, prompt: np.ndarray, chances: Sequence[float], overall: dict[str, Acceptance], fixed: bool
    ) -> None:
        super().__init__(prompt, b"", len(chances), suffixes=False, overall=overall)
        self.chances = chances
        self.fixed = fixed

    def pause(self) -> int:
        return 0 if self.fixed else super().pause()

    def propose(self, answer: list[int], most: int, shared: SharedTexts, ahead: int = 0) -> Proposal | None:
        count = min(most, len(self.chances))
        if count < 1:
            return None
        found = self.spell(range(1000, 1000 + count), most)
        if found is None or not ahead:
            return found
        # Those before it are of no interest: a drafter on the device knows what it continues.
        return replace(found, tokens=(1000,) * ahead + found.tokens, worth=(1.0,) * ahead + found.worth)

    def outlook(self, proposal: Proposal) -> tuple[float, float]:
        known, _ = super().outlook(proposal)
        return known, known


class ScriptedDrafting(Drafting):
    """`fixed`: every row has all its drafts in every step; otherwise learned costs decide.

    `follows`: steps with drafts do not wait for each other.
    """

    def __init__(self, chances: Sequence[float], fixed: bool, following: bool = True) -> None:
        super().__init__(len(chances), suffixes=False, costs=FreeDrafts() if fixed else None)
        self.chances = chances
        self.fixed = fixed
        self.following = following

    def follows(self, known: float, unknown: float, lost: float) -> bool:
        return self.following

    def begin(self, prompt: Any, salt: bytes, most: int | None, prediction: Any) -> SequenceDrafts:
        return ScriptedDrafts(prompt, self.chances, self.overall, self.fixed)

    def choose(self, proposals: Sequence[Proposal], rows: int, most: int) -> list[int]:
        return [len(p.tokens) for p in proposals] if self.fixed else super().choose(proposals, rows, most)


class ScriptedEngine(Engine):
    """Accepts drafts as the script says, whatever the model does."""

    script: Script

    def verify(self, step: PlannedStep, landing: Landing) -> dict[int, int]:
        seats = step.plan.seat.tolist()
        return {row: min(self.script.read(seats[row]), len(p.tokens)) for row, p in step.drafts.items()}


def measure_rows(llm: LLM, rows: int, script: Script, ways: Sequence[str]) -> dict[str, Any]:
    """Return tokens per second of `rows` rows: without drafts, with three, with adaptive ones, with useless ones."""
    plain, clock = tokens_per_second(fresh(llm, draft="off"), llm, rows, WARM_ANSWER)
    found: dict[str, Any] = {"plain": plain, "plain idle": clock.idle}
    for name in ways:
        chances, fixed, following = WAYS[name]
        before = llm.engine
        drafting = ScriptedDrafting(chances, fixed, following)
        engine = ScriptedEngine(before.ledger.spec, before._device, before.config, drafting=drafting)
        engine.script = script
        script.begin(chances)
        warm = WARM_ANSWER if fixed else ANSWER
        found[name], clock = tokens_per_second(engine, llm, rows, warm)
        found[f"{name} idle"], found[f"{name} sizes"] = clock.idle, clock.sizes.most_common(SIZES)
        counts = drafting.counts
        verified = max(1, counts.proposed["grammar", 1])
        found[f"{name} accepted"] = 1 + counts.accepted.total() / verified
    return found


def tokens_per_second(engine: Engine, llm: LLM, rows: int, warm_answer: int = ANSWER) -> tuple[float, IdleClock]:
    """Return the rate while all rows decode, and the share of that time in which the GPU waits between steps.

    It begins when the first token of every answer has landed; before that, prompts are computed. It ends with the first
    answer that does: the others follow over a tenth of the steps, in ever smaller batches, which a server would fill.
    From answers of `warm_answer` tokens before them, the engine learns what steps cost and drafts are worth.
    """
    for round_, answer in enumerate((warm_answer, ANSWER)):
        asks = (Ask(random_prompt(llm, PROMPT, rows, number, round_), answer) for number in range(rows))
        begin(engine, [ask.request() for ask in asks])
        clock = IdleClock(engine._device)
        began, tokens, all_decode = time.perf_counter(), 0, True
        while all_decode:
            outputs = engine.step()
            tokens += sum(output.token is not None for output in outputs)
            all_decode = all(output.finish is None for output in outputs)
        seconds = time.perf_counter() - began
        clock.stop()
        while not engine.idle:
            engine.step()
    return tokens / seconds, clock


def line_of(each: dict[str, Any]) -> str:
    """Return the figures of one number of rows: tokens/s, and for each way their ratio to plain, length and idle."""
    line = f"  {each['rows']:>6} {each['plain']:>9.0f}"
    for name in filter(each.__contains__, WAYS):
        ratio, idle = each[name] / each["plain"], each[f"{name} idle"]
        line += f" {each[name]:>7.0f} {ratio:.2f} {each[f'{name} accepted']:.2f} {idle:.2f}"
    return line


def show(model: str, found: dict[str, Any]) -> None:
    print(f"  {found['machine']['device']}")
    if "rows" in found:
        first = next(iter(found["rows"]), {})
        names = "".join(f" {name:>21}" for name in filter(first.__contains__, WAYS))
        print(f"  {'rows':>6} {'plain':>9}{names}   tokens/s (÷ plain, length, idle)")
    for each in found.get("rows", ()):
        print(line_of(each))
    for part, error in found["errors"].items():
        print(f"  {part}: {error}")


if __name__ == "__main__":
    sys.exit(main())
