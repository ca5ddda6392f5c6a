"""Bugs of kernels and models, planted here from outside, each caught by a check that other tests use.

Every check is shown to pass without its bugs. `docs/lab/planted-bugs.md` is the table of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from tests.support.engine import sameness as sameness_checks
from tests.support.fences import ROOT
from tests.support.kernels import moe
from tests.support.kernels.attention import Scene, assert_equal
from tests.support.kernels.causal_conv import make_rig as conv_rig
from tests.support.kernels.gated_delta import make_rig as delta_rig
from tests.support.kernels.operations import CPU
from tests.support.kernels.ssd import make_rig as ssd_rig
from tests.support.models.engines import Ask, greedy, make_engine, serve, tokens
from tests.support.runner.sampler import Row, choose
from weft.base.plan import Captures
from weft.kernels.cpu import cells, index_building, paged_reads, recurrence
from weft.runner import batching, step_sampling

Patch = pytest.MonkeyPatch
Check = Callable[[], None]
LENGTHS = [50, 33, 24, 8, 7, 1, 65]
STEPS = [1, 1, 2, 3, 5, 8, 9, 16, 27]


@dataclass(frozen=True)
class Plant:
    name: str
    sow: Callable[[Patch], None]
    check: Check


PLANTS: list[Plant] = []


def plant(*checks: Check) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Each of the checks must notice."""

    def note(sow: Callable[[Patch], None]) -> Callable[[Patch], None]:
        PLANTS.extend(Plant(sow.__name__, sow, check) for check in checks)
        return sow

    return note


# checks ---------------------------------------------------------------------------------------------------------------


def packed_convolution() -> None:
    conv_rig(LENGTHS).run(STEPS)


def packed_ssd() -> None:
    ssd_rig(LENGTHS).run(STEPS)


def packed_delta() -> None:
    delta_rig(LENGTHS).run(STEPS)


def decoded_ssd() -> None:
    ssd_rig([40, 20]).run([1])


def decoded_delta() -> None:
    delta_rig([40, 20]).run([1])


def _tenant_after(rig) -> None:
    """A second sequence in the tail that the first has left."""
    rig.step([(0, 20)])
    rig.sequences[1].tail = rig.sequences[0].tail
    rig.step([(1, 1)])
    rig.step([(1, 19)])


def tenants_of_a_convolution() -> None:
    _tenant_after(conv_rig([20, 20]))


def tenants_of_ssd() -> None:
    _tenant_after(ssd_rig([20, 20]))


def tenants_of_delta() -> None:
    _tenant_after(delta_rig([20, 20]))


def _roll_back(rig) -> None:
    rig.step([(0, 14), (1, 7), (2, 1)])
    while min(rig.remaining(i) for i in range(3)) > 6:
        back = [rig.random.randint(1, 5) for _ in range(3)]
        rig.step(list(enumerate(back)))
        for i, count in enumerate(back):
            rig.roll_back(i, rig.sequences[i].computed - rig.random.randint(0, count - 1))


def drafts_of_ssd() -> None:
    for seed in range(4):
        _roll_back(ssd_rig([60, 60, 60], room=5, seed=seed))


def drafts_of_delta() -> None:
    for seed in range(4):
        _roll_back(delta_rig([60, 60, 60], room=5, seed=seed))


def window_without_prefix() -> None:
    assert_equal(Scene([(0, 130)], 20))


def window_with_prefix() -> None:
    assert_equal(Scene([(70, 200)], 70))


def windows_of_decodes() -> None:
    assert_equal(Scene([(150, 151), (3, 4), (64, 65), (190, 191)], 20))


def decodes_of_many_lengths() -> None:
    assert_equal(Scene([(0, 1), (63, 64), (64, 65), (200, 201), (5, 6)], None))


def rows_that_part_after_a_page() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_reads, "SHARING_PAGES", 1)
        scene = Scene([(150, 151), (190, 191)], None, shared=64)
        assert_equal(scene)


def company_of_drawn_tokens() -> None:
    random = np.random.default_rng(0)
    rows = [Row(random.normal(0, 1, 40), uniform=float(u), top_k=k) for u, k in zip(random.random(6), [0, 5] * 3)]
    assert choose(rows) == [choose([row])[0] for row in rows]


def company_of_penalised_tokens() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(0, 1, (4, 40))
    rows = [Row(logits[0], temperature=0), Row(logits[1], temperature=0, frequency=2, answer=[int(logits[1].argmax())])]
    rows += [Row(logits[2], temperature=0), Row(logits[3], temperature=0, presence=2, answer=[int(logits[3].argmax())])]
    assert choose(rows) == [choose([row])[0] for row in rows]


def company_of_experts() -> None:
    moe.check_a_token_is_worth_the_same_in_any_company()


def sameness(family: str, scenario: str) -> Check:
    def check() -> None:
        sameness_checks.check_answers_do_not_depend_on_how_they_are_computed(family, scenario)

    return check


