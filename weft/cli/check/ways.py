"""Every way in which an engine computes answers, against cold runs: hits, drafts, a disk tier, long prompts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.base.errors import WeftError
from weft.base.options import Options
from weft.cli.check.measures import ANSWER, LeftOut, Line, Measure, Measuring
from weft.cli.selftest import KL_FLOOR, KL_LIMIT, SLACK

if TYPE_CHECKING:
    from weft.offline.llm import LLM

# A long prompt starts with texts and repeats them. It has a length of each factor up to what fits.
FACTOR = 8
SHARE_OF_MEMORY = 2
DISK_SIZE = "256MiB"


def ways(llm: LLM, options: Options, dtype: str) -> Iterator[Line]:
    measuring = Measuring(llm)
    prompts = measuring.texts()
    salt = measuring.new_salt()
    noise = measuring.kl_to_cold(measuring.answers(prompts, salt, draft=0))
    yield Measure("cold runs, decodes against prompts", noise, KL_LIMIT[dtype])
    allowed = max(KL_FLOOR, SLACK * noise)
    yield from hits(measuring, prompts, salt, allowed)
    yield from drafts(measuring, prompts, allowed)
    yield from long_prompts(measuring, prompts, allowed)
    yield from tiers(llm, options, allowed)


def hits(measuring: Measuring, prompts: list[list[int]], salt: str, allowed: float) -> Iterator[Line]:
    if not measuring.llm.config.cache:
        yield LeftOut("cache hits", "the cache is off")
        return
    found = measuring.answers(prompts, salt, draft=0)
    reused = sum(result.cached_tokens for result in found)
    if not reused:
        yield LeftOut("cache hits", "all texts are shorter than a cell")
        return
    yield Measure("cache hits", measuring.kl_to_cold(found), allowed, f"{reused} tokens reused")


def drafts(measuring: Measuring, prompts: list[list[int]], allowed: float) -> Iterator[Line]:
    config = measuring.llm.config
    if not config.draft_tokens:
        yield LeftOut("drafts", "drafts are off")
        return
    found = measuring.answers(prompts, measuring.new_salt())
    yield Measure(f"drafts by {config.draft}", measuring.kl_to_cold(found), allowed)


def long_prompts(measuring: Measuring, prompts: list[list[int]], allowed: float) -> Iterator[Line]:
    """Compare hits with cold runs at growing lengths, up to the longest prompt that half of the memory holds."""
    llm = measuring.llm
    spec = llm.engine.ledger.spec
    per_token = max(1, (spec.page_bytes + spec.state_bytes) // spec.cell)
    fits = llm.config.memory_bytes // SHARE_OF_MEMORY // per_token
    most = min(fits, llm.config.max_length - 2 * ANSWER)
    page = [token for prompt in prompts for token in prompt]
    length = FACTOR * spec.cell
    while length <= most and llm.config.cache:
        prompt = (page * (1 + length // len(page)))[:length]
        salt = measuring.new_salt()
        measuring.answers([prompt], salt, draft=0)
        found = measuring.answers([prompt], salt, draft=0)
        yield Measure(f"a prompt of {length}", measuring.kl_to_cold(found), allowed, f"{found[0].cached_tokens} reused")
        length *= FACTOR
    bound = "memory" if fits < llm.config.max_length - 2 * ANSWER else f"max_length {llm.config.max_length}"
    yield LeftOut(f"prompts of {length} tokens and more", f"{bound} does not hold them")


def tiers(llm: LLM, options: Options, allowed: float) -> Iterator[Line]:
    """Compare answers of prefixes that come from a file with cold runs: an engine writes it, and another reads it."""
    from weft.offline.llm import LLM as Engine

    if not llm.config.cache:
        yield LeftOut("a disk tier", "the cache is off")
        return
    with tempfile.TemporaryDirectory(prefix="weft-check-") as folder:
        own = replace(options, disk=str(Path(folder) / "tier"), disk_size=DISK_SIZE, host_memory="off")
        try:
            with Engine.from_options(own, progress=False) as first:
                measuring = Measuring(first, "tier")
                prompts = measuring.texts()
                measuring.answers(prompts, "tier", draft=0)
            with Engine.from_options(own, progress=False) as second:
                measuring = Measuring(second, "tier again")
                found = measuring.answers(prompts, "tier", draft=0)
                loaded = sum(result.disk_tokens for result in found)
                if not loaded:
                    yield LeftOut("a disk tier", "nothing was worth a place in its file")
                    return
                yield Measure("a disk tier", measuring.kl_to_cold(found), allowed, f"{loaded} tokens from a file")
        except (WeftError, OSError) as error:
            yield LeftOut("a disk tier", str(error))
