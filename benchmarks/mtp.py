"""Measure drafts of an MTP head that is computed, with scripted acceptance, on a GPU.

    python -m benchmarks.mtp                     Qwen3.5-9B and Qwen3.5-35B-A3B, 3 drafts a row
    python -m benchmarks.mtp qwen3.5-9b --rows 32 --only mtp

Weights are random, the head's too, so no draft would be right: acceptance is that of `benchmarks.drafts`, 3.0 tokens a
step on average. `waiting` and `script` are verification alone, with and without a wait for each landing; `mtp waiting`
and `mtp` compute the head for every row and step, `mtp all` with guesses among all tokens and not the frequent ones.
`head` are the microseconds that a call of the head takes on the host to launch its steps, and `busy` those of the steps
on the GPU; `idle` is the share of the time in which the GPU does not verify. Goals: `mtp` at least 1.8 times plain for
Qwen3.5-9B with 1 to 32 rows, and for Qwen3.5-35B-A3B 1.3 times with one row and 2.0 times with 128 to 256.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.drafts import STEADY, Script, ScriptedDrafting, ScriptedDrafts, ScriptedEngine, tokens_per_second
from benchmarks.gpu import Attempts, arguments_of, fresh, keep, run, start, warm_up
from weft import LLM
from weft.drafting import head as draft_head
from weft.drafting.head import DraftHead
from weft.drafting.policy.choosing import RowDrafts
from weft.drafting.policy.suffix import SharedTexts
from weft.runner.runner import Runner

MODELS = {"qwen3.5-9b": (1, 8, 32), "qwen3.5-35b-a3b": (1, 128, 256)}
# By name: whether the head computes the drafts, and whether steps follow each other without a wait.
WAYS = {
    "waiting": (False, False),
    "script": (False, True),
    "mtp waiting": (True, False),
    "mtp all": (True, True),
    "mtp": (True, True),
}


def main() -> int:
    every = sorted({rows for batches in MODELS.values() for rows in batches})
    options = arguments_of("mtp", __doc__, limit_seconds=420, models=tuple(MODELS), rows=every, parts=tuple(WAYS))
    return run(options, measure, show)


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    attempts = Attempts()
    began = time.perf_counter()
    batches = [rows for rows in MODELS.get(model, (1, 8, 32)) if rows in arguments.rows]
    batches = sorted({batches[0], batches[-1]}) if arguments.quick else batches
    script = Script(max(batches), arguments.device)
    script.lead_device()
    llm = start(model, arguments, draft="mtp", max_sequences=max(batches), max_length=1024)
    found: dict[str, Any] = {"machine": llm.placement, "errors": attempts.errors, "rows": []}
    found["start seconds"] = time.perf_counter() - began
    found["memory"] = {"target": llm.config.memory_bytes, "head": llm.config.draft_bytes}
    keep(found, arguments)
    warm_up(llm, lengths=(100,))
    for rows in batches:
        with attempts.part(f"{rows} rows"):
            found["rows"].append({"rows": rows} | measure_rows(llm, rows, script, arguments.only))
        keep(found, arguments)
    return found


class HeadDrafts(ScriptedDrafts):
    """Drafts that the head decodes, accepted by chance."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.model = DraftHead.name

    def find_drafts(self, answer: list[int], most: int, shared: SharedTexts, ahead: int = 0) -> RowDrafts | None:
        count = min(most, len(self.chances))
        return RowDrafts(DraftHead.name, DraftHead.name, (), self.chances[:count]) if count > 0 else None


class HeadDrafting(ScriptedDrafting):
    """Three drafts of the head in every row."""

    def __init__(self, chances: Sequence[float], fixed: bool, following: bool = True) -> None:
        super().__init__(chances, fixed, following)
        self.model = DraftHead.name

    def begin(self, prompt: Any, salt: bytes, most: int | None, prediction: Any, grammar: Any) -> ScriptedDrafts:
        return HeadDrafts(prompt, self.chances, self.overall, self.fixed)

    def choose(self, proposals: Sequence[RowDrafts], rows: int, most: int) -> list[int]:
        return [len(proposal.worth) for proposal in proposals]


