"""Measure drafts of an MTP head that is computed, with scripted acceptance, on a GPU.

    python -m benchmarks.mtp                     Qwen3.5-9B and Qwen3.5-35B-A3B, 3 drafts a row
    python -m benchmarks.mtp qwen3.5-9b --quick

Weights are random, the head's too, so no draft would be right: acceptance is that of `benchmarks.drafts`, 3.0 tokens a
step on average. `script` is verification alone, as there; `mtp` computes the head for every row and step. `head` are
the microseconds from the call of the head to its landing, on average, and `ahead` those until all its flights are
launched: the rest is the GPU's. Goals: `mtp` at least 1.8 times plain for Qwen3.5-9B with 1 to 32 rows, and for
Qwen3.5-35B-A3B 1.3 times with one row and 2.0 times with 128 to 256.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.drafts import STEADY, ScriptedDrafting, ScriptedDrafts, ScriptedEngine, tokens_per_second
from benchmarks.gpu import Attempts, arguments_of, fresh, keep, run, start, warm_up
from weft import LLM
from weft.base.plan import Plan
from weft.engine.draft_head import DraftHead
from weft.speculate.drafting import Proposal
from weft.speculate.suffix import SharedTexts

MODELS = {"qwen3.5-9b": (1, 8, 32), "qwen3.5-35b-a3b": (1, 128, 256)}


def main() -> int:
    return run(arguments_of("mtp", __doc__, limit_seconds=420, models=tuple(MODELS)), measure, show)


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    attempts = Attempts()
    began = time.perf_counter()
    batches = MODELS.get(model, (1, 8, 32))
    batches = (batches[0], batches[-1]) if arguments.quick else batches
    llm = start(model, arguments, draft="mtp", max_sequences=max(batches), max_length=1024)
    found: dict[str, Any] = {"machine": llm.placement, "errors": attempts.errors, "rows": []}
    found["start seconds"] = time.perf_counter() - began
    found["memory"] = {"target": llm.config.memory_bytes, "head": llm.config.draft_bytes}
    keep(found, arguments)
    warm_up(llm, lengths=(100,))
    for rows in batches:
        with attempts.part(f"{rows} rows"):
            found["rows"].append({"rows": rows} | measure_rows(llm, rows))
        keep(found, arguments)
    return found


class HeadDrafts(ScriptedDrafts):
    """Drafts that the head decodes, accepted by chance."""

    def propose(self, answer: list[int], most: int, shared: SharedTexts) -> Proposal | None:
        count = min(most, len(self.chances))
        return Proposal(DraftHead.name, DraftHead.name, (), self.chances[:count]) if count > 0 else None


class HeadDrafting(ScriptedDrafting):
    """Three drafts of the head in every row."""

    def __init__(self, chances: Sequence[float]) -> None:
        super().__init__(chances, fixed=True)
        self.model = DraftHead.name

    def begin(self, prompt: Any, salt: bytes, most: int | None, prediction: Any) -> ScriptedDrafts:
        return HeadDrafts(prompt, self.chances, self.overall, self.fixed)

    def choose(self, proposals: Sequence[Proposal], rows: int, most: int) -> list[int]:
        return [len(proposal.worth) for proposal in proposals]


class TimedHead:
    """Times the calls of a head that guess, and their launches."""

    def __init__(self, head: DraftHead) -> None:
        self.head, self.seconds, self.ahead, self.launched = head, list[float](), list[float](), 0.0
        self._draft, self._launch = head.draft, head.executor.launch

    def __enter__(self) -> TimedHead:
        self.head.draft, self.head.executor.launch = self.draft, self.launch  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self.head.draft, self.head.executor.launch

    def draft(self, asked: Any) -> Any:
        began = time.perf_counter()
        found = self._draft(asked)
        if found:
            self.seconds.append(time.perf_counter() - began)
            self.ahead.append(self.launched - began)
        return found

    def launch(self, plan: Plan) -> Any:
        flight = self._launch(plan)
        self.launched = time.perf_counter()
        return flight


def measure_rows(llm: LLM, rows: int) -> dict[str, Any]:
    """Return tokens per second of `rows` rows: without drafts, with those of a script, with those of the head."""
    before, head = llm.engine, llm.engine.planner.drafts.model
    assert isinstance(head, DraftHead)
    found: dict[str, Any] = {"plain": tokens_per_second(fresh(llm, draft="off"), llm, rows)}
    for name, drafting, model in (
        ("script", ScriptedDrafting(STEADY, fixed=True), None),
        ("mtp", HeadDrafting(STEADY), head),
    ):
        for seat in range(before.config.max_sequences):
            head.hidden.forget(seat)
        head.flush()
        engine = ScriptedEngine(before.ledger.spec, before._device, before.config, drafting=drafting, draft_model=model)
        with TimedHead(head) as timed:
            found[name] = tokens_per_second(engine, llm, rows)
        counts = drafting.counts
        first = sum(count for (_, place), count in counts.proposed.items() if place == 1)
        found[f"{name} accepted"] = 1 + counts.accepted.total() / max(1, first)
        found[f"{name} steps"] = engine.planner.number
        if timed.seconds:
            found["head"] = 1e6 * float(np.mean(timed.seconds))
            found["ahead"] = 1e6 * float(np.mean(timed.ahead))
            found["calls"] = len(timed.seconds)
    return found


def show(model: str, found: dict[str, Any]) -> None:
    sizes = ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in found["memory"].items())
    print(f"  {found['machine']}; started in {found['start seconds']:.0f} s; memory: {sizes}")
    print(
        f"  {'rows':>6} {'plain':>9} {'script':>18} {'mtp':>18} {'head':>8} {'ahead':>8}   tokens/s (÷ plain, length)"
    )
    for each in found["rows"]:
        line = f"  {each['rows']:>6} {each['plain']:>9.0f}"
        for name in ("script", "mtp"):
            line += f" {each[name]:>8.0f} {each[name] / each['plain']:.2f} {each[f'{name} accepted']:.2f}"
        print(line + f" {each.get('head', 0):>8.0f} {each.get('ahead', 0):>8.0f}")
    for part, error in found["errors"].items():
        print(f"  {part}: {error}")


if __name__ == "__main__":
    sys.exit(main())
