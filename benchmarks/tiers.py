"""Measure what host memory below a GPU is worth: a host hit, the rate of copies, conversations, nothing to reuse.

    python -m benchmarks.tiers                          LFM2-1.2B, Nemotron-Nano-9B-v2 and qwen3-next-mini
    python -m benchmarks.tiers nemotron-nano-9b-v2 --quick

All with 8 GiB on the device (or `--memory`) and 24 GiB of host memory, without FlashInfer. Figures are printed as soon
as they are known. Hit: a prompt of 20,000 tokens is sent again, with another end, while the device has it, and after
the device has evicted it; medians of the time to the first token. The bound is the device hit, plus the bytes at the
rate of a plain pinned copy of 1 GiB in the same run, plus 2 ms. Beside decodes: the step time of up to 32 decodes while
10 GB/s are copied, half of them in each direction. Nothing shared: 64 prompts of 2,048 random tokens, answers of 64,
alternating between with and without host memory. Conversations: 64 of them, 1,500 tokens to begin with, six turns of
300 tokens with answers of 150, round robin, up to 32 at a time, with and without host memory. `--quick` leaves them out
where they fit into 8 GiB, and has 4 GiB of host memory there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

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
    without_flashinfer,
)
from weft import LLM
from weft.base.copies import CopyPlan, Direction, UnitCopy
from weft.engine.loop import Engine
from weft.memory.kinds import Kind

PROMPT, END = 20_000, 64
PLAIN_BYTES = 1 << 30
ROWS, STEPS, BESIDE_BYTES_PER_SECOND = 32, 200, 10e9
CONVERSATIONS, TURNS, BEGINNING, TURN, ANSWER, AT_ONCE = 64, 6, 1500, 300, 150, 32
STRANGERS, STRANGER, STRANGER_ANSWER = 64, 2048, 64
QUICK_SECONDS, SECONDS = 8.0, 30.0
QUICK_HOST_MEMORY, HOST_MEMORY = "4GiB", "24GiB"
# Models whose conversations do not fit into 8 GiB.
LARGE_WORKING_SETS = ("nemotron-nano-9b-v2",)


def main() -> int:
    return run(arguments_of("tiers", __doc__, limit_seconds=420), measure, show)


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    llm = prepare(model, arguments)
    attempts = Attempts()
    found: dict[str, Any] = {"machine": machine(arguments.device), "errors": attempts.errors}
    for name, part in parts(model, llm, arguments.quick).items():
        with attempts.part(name):
            found[name] = part()
        if name in attempts.errors:
            print(f"  {name}: {attempts.errors[name]}", flush=True)
        keep(found, arguments)
    return found


def prepare(model: str, arguments: argparse.Namespace) -> LLM:
    """Load a model, pin host memory and compile what the parts launch; print how long that took."""
    began = time.perf_counter()
    if arguments.memory == "auto":
        arguments.memory = "8GiB"
    small = arguments.quick and model not in LARGE_WORKING_SETS
    host = QUICK_HOST_MEMORY if small else HOST_MEMORY
    with without_flashinfer():
        llm = start(model, arguments, depth=1, max_sequences=64, max_length=24_576, host_memory=host)
    started = time.perf_counter()
    warm_up(llm, rows=(1, 16, 32, 64))
    taken = f"started in {started - began:.0f} s, warmed up in {time.perf_counter() - started:.0f} s"
    print(f"  {model}: {taken}", flush=True)
    return llm


def parts(model: str, llm: LLM, quick: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return what is measured, by name; each prints its figures."""
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "hit": lambda: hit(llm, 3 if quick else 7),
        "beside": lambda: beside_decodes(llm),
        "strangers": lambda: nothing_shared(llm, QUICK_SECONDS if quick else SECONDS),
    }
    if not quick or model in LARGE_WORKING_SETS:
        found["conversations"] = lambda: conversations(llm)
    return found


