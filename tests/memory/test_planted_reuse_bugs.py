"""Ways to lose what was computed, or to give it to the wrong one, planted from outside and caught by the tests of hits.

Answers may stay right under some of these: they guard what is reused, how much memory it takes and who learns of it.
`docs/lab/planted-bugs.md` is the table of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest

from tests.support.engine import hits, preemption
from tests.support.fences import ROOT
from tests.support.kernels import attention as attention_checks
from tests.support.kernels import masks
from tests.support.models.engines import Ask, greedy, make_engine, serve, tokens
from tests.support.tiers.planted_keys import plant_identity
from weft.engine.seat_sampling import SeatSampling
from weft.engine.sequence import Sequence
from weft.kernels.cpu import attention, cells, index_building, paged_reads, recurrence
from weft.memory import ledger as ledger_module
from weft.memory import snapshots
from weft.memory.kinds import Kind
from weft.memory.ledger import Ledger
from weft.memory.misses import Miss

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Plant:
    name: str
    sow: Callable[[Patch], None]
    check: Callable[[], None]


PLANTS: list[Plant] = []


def plant(check: Callable[[], None]) -> Callable[[Callable[[Patch], None]], None]:
    return lambda sow: PLANTS.append(Plant(sow.__name__, sow, check))


def _choose_without(patch: Patch, **changes: object) -> None:
    original = snapshots.positions_to_capture
    patch.setattr(snapshots, "positions_to_capture", lambda *args, **known: original(*args, **{**known, **changes}))


# What is kept.


@plant(partial(hits.check_without_regular_snapshots_the_third_branch_still_hits, "falcon_h1"))
def no_state_is_left_where_prompts_part(patch: Patch) -> None:
    _choose_without(patch, junction=0)


@plant(partial(hits.check_a_declared_point_is_kept_and_hit_by_the_next_request, "lfm2"))
def a_declared_point_is_ignored(patch: Patch) -> None:
    _choose_without(patch, asked=())


@plant(partial(hits.check_a_hit_after_prefill_does_not_diverge_from_a_cold_run, "qwen3_5"))
def the_end_of_a_prompt_is_not_kept(patch: Patch) -> None:
    # Also what a sequence would leave when it closes: the same position, here.
    _choose_without(patch, prompt=1)
    patch.setattr(Ledger, "keep_capture", lambda self, lease, position, slot: None)


@plant(partial(hits.check_a_hit_after_decode_does_not_diverge_from_a_cold_run, "nemotron_h", 1))
def the_end_of_an_answer_is_not_kept(patch: Patch) -> None:
    original = Ledger.close

    def forgetful(self, lease, returns=False):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Ledger, "keep_capture", lambda self, lease, position, slot: None)
            original(self, lease, returns)

    patch.setattr(Ledger, "close", forgetful)


def branches_of_one_step() -> None:
    """The budget of a step has room for all of them."""
    engine, stem = make_engine("granite_moe_hybrid", max_tokens_per_step=2048), tokens(257, 15)
    asks = [Ask(stem + tokens(20, 16 + i), greedy(4)) for i in range(4)]
    assert [answer.report.cached_tokens for answer in serve(engine, asks)] == [0, 256, 256, 256]


@plant(branches_of_one_step)
def prompts_that_arrive_together_all_compute_their_stem(patch: Patch) -> None:
    patch.setattr(Ledger, "expects", lambda self, keys, match, limit: False)


# That it is right.


@plant(partial(hits.check_a_hit_after_prefill_does_not_diverge_from_a_cold_run, "qwen3_5"))
def a_kept_state_is_quantised(patch: Patch) -> None:
    original = cells.hand_out

    def coarse(rank, states, part):
        step = states.numbers.abs().amax() / 127
        original(rank, states._replace(numbers=(states.numbers / step).round() * step), part)

    patch.setattr(recurrence, "hand_out", coarse)


@plant(partial(hits.check_no_stranger_shows_through, "lfm2"))
def a_stranger_shows_through_the_convolution(patch: Patch) -> None:
    names = ("from_tail", "from_state", "read_slot", "state_index")
    trusting = {"all_tail": True, "any_state": False, **dict.fromkeys(names)}
    patch.setattr(index_building, "history_sources", lambda rows, history, back: trusting)


# That a preemption loses nothing of it.


@plant(partial(preemption.check_scores_and_penalties_do_not_depend_on_preemptions, "falcon_h1", 0))
def a_preempted_prompt_is_scored_from_its_start_again(patch: Patch) -> None:
    patch.setattr(Sequence, "scored", property(lambda self: self.request.params.prompt_logprobs_start))


@plant(partial(preemption.check_scores_and_penalties_do_not_depend_on_preemptions, "llama", 1))
def penalties_take_the_answer_before_a_preemption_for_the_prompt(patch: Patch) -> None:
    original = SeatSampling.token_history

    def confused(self, seats, sequences, starts, boarded, ahead):
        rows, tokens, generated = original(self, seats, sequences, starts, boarded, ahead)
        for row in np.unique(rows):
            own = rows == row
            generated[own] = np.arange(own.sum()) >= len(sequences[row].known)
        return rows, tokens, generated

    patch.setattr(SeatSampling, "token_history", confused)


# What it takes.


@plant(partial(hits.check_window_pages_are_returned_while_the_request_still_runs, "gemma3"))
def window_pages_are_kept_until_the_end(patch: Patch) -> None:
    patch.setattr(Ledger, "drop_window", lambda self, lease: None)


@plant(partial(hits.check_a_resume_point_keeps_exactly_the_window_that_it_needs, "gpt_oss"))
def a_resume_point_keeps_a_page_more_than_its_window(patch: Patch) -> None:
    original = ledger_module.first_window_cell
    patch.setattr(ledger_module, "first_window_cell", lambda *args: max(0, original(*args) - 1))


@plant(partial(hits.check_a_running_sequence_holds_one_slot_shared_until_it_passes_a_cell, "qwen3_next"))
def a_hit_copies_the_state_that_it_starts_from(patch: Patch) -> None:
    original = Ledger.resume

    def copying(self, lease, cached):
        original(self, lease, cached)
        if lease.slot is not None:
            copy = self.cache.take(Kind.STATE)
            self.cache.written_for[copy] = cached
            self.cache.release_slot(lease.slot)
            lease.slot = self.read_slot[lease.seat] = copy

    patch.setattr(Ledger, "resume", copying)


@plant(attention_checks.check_masks_and_reads_stay_bounded_by_the_window)
def a_row_reads_all_of_its_prefix(patch: Patch) -> None:
    patch.setattr(paged_reads, "first_visible", lambda position, floor, window: floor)


@plant(masks.masks_are_made_once_a_step)
def masks_are_made_for_every_layer(patch: Patch) -> None:
    original = attention.attention

    def forgetful(q, k, v, batch, *args, **options):
        return original(q, k, v, replace(batch, derived={}), *args, **options)

    patch.setattr(attention, "attention", forgetful)


# Who learns of it.


@plant(hits.check_the_reason_of_every_miss_is_told)
def tenants_share_their_prefixes(patch: Patch) -> None:
    plant_identity(patch, lambda identity: replace(identity, salt=b""))


@plant(hits.check_the_reason_of_every_miss_is_told)
def a_tenant_learns_what_others_have_sent(patch: Patch) -> None:
    patch.setattr(Miss, "for_client", lambda self: self)


@pytest.mark.parametrize("bug", PLANTS, ids=lambda p: p.name)
def test_a_planted_reuse_bug_is_caught(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.check()
    bug.sow(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        bug.check()


def test_every_plant_stands_in_the_table() -> None:
    table = (ROOT / "docs" / "lab" / "planted-bugs.md").read_text()
    assert [p.name for p in PLANTS if f"`{p.name}`" not in table] == []
