"""Measure verification of drafts with scripted acceptance on a GPU.

    python -m benchmarks.drafts                          Nemotron-Nano-9B-v2 and Qwen3.5-9B, 3 drafts a row
    python -m benchmarks.drafts qwen3.5-9b --rows 32 128 --only falling never
    python -m benchmarks.drafts qwen3.5-9b --rows 4 8 16 32 --only lengths

With random weights, no draft would be right. So acceptance is scripted, as in published benchmarks: drafts are any
tokens, and each is accepted with a fixed probability if those before it were, whatever the model says; host and device
read the same script. With 0.81, three drafts give 3.0 tokens a step on average, the free one included. The time of a
step is that of real drafts; the drafter costs nothing. Compared are: no drafts; 3 drafts in every row, where a step
waits for the landing of the one before it, as drafts from the host need it, and where it follows before that, as drafts
from the device could; up to 7 drafts chosen by the engine, whose acceptance falls from 0.7 to 0.1; and drafts that are
never accepted, chosen by the engine. `idle` is the share of the time in which the GPU waits between two recorded
steps. Rates are those while all rows decode.

`lengths` holds the engine's choice against 1, 2, 3, 5 and 7 drafts in every row, with the acceptance that falls from
0.7 to 0.1. All read the same script, and a row of a step counts for the tokens that are expected of its number of
drafts: what is left to chance is what the engine learns. `±` is the standard error, by the differences between answers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

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
from weft.drafting.policy.acceptance import Acceptance
from weft.drafting.policy.choosing import Drafting, RowDrafts, SequenceDrafts
from weft.drafting.policy.costs import FreeDrafts
from weft.drafting.policy.suffix import Match, SharedTexts
from weft.engine.assembly import PlannedStep
from weft.engine.loop import Engine
from weft.kernels.following import DraftSamples
from weft.runner.cuda import recorded
from weft.runner.runner import Runner

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
# Fixed numbers of drafts that the engine's choice is held against, and the least seconds and answers of each.
LENGTHS = (1, 2, 3, 5, 7)
LENGTH_SECONDS, LENGTH_ROUNDS = 1.5, 3
# Sizes of steps that are kept of each way: the most frequent.
SIZES = 5
# Rows of a seat after which its script begins again.
SCRIPTED = 1024


def main() -> int:
    options = arguments_of("drafts", __doc__, limit_seconds=300, models=MODELS, rows=BATCHES, parts=(*WAYS, "lengths"))
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
            ways = [name for name in WAYS if name in arguments.only]
            each = {"rows": rows} | (measure_rows(llm, rows, script, ways) if ways else {})
            if "lengths" in arguments.only:
                each["lengths"] = measure_lengths(llm, rows, script)
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
        # Expected tokens of a row by its number of drafts.
        self.expected = [1.0]

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
        self.expected = list(accumulate(accumulate(chances, mul), initial=1.0))

    def read(self, seat: int) -> int:
        """Return how many drafts of a seat's next row are right."""
        self.rows[seat] += 1
        return int(self.right[seat, (self.rows[seat] - 1) % SCRIPTED])

    def verify_drafts(self, tokens: Tensor, inputs: Tensor, rows: DraftSamples, board: Tensor, refused: Tensor) -> None:
        if tokens.is_cuda:
            scripted = import_module("benchmarks.scripted_drafts")
            scripted.verify(tokens, rows, self.device_right, self.device_rows, board, refused)
            return
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
        self.device: Runner | None = None
        if device.recorded is None or device.device.type != "cuda":
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
    """Any tokens, as many as there are chances. The engine learns their acceptance, from that of forced tokens on."""

    def __init__(
        self, prompt: np.ndarray, chances: Sequence[float], overall: dict[str, Acceptance], fixed: bool
    ) -> None:
        super().__init__(prompt, b"", len(chances), suffixes=False, overall=overall)
        self.chances = chances
        self.fixed = fixed

    def pause(self) -> int:
        return 0 if self.fixed else super().pause()

    def find_drafts(self, answer: list[int], most: int, shared: SharedTexts, ahead: int = 0) -> RowDrafts | None:
        count = min(most, len(self.chances))
        if count < 1:
            return None
        found = self._drafts_of("grammar", "forced", Match(0, tuple(range(1000, 1000 + count))))
        if not ahead:
            return found
        # Those before it are of no interest: a drafter on the device knows what it continues.
        return replace(found, tokens=(1000,) * ahead + found.tokens, worth=(1.0,) * ahead + found.worth)

    def outlook(self, proposal: RowDrafts) -> tuple[float, float]:
        known, _ = super().outlook(proposal)
        return known, known