class TimedHead:
    """Times the calls of a head that guess: on the host, and on a GPU its recorded steps."""

    def __init__(self, head: DraftHead) -> None:
        self.head, self.calls, self.seconds = head, 0, 0.0
        self.events: list[torch.cuda.Event] = []
        self._begin, executor = head.begin, head.executor
        self.recorded = executor.recorded if isinstance(executor, Runner) else None
        self._replay = None if self.recorded is None else self.recorded._replay

    def __enter__(self) -> TimedHead:
        self.head.begin = self.begin  # type: ignore[method-assign]
        if self.recorded is not None and torch.cuda.is_available():
            self.recorded._replay = self.replay  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self.head.begin
        if self.recorded is not None and torch.cuda.is_available():
            del self.recorded._replay

    def begin(self, *asked: Any) -> Any:
        began = time.perf_counter()
        found = self._begin(*asked)
        if found is not None:
            self.seconds += time.perf_counter() - began
            self.calls += 1
        return found

    def replay(self, *step: Any) -> Any:
        assert self._replay is not None
        self.record()
        output = self._replay(*step)
        self.record()
        return output

    def record(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append(event)

    def times(self) -> dict[str, float]:
        """Return the microseconds of a call on the host and on the GPU, and the number of calls."""
        if not self.calls:
            return {}
        if self.events:
            torch.cuda.synchronize()
        steps = zip(self.events[::2], self.events[1::2], strict=True)
        busy = 1e3 * sum(begin.elapsed_time(end) for begin, end in steps)
        return {"head": 1e6 * self.seconds / self.calls, "busy": busy / self.calls, "calls": self.calls}


def measure_rows(llm: LLM, rows: int, script: Script, ways: Iterable[str] = WAYS) -> dict[str, Any]:
    """Return tokens per second of `rows` rows: without drafts, with those of a script, with those of the head."""
    before, head = llm.engine, llm.engine.planner.drafts.model
    assert isinstance(head, DraftHead)
    found: dict[str, Any] = {"plain": tokens_per_second(fresh(llm, draft="off"), llm, rows)[0]}
    for name in ways:
        computes, following = WAYS[name]
        drafting = (HeadDrafting if computes else ScriptedDrafting)(STEADY, fixed=True, following=following)
        model = head if computes else None
        for seat in range(before.config.max_sequences):
            head.hidden.forget(seat)
        head.flush()
        engine = ScriptedEngine(before.ledger.spec, before._device, before.config, drafting=drafting, draft_model=model)
        engine.script = script
        script.begin(STEADY)
        # Random text has no frequent tokens.
        share = 0.0 if name == "mtp all" else 2.0
        with TimedHead(head) as timed, patch.object(draft_head, "RARE_SHARE", share):
            found[name], clock = tokens_per_second(engine, llm, rows)
            found[f"{name} idle"] = clock.idle
        counts = drafting.counts
        first = sum(count for (_, place), count in counts.proposed.items() if place == 1)
        found[f"{name} accepted"] = 1 + counts.accepted.total() / max(1, first)
        found[f"{name} steps"] = engine.planner.number
        found |= {f"{name} {part}": figure for part, figure in timed.times().items()}
    return found


def show(model: str, found: dict[str, Any]) -> None:
    sizes = ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in found["memory"].items())
    print(f"  {found['machine']}; started in {found['start seconds']:.0f} s; memory: {sizes}")
    names = [name for name in WAYS if any(name in each for each in found["rows"])]
    heads = "".join(f" {name:>21}" for name in names)
    print(f"  {'rows':>6} {'plain':>9}{heads} {'head':>8} {'busy':>8}   tokens/s (÷ plain, length, idle)")
    for each in found["rows"]:
        line = f"  {each['rows']:>6} {each['plain']:>9.0f}"
        for name in names:
            ratio, idle = each[name] / each["plain"], each[f"{name} idle"]
            line += f" {each[name]:>7.0f} {ratio:.2f} {each[f'{name} accepted']:.2f} {idle:.2f}"
        print(line + f" {each.get('mtp head', 0):>8.0f} {each.get('mtp busy', 0):>8.0f}")
    for part, error in found["errors"].items():
        print(f"  {part}: {error}")


if __name__ == "__main__":
    sys.exit(main())
