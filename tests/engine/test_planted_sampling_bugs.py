"""Ways to choose a token from other logits than its answer's, planted from outside: drafts, stop tokens, late masks.

`docs/lab/planted-bugs.md` is the table of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.support.drafting import drafts_at_stops, drafts_of_models, sampling_after_drafts, scripted
from tests.support.engine import slow_masks
from tests.support.fences import ROOT
from weft.engine import loop
from weft.engine.masks import LateMask, MaskFinder
from weft.engine.seat_sampling import DraftsBefore, SeatSampling

SEEDS = 100
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Plant:
    name: str
    sow: Callable[[Patch], None]
    check: Callable[[], None]


PLANTS: list[Plant] = []


def plant(check: Callable[[], None]) -> Callable[[Callable[[Patch], None]], None]:
    return lambda sow: PLANTS.append(Plant(sow.__name__, sow, check))


def random_workloads() -> None:
    for seed in range(SEEDS):
        scripted.run_drafted(seed)


def slow_workloads() -> None:
    for seed in range(40):
        slow_masks.compare(seed)


class Unseen(DraftsBefore):
    """Drafts that are counted, and whose tokens are not seen."""

    def __init__(self, ahead: DraftsBefore) -> None:
        super().__init__(ahead.before, ahead.before, {})

    def __bool__(self) -> bool:
        return len(self.before) > 0


@plant(random_workloads)
def bad_words_do_not_see_the_drafts_before_a_sample(patch: Patch) -> None:
    original = SeatSampling.gather

    def blind(self, seats, sequences, starts, boarded, ahead, *late):
        return original(self, seats, sequences, starts, boarded, Unseen(ahead), *late)

    patch.setattr(SeatSampling, "gather", blind)


@plant(drafts_of_models.check_every_parameter)
def min_tokens_do_not_count_the_drafts_before_a_sample(patch: Patch) -> None:
    original = SeatSampling.biases

    def uncounted(self, seats, sequences, index, boarded, ahead):
        return original(self, seats, sequences, index - ahead.before if ahead else index, boarded, ahead)

    patch.setattr(SeatSampling, "biases", uncounted)


@plant(drafts_of_models.check_every_parameter)
def penalties_do_not_see_the_drafts_before_a_sample(patch: Patch) -> None:
    original = SeatSampling.token_history

    def blind(self, seats, sequences, starts, boarded, ahead):
        return original(self, seats, sequences, starts, boarded, Unseen(ahead))

    patch.setattr(SeatSampling, "token_history", blind)


@plant(sampling_after_drafts.check_every_field)
def tokens_are_biased_only_before_drafts(patch: Patch) -> None:
    original = SeatSampling.biases

    def first(self, seats, sequences, index, boarded, ahead):
        rows, tokens, values = original(self, seats, sequences, index, boarded, ahead)
        kept = ahead.before[rows] == 0 if ahead else slice(None)
        return rows[kept], tokens[kept], values[kept]

    patch.setattr(SeatSampling, "biases", first)


@plant(sampling_after_drafts.check_every_field)
def tokens_are_allowed_only_before_drafts(patch: Patch) -> None:
    original = SeatSampling.masks

    def first(self, seats, sequences, ahead, late):
        rows, masks = original(self, seats, sequences, ahead, late)
        kept = ahead.before[rows] == 0 if ahead else slice(None)
        return rows[kept], masks[kept]

    patch.setattr(SeatSampling, "masks", first)


@plant(drafts_at_stops.check_counts)
def drafts_are_accepted_past_a_stop_token(patch: Patch) -> None:
    def eager(self, step, landing):
        for sequence in step.sequences:
            sequence.stop_tokens = frozenset()
        found = original(self, step, landing)
        for sequence in step.sequences:
            sequence.stop_tokens = sequence.request.stop_tokens
        return found

    original = loop.Engine.verify
    patch.setattr(loop.Engine, "verify", eager)


@plant(slow_workloads)
def what_a_row_samples_without_its_mask_is_kept(patch: Patch) -> None:
    patch.setattr(loop, "without_masks", lambda step: [])


@plant(slow_workloads)
def a_row_goes_on_before_its_mask_is_found(patch: Patch) -> None:
    original = SeatSampling.note_mask

    def hasty(self, sequence):
        original(self, sequence)
        self.waiting[sequence.seat] = False

    patch.setattr(SeatSampling, "note_mask", hasty)


@plant(slow_masks.check_that_others_go_on)
def a_slow_mask_is_looked_for_between_two_steps(patch: Patch) -> None:
    patch.setattr(MaskFinder, "affords", lambda self, constraint: True)


@plant(slow_masks.check_the_bound_of_a_step)
def the_time_of_masks_is_counted_for_each_row(patch: Patch) -> None:
    original = MaskFinder.affords

    def renewed(self, constraint):
        self.begin_step()
        return original(self, constraint)

    patch.setattr(MaskFinder, "affords", renewed)


@plant(slow_masks.check_tenants_take_turns_in_the_thread)
def slow_masks_are_found_in_the_order_of_their_tokens(patch: Patch) -> None:
    patch.setattr(LateMask, "tenant", b"")


@pytest.mark.parametrize("bug", PLANTS, ids=lambda bug: bug.name)
def test_a_planted_sampling_bug_is_caught(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.sow(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        bug.check()
    print(f"{caught.type.__name__}: {caught.value}"[:200])


def test_every_planted_sampling_bug_stands_in_the_table() -> None:
    table = (ROOT / "docs" / "lab" / "planted-bugs.md").read_text()
    assert [bug.name for bug in PLANTS if f"`{bug.name}`" not in table] == []