class ScriptedDrafting(Drafting):
    """`fixed`: drafts cost nothing, so every row has all of them in every step; otherwise learned costs decide.

    `follows`: steps with drafts do not wait for each other.
    """

    def __init__(self, chances: Sequence[float], fixed: bool, following: bool = True) -> None:
        super().__init__(len(chances), suffixes=False, costs=FreeDrafts() if fixed else None)
        self.chances = chances
        self.fixed = fixed
        self.following = following

    def plans_ahead(self, known: float, unknown: float, lost: float) -> bool:
        return self.following

    def begin(self, prompt: Any, salt: bytes, most: int | None, prediction: Any, grammar: Any) -> SequenceDrafts:
        return ScriptedDrafts(prompt, self.chances, self.overall, self.fixed)


class ScriptedEngine(Engine):
    """Accepts drafts as the script says, whatever the model does. `expected` counts the tokens of landed steps that are
    expected of the numbers of drafts, whatever was accepted."""

    script: Script
    expected = 0.0

    def verify(self, step: PlannedStep, landing: Landing) -> dict[int, int]:
        self.expected += step.plan.rows - len(step.drafts)
        self.expected += sum(self.script.expected[len(p.tokens)] for p in step.drafts.values())
        seats = step.plan.seat.tolist()
        return {row: min(self.script.read(seats[row]), len(p.tokens)) for row, p in step.drafts.items()}


def measure_rows(llm: LLM, rows: int, script: Script, ways: Sequence[str]) -> dict[str, Any]:
    """Return tokens per second of `rows` rows: without drafts, with three, with adaptive ones, with useless ones."""
    plain, clock = tokens_per_second(fresh(llm, draft="off"), llm, rows, WARM_ANSWER)
    found: dict[str, Any] = {"plain": plain, "plain idle": clock.idle}
    for name in ways:
        chances, fixed, following = WAYS[name]
        drafting = ScriptedDrafting(chances, fixed, following)
        engine = scripted_engine(llm, drafting, script, chances)
        warm = WARM_ANSWER if fixed else ANSWER
        found[name], clock = tokens_per_second(engine, llm, rows, warm)
        found[f"{name} idle"], found[f"{name} sizes"] = clock.idle, clock.sizes.most_common(SIZES)
        counts = drafting.counts
        verified = max(1, counts.proposed["grammar", 1])
        found[f"{name} accepted"] = 1 + counts.accepted.total() / verified
    return found


def scripted_engine(llm: LLM, drafting: ScriptedDrafting, script: Script, chances: Sequence[float]) -> ScriptedEngine:
    """Return a new engine on the same device, and begin the script."""
    before = llm.engine
    engine = ScriptedEngine(before.ledger.spec, before._device, before.config, drafting=drafting)
    engine.script = script
    script.begin(chances)
    return engine


def tokens_per_second(engine: Engine, llm: LLM, rows: int, warm_answer: int = ANSWER) -> tuple[float, IdleClock]:
    """Return the rate while all rows decode, and the share of that time in which the GPU waits between steps.

    From answers of `warm_answer` tokens before them, the engine learns what steps cost and drafts are worth.
    """
    decode_answers(engine, llm, rows, warm_answer, 0)
    found = decode_answers(engine, llm, rows, ANSWER, 1)
    return found.tokens / found.seconds, found.clock


class Decoded(NamedTuple):
    """What was decoded while all rows did: tokens, those that a scripted engine expected, and seconds."""

    tokens: int
    expected: float
    seconds: float
    clock: IdleClock


def decode_answers(engine: Engine, llm: LLM, rows: int, answer: int, round_: int) -> Decoded:
    """Decode answers of this length, and measure while all rows do.

    It begins when the first token of every answer has landed; before that, prompts are computed. It ends with the first
    answer that does: the others follow over a tenth of the steps, in ever smaller batches, which a server would fill.
    """
    asks = (Ask(random_prompt(llm, PROMPT, rows, number, round_), answer) for number in range(rows))
    begin(engine, [ask.request() for ask in asks])
    clock = IdleClock(engine._device)
    began, expected, tokens, all_decode = time.perf_counter(), expected_of(engine), 0, True
    while all_decode:
        outputs = engine.step()
        tokens += sum(output.token is not None for output in outputs)
        all_decode = all(output.finish is None for output in outputs)
    seconds, expected = time.perf_counter() - began, expected_of(engine) - expected
    clock.stop()
    while not engine.idle:
        engine.step()
    return Decoded(tokens, expected, seconds, clock)


