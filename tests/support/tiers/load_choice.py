"""Second turns on a small device, which load or compute."""

from __future__ import annotations

import numpy as np

from benchmarks.gpu import Ask, play
from benchmarks.tier_costs import InstantCopies
from weft.base.config import EngineConfig
from weft.engine.loop import Engine
from weft.memory.tiers.rates import Rates
from weft.memory.tiers.tiers import Tiers
from weft.simulate.costs import cost_model


def tiers_of(engine: Engine) -> Tiers:
    tiers = engine.ledger.tiers
    assert tiers is not None
    return tiers


def second_turns_on_a_small_device() -> tuple[float, int]:
    """Return the share of prompt tokens that were cached, and how many loads were declined as too slow.

    All requests of a turn arrive at once.

    The device takes no time, so the rates are those of Nemotron-9B on an H200. It holds a quarter of the conversations.
    """
    config = EngineConfig(
        memory_bytes=8 << 30, host_bytes=64 << 30, max_sequences=32, max_tokens_per_step=8192, max_length=8192, depth=1
    )
    engine = Engine(cost_model("nemotron-nano-9b-v2").spec, InstantCopies(), config)
    [link] = tiers_of(engine).links
    # No load is given up because this machine is slow.
    tiers_of(engine).clock = lambda: 0.0
    link.rates = FixedRates(load_bytes=55e9, prefill_tokens=38e3)
    link.demotion.copy_pays = link.rates.copy_pays
    random = np.random.default_rng(0)
    said = [random.integers(0, 60_000, 1500).astype(np.int32) for _ in range(64)]
    share = 0.0
    for _ in range(2):
        asks = [Ask(np.concatenate([each, random.integers(0, 60_000, 300).astype(np.int32)]), 70) for each in said]
        play(engine, asks)
        said = [np.concatenate([ask.prompt, np.array(ask.tokens, np.int32)]) for ask in asks]
        share = sum(ask.cached_tokens for ask in asks) / sum(len(ask.prompt) for ask in asks)
    return share, tiers_of(engine).slower


class FixedRates(Rates):
    def loaded(self, size_bytes: int, seconds: float) -> None:
        pass

    def computed(self, tokens: int, seconds: float) -> None:
        pass


def check_second_turns() -> None:
    share, declined = second_turns_on_a_small_device()
    assert share > 0.65
    assert declined <= 2