def plain_rates(llm: LLM) -> dict[str, float]:
    """Return the bytes per second of one large copy in each direction, beside nothing."""
    device, host = llm.engine._device.store.buffer, llm.engine._device.tiers.levels[0].buffer
    size, found = min(PLAIN_BYTES, len(device), len(host)), {}
    for name, to, source in (("load", device, host), ("save", host, device)):
        taken = []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            to[:size].copy_(source[:size], non_blocking=True)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        found[name] = size / min(taken)
    return found


def first_token(engine: Engine, prompt: np.ndarray) -> float:
    ask = Ask(prompt, 1)
    play(engine, [ask])
    assert ask.cached_tokens >= PROMPT - PROMPT % 64, f"only {ask.cached_tokens} tokens were cached"
    return ask.first_token_seconds


def hit(llm: LLM, repeats: int) -> dict[str, Any]:
    plain = plain_rates(llm)
    print("  plain copies  " + ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in plain.items()), flush=True)
    engine = fresh(llm)
    tiers = engine.ledger.tiers
    assert tiers is not None
    assert engine.copier is not None
    # Save what is kept at once, although memory is free.
    tiers.links[0].demotion.least_bytes = 1 << 60
    stem = random_prompt(llm, PROMPT, 1)
    ends = (random_prompt(llm, END, 2, number) for number in range(1000))
    cold = Ask(np.concatenate([stem, next(ends)]), 1, snapshots=(PROMPT,))
    play(engine, [cold])
    on_device, in_host, rates = [], [], []
    for _ in range(repeats):
        before = tiers.stats()["host"]
        on_device.append(first_token(engine, np.concatenate([stem, next(ends)])))
        engine.copier.launch()
        engine.copier.finish()
        engine.ledger.cache.clear()
        in_host.append(first_token(engine, np.concatenate([stem, next(ends)])))
        after = tiers.stats()["host"]
        each, seconds = (after[name] - before[name] for name in ("loaded_bytes", "loaded_seconds"))
        rates.append(each / seconds)
    device_hit, host_hit = statistics.median(on_device), statistics.median(in_host)
    found = {
        "plain": plain,
        "cold_seconds": cold.first_token_seconds,
        "device_seconds": device_hit,
        "host_seconds": host_hit,
        "bytes": each,
        "bound_seconds": device_hit + each / plain["load"] + 0.002,
        "copy_share": statistics.median(rates) / plain["load"],
    }
    shown = {name: found[f"{name}_seconds"] * 1e3 for name in ("cold", "device", "host", "bound")}
    print("  20,000 tokens " + ", ".join(f"{name} {value:.1f} ms" for name, value in shown.items()))
    print(f"  copies        {each / 1e6:.0f} MB at {found['copy_share']:.2f} of the plain rate", flush=True)
    return found


