"""Measure what masks of grammars cost on a GPU, where sampling is launched after the forward pass.

    python -m benchmarks.mask_rates qwen3.5-9b --rows 1 8 32 128

All rows answer JSON of a schema, over a vocabulary of the model's size, chosen by random weights, without drafts. Rates
are tokens per second while all rows decode, with the grammar and without. The difference is what the GPU waits for the
host, and the masks' own time. `benchmarks.mask_gap` measures the host's part.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from benchmarks.gpu import Attempts, arguments_of, keep, random_prompt, rate_of, run, start, warm_up, without_flashinfer
from benchmarks.mask_gap import ANY_PEOPLE, PEOPLE, wide_grammars
from weft import LLM
from weft.base.grammar import Grammar
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request

MODELS = ("qwen3.5-9b",)
BATCHES = (1, 8, 32, 128)
PROMPT, WARM_ANSWER, ANSWER = 128, 24, 128
ROUNDS = 3
WAYS: dict[str, Grammar | None] = {"plain": None, "any": ANY_PEOPLE, "bounded": PEOPLE}


def main() -> int:
    return run(arguments_of("mask_rates", __doc__, 300, MODELS, rows=BATCHES), measure, show)


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    attempts = Attempts()
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    found: dict[str, Any] = {"machine": {"device": device}, "errors": attempts.errors, "rows": []}
    with without_flashinfer():
        llm = start(model, arguments, draft="off", max_sequences=max(arguments.rows), max_length=1024)
    warm_up(llm)
    before, grammars = llm.engine, wide_grammars(llm.vocab_size)
    engine = Engine(before.ledger.spec, before._device, before.config, grammars)
    for rows in arguments.rows:
        with attempts.part(f"{rows} rows"):
            rate(engine, llm, rows, PEOPLE, WARM_ANSWER)
            rates = [[rate(engine, llm, rows, each) for each in WAYS.values()] for _ in range(ROUNDS)]
            best = (max(way) for way in zip(*rates, strict=True))
            found["rows"].append({"rows": rows} | dict(zip(WAYS, best, strict=True)))
            print(line_of(found["rows"][-1]), flush=True)
        keep(found, arguments)
    return found


def rate(engine: Engine, llm: LLM, rows: int, grammar: Grammar | None, answer: int = ANSWER) -> float:
    """Return tokens per second while all rows decode."""
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    prompts = (random_prompt(llm, PROMPT, rows, number) for number in range(rows))
    return rate_of(engine, [Request(prompt, params, grammar=grammar) for prompt in prompts])


def line_of(each: dict[str, Any]) -> str:
    line = f"  {each['rows']:>6} {each['plain']:>9.0f}"
    for way in list(WAYS)[1:]:
        more = 1e3 * each["rows"] * (1 / each[way] - 1 / each["plain"])
        line += f" {each[way]:>9.0f} {each[way] / each['plain']:>6.3f} {more:>7.3f}"
    return line


def show(model: str, found: dict[str, Any]) -> None:
    print(f"  {found['machine']['device']}; tokens/s, best of {ROUNDS}, their ratio to plain, and ms more a step")
    print(f"  {'rows':>6} {'plain':>9} {'any string':>24} {'bounded strings':>24}")
    for each in found["rows"]:
        print(line_of(each))
    for part, error in found["errors"].items():
        print(f"  {part}: {error}")


if __name__ == "__main__":
    sys.exit(main())