lfm2_with_cache, falcon_with_cache, qwen_with_cache = (
    sameness(family, "cache on") for family in ("lfm2", "falcon_h1", "qwen3_5")
)
falcon_in_flight = sameness("falcon_h1", "chunks of 50, depth 1")


def falcon_strangers() -> None:
    """Prompts that share nothing: side by side in a prefill, every row has a state of its own."""
    asks = [Ask(tokens(150, seed=1), greedy(12)), Ask(tokens(199, seed=2), greedy(12))]
    together = serve(make_engine("falcon_h1", cache=False), asks)
    alone = [serve(make_engine("falcon_h1", cache=False, max_sequences=1), [ask])[0] for ask in asks]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.tokens == theirs.tokens
        assert np.allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


# Fresh or resumed is told by the position, row by row.


@plant(tenants_of_a_convolution, packed_convolution)
def a_convolution_reads_what_the_last_tenant_left(patch: Patch) -> None:
    names = ("from_tail", "from_state", "read_slot", "state_index")
    trusting = {"all_tail": True, "any_state": False, **dict.fromkeys(names)}
    patch.setattr(index_building, "history_sources", lambda rows, history, back: trusting)


@plant(packed_convolution)
def a_batch_is_fresh_if_its_first_row_is(patch: Patch) -> None:
    original = index_building.history_sources

    def as_the_first(rows, history, back):
        sources = original(rows, history, back)
        if not sources["all_tail"]:
            sources["from_state"] = np.broadcast_to(sources["from_state"][:1], history.shape).copy()
        return sources

    patch.setattr(index_building, "history_sources", as_the_first)


@plant(packed_ssd, packed_delta, tenants_of_ssd, tenants_of_delta)
def a_scan_starts_from_whatever_its_slot_holds(patch: Patch) -> None:
    original = index_building.open_cells

    def trusting(plan, rows, chosen, ring):
        return tuple(c._replace(slot=0 if c.slot is None else c.slot) for c in original(plan, rows, chosen, ring))

    patch.setattr(index_building, "open_cells", trusting)


@plant(packed_ssd, packed_delta, falcon_with_cache, qwen_with_cache)
def a_resumed_row_starts_from_nothing(patch: Patch) -> None:
    original = index_building.open_cells

    def forgetful(plan, rows, chosen, ring):
        return tuple(cell._replace(slot=None) for cell in original(plan, rows, chosen, ring))

    patch.setattr(index_building, "open_cells", forgetful)


@plant(packed_convolution, lfm2_with_cache)
def a_resumed_convolution_starts_from_zeros(patch: Patch) -> None:
    original = index_building.history_sources
    patch.setattr(index_building, "history_sources", lambda *args: original(*args) | {"any_state": False})


# States from the middle of a prefill: the right row, the right position, the right precision.


@plant(packed_ssd, packed_delta, falcon_strangers)
def only_the_first_row_of_a_batch_is_captured_rightly(patch: Patch) -> None:
    def confused(rank, states, part):
        for _, slot in rank.captures:
            part.write(slot, states, 0)

    patch.setattr(recurrence, "hand_out", confused)


@plant(packed_ssd, packed_delta)
def a_state_is_captured_at_the_end_of_its_row(patch: Patch) -> None:
    original = index_building.stage_groups

    def late(plan, rows, spec, ring):
        ends = plan.end[plan.captures.row] // spec.cell * spec.cell
        captures = Captures(plan.captures.row, ends.astype(np.int32), plan.captures.slot)
        return original(replace(plan, captures=captures), rows, spec, ring)

    patch.setattr(index_building, "stage_groups", late)


@plant(packed_convolution, packed_ssd, packed_delta, lfm2_with_cache)
def the_window_of_a_capture_is_one_token_old(patch: Patch) -> None:
    original = index_building.window_captures

    def early(plan, rows, back):
        captures = Captures(plan.captures.row, plan.captures.position - 1, plan.captures.slot)
        return original(replace(plan, captures=captures), rows, back)

    patch.setattr(index_building, "window_captures", early)


@plant(packed_ssd, packed_delta)
def a_capture_passes_through_bfloat16(patch: Patch) -> None:
    original = cells.hand_out

    def coarse(rank, states, part):
        original(rank, states._replace(numbers=states.numbers.bfloat16().float()), part)

    patch.setattr(recurrence, "hand_out", coarse)


@plant(decoded_ssd, decoded_delta)
def a_decode_that_ends_its_cell_captures_nothing(patch: Patch) -> None:
    original = index_building.stage_decodes

    def lossy(plan, rows, ring):
        staged = original(plan, rows, ring)
        return replace(staged, fields=staged.fields | {"captures": ()})

    patch.setattr(index_building, "stage_decodes", lossy)


# Tails are private, and drafts can be undone.


@plant(drafts_of_ssd, drafts_of_delta)
def a_tail_has_no_room_for_drafts(patch: Patch) -> None:
    original = index_building.earliest_kept
    patch.setattr(
        index_building, "earliest_kept", lambda rows, chosen, spec: original(rows, chosen, replace(spec, draft_room=0))
    )


