"""Measure tokens per second of concurrent requests with shared prefixes, of conversations, and without sharing.

    python -m benchmarks.serving                        LFM2-1.2B, Nemotron-Nano-9B-v2 and qwen3-next-mini
    python -m benchmarks.serving qwen3.5-9b --quick
    python -m benchmarks.serving lfm2-1.2b --columns default draft=off exact=false

Runs the engine in this process, greedy, with answers of fixed length. A rate is the tokens of all answers over the time
from the first request to the last token. A hit share is the cached prompt tokens over all prompt tokens.

Shared prefix: 8 system prompts of 2,048 tokens, each with 16 questions of 128 tokens and answers of 128, all at once;
then the same system prompts with other questions. Conversations: 32 of them, each starting with 500 tokens, then four
turns of 200 tokens with answers of 150; a turn is sent with the whole history as soon as the previous one is answered.
Greedy answers of random weights repeat themselves, so drafts are right more often than in most texts; the column
`draft=off` shows what is left without them. Nothing shared: 256 prompts of 512 random tokens, answers of 128,
alternating between cache on and cache off.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np

from benchmarks.columns import COLUMNS
from benchmarks.gpu import (
    Ask,
    Attempts,
    arguments_of,
    fresh,
    keep,
    machine,
    play,
    random_prompt,
    run,
    start,
    warm_up,
)
from weft import LLM

SYSTEMS, QUESTIONS = 8, 16
SYSTEM, QUESTION, SHARED_ANSWER = 2048, 128, 128
CONVERSATIONS, TURNS = 32, 4
BEGINNING, TURN, TURN_ANSWER = 500, 200, 150
STRANGERS, STRANGER, STRANGER_ANSWER = 256, 512, 128


def main() -> int:
    return run(arguments_of("serving", __doc__, limit_seconds=300, columns=COLUMNS), measure, show)


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    attempts = Attempts()
    found: dict[str, Any] = {"machine": machine(arguments.device), "errors": attempts.errors}
    llm = start(model, arguments, depth=1, max_sequences=256, max_length=4096)
    warm_up(llm, rows=(1, 32, 128, 256))
    with attempts.part("shared prefix"):
        found["shared"] = shared_prefix(llm)
    keep(found, arguments)
    with attempts.part("conversations"):
        found["conversations"] = conversations(llm)
    keep(found, arguments)
    with attempts.part("nothing shared"):
        found["strangers"] = nothing_shared(llm, 1 if arguments.quick else 3, arguments.deadline)
    return found


def rates(asks: list[Ask], seconds: float) -> dict[str, float]:
    answered = sum(len(ask.tokens or ()) for ask in asks)
    asked, cached = sum(len(ask.prompt) for ask in asks), sum(ask.cached_tokens for ask in asks)
    return {"tokens_per_second": answered / seconds, "hit_share": cached / asked, "seconds": seconds}


def shared_prefix(llm: LLM) -> dict[str, dict[str, float]]:
    engine = fresh(llm)
    found = {}
    for time_, name in enumerate(("first", "second")):
        asks = [
            Ask(
                np.concatenate(
                    [random_prompt(llm, SYSTEM, 1, system), random_prompt(llm, QUESTION, 2, time_, system, n)]
                ),
                SHARED_ANSWER,
            )
            for system in range(SYSTEMS)
            for n in range(QUESTIONS)
        ]
        found[name] = rates(asks, play(engine, asks))
    return found


def conversations(llm: LLM) -> dict[str, float]:
    asks = [Ask(random_prompt(llm, BEGINNING + TURN, 3, number), TURN_ANSWER) for number in range(CONVERSATIONS)]
    turns = dict.fromkeys(map(id, asks), 1)
    every = list(asks)

    def follow(ask: Ask) -> Ask | None:
        turn = turns.pop(id(ask))
        if turn == TURNS:
            return None
        said = np.array(ask.tokens, np.int32)
        following = Ask(np.concatenate([ask.prompt, said, random_prompt(llm, TURN, 4, len(every))]), TURN_ANSWER)
        turns[id(following)] = turn + 1
        every.append(following)
        return following

    seconds = play(fresh(llm), asks, follow)
    assert len(every) == CONVERSATIONS * TURNS
    return rates(every, seconds)


def nothing_shared(llm: LLM, repeats: int, deadline: float) -> dict[str, float]:
    """Return the median rates with and without the cache, and their ratio. Does fewer repetitions if time runs out."""
    taken: dict[bool, list[float]] = {True: [], False: []}
    began = time.perf_counter()
    for number in range(repeats):
        each = (time.perf_counter() - began) / max(1, number)
        if number and time.perf_counter() + each > deadline:
            break
        # Alternate the order, because the first of a pair may find a cooler GPU.
        for cache in (True, False) if number % 2 else (False, True):
            asks = [Ask(random_prompt(llm, STRANGER, 5, number, n), STRANGER_ANSWER) for n in range(STRANGERS)]
            taken[cache].append(rates(asks, play(fresh(llm, cache=cache), asks))["tokens_per_second"])
    on, off = (statistics.median(taken[cache]) for cache in (True, False))
    return {"tokens_per_second": on, "without_cache": off, "share": on / off, "repeats": len(taken[True])}


def show(model: str, found: dict[str, Any]) -> None:
    print(f"  {found['machine']['device']}")
    lines = {f"shared prefix, {name} time": each for name, each in found.get("shared", {}).items()}
    if "conversations" in found:
        lines["conversations"] = found["conversations"]
    for name, each in lines.items():
        print(f"  {name:28} {each['tokens_per_second']:>8.0f} tokens/s   hits {each['hit_share']:.2f}")
    if "strangers" in found:
        each = found["strangers"]
        on, off = each["tokens_per_second"], each["without_cache"]
        print(f"  {'nothing shared':28} {on:>8.0f} tokens/s   without cache {off:.0f} ({each['share']:.3f})")
    for part, error in found["errors"].items():
        print(f"  {part}: {error}")


if __name__ == "__main__":
    sys.exit(main())
