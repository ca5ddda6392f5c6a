"""Ways to get drafts wrong, planted from outside and caught by the tests of drafts.

`docs/lab/planted-bugs.md` is the table of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest

from tests.support.drafting import (
    draft_models,
    draft_sizes,
    drafts_of_grammars,
    drafts_of_models,
    following,
    habits,
    heads,
    leaving_heads,
    mtp,
    scripted,
    suffixes,
    turning_down,
)
from tests.support.runner import hidden_states
from weft.drafting import head as draft_head
from weft.drafting import rows as draft_rows
from weft.drafting.head import DraftHead
from weft.drafting.model import DraftModel
from weft.drafting.policy import choosing as drafting
from weft.drafting.policy.choosing import SequenceDrafts
from weft.drafting.policy.habits import key_of
from weft.drafting.policy.suffix import OwnText, SharedTexts
from weft.drafting.state_lines import BLOCK, StateLines
from weft.engine import loop, planner
from weft.engine.seat_sampling import SeatSampling, uniform
from weft.memory.kinds import Kind
from weft.memory.ledger import Ledger
from weft.text.grammar import Guide

SEEDS = 100
REGEX = drafts_of_grammars.GRAMMARS[1]
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Plant:
    name: str
    sow: Callable[[Patch], None]
    check: Callable[[], None]
    slow: bool = False


PLANTS: list[Plant] = []


def random_workloads() -> None:
    for seed in range(SEEDS):
        scripted.run_drafted(seed)


def following_workloads() -> None:
    for seed in range(SEEDS):
        following.run_following(seed)


def head_workloads() -> None:
    for seed in range(SEEDS):
        heads.run_head(seed)


def leaving_workloads() -> None:
    for seed in range(SEEDS):
        leaving_heads.check_leaving_at_any_time(seed)


def plant(check: Callable[[], None], slow: bool = False) -> Callable[[Callable[[Patch], None]], None]:
    return lambda sow: PLANTS.append(Plant(sow.__name__, sow, check, slow))


@plant(random_workloads)
def a_step_without_drafts_reads_the_slot_of_one_with(patch: Patch) -> None:
    original = Ledger.settle

    def forgetful(self, lease, grant, accepted):
        original(self, lease, grant, accepted)
        own = [capture.slot for capture in grant.captures if capture.own]
        if own and accepted < grant.end:
            self.read_slot[lease.seat] = own[-1]

    patch.setattr(Ledger, "settle", forgetful)


@plant(random_workloads)
def a_row_is_settled_with_the_accepted_length_of_its_neighbour(patch: Patch) -> None:
    original = loop.Engine.verify

    def rotated(self, step, landing):
        verified = original(self, step, landing)
        lengths = [*list(verified.values())[1:], *list(verified.values())[:1]]
        return {row: min(n, len(step.drafts[row].tokens)) for row, n in zip(verified, lengths, strict=True)}

    patch.setattr(loop.Engine, "verify", rotated)


@plant(random_workloads)
def a_capture_beyond_the_accepted_drafts_is_published(patch: Patch) -> None:
    original = Ledger.settle

    def hasty(self, lease, grant, accepted):
        beyond = [c.slot for c in grant.captures if c.position > accepted and c.slot is not None]
        for slot in beyond:
            self.arena.share(Kind.STATE, slot)
        original(self, lease, grant, accepted)
        if beyond and lease.published and self.enabled:
            self.cache.keep(lease.keys[lease.published - 1], beyond[0], ())
        for slot in beyond:
            self.cache.release_slot(slot)

    patch.setattr(Ledger, "settle", hasty)


@plant(random_workloads)
def the_cursor_of_a_tail_stays_behind_wrong_drafts(patch: Patch) -> None:
    original = Ledger.settle

    def stuck(self, lease, grant, accepted):
        original(self, lease, grant, accepted)
        if accepted < grant.end and accepted // self.cell == grant.end // self.cell:
            self.planned[lease.seat] = grant.end

    patch.setattr(Ledger, "settle", stuck)


@plant(random_workloads)
def the_cursor_stays_behind_wrong_drafts_inside_a_cell(patch: Patch) -> None:
    patch.setattr(Ledger, "undo_each", lambda self, seats, ends, refused: None)


@plant(random_workloads)
def the_token_of_a_row_with_drafts_is_expected_on_the_board(patch: Patch) -> None:
    original = planner.assemble

    def boarded(number, rows, *others):
        rows.inputs.clear()
        return original(number, rows, *others)

    patch.setattr(planner, "assemble", boarded)


@plant(following_workloads)
def a_settled_flight_does_not_move_the_next_one(patch: Patch) -> None:
    original = Ledger.settle

    def still(self, lease, grant, accepted):
        before = int(self.planned[lease.seat])
        original(self, lease, grant, accepted)
        if lease.pending:
            self.planned[lease.seat] = before

    patch.setattr(Ledger, "settle", still)


@plant(following_workloads)
def a_grant_stays_where_it_was_planned_while_the_drafts_before_it_are_refused(patch: Patch) -> None:
    patch.setattr(Ledger, "move_next", lambda self, lease, start, slot: None)


@plant(following_workloads)
def a_row_reads_the_checkpoint_of_the_wrong_side_of_the_grid(patch: Patch) -> None:
    original = planner.assemble

    def confused(*args):
        step = original(*args)
        drafts = replace(step.plan.drafts, earlier_slot=step.plan.read_slot)
        return replace(step, plan=replace(step.plan, drafts=drafts))

    patch.setattr(planner, "assemble", confused)
    patch.setattr(loop, "check_plan", lambda plan, ledger: None)


@plant(following_workloads)
def a_capture_that_the_next_flight_did_not_write_is_kept(patch: Patch) -> None:
    original = Ledger.move_next

    def hasty(self, lease, start, slot):
        grants = [grant for grant in lease.pending[:1] if grant.unverified_before and self.enabled]
        captures = [capture for grant in grants for capture in grant.captures]
        unwritten = [c for c in captures if c.position <= start and c.slot is not None]
        for capture in unwritten:
            self.arena.share(Kind.STATE, capture.slot)
        original(self, lease, start, slot)
        for capture in unwritten:
            self.cache.keep(lease.keys[capture.position // self.cell - 1], capture.slot, ())
            self.cache.release_slot(capture.slot)

    patch.setattr(Ledger, "move_next", hasty)


@plant(following_workloads)
def random_numbers_do_not_move_with_their_row(patch: Patch) -> None:
    original = SeatSampling.earlier_numbers

    def same(self, seats, index, behind):
        numbers = original(self, seats, index, behind)
        return np.repeat(uniform(self._seed[seats], index)[:, None], behind, axis=1) if behind else numbers

    patch.setattr(SeatSampling, "earlier_numbers", same)


@plant(following_workloads)
def what_a_row_computed_beyond_a_stop_token_counts(patch: Patch) -> None:
    original = loop.moved_step
    patch.setattr(loop, "moved_step", lambda step, ledger: replace(original(step, ledger), void=frozenset()))


@plant(drafts_of_models.check_every_parameter)
def samples_after_drafts_are_not_taken_back(patch: Patch) -> None:
    patch.setattr(SeatSampling, "undo", lambda self, seat, samples: None)


@plant(drafts_of_models.check_every_parameter)
def all_samples_of_a_row_have_the_random_number_of_its_first(patch: Patch) -> None:
    original = SeatSampling.gather

    def same(self, seats, sequences, starts, boarded, ahead, *late):
        sampling = original(self, seats, sequences, starts, boarded, ahead, *late)
        numbers = sampling.uniform.copy()
        for sample in ahead.before.nonzero()[0]:
            numbers[sample] = numbers[sample - 1]
        return replace(sampling, uniform=numbers)

    patch.setattr(SeatSampling, "gather", same)


@plant(partial(drafts_of_grammars.check_a_grammar_gives_the_same_answers_with_drafts_in_fewer_steps, REGEX, 0))
def a_grammar_does_not_see_the_drafts_before_a_sample(patch: Patch) -> None:
    original = Guide.masks_along
    patch.setattr(Guide, "masks_along", lambda self, tokens: [self.mask for _ in original(self, tokens)])


@plant(draft_models.check_perfect_guesses)
def the_draft_model_keeps_guesses_that_were_refused(patch: Patch) -> None:
    original = DraftModel.settle
    patch.setattr(DraftModel, "settle", lambda self, seat, accepted: original(self, seat, accepted + 1))


@plant(partial(mtp.check_entries_of_guesses_do_not_stay_even_if_the_guesses_are_right, "qwen3_5"), slow=True)
def the_head_keeps_an_entry_of_its_own_guess(patch: Patch) -> None:
    original = DraftHead.kept
    patch.setattr(DraftHead, "kept", lambda self, row, accepted: original(self, row, accepted) + 1)


@plant(head_workloads)
def the_target_is_told_the_guesses_of_a_neighbour(patch: Patch) -> None:
    original = draft_rows.tokens_of

    def other(guesses, seat):
        own, others = original(guesses, seat), [t for s, t in guesses.tokens().items() if s != seat]
        return next((tokens for tokens in others if len(tokens) == len(own)), own)

    patch.setattr(draft_rows, "tokens_of", other)


@plant(head_workloads)
def the_target_is_told_the_guesses_of_the_step_before(patch: Patch) -> None:
    original, before = draft_rows.tokens_of, dict[int, tuple[int, ...]]()

    def late(guesses, seat):
        now = original(guesses, seat)
        last, before[seat] = before.get(seat, now), now
        return last if len(last) == len(now) else now

    patch.setattr(draft_rows, "tokens_of", late)


@plant(head_workloads)
def the_head_keeps_entries_after_drafts_that_were_refused(patch: Patch) -> None:
    patch.setattr(DraftHead, "kept", lambda self, row, accepted: self.known(row.sequence))


@plant(head_workloads)
def hidden_states_of_a_row_that_was_moved_are_read_where_it_was_planned(patch: Patch) -> None:
    original = StateLines.move

    def forgetful(self, seat, refused):
        original(self, seat, refused)
        self._moved[seat] -= refused

    patch.setattr(StateLines, "move", forgetful)


@plant(heads.check_guesses_follow_drafts_in_flight)
def hidden_states_are_lost_where_drafts_were_refused(patch: Patch) -> None:
    patch.setattr(StateLines, "move", lambda self, seat, refused: None)


@plant(head_workloads)
def a_head_guesses_after_drafts_as_if_all_were_right(patch: Patch) -> None:
    original = DraftModel.launch

    def blind(self, seat, start, end, ahead, tokens, samples):
        return original(self, seat, start, end, ahead if tokens is not None else 0 * ahead, tokens, samples)

    patch.setattr(DraftModel, "launch", blind)


@plant(heads.check_rows_copy_from_texts_beside_a_head_that_follows)
def states_of_copied_drafts_are_kept_in_the_line_of_a_neighbour(patch: Patch) -> None:
    original = StateLines.place

    def shifted(self, plan):
        lines = original(self, plan)
        return np.roll(lines, 1) if len(plan.drafts.counts) and not len(plan.drafts.on_device) else lines

    patch.setattr(StateLines, "place", shifted)


@plant(partial(heads.run_head, 96))
def guesses_land_behind_a_flight(patch: Patch) -> None:
    original = draft_rows.DraftRows.choose

    def hasty(self, rows, count, room, number, idle, prompts, fits):
        return original(self, rows, count, room, number, True, prompts, fits)

    patch.setattr(draft_rows.DraftRows, "choose", hasty)


@plant(partial(heads.check_a_row_that_looks_back_lets_no_other_row_wait_for_a_landing, None))
def guesses_land_while_prompts_wait(patch: Patch) -> None:
    original = draft_rows.DraftRows.choose

    def eager(self, rows, count, room, number, idle, prompts, fits):
        return original(self, rows, count, room, number, idle, False, fits)

    patch.setattr(draft_rows.DraftRows, "choose", eager)


@plant(leaving_workloads)
def a_row_that_left_the_head_keeps_its_lease(patch: Patch) -> None:
    def kept_for(self, seat, sequence):
        sequence.drafting.leave_model()
        self.hidden.forget(seat)
        self.hidden.kept_for[seat] = False

    patch.setattr(DraftModel, "abandon", kept_for)


@plant(partial(leaving_heads.check_leaving_at_any_time, 54))
def a_row_that_left_the_head_is_asked_for_guesses(patch: Patch) -> None:
    patch.setattr(SequenceDrafts, "leave_model", lambda self: None)


@plant(leaving_workloads)
def hidden_states_of_a_row_that_left_the_head_are_kept(patch: Patch) -> None:
    original = DraftHead.leave

    def kept(self, seat, returns):
        kept_for = bool(self.hidden.kept_for[seat])
        original(self, seat, returns)
        self.hidden.kept_for[seat] = kept_for

    patch.setattr(DraftHead, "leave", kept)


@plant(leaving_workloads)
def a_row_that_left_the_head_begins_with_it_after_a_preemption(patch: Patch) -> None:
    original = DraftHead.expect
    patch.setattr(DraftHead, "expect", lambda self, seat, guesses: original(self, seat, True))


@plant(leaving_heads.check_guesses_are_judged_though_prompts_are_read_in_every_step)
def the_host_waits_for_guesses_of_a_reading(patch: Patch) -> None:
    patch.setattr(draft_head, "FOLLOWED_AT_ONCE", leaving_heads.OFTEN)

    def judged_at_once(self):
        if self._unjudged is not None:
            _, guesses = self._unjudged
            self._unjudged = None
            guesses.tokens()

    patch.setattr(DraftHead, "judge", judged_at_once)


@plant(heads.check_rows_copy_from_texts_beside_a_head_that_follows)
def a_head_that_reads_guesses_where_drafts_are_in_flight(patch: Patch) -> None:
    original = DraftHead.follow

    def follow(self, by_seat):
        begin = self.begin
        self.begin = lambda rows: begin({seat: (sequence, 1) for seat, (sequence, _) in rows.items()})
        original(self, by_seat)
        del self.begin

    patch.setattr(draft_head, "FOLLOWED_AT_ONCE", 2)
    patch.setattr(DraftHead, "follow", follow)


@plant(mtp.check_a_seat_that_was_left_keeps_no_hidden_states)
def hidden_states_stay_when_their_sequence_leaves(patch: Patch) -> None:
    patch.setattr(DraftHead, "leave", DraftModel.leave)


@plant(hidden_states.check_states_are_read_as_they_were_written)
def a_block_is_released_with_hidden_states_that_wait(patch: Patch) -> None:
    original = StateLines.drop
    patch.setattr(StateLines, "drop", lambda self, seats, before: original(self, seats, before + BLOCK - 1))


@plant(draft_sizes.check_many_rows_draft_in_recorded_steps_and_miss_none)
def drafts_are_chosen_beyond_the_recorded_sizes(patch: Patch) -> None:
    unknown = property(lambda self: lambda rows: None, lambda self, counts: None)
    patch.setattr(drafting.Drafting, "counts_that_fit", unknown, raising=False)


@plant(draft_sizes.check_many_rows_draft_in_recorded_steps_and_miss_none)
def a_row_that_follows_is_left_without_drafts(patch: Patch) -> None:
    patch.setattr(draft_rows, "spread", lambda *_: None)


@plant(habits.check_habits_of_another_salt_or_grammar_are_never_guesses)
def a_habit_of_another_salt_is_a_guess(patch: Patch) -> None:
    patch.setattr(drafting, "key_of", lambda salt, grammar: key_of(b"", grammar))


@plant(habits.check_habits_of_another_salt_or_grammar_are_never_guesses)
def a_habit_of_another_grammar_is_a_guess(patch: Patch) -> None:
    patch.setattr(drafting, "key_of", lambda salt, grammar: key_of(salt, REGEX))


@plant(suffixes.check_texts_of_another_salt_are_never_drafted)
def a_suffix_of_another_salt_is_drafted(patch: Patch) -> None:
    original = SharedTexts.place

    def anyone(self, salt, key):
        found = (original(self, each, key) for each in {each for each, _ in self._texts.values()})
        return next((place for place in found if place is not None), None)

    patch.setattr(SharedTexts, "place", anyone)


@plant(turning_down.check_every_row_wakes_when_its_time_has_come)
def a_row_that_sits_down_sleeps_as_long_as_the_others(patch: Patch) -> None:
    original = draft_rows.DraftRows.sit

    def late(self, seat, sequence):
        before = self.first_wake
        original(self, seat, sequence)
        self.first_wake = before

    patch.setattr(draft_rows.DraftRows, "sit", late)


@plant(suffixes.check_random_texts_match_wherever_a_search_of_all_places_does)
def only_the_answer_is_searched(patch: Patch) -> None:
    def begin(self, prompt):
        original(self, prompt[:0])

    original = OwnText.__init__
    patch.setattr(OwnText, "__init__", begin)


@plant(suffixes.check_what_has_a_guess_is_asked_for_it)
def other_texts_are_not_searched_before_a_question(patch: Patch) -> None:
    patch.setattr(SharedTexts, "agrees", lambda self, place, recent: False)


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=pytest.mark.slow if bug.slow else (), id=bug.name) for bug in PLANTS]
)
def test_a_planted_bug_is_caught(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.sow(monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError)) as caught:
        bug.check()
    print(f"{caught.type.__name__}: {caught.value}"[:200])
