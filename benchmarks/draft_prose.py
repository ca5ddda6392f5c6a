"""Measure what drafts cost on a CPU where few of them are right: sampled stories of weft-small, engines in turns.

    python -m benchmarks.draft_prose --dtype float32
    python -m benchmarks.draft_prose --dtype bfloat16 --rows 1 4 --seconds 120

There are three engines in one process: without drafts, without again, and with suffixes. Each has a device and memory
of its own, and all share the weights: where the system happens to place those changes a rate by 2 %. They take turns
after a few tokens of the same stories, in all orders, so that what other programs do to one of them they soon do to the
others. A turn is compared with that of the first engine at the same place. "All" is the tokens of all turns by their
time, "median" that of single turns; both are given relative to the first engine, with a standard error from resampled
turns. What the second engine differs by is noise. Steps with any number of drafts run before the first turn: they are
recorded, once in a process, which takes as long as a few of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, permutations

import numpy as np
from numpy.typing import NDArray

from benchmarks.draft_texts import STORIES, STORY
from weft.base.config import MOST_DRAFTS
from weft.base.options import Options
from weft.base.sampling import SamplingParams
from weft.drafting.policy.counts import DraftCounts
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.start.loading import Loaded, load

WAYS = {"off": "off", "off again": "off", "suffix": "suffix"}
# Tokens of each row in a turn, and steps before them that are not measured: threads and caches are those of the others.
TURN, UNMEASURED = 16, 2
RESAMPLED = 1000
# Tokens of the answers with which steps are recorded.
RECORDED = 48
TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True)
class Turn:
    tokens: int
    seconds: float
    processor: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft_prose", description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="stories that are written at once")
    parser.add_argument("--seconds", type=float, default=60, help="time for each number of rows")
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core that this process may use")
    arguments = parser.parse_args()
    options = Options(device="cpu", dtype=arguments.dtype, memory="256MiB", draft="suffix")
    loaded = load(options, progress=False)
    engines = {name: engine_of(loaded, draft, arguments.threads) for name, draft in WAYS.items()}
    assert loaded.tokenizer is not None
    prompts = [np.array(loaded.tokenizer.encode(each), np.int32) for each in STORIES]
    for rows in arguments.rows:
        record_steps(engines, prompts[0], rows)
        found = measure(engines, prompts, rows, ends_after(arguments.seconds))
        print(f"\n{arguments.dtype}, {rows} rows: {len(found['off'])} turns of {rows * TURN} tokens")
        for line in lines_of(found):
            print(line)
        print(f"  drafts so far: {drafts_of(engines['suffix'])}", flush=True)
    for engine in engines.values():
        engine.close()
    return 0


def engine_of(loaded: Loaded, draft: str, threads: int) -> Engine:
    """Return an engine with the model that is loaded. Without drafts, its tails are as long as they are then."""
    if draft == "off":
        spec, config = replace(loaded.spec, draft_room=0), replace(loaded.config, draft="off", draft_tokens=0)
        loaded = replace(loaded, spec=spec, config=config)
    return Engine(loaded.spec, loaded.runner(threads), loaded.config)


def record_steps(engines: dict[str, Engine], prompt: np.ndarray, rows: int) -> None:
    """Let every engine verify all numbers of drafts of one row. Of that, it remembers only how long its steps take."""
    for engine in engines.values():
        answer: list[int] = []
        for drafts in range(MOST_DRAFTS + 1):
            # The first answer is the prediction of the others.
            prediction = np.array(answer, np.int32)
            for row in range(rows):
                params = SamplingParams(max_tokens=RECORDED, temperature=0, draft=0 if row else drafts, ignore_eos=True)
                engine.add(Request(prompt, params, prediction=prediction))
            outputs = []
            while not engine.idle:
                outputs += engine.step()
            answer = [each.token for each in outputs if each.sequence == outputs[0].sequence and each.token is not None]
        engine.flush()
        if engine.planner.drafting is not None:
            engine.planner.drafting.overall.clear()
            engine.planner.drafting.counts = DraftCounts()


def ends_after(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def measure(
    engines: dict[str, Engine], prompts: Sequence[np.ndarray], rows: int, ends: Callable[[], bool]
) -> dict[str, list[Turn]]:
    """Return the turns of each engine, in the same places. The first story of each is not measured: it records steps,
    and there is nothing to draft from yet."""
    found: dict[str, list[Turn]] = {name: [] for name in engines}
    place = 0
    while not place or not ends():
        turns = tell(engines, [prompts[(place + row) % len(prompts)] for row in range(rows)], seed=place)
        if place:
            for together in zip(*turns.values()):
                if all(turn.tokens >= rows * TURN for turn in together):
                    for name, turn in zip(turns, together, strict=True):
                        found[name].append(turn)
        place += 1
    return found


def tell(engines: dict[str, Engine], prompts: Sequence[np.ndarray], seed: int) -> dict[str, list[Turn]]:
    """Return the turns of each engine that writes these stories."""
    found: dict[str, list[Turn]] = {name: [] for name in engines}
    for engine in engines.values():
        for row, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=STORY, temperature=TEMPERATURE, seed=1000 * seed + row, ignore_eos=True)
            engine.add(Request(prompt, params))
        while len(engine.planner.queue) or engine.planner.prefilling:
            engine.step()
    # In every order: what one engine leaves in caches must not always meet the same other one.
    orders = islice(cycle(permutations(engines)), seed, None)
    while not all(engine.idle for engine in engines.values()):
        for name in next(orders):
            found[name].append(take_turn(engines[name], len(prompts) * TURN))
    return found


def take_turn(engine: Engine, tokens: int) -> Turn:
    for _ in range(UNMEASURED):
        engine.step()
    written = 0
    began, of_processor = time.perf_counter(), time.process_time()
    while written < tokens and not engine.idle:
        written += sum(output.token is not None for output in engine.step())
    return Turn(written, time.perf_counter() - began, time.process_time() - of_processor)


def lines_of(found: dict[str, list[Turn]]) -> list[str]:
    """Return a table: tokens per second, and the rates relative to the first engine, each with a standard error."""
    first, *others = found
    base, lines = found[first], [f"  {'':<12} {'tokens/s':>9}  {'by the clock: all, median':<36}  by processor time"]
    rate = sum(turn.tokens for turn in base) / sum(turn.seconds for turn in base)
    lines.append(f"  {first:<12} {rate:9.1f}")
    for name in others:
        clock, processor = (
            "   ".join(f"{value:.4f} ± {error:.4f}" for value, error in relative(base, found[name], part))
            for part in ("seconds", "processor")
        )
        rate = sum(turn.tokens for turn in found[name]) / sum(turn.seconds for turn in found[name])
        lines.append(f"  {name:<12} {rate:9.1f}  {clock:<36}  {processor}")
    return lines


def relative(base: Sequence[Turn], other: Sequence[Turn], part: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the rate of the other engine over that of the base, of all turns together and the median of single ones.

    >>> slow, fast = [Turn(10, 2.0, 2.0), Turn(10, 4.0, 4.0)], [Turn(10, 1.0, 2.0), Turn(20, 4.0, 4.0)]
    >>> relative(slow, fast, "seconds")[0][0]
    1.8
    >>> relative(slow, fast, "seconds")[1]
    (2.0, 0.0)
    """
    numbers = np.array(
        [(a.tokens, getattr(a, part), b.tokens, getattr(b, part)) for a, b in zip(base, other, strict=True)], np.float64
    )
    chosen = np.random.default_rng(1).integers(len(numbers), size=(RESAMPLED, len(numbers)))
    whole = _of_all(numbers.sum(0)), float(_of_all(numbers[chosen].sum(1).T).std())
    single = _of_all(numbers.T)
    return (float(whole[0]), whole[1]), (float(np.median(single)), float(np.median(single[chosen], axis=1).std()))


def _of_all(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    of_base, base_time, of_other, other_time = numbers
    return np.asarray((of_other / other_time) / (of_base / base_time))


def drafts_of(engine: Engine) -> str:
    assert engine.planner.drafting is not None
    counts = engine.planner.drafting.counts
    rows = sum(count for (_, place), count in counts.proposed.items() if place == 1)
    return f"{counts.proposed.total()} in {rows} rows, {counts.accepted.total()} right, {engine.planner.number} steps"


if __name__ == "__main__":
    sys.exit(main())
