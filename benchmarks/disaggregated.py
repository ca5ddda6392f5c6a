"""Gains and costs of disaggregated prefill: `python -m benchmarks.disaggregated`, with `--device cuda` on one GPU.

Hidden: how much of a transfer happens while the prompt is still being computed. It compares the time from the end of
the prefill to the confirmation that all has arrived with the time that sending takes.

Gaps: the time between two tokens of answers that run while long prompts arrive. It compares a prefill and a decode
engine with two engines that do both, on the same cores, and with one engine whose steps are bounded. With a GPU, all
engines share it, and weights are random: `python -m benchmarks.disaggregated --device cuda --model nemotron-nano-9b-v2
--tokens 8192 --chunk 8192 2048 --arrivals 4GiB`.

Rate: how fast memory of one process arrives in another one, over TCP and read by NIXL, without engines.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from time import perf_counter
from typing import Any

from benchmarks.replicas import answered, random_request, running
from benchmarks.transfer_rate import measure
from weft.base.cores import core_numbers
from weft.base.options import Options
from weft.base.transfers import WAYS, TransferSettings
from weft.fleet.backend import FleetBackend
from weft.fleet.choosing import LeastOpen
from weft.fleet.member import Member
from weft.fleet.pairing import destination_of, prefix_request
from weft.fleet.routing import RoutedChoice
from weft.start.process_backend import ProcessBackend

SECRET = b"only for measurements on this machine"
# Medians of a prompt's way, and the share of it that was hidden.
Shares = dict[str, float]


def options_of(asked: argparse.Namespace, chunk: int, **more: Any) -> Options:
    sizes: dict[str, Any] = {"memory": "16GiB"} if asked.device == "cuda" else {"memory": "1GiB", "threads": 1}
    longest = asked.tokens + 512
    return Options(
        model=asked.model,
        device=asked.device,
        weights="dummy" if asked.device == "cuda" else "checkpoint",
        max_length=longest,
        max_sequences=16,
        max_tokens_per_step=chunk,
        draft="off",
        **sizes,
        **more,
    )


def engine(asked: argparse.Namespace, role: str, place: int, chunk: int, **more: Any) -> ProcessBackend:
    transfer = None if role == "both" else TransferSettings(role, SECRET, asked.arrivals, way=asked.transfer)
    cores = () if asked.device == "cuda" else core_numbers()[place : place + 1]
    return ProcessBackend(options_of(asked, chunk, **more), progress=False, cores=cores, transfer=transfer)


async def transfers(backend: ProcessBackend) -> dict[str, float]:
    return dict((await backend.stats())["transfers"])


async def hidden(asked: argparse.Namespace) -> dict[int, Shares]:
    """Return what is hidden, by the tokens of a step."""
    prefills = [engine(asked, "prefill", 0, chunk) for chunk in asked.chunk]
    decode = engine(asked, "decode", 1, asked.chunk[0])
    found = {}
    async with AsyncExitStack() as stack:
        # At the same time, because they share no core that matters.
        await asyncio.gather(*(stack.enter_async_context(running(each)) for each in (*prefills, decode)))
        for chunk, prefill in zip(asked.chunk, prefills, strict=True):
            found[chunk] = shares = await hidden_between(asked, prefill, decode)
            times = ", ".join(f"{name} {1e3 * shares[name]:.1f} ms" for name in ("leg", "send", "exposed"))
            share = f"{100 * shares['hidden']:.1f} % hidden"
            print(f"steps of {chunk} tokens, {shares['bytes'] / 1e6:.1f} MB: {times}; {share}", flush=True)
    return found


async def hidden_between(
    asked: argparse.Namespace, prefill: ProcessBackend, decode: ProcessBackend
) -> dict[str, float]:
    """Return the bytes of a prompt, and the seconds of its way, of sending it, and of the part after the prefill."""
    found: dict[str, list[float]] = {name: [] for name in ("bytes", "leg", "send", "exposed")}
    vocabulary = min(prefill.info.vocab_size, 256)
    there = destination_of(Member("decode", decode, perf_counter))
    assert there is not None
    # Both are warm, and their first connection is made.
    await answered(decode, random_request(10_000, 256, 1, vocabulary))
    # One prompt of this length compiles, allocates and connects whatever no other does.
    for number, length in enumerate((257, asked.tokens + 1), 10_001):
        await answered(prefill, prefix_request(random_request(number, length, 1, vocabulary), there))
    first = 1000 * next(MEASURED)
    for place in range(first, first + asked.repeats):
        before, began = await transfers(prefill), perf_counter()
        await answered(prefill, prefix_request(random_request(place, asked.tokens + 1, 1, vocabulary), there))
        found["leg"].append(perf_counter() - began)
        after = await transfers(prefill)
        assert after["failed"] == 0, "a prompt was not sent"
        found["bytes"].append(after["sent_bytes"] - before["sent_bytes"])
        for name in ("send", "exposed"):
            found[name].append(after[f"{name}_seconds"] - before[f"{name}_seconds"])
    middle = {name: statistics.median(values) for name, values in found.items()}
    return middle | {"hidden": 1 - middle["exposed"] / max(middle["exposed"], middle["send"])}


async def gaps(asked: argparse.Namespace, roles: Sequence[str], **more: Any) -> list[float]:
    """Return the seconds between tokens of answers that run while long prompts arrive."""
    backends = [engine(asked, role, place, asked.chunk[0], **more) for place, role in enumerate(roles)]
    named = [(f"{place} {role}", backend) for place, (role, backend) in enumerate(zip(roles, backends, strict=True))]
    found: list[float] = []
    chooser = LeastOpen() if "prefill" in roles else RoutedChoice()
    async with running(FleetBackend(named, chooser=chooser)) as fleet:
        vocabulary = min(backends[0].info.vocab_size, 256)

        async def follow(place: int) -> None:
            last = None
            async for _ in await fleet.submit(random_request(place, 32, asked.answer, vocabulary)):
                now = perf_counter()
                found.extend([] if last is None else [now - last])
                last = now

        streams = [asyncio.ensure_future(follow(place)) for place in range(asked.streams)]
        number = 0
        while not all(stream.done() for stream in streams):
            await answered(fleet, random_request(1000 + number, asked.tokens, 1, vocabulary))
            number += 1
        await asyncio.gather(*streams)
    return sorted(found)


def rates(asked: argparse.Namespace) -> dict[str, float]:
    """Return the rates of transfers without engines, by their way and the size of units."""
    found = {}
    for unit_bytes, units in RATE_SIZES:
        for way in ("tcp", "nixl"):
            rate = measure(way, unit_bytes, units, asked.repeats)
            found[f"{way}, {units} units of {unit_bytes} bytes"] = rate
            print(f"{way}: {units} units of {unit_bytes >> 10} KiB at {rate / 2**30:.2f} GiB/s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=1024, help="length of long prompts")
    parser.add_argument("--chunk", type=int, nargs="+", default=[128], help="tokens of a step; gaps use the first")
    parser.add_argument("--max-step-ms", type=float, default=30.0, help="bound of a single engine's steps")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="engines whose gaps are measured")
    parser.add_argument("--arrivals", default="1GiB")
    parser.add_argument("--transfer", choices=WAYS, default="tcp", help="how prompts travel")
    parser.add_argument("--answer", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=("hidden", "gaps", "rate"))
    parser.add_argument("--json")
    asked = parser.parse_args()
    report: dict[str, Any] = {"asked": vars(asked)}
    if asked.only == "rate":
        report["rate"] = rates(asked)
    if asked.only in (None, "hidden"):
        report["hidden"] = asyncio.run(hidden(asked))
    if asked.only in (None, "gaps"):
        for name in asked.sets:
            bounded = {"max_step_ms": asked.max_step_ms} if name == "bounded" else {}
            found_gaps = asyncio.run(gaps(asked, SETS[name], **bounded))
            chosen = {name: 1e3 * found_gaps[int(share * (len(found_gaps) - 1))] for name, share in QUANTILES.items()}
            report[name] = chosen
            shown = ", ".join(f"{name} {value:.1f} ms" for name, value in chosen.items())
            print(f"gaps with engines {' and '.join(SETS[name])} ({name}): {shown}", flush=True)
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(report, file, indent=1)


# The roles of engines whose gaps are compared.
SETS = {"two": ("both", "both"), "bounded": ("both",), "disaggregated": ("prefill", "decode")}
# Every measurement has prompts of its own.
MEASURED = itertools.count(1)
RATE_SIZES = ((32 << 10, 512), (1 << 20, 64), (16 << 20, 8))
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "worst": 1.0}

if __name__ == "__main__":
    main()
