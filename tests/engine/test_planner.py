"""Who runs, how far, in which step: tables of requests in, plans out."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.hashed.rolling import RollingDevice, rolling_spec
from weft.base.config import EngineConfig
from weft.base.errors import OptionError, RequestError
from weft.base.sampling import SamplingParams
from weft.engine.events import FinishReason
from weft.engine.loop import Engine
from weft.engine.request import Request


class Watched(RollingDevice):
    """Remembers the plans."""

    def launch(self, plan):
        self.plans = [*getattr(self, "plans", []), plan]
        return super().launch(plan)


def make(memory: int = 1 << 16, **settings: object) -> tuple[Engine, Watched]:
    options = {"max_sequences": 4, "max_tokens_per_step": 16, "max_length": 200, "paranoid": True} | settings
    spec = rolling_spec()
    device = Watched(spec, memory, options["max_sequences"])
    return Engine(spec, device, EngineConfig(memory_bytes=memory, **options)), device


def ask(length: int, count: int = 3, seed: int = 0, **more: object) -> Request:
    prompt = np.random.default_rng(seed).integers(0, 90, length).astype(np.int32)
    return Request(prompt, SamplingParams(max_tokens=count, temperature=0.0), **more)


def run(engine: Engine) -> list[int]:
    """The order in which sequences finished."""
    order = []
    while not engine.idle:
        order += [output.sequence for output in engine.step() if output.finish]
    return order


def shapes(device: Watched) -> list[list[tuple[int, int]]]:
    return [list(zip(plan.start.tolist(), plan.end.tolist(), strict=True)) for plan in device.plans]


def test_a_long_prompt_is_cut_at_the_grid_to_fit_the_budget() -> None:
    engine, device = make(max_tokens_per_step=10)
    engine.add(ask(21))
    engine.step(), engine.step(), engine.step()
    assert shapes(device) == [[(0, 8)], [(8, 16)], [(16, 21)]]


def test_a_budget_below_a_cell_still_goes_on() -> None:
    engine, device = make(max_tokens_per_step=4, max_sequences=3)
    engine.add(ask(7, count=1))
    run(engine)
    assert shapes(device) == [[(0, 4)], [(4, 7)]]


def test_decodes_come_first_and_prompts_fill_the_rest_of_the_same_step() -> None:
    engine, device = make()
    engine.add(ask(5, count=9))
    engine.step()
    engine.add(ask(40, seed=1))
    engine.step()
    assert shapes(device)[1] == [(5, 6), (0, 12)]
    assert device.plans[1].from_board.tolist() == [1, 0]


def test_a_step_never_exceeds_its_budget() -> None:
    engine, device = make(max_tokens_per_step=9)
    for seed in range(8):
        engine.add(ask(30, count=5, seed=seed))
    run(engine)
    assert all(len(plan.tokens) <= 9 for plan in device.plans)


def test_a_lower_priority_number_goes_first() -> None:
    engine, _ = make(max_sequences=1)
    engine.add(ask(8, seed=1, priority=5))
    urgent = engine.add(ask(8, seed=2, priority=-1))
    assert run(engine)[0] == urgent


@pytest.mark.parametrize("order", ["fcfs", "prefix"])
def test_the_line_is_served_in_its_order(order: str) -> None:
    engine, _ = make(max_sequences=1, order=order)
    engine.add(ask(40, seed=3, count=1))
    run(engine)
    stranger = engine.add(ask(40, seed=4, count=1))
    again = engine.add(ask(40, seed=3, count=1))
    assert run(engine) == ([stranger, again] if order == "fcfs" else [again, stranger])


def test_nobody_starves_behind_better_prefixes() -> None:
    engine, _ = make(max_sequences=1, order="prefix")
    engine.add(ask(40, seed=3, count=1))
    run(engine)
    stranger = engine.add(ask(40, seed=4, count=1))
    finished = []
    for _ in range(40):
        engine.add(ask(40, seed=3, count=1))
        finished += [output.sequence for output in engine.step() if output.finish]
    assert stranger in finished


def test_one_computes_what_many_share_and_the_others_wait() -> None:
    engine, device = make(max_tokens_per_step=64)
    for _ in range(4):
        engine.add(ask(41, count=2))
    run(engine)
    assert shapes(device)[0] == [(0, 41)]
    assert sorted(shapes(device)[1])[:3] == [(40, 41)] * 3


def test_whoever_waits_for_a_shared_prefix_goes_on_when_its_maker_is_aborted() -> None:
    engine, _ = make(max_tokens_per_step=8)
    first, second = engine.add(ask(41, count=2)), engine.add(ask(41, count=2))
    engine.step()
    engine.abort(first)
    assert run(engine) == [first, second]


def test_the_youngest_gives_way_and_loses_nothing() -> None:
    engine, _ = make(memory=2560, max_sequences=2, max_tokens_per_step=64)
    old, young = engine.add(ask(20, count=30, seed=1)), engine.add(ask(20, count=30, seed=2))
    assert run(engine) == [old, young]
    assert engine.report(young).preemptions > 0
    assert engine.report(old).preemptions == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_an_abort_frees_memory_within_a_step(depth: int) -> None:
    engine, _ = make(depth=depth, cache=False)
    number = engine.add(ask(30, count=50))
    for _ in range(4):
        engine.step()
    engine.abort(number)
    assert engine.step()[-1].finish is FinishReason.ABORT
    assert engine.ledger.arena.used_slabs == 0


def test_at_depth_one_the_next_step_is_launched_before_the_last_has_landed() -> None:
    engine, device = make(depth=1)
    engine.add(ask(4, count=5))
    assert engine.step() == []
    assert [output.token for output in engine.step()] != []
    assert len(device.plans) == 2


def test_a_request_that_cannot_fit_is_refused_and_harms_nobody() -> None:
    engine, _ = make(memory=4096)
    running = engine.add(ask(10))
    with pytest.raises(RequestError, match="does not fit"):
        engine.add(ask(150))
    with pytest.raises(RequestError, match="max_length"):
        engine.add(ask(201))
    with pytest.raises(RequestError, match="at least one token"):
        engine.add(ask(0))
    assert run(engine) == [running]


def test_a_wrong_setting_is_named() -> None:
    for name, value in [("depth", 2), ("order", "random"), ("eviction", "mru"), ("max_sequences", 0)]:
        with pytest.raises(OptionError, match=name):
            EngineConfig(**({"memory_bytes": 1 << 20} | {name: value}))
    with pytest.raises(OptionError, match="max_tokens_per_step"):
        EngineConfig(memory_bytes=1 << 20, max_sequences=64, max_tokens_per_step=32)


def test_plans_cannot_be_changed() -> None:
    engine, device = make()
    engine.add(ask(4))
    engine.step()
    with pytest.raises(ValueError, match="read-only"):
        device.plans[0].start[0] = 3