@plant(packed_ssd, packed_delta, falcon_in_flight)
def rows_write_the_tail_of_their_neighbour(patch: Patch) -> None:
    original = index_building.stage_writes

    def rolled(plan, rows, chosen, spec, ring):
        return original(replace(plan, tail=np.roll(plan.tail, 1)), rows, chosen, spec, ring)

    patch.setattr(index_building, "stage_writes", rolled)


# Sliding windows, by global position.


def _patch_row_reads(patch: Patch, change: Callable[..., dict]) -> None:
    original = paged_reads.row_read

    def changed(spans, paging, row, start, end, floor, window, cell):
        read = original(spans, paging, row, start, end, floor, window, cell)
        return replace(read, **change(start, end, window, read)) if window is not None and end - start > 1 else read

    patch.setattr(paged_reads, "row_read", changed)


@plant(window_with_prefix)
def a_window_is_forgotten_behind_a_prefix(patch: Patch) -> None:
    def change(start, end, window, read):
        keys = torch.arange(end - (read.high - read.low), end)
        return {"mask": keys <= torch.arange(start, end).unsqueeze(1)} if start else {}

    _patch_row_reads(patch, change)


@plant(window_without_prefix)
def a_window_is_forgotten_without_a_prefix(patch: Patch) -> None:
    _patch_row_reads(patch, lambda start, end, window, read: {} if start else {"causal": True, "mask": None})


@plant(windows_of_decodes, window_with_prefix)
def a_window_is_measured_from_where_the_row_starts(patch: Patch) -> None:
    original = paged_reads.first_visible
    patch.setattr(paged_reads, "first_visible", lambda position, floor, window: original(position + 1, floor, window))


# What a row cannot see may hold anything.


@plant(decodes_of_many_lengths, windows_of_decodes)
def padding_is_seen_by_shorter_rows(patch: Patch) -> None:
    original = paged_reads.padded_read

    def blind(*args):
        read = original(*args)
        return replace(read, mask=torch.ones_like(read.mask))

    patch.setattr(paged_reads, "padded_read", blind)


@plant(decodes_of_many_lengths, windows_of_decodes)
def a_freed_page_is_multiplied_by_zero(patch: Patch) -> None:
    original = paged_reads.padded_read
    patch.setattr(paged_reads, "padded_read", lambda *args: replace(original(*args), unseen=torch.tensor([]).long()))


# What a batch contains beside a row changes nothing for it.


@plant(rows_that_part_after_a_page)
def rows_that_begin_alike_are_taken_for_the_same(patch: Patch) -> None:
    def credulous(spans, paging, window, cell):
        rows = list(range(spans.decodes))
        return [(rows, min(spans.start[row] for row in rows) // cell)]

    patch.setattr(paged_reads, "by_beginning", credulous)


@plant(company_of_drawn_tokens)
def random_numbers_are_dealt_in_the_order_of_the_batch(patch: Patch) -> None:
    original = CPU.draw

    def dealt(logits, draws):
        numbers = torch.rand(len(logits), generator=torch.Generator().manual_seed(0))
        return original(logits, replace(draws, uniform=numbers))

    patch.setattr(CPU, "draw", dealt)


@plant(company_of_penalised_tokens)
def penalties_fall_on_the_next_row(patch: Patch) -> None:
    original = step_sampling.stage_penalties

    def shifted(plan):
        staged = original(plan)
        return (
            None
            if staged is None
            else replace(staged, fields=staged.fields | {"row": np.roll(staged.fields["row"], 1)})
        )

    patch.setattr(step_sampling, "stage_penalties", shifted)


@plant(company_of_experts)
def an_expert_takes_only_so_many_tokens(patch: Patch) -> None:
    original = moe.experts

    def limited(x, *args):
        y = original(x, *args)
        y[16:] = 0
        return y

    patch.setattr(moe, "experts", limited)


@plant(falcon_in_flight)
def the_board_is_read_in_the_order_of_rows(patch: Patch) -> None:
    original = batching.build_step

    def by_row(plan, spec, board, *more):
        seats = np.arange(plan.rows, dtype=np.int32) % len(board)
        return original(replace(plan, seat=seats), spec, board, *more)

    patch.setattr("weft.runner.eager.build_step", by_row)


# harvest --------------------------------------------------------------------------------------------------------------


@cache
def passes(check: Check) -> bool:
    """Also brings up what checks remember between runs, while nothing is planted."""
    check()
    return True


@pytest.mark.parametrize("bug", PLANTS, ids=lambda p: f"{p.name}-{PLANTS.index(p)}")
def test_a_planted_kernel_bug_is_caught(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert passes(bug.check)
    bug.sow(monkeypatch)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        bug.check()


def test_every_plant_stands_in_the_table() -> None:
    table = (ROOT / "docs" / "lab" / "planted-bugs.md").read_text()
    assert [p.name for p in PLANTS if f"`{p.name}`" not in table] == []
