"""What a start promises: a request of exactly `max_length` runs, and so does a short one in the least memory named."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.support.hashed.rolling import rolling_spec
from tests.support.hashed.workloads import Workload, make_arrivals, run_and_check
from tests.support.models.engines import FAMILIES, greedy, make_engine, spec_of, tokens
from weft.base.config import EngineConfig
from weft.base.errors import OptionError
from weft.base.options import Options, SizingFacts, resolve
from weft.engine.events import FinishReason
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.arena import choose_slab_bytes
from weft.memory.capacity import PAGE_BYTES, least_bytes, longest_alone, slabs_alone
from weft.memory.kinds import unit_bytes
from weft.memory.ledger import Ledger

# Shares of the least memory, which differs by a factor of a hundred between families.
SIZES = (1.0, 1.6, 3.1)


def memory_of(family: str, share: float) -> int:
    return int(least_bytes(spec_of(family)) * share) // PAGE_BYTES * PAGE_BYTES


def promise(family: str, memory: int) -> int:
    """What `max_length: auto` becomes."""
    spec = spec_of(family)
    known = SizingFacts(1 << 40, None, lambda size: longest_alone(spec, size), least_bytes(spec))
    config, reasons = resolve(Options(memory=memory), known)
    if config.max_length < 32768:
        assert "what fits into memory" in reasons["max_length"]
    return config.max_length


def run(engine: Engine, prompt: int, answer: int) -> int:
    """The number of tokens that a lone request gets; an error fails the test."""
    engine.add(Request(np.array(tokens(prompt, seed=prompt), np.int32), greedy(answer)))
    found = 0
    while not engine.idle:
        for output in engine.step():
            found += output.token is not None
            assert output.finish in (None, FinishReason.LENGTH), output.error
    return found


def check_promise(family: str, depth: int, share: float) -> None:
    memory = memory_of(family, share)
    length = promise(family, memory)
    # Families with nothing but windows promise any length.
    length = length if spec_of(family).page_bytes else min(length, 1024)
    settings = {"max_length": length, "depth": depth, "max_tokens_per_step": 256, "paranoid": False}
    engine = make_engine(family, memory, **settings)
    # The second one finds what the first one left in the cache.
    for answer in (3, min(length - 1, 70)):
        assert run(engine, length - answer, answer) == answer, (share, length)


@pytest.mark.parametrize("share", [1.0, 1.3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_of_the_promised_length_runs_to_its_end(family, share):
    check_promise(family, int(share > 1), share)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_of_the_promised_length_runs_to_its_end_in_any_memory(family, depth):
    for share in (1.0, 1.07, 1.5, 2.0, 3.1, 7.0):
        check_promise(family, depth, share)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_cell_more_than_promised_is_refused_at_the_door(family):
    spec = spec_of(family)
    for share in SIZES:
        memory = memory_of(family, share)
        longest = longest_alone(spec, memory)
        ledger = Ledger(spec, memory, 1, 64)
        assert longest >= spec.cell
        assert ledger.fits_alone(longest)
        if spec.page_bytes:
            assert not ledger.fits_alone(longest + 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_least_memory_that_an_error_names_is_enough_and_one_page_less_is_not(family):
    spec = spec_of(family)
    with pytest.raises(OptionError, match="needs at least") as error:
        make_engine(family, PAGE_BYTES)
    named = int(re.findall(r"at least (\d+)", str(error.value))[0])
    assert named == least_bytes(spec)
    assert run(make_engine(family, named, max_length=promise(family, named)), 5, 20) == 20
    for short in (named - PAGE_BYTES, named // 2):
        with pytest.raises(OptionError, match=f"needs at least {named}"):
            make_engine(family, short)
        with pytest.raises(OptionError, match=f"needs at least {named} bytes"):
            promise(family, short)


@pytest.mark.parametrize("family", FAMILIES)
def test_more_memory_never_promises_nothing(family):
    """Slabs grow with memory: what is enough must stay enough."""
    spec = spec_of(family)
    least = least_bytes(spec)
    for size in range(least, 40 * least, max(PAGE_BYTES, least // 16)):
        assert longest_alone(spec, size) >= spec.cell, size


def lone_workload(seed: int) -> Workload:
    """Requests of exactly the promised length, one at a time, without a slab to spare."""
    random = Random(seed)
    window = random.choice([None, 2, 3, 4, 5, 8, 9, 13, 30])
    recurrent = window is None or random.random() < 0.5
    spec = rolling_spec(random.random() < 0.7 or not recurrent, window, recurrent, heavy=random.random() < 0.5)
    length, slab_bytes = random.randint(2, 40), choose_slab_bytes(unit_bytes(spec), 0)
    memory = slabs_alone(spec, unit_bytes(spec), slab_bytes, length) * slab_bytes
    arrivals = []
    for prompt in make_arrivals(random, spec, random.randint(1, 4), length):
        read = prompt.prompt[: random.randint(1, length - 1)]
        arrivals.append(replace(prompt, prompt=read, count=length - len(read), salt=b"", snapshots=()))
    config = EngineConfig(
        memory_bytes=memory,
        max_sequences=1,
        max_tokens_per_step=random.choice([1, 3, 5, 8, 64]),
        max_length=length,
        depth=random.randint(0, 1),
        capture_every=random.choice([0, 4, 8]),
        paranoid=True,
    )
    return Workload(spec, arrivals, config)


# Slabs for 40 tokens in cells of 4, where a slab holds one page, window page or state.
NEEDS = {
    "a page for each cell": (rolling_spec(True, None, False), 10),
    "2 window pages, that of the open cell, that of a chunk, and a slab to move on": (rolling_spec(False, 9, False), 5),
    "the state that is read, the one that is written, a slab to move on, and a tail": (
        rolling_spec(False, None, True, heavy=True),
        4,
    ),
}


@pytest.mark.parametrize("need", NEEDS)
def test_a_lone_sequence_is_promised_what_it_holds_and_a_slab_to_move_on(need):
    """In most workloads one margin covers for another, so each is counted here."""
    spec, slabs = NEEDS[need]
    assert slabs_alone(spec, unit_bytes(spec), max(unit_bytes(spec).values()), 40) == slabs


@pytest.mark.parametrize("seeds", [range(50), pytest.param(range(50, 150), marks=pytest.mark.thorough)], ids=str)
def test_whatever_a_model_remembers_the_promised_length_runs(seeds):
    for seed in seeds:
        run_and_check(lone_workload(seed))
