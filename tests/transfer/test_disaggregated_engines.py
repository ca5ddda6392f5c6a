"""Disaggregated prefill and decode with real models over TCP: the tokens of one engine, in exact mode its bits."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.engine.sameness import asks, check
from tests.support.models.engines import FAMILIES, Ask, serve
from tests.support.models.exact_traffic import ExactModel, exact_engine, exact_model
from tests.support.transfer.engine_pairs import SECONDS, engine_pair, plain_pair
from weft.base.config import EngineConfig
from weft.base.sampling import SamplingParams
from weft.engine.request import Request
from weft.memory.kinds import Kind, unit_bytes
from weft.runner.runner import Runner
from weft.start.assembling import numerics_of

# One with large states, one with windows: the others are slow.
QUICK = ("nemotron_h", "gpt_oss")
QUICK_EXACT = ("qwen3_5",)


def exact_pair(found: ExactModel):
    def make(config: EngineConfig) -> Runner:
        sizes = (config.memory_bytes, config.max_sequences)
        parts = {"operations": found.chosen.operations, "numerics": numerics_of(found.chosen)}
        return Runner(found.model, found.spec, *sizes, threads=1, **parts)

    return engine_pair(make, found.spec, exact=True)


def families(quick: tuple[str, ...]) -> list[object]:
    return [pytest.param(each, marks=[] if each in quick else [pytest.mark.slow]) for each in FAMILIES]


@pytest.mark.parametrize("family", families(QUICK))
def test_answers_are_those_of_one_engine(family):
    order = [0, 1, 3, 7]
    given = [asks()[place] for place in order]
    with plain_pair(family) as pair:
        check(family, given, pair.serve(given), order)
        assert pair.arrived_tokens >= 64 * 3
        # Once more, with all of it cached on both sides.
        check(family, given[:1], pair.serve(given[:1]), order[:1])


@pytest.mark.parametrize("family", families(QUICK_EXACT))
def test_exact_answers_have_the_bits_of_one_engine(family):
    found = exact_model(family, torch.bfloat16)
    given = [Ask(ask.prompt, replace(ask.params, logits_digest=True)) for ask in (asks()[1], asks()[3])]
    alone = [serve(exact_engine(found), [ask])[0].digests for ask in given]
    with exact_pair(found) as pair:
        assert [answer.digests for answer in pair.serve(given)] == alone
        assert pair.arrived_tokens >= 64 * 3


def test_a_decode_engine_computes_at_most_a_cell_of_a_prompt_that_has_arrived():
    prompt = asks()[1].prompt
    with plain_pair("lfm2") as pair:
        pair.send(prompt)
        [answer] = serve(pair.decode, [Ask(prompt)])
    assert answer.report is not None
    assert answer.report.cached_tokens == (len(prompt) - 1) // 64 * 64
    assert answer.report.loaded_tokens == answer.report.cached_tokens


def test_a_prefix_that_arrived_under_one_salt_is_not_found_under_another():
    prompt = asks()[1].prompt
    with plain_pair("lfm2") as pair:
        pair.send(prompt, salt=b"tenant")
        [stranger] = serve(pair.decode, [Ask(prompt)])
        [owner] = serve(pair.decode, [Ask(prompt, salt=b"tenant")])
    assert stranger.report is not None
    assert owner.report is not None
    assert stranger.report.cached_tokens == 0
    assert owner.report.loaded_tokens > 0


def test_the_second_turn_sends_only_what_the_decode_engine_lacks():
    first = asks()[3].prompt
    second = first + asks()[6].prompt
    with plain_pair("lfm2") as pair:
        pair.send(first)
        serve(pair.decode, [Ask(first)])
        before = pair.prefill.stats()["transfers"]["sent_bytes"]
        pair.send(second)
        sent = pair.prefill.stats()["transfers"]["sent_bytes"] - before
        spec = pair.prefill.ledger.spec
    sizes = unit_bytes(spec)
    assert (len(first), len(second)) == (150, 213)
    assert sent == sizes[Kind.PAGE] + sizes[Kind.STATE]


def test_an_aborted_prefill_frees_both_engines():
    prompt = asks()[1].prompt
    with plain_pair("lfm2") as pair:
        params = SamplingParams(max_tokens=0, temperature=0.0)
        number = pair.prefill.add(Request(np.array(prompt[:192], np.int32), params, send_to=pair.place))
        pair.prefill.step()
        pair.prefill.abort(number)
        deadline = time.monotonic() + SECONDS
        departures, tiers = pair.prefill.ledger.departures, pair.decode.ledger.tiers
        assert departures is not None
        assert tiers is not None
        assert tiers.arrivals is not None
        while departures.active or tiers.arrivals.incoming:
            assert time.monotonic() < deadline
            pair.prefill.step()
            pair.decode.step()
        for engine in (pair.prefill, pair.decode):
            engine.flush()
            assert engine.ledger.arena.used_slabs == 0
        assert departures.arena.used_slabs == 0
        assert tiers.arrivals.lower.arena.used_slabs == 0
