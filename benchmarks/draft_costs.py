"""Measure what drafts cost where they never pay: at the start of an engine, in its memory, in steps and prompts.

    python -m benchmarks.draft_costs qwen3.5-9b
    python -m benchmarks.draft_costs nemotron-nano-9b-v2 --only "exact off" "exact suffix" --rows 1 32

Each way is an engine of its own, started as users do: `off`, `suffix`, `mtp`, and the first two with exact answers.
Weights are random and answers are drawn, so earlier text is of no use and a head is never right: `tokens/s` are those
of rows that try drafts and turn them down, over those of `off`. `never` are guesses in every row and step, as far as
the engine chooses them, none of which is right. `prompt` are the milliseconds of a prompt of 8,192 tokens. Of the
start, the seconds for compiling, and for recording steps; of the memory, what pages and states have, and what recorded
steps took.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.drafts import NEVER, ScriptedDrafting
from benchmarks.gpu import (
    Attempts,
    arguments_of,
    begin,
    fresh,
    keep,
    random_prompt,
    rate_of,
    run,
    start,
    without_flashinfer,
)
from weft import LLM
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.runner.cuda.recorded import RecordedSteps
from weft.start import loading as weft_loading

MODELS = ("qwen3.5-9b",)
WAYS = {
    "off": {"draft": "off", "exact": False},
    "suffix": {"draft": "suffix", "exact": False},
    "mtp": {"draft": "mtp", "exact": False},
    "exact off": {"draft": "off", "exact": True},
    "exact suffix": {"draft": "suffix", "exact": True},
}
BATCHES = (1, 32, 128)
PROMPT, LONG_PROMPT, LONG_PROMPTS = 128, 8192, 3
# Tokens of answers: those from which an engine learns, and those that are measured, the latter several times.
LEARNING, ANSWER, ROUNDS = 96, 160, 3


def main() -> int:
    options = arguments_of("draft_costs", __doc__, 300, MODELS, rows=BATCHES, parts=tuple(WAYS))
    return run(options, measure, show)


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    attempts = Attempts()
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    found: dict[str, Any] = {"machine": {"device": device}, "errors": attempts.errors, "ways": {}}
    for name in arguments.only:
        with attempts.part(name):
            found["ways"][name] = each = {}
            measure_way(model, arguments, WAYS[name], each, alone=base_of(name) not in found["ways"])
            print(line_of(name, each, found["ways"].get(base_of(name))), flush=True)
        keep(found, arguments)
        # A start freezes the heap.
        gc.unfreeze()
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    return found


def base_of(name: str) -> str:
    return "exact off" if name.startswith("exact") else "off"


def measure_way(
    model: str, arguments: argparse.Namespace, options: dict[str, Any], found: dict[str, Any], alone: bool
) -> None:
    """Start an engine and measure it; suffixes that are `alone`, also without drafts. What was measured stays."""
    rows = max(arguments.rows)
    spent: dict[str, float] = {}
    began = time.perf_counter()
    with without_flashinfer() if arguments.device == "cuda" else ExitStack(), timed(spent):
        llm = start(model, arguments, max_sequences=max(256, rows), **options)
    found |= {"start": time.perf_counter() - began, **spent}
    found |= {"memory": llm.config.memory_bytes, "draft memory": llm.config.draft_bytes}
    with llm:
        for count in arguments.rows:
            found[f"{count} rows"] = rate(llm.engine, llm, count)
            if options["draft"] == "suffix":
                drafting = ScriptedDrafting(NEVER, fixed=False)
                before = llm.engine
                engine = Engine(before.ledger.spec, before._device, before.config, drafting=drafting)
                found[f"{count} rows, never"] = rate(engine, llm, count)
                found[f"{count} rows, drafts"] = drafting.counts.proposed.total()
                if alone:
                    found[f"{count} rows, plain"] = rate(fresh(llm, draft="off"), llm, count)
                llm.engine = fresh(llm)
        found["prompt"] = prompt_seconds(llm)


@contextmanager
def timed(spent: dict[str, float]) -> Iterator[None]:
    """Note the seconds that parts of a start take, and the memory of recorded steps."""

    def free() -> int:
        return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*args: Any, **more: Any) -> Any:
            began, before = time.perf_counter(), free()
            try:
                return original(*args, **more)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - began
                if name == "recording":
                    spent["recorded memory"] = spent.get("recorded memory", 0.0) + before - free()

        return timing

    with ExitStack() as stack:
        for owner, attribute, name in (
            (weft_loading, "load_model", "loading"),
            (weft_loading, "compile_once", "compiling"),
            (RecordedSteps, "record_all", "recording"),
        ):
            stack.enter_context(patch.object(owner, attribute, wrap(name, getattr(owner, attribute))))
        yield


def request(llm: LLM, tokens: int, answer: int, *seed: int) -> Request:
    params = SamplingParams(max_tokens=answer, temperature=1.0, ignore_eos=True, seed=sum(seed))
    return Request(random_prompt(llm, tokens, *seed), params)


def rate(engine: Engine, llm: LLM, rows: int) -> float:
    """Return tokens per second while all rows decode, after answers from which the engine has learned: the median."""
    rates = [
        rate_of(engine, [request(llm, PROMPT, answer, rows, number, round_) for number in range(rows)])
        for round_, answer in enumerate((LEARNING, *[ANSWER] * ROUNDS))
    ]
    return median(rates[1:])


def prompt_seconds(llm: LLM) -> float:
    """Return the least time of a long prompt."""
    length = min(LONG_PROMPT, llm.config.max_length - 2)
    best = float("inf")
    for number in range(LONG_PROMPTS):
        began = time.perf_counter()
        begin(llm.engine, [request(llm, length, 2, 7, number)])
        best = min(best, time.perf_counter() - began)
        while not llm.engine.idle:
            llm.engine.step()
    return best


def line_of(name: str, found: dict[str, Any], base: dict[str, Any] | None) -> str:
    parts = (f"{part} {found[part]:.1f}" for part in ("loading", "compiling", "recording") if part in found)
    line = f"  {name:>12}: start {found['start']:.1f} s ({', '.join(parts)}), "
    memory, own, recorded = (found.get(part, 0) / 2**30 for part in ("memory", "draft memory", "recorded memory"))
    line += f"memory {memory:.2f} + {own:.2f} GiB, recorded steps {recorded:.2f} GiB"
    for part in (part for part in found if " rows" in part):
        rows = part.partition(",")[0]
        plain = (base or {}).get(rows, found.get(f"{rows}, plain"))
        over = f" ({found[part] / plain:.4f})" if plain and not part.endswith("drafts") else ""
        line += f"; {part} {found[part]:.0f}{over}"
    return line + f"; prompt {1e3 * found.get('prompt', 0.0):.1f} ms"


def show(model: str, found: dict[str, Any]) -> None:
    print(f"  {found['machine']['device']}; tokens/s (over those without drafts)")
    for name, each in found["ways"].items():
        if "prompt" in each:
            print(line_of(name, each, found["ways"].get(base_of(name))))
    for part, error in found["errors"].items():
        print(f"  {part}: {error}")


if __name__ == "__main__":
    sys.exit(main())