def beside_decodes(llm: LLM) -> dict[str, float]:
    """Return the median step time of decodes, alone and while other units are copied."""
    engine = fresh(llm, host_bytes=0)
    length = 512 + 4 * STEPS
    rows = min(ROWS, engine.config.memory_bytes // engine.ledger.bytes_alone(length))
    for number in range(rows):
        engine.add(Ask(random_prompt(llm, 512, 3, number), 4 * STEPS).request())
    while engine.planner.prefilling or len(engine.planner.queue):
        engine.step()
    assert len(engine.planner.decoding) == rows, "the device's memory is too small for this part"
    kind = Kind.PAGE if Kind.PAGE in engine.ledger.arena.unit_bytes else Kind.STATE
    size = engine.ledger.arena.unit_bytes[kind]
    alone = _steps(engine, None)
    units = max(2, round(BESIDE_BYTES_PER_SECOND * alone / size))
    taken = [unit for _ in range(units // 2) if (unit := engine.ledger.arena.take(kind)) is not None]
    plans = [
        CopyPlan(0, direction, tuple(UnitCopy(kind, unit, unit) for unit in taken), len(taken) * size)
        for direction in Direction
    ]
    moving = _steps(engine, plans)
    rate = 2 * len(taken) * size / moving
    beside = f"x {moving / alone:.3f} beside {rate / 1e9:.1f} GB/s"
    print(f"  {rows} decodes    {alone * 1e3:.2f} ms a step, {beside}", flush=True)
    return {"alone_seconds": alone, "moving_seconds": moving, "ratio": moving / alone, "bytes_per_second": rate}


def _steps(engine: Engine, plans: list[CopyPlan] | None) -> float:
    taken = []
    for _ in range(STEPS):
        began = time.perf_counter()
        for plan in plans or ():
            engine._device.tiers.copy(plan)
        engine.step()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def conversations(llm: LLM) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, size in both(llm).items():
        each = found[name] = converse(llm, size)
        rate = f"{each['tokens_per_second']:.0f} tokens/s in {each['seconds']:.1f} s, hits {each['hit_share']:.2f}"
        counts = ", ".join(
            f"{count} {each[count]}" for count in ("unsaved", "unworthy", "cancelled_loads") if count in each
        )
        print(f"  conversations {name} host memory: {rate} {counts}", flush=True)
    times = found["with"]["tokens_per_second"] / found["without"]["tokens_per_second"]
    print(f"  conversations x {times:.2f}", flush=True)
    return found


def converse(llm: LLM, host_bytes: int) -> dict[str, float]:
    engine = fresh(llm, host_bytes=host_bytes, max_sequences=AT_ONCE)
    histories = [random_prompt(llm, BEGINNING, 4, number) for number in range(CONVERSATIONS)]
    seconds, answered, asked, cached = 0.0, 0, 0, 0
    for turn in range(TURNS):
        news = [random_prompt(llm, TURN, 5, turn, number) for number in range(CONVERSATIONS)]
        asks = [Ask(np.concatenate(both), ANSWER) for both in zip(histories, news, strict=True)]
        seconds += play(engine, asks)
        histories = [np.concatenate([ask.prompt, np.array(ask.tokens, np.int32)]) for ask in asks]
        answered += sum(len(ask.tokens or ()) for ask in asks)
        asked += sum(len(ask.prompt) for ask in asks)
        cached += sum(ask.cached_tokens for ask in asks)
    tiers = {} if engine.ledger.tiers is None else engine.ledger.tiers.stats()["host"]
    return {"tokens_per_second": answered / seconds, "hit_share": cached / asked, "seconds": seconds, **tiers}


def nothing_shared(llm: LLM, seconds: float) -> dict[str, float]:
    """Return the median rates with and without host memory; as many pairs of runs as fit, but two at least."""
    taken: dict[str, list[float]] = {"without": [], "with": []}
    began = time.perf_counter()
    while len(taken["with"]) < 2 or time.perf_counter() - began < seconds:
        number = len(taken["with"])
        for name in ("with", "without") if number % 2 else ("without", "with"):
            asks = [Ask(random_prompt(llm, STRANGER, 6, number, n), STRANGER_ANSWER) for n in range(STRANGERS)]
            once = play(fresh(llm, host_bytes=both(llm)[name]), asks)
            taken[name].append(STRANGERS * STRANGER_ANSWER / once)
    without, with_ = (statistics.median(taken[name]) for name in ("without", "with"))
    share = with_ / without
    rounds = " ".join(f"{a / b:.3f}" for a, b in zip(taken["with"], taken["without"], strict=True))
    print(f"  nothing shared {with_:.0f} tokens/s, {share:.3f} of {without:.0f}; by pairs {rounds}", flush=True)
    return {"tokens_per_second": with_, "without": without, "share": share}


def both(llm: LLM) -> dict[str, int]:
    return {"with": llm.config.host_bytes, "without": 0}


def show(model: str, found: dict[str, Any]) -> None:
    print(f"  {found['machine']['device']}")


if __name__ == "__main__":
    sys.exit(main())