def expected_of(engine: Engine) -> float:
    return engine.expected if isinstance(engine, ScriptedEngine) else 0.0


# the engine's choice and fixed numbers of drafts ----------------------------------------------------------------------


class LengthRate(NamedTuple):
    """Expected tokens per second, its standard error, the tokens per second that were counted, and sizes of steps."""

    expected: float
    error: float
    counted: float
    sizes: list[tuple[tuple[int, int], int]]


def measure_lengths(llm: LLM, rows: int, script: Script) -> dict[str, Any]:
    """Return rates of the engine's choice and of fixed numbers of drafts, and the ratio of the choice to the best."""
    rates = {}
    for count in (*LENGTHS, None):
        drafting = ScriptedDrafting(FALLING if count is None else FALLING[:count], fixed=count is not None)
        engine = scripted_engine(llm, drafting, script, FALLING)
        rates["chosen" if count is None else str(count)] = rate_of_length(engine, llm, rows, drafting.fixed)
    best = max(map(str, LENGTHS), key=lambda count: rates[count].expected)
    chosen, fixed = rates["chosen"], rates[best]
    ratio = chosen.expected / fixed.expected
    error = ratio * float(np.hypot(chosen.error / chosen.expected, fixed.error / fixed.expected))
    return {name: rate._asdict() for name, rate in rates.items()} | {"best": best, "ratio": ratio, "error": error}


def rate_of_length(engine: ScriptedEngine, llm: LLM, rows: int, fixed: bool) -> LengthRate:
    """Measure answers one after the other, after one of which the engine learns."""
    decode_answers(engine, llm, rows, WARM_ANSWER if fixed else ANSWER, 0)
    parts: list[Decoded] = []
    while len(parts) < LENGTH_ROUNDS or sum(part.seconds for part in parts) < LENGTH_SECONDS:
        parts.append(decode_answers(engine, llm, rows, ANSWER, 1 + len(parts)))
    expected, seconds = np.array([part.expected for part in parts]), np.array([part.seconds for part in parts])
    rate = expected.sum() / seconds.sum()
    sizes = sum((part.clock.sizes for part in parts), Counter[tuple[int, int]]())
    tokens = sum(part.tokens for part in parts)
    # Of a ratio of two sums.
    error = np.sqrt(len(parts) / (len(parts) - 1) * ((expected - rate * seconds) ** 2).sum()) / seconds.sum()
    return LengthRate(rate, error, tokens / seconds.sum(), sizes.most_common(SIZES))


def line_of(each: dict[str, Any]) -> str:
    """Return the figures of one number of rows: tokens/s, and for each way their ratio to plain, length and idle."""
    line = f"  {each['rows']:>6}"
    if "plain" in each:
        line += f" {each['plain']:>9.0f}"
    for name in filter(each.__contains__, WAYS):
        ratio, idle = each[name] / each["plain"], each[f"{name} idle"]
        line += f" {each[name]:>7.0f} {ratio:.2f} {each[f'{name} accepted']:.2f} {idle:.2f}"
    return line + lengths_of(each["lengths"]) if "lengths" in each else line


def lengths_of(found: dict[str, Any]) -> str:
    """Return the expected tokens/s of fixed numbers of drafts and of the choice, and its ratio to the best."""
    rates = "  ".join(f"{name}: {found[name]['expected']:.0f}" for name in (*map(str, LENGTHS), "chosen"))
    counted = found["chosen"]["counted"] / found[found["best"]]["counted"]
    return f"  {rates}  chosen / {found['best']}: {found['ratio']:.4f} ± {found['error']:.4f} (counted {counted:.3f})"


def show(model: str, found: dict[str, Any]) -> None:
    print(f"  {found['machine']['device']}")
    first = next(iter(found.get("rows", ())), {})
    if "plain" in first:
        names = "".join(f" {name:>21}" for name in filter(first.__contains__, WAYS))
        print(f"  {'rows':>6} {'plain':>9}{names}   tokens/s (÷ plain, length, idle)")
    for each in found.get("rows", ()):
        print(line_of(each))
    for part, error in found["errors"].items():
        print(f"  {part}: {error}")


if __name__ == "__main__":
    sys.exit(main())
