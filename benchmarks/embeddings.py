"""Measure embeddings against the engine's prefill rate, and what texts with a shared instruction compute.

    python -m benchmarks.embeddings                              the built-in model, 1,000 texts of 128 tokens
    python -m benchmarks.embeddings --model Qwen/Qwen3-Embedding-0.6B
    python -m benchmarks.embeddings --texts 100 --rounds 2

Texts are random token ids, so no time goes to a tokenizer. The prefill rate is that of the same prompts without an
answer. Both alternate, each time under a new salt, so that nothing is cached. The goal is 0.9 of the prefill rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from weft import LLM, SamplingParams

INSTRUCTION = 256
GOAL = 0.9


def main() -> int:
    arguments = arguments_of()
    with LLM(arguments.model, progress=False, memory=arguments.memory, threads=arguments.threads) as llm:
        found = measure(llm, arguments)
    show(found)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=1)
    return 0 if found["share"] >= GOAL else 1


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id (default: the built-in model)")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--threads", type=int, default=0, help="of a CPU (default: all)")
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args()


def measure(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    random = np.random.default_rng(0)
    texts = random.integers(0, llm.vocab_size, (arguments.texts, arguments.tokens)).tolist()
    instruction = random.integers(0, llm.vocab_size, INSTRUCTION).tolist()
    silent = SamplingParams(max_tokens=0)
    ways: dict[str, Callable[[str], Any]] = {
        "prefill": lambda salt: llm.generate(texts, silent, use_tqdm=False, cache_salt=salt),
        "embed": lambda salt: llm.embed(texts, use_tqdm=False, cache_salt=salt),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds + 1):
        for name, way in ways.items():
            began = perf_counter()
            way(f"{name} {number}")
            # The first round warms up.
            rates[name] += [arguments.texts * arguments.tokens / (perf_counter() - began)] if number else []
    shared = llm.embed([instruction + text for text in texts], use_tqdm=False, cache_salt="shared")
    medians = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "model": arguments.model or "weft-small",
        "placement": llm.placement,
        "texts": arguments.texts,
        "tokens": arguments.tokens,
        "tokens_per_second": rates,
        "share": medians["embed"] / medians["prefill"],
        "instructions_computed": sum(INSTRUCTION - min(each.num_cached_tokens, INSTRUCTION) for each in shared)
        / INSTRUCTION,
    }


def show(found: dict[str, Any]) -> None:
    print(f"{found['model']}, {found['placement']}: {found['texts']} texts of {found['tokens']} tokens")
    for name, rates in found["tokens_per_second"].items():
        print(
            f"{name:8} {statistics.median(rates):10,.0f} tokens/s   (rounds: {', '.join(f'{r:,.0f}' for r in rates)})"
        )
    print(f"embed / prefill {found['share']:.3f}, goal {GOAL}")
    print(f"a shared instruction of {INSTRUCTION} tokens was computed {found['instructions_computed']:.2f} times")


if __name__ == "__main__":
    sys.exit(main())
