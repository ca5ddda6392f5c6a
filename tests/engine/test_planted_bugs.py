"""Every invariant has a bug that breaks it, planted here and caught by the random workloads.

The product has no switches for this: bugs are patched in from outside. `docs/lab/planted-bugs.md` is the table of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import SystemRandom

import numpy as np
import pytest

from tests.support.engine.properties import record_plans, same_plan
from tests.support.fences import ROOT
from tests.support.hashed.rolling import RollingDevice
from tests.support.hashed.workloads import random_workload, run_and_check
from weft.base.plan import Captures
from weft.engine import loop, planner
from weft.engine.bad_words import BadWords
from weft.engine.seat_sampling import SeatSampling
from weft.engine.sequence import Sequence
from weft.engine.waiting_queue import WaitingQueue
from weft.memory import ledger as ledger_module
from weft.memory import plans
from weft.memory import spec as spec_module
from weft.memory.cache import Cache
from weft.memory.kinds import Kind
from weft.memory.ledger import Ledger
from weft.memory.snapshots import Snapshots
from weft.memory.trie import resume_at_or_above

SEEDS = 400
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Plant:
    name: str
    sow: Callable[[Patch], None]


PLANTS: list[Plant] = []


def plant(sow: Callable[[Patch], None]) -> Callable[[Patch], None]:
    PLANTS.append(Plant(sow.__name__, sow))
    return sow


# Invariant 1: only the forward stream writes, in plan order.


@plant
def plans_are_executed_out_of_order(patch: Patch) -> None:
    def land(self, flight):
        while "landing" not in flight:
            plan, newest = self._waiting.pop()
            newest["landing"] = self.execute(plan)
        return flight["landing"]

    patch.setattr(RollingDevice, "land", land)


@plant
def the_host_clears_a_slot_while_older_steps_fly(patch: Patch) -> None:
    devices = []
    create, take = RollingDevice.__init__, Cache.take

    def remember(self, *args, **kwargs):
        create(self, *args, **kwargs)
        devices.append(self)

    def take_and_clear(self, kind, optional=False):
        unit = take(self, kind, optional)
        if unit is not None and kind is Kind.STATE:
            devices[-1].memory[kind][unit] = 0
            # A clear that arrives late hits what the step has written meanwhile.
            devices[-1].late = (kind, unit)
        return unit

    def execute(self, plan, original=RollingDevice.execute):
        landing = original(self, plan)
        if getattr(self, "late", None):
            kind, unit = self.late
            self.memory[kind][unit] = 0
            self.late = None
        return landing

    patch.setattr(RollingDevice, "__init__", remember)
    patch.setattr(RollingDevice, "execute", execute)
    patch.setattr(Cache, "take", take_and_clear)


# Invariant 2: a slot is written once; a published checkpoint never.


@plant
def a_checkpoint_is_advanced_in_place(patch: Patch) -> None:
    original = Ledger.advance

    def in_place(self, lease, end, certain=None):
        before, grant = lease.slot, original(self, lease, end, certain)
        if grant is None or not grant.captures or before is None:
            return grant
        last = grant.captures[-1]
        self.cache.release_slot(last.slot)
        self.arena.share(Kind.STATE, before)
        self.cache.written_for[before] = last.position
        lease.slot = self.read_slot[lease.seat] = before
        lease.pending[-1] = replace(grant, captures=(*grant.captures[:-1], replace(last, slot=before)))
        return lease.pending[-1]

    patch.setattr(Ledger, "advance", in_place)


# Invariant 3: a slot is read only at the position it was written for.


@plant
def a_resume_reads_the_checkpoint_of_a_shallower_point(patch: Patch) -> None:
    original = Cache.pin

    def pin(self, node):
        slot, window = original(self, node)
        above = resume_at_or_above(node.parent)
        if slot is not None and above is not None:
            self.arena.release(Kind.STATE, slot)
            self.arena.share(Kind.STATE, above.slot)
            return above.slot, window
        return slot, window

    patch.setattr(Cache, "pin", pin)


@plant
def a_plan_reads_the_slot_that_it_is_about_to_write(patch: Patch) -> None:
    locate = Ledger.locate
    patch.setattr(Ledger, "locate", lambda self, seats, start, end, grants: locate(self, seats, start, end, {}))


# Invariant 4: fresh or resumed is decided by the position alone.


@plant
def a_fresh_row_trusts_what_lies_in_its_slot(patch: Patch) -> None:
    original = RollingDevice.restore

    def trust(self, plan, row):
        if plan.start[row] < self.spec.cell:
            return tuple(self.memory[Kind.STATE][plan.read_slot[row]].tolist())
        return original(self, plan, row)

    patch.setattr(RollingDevice, "restore", trust)


# Invariant 5: window and state of a checkpoint come from the same position.


@plant
def the_window_of_a_checkpoint_is_one_token_old(patch: Patch) -> None:
    patch.setattr(RollingDevice, "checkpoint", lambda self, state, last, earlier: (state, earlier))


# Invariant 6: everything has exactly one set of owners.


@plant
def a_finished_sequence_keeps_its_tail(patch: Patch) -> None:
    original = Ledger.let_go

    def forgetful(self, lease):
        lease.tail = None
        original(self, lease)

    patch.setattr(Ledger, "let_go", forgetful)


@plant
def a_window_page_is_returned_while_it_is_still_seen(patch: Patch) -> None:
    original = ledger_module.first_window_cell

    def early(start, window, cell):
        return min(original(start, window, cell) + 1, start // cell)

    patch.setattr(ledger_module, "first_window_cell", early)


@plant
def a_page_published_twice_is_freed_for_good(patch: Patch) -> None:
    original = Cache.publish

    def publish(self, key, parent, page):
        node = self.trie.nodes.get(key)
        if node is not None and page is not None and page != node.page:
            self.arena.release(Kind.PAGE, node.page)
            node.page = page
            return node
        return original(self, key, parent, page)

    patch.setattr(Cache, "publish", publish)


@plant
def a_snapshot_is_donated_while_the_sequence_still_uses_it(patch: Patch) -> None:
    original = Cache.keep

    def donate(self, key, slot, window):
        fresh = self.trie.nodes[key].resume is None
        original(self, key, slot, window)
        if fresh and slot is not None:
            self.arena.release(Kind.STATE, slot)

    patch.setattr(Cache, "keep", donate)


# Invariant 7: a snapshot for others is optional.


@plant
def a_snapshot_without_room_fails_the_row(patch: Patch) -> None:
    original = Snapshots.add

    def strict(self, leases, spare):
        skipped = self.cache.counts.captures_skipped
        original(self, leases, spare)
        assert self.cache.counts.captures_skipped == skipped, "can not alloc a state"

    patch.setattr(Snapshots, "add", strict)


# Invariant 8: publishing uses what the plan recorded.


@plant
def cells_are_published_up_to_the_live_length(patch: Patch) -> None:
    original = Ledger.publish_cells
    patch.setattr(
        Ledger, "publish_cells", lambda self, lease, accepted: original(self, lease, int(self.planned[lease.seat]))
    )


@plant
def a_state_is_published_before_the_step_that_writes_it(patch: Patch) -> None:
    original = Ledger.advance

    def eager(self, lease, end, certain=None):
        grant = original(self, lease, end, certain)
        if grant is not None and end <= lease.prompt and self.enabled:
            self.publish_cells(lease, end)
        return grant

    patch.setattr(Ledger, "advance", eager)


# Invariant 9: the rest of the batch changes nothing.


@plant
def captures_are_numbered_by_order_instead_of_row(patch: Patch) -> None:
    original = plans.planned_captures

    def confused(grants):
        captures = original(grants)
        order = np.unique(captures.row, return_inverse=True)[1].astype(np.int32)
        return Captures(order, captures.position, captures.slot)

    patch.setattr(plans, "planned_captures", confused)


@plant
def mixed_batches_lose_their_captures(patch: Patch) -> None:
    original = planner.assemble

    def lossy(*args):
        step = original(*args)
        if 0 < step.plan.decode_rows < step.plan.rows:
            empty = np.zeros(0, np.int32)
            return replace(step, plan=replace(step.plan, captures=Captures(empty, empty.copy(), empty.copy())))
        return step

    patch.setattr(planner, "assemble", lossy)


@plant
def a_deferred_copy_is_lost_when_nothing_is_sampled(patch: Patch) -> None:
    original = RollingDevice.captures_of
    patch.setattr(
        RollingDevice, "captures_of", lambda self, plan, row: original(self, plan, row) if len(plan.sampled) else {}
    )


# Invariant 10: all ranks run the same plan.


@plant
def the_waiting_line_is_shuffled_by_chance(patch: Patch) -> None:
    def shuffled(self, now):
        head = list(self)
        SystemRandom().shuffle(head)
        return head

    patch.setattr(WaitingQueue, "head", shuffled)


# Further bugs that other engines had.


@plant
def memory_is_freed_while_a_flight_still_uses_it(patch: Patch) -> None:
    patch.setattr(planner.Planner, "in_flight", lambda self, sequence: False)


@plant
def a_token_flown_too_far_is_delivered(patch: Patch) -> None:
    original = loop.Engine.take_tokens

    def deaf(self, step, landing, verified):
        reasons = [(s, s.reason) for s in step.sequences if s.reason is not None]
        for sequence, _ in reasons:
            sequence.reason = None
            sequence.max_tokens += 99
        original(self, step, landing, verified)
        for sequence, reason in reasons:
            sequence.reason = reason

    patch.setattr(loop.Engine, "take_tokens", deaf)


@plant
def a_preempted_sequence_forgets_what_it_said(patch: Patch) -> None:
    original = Sequence.go_back

    def forgetful(self):
        original(self)
        self.known = self.request.prompt

    patch.setattr(Sequence, "go_back", forgetful)


@plant
def a_window_is_forgotten_when_a_prefix_was_cached(patch: Patch) -> None:
    original = RollingDevice.digest_window

    def forgetful(self, plan, row, end):
        true = self.spec
        if plan.start[row] >= true.cell and plan.end[row] - plan.start[row] > 1:
            # As far as the table reaches.
            reach = end - int(plan.window_first[row]) * true.cell
            self.spec = replace(true, memories=tuple(_with_window(m, reach) for m in true.memories))
        try:
            return original(self, plan, row, end)
        finally:
            self.spec = true

    patch.setattr(RollingDevice, "digest_window", forgetful)


def _with_window(memory, window):
    if isinstance(memory, spec_module.AttentionMemory) and memory.window is not None:
        return replace(memory, window=window)
    return memory


@plant
def tails_are_shared_by_all_rows(patch: Patch) -> None:
    original = planner.assemble

    def shared(*args):
        step = original(*args)
        return replace(step, plan=replace(step.plan, tail=np.zeros_like(step.plan.tail) + step.plan.tail.min()))

    patch.setattr(planner, "assemble", shared)


# Bad words: the newest token may not be on the host yet, and a preempted answer keeps its own.


@plant
def bad_words_do_not_see_the_token_on_the_board(patch: Patch) -> None:
    patch.setattr(SeatSampling, "bans_by_input", lambda self, *rows: np.zeros((0, 3), np.int32))


@plant
def bad_words_take_the_token_before_the_board_for_the_newest(patch: Patch) -> None:
    original = SeatSampling.bans_by_input

    def late(self, seats, sequences, starts, boarded):
        return original(self, seats, sequences, starts - 1, boarded)

    patch.setattr(SeatSampling, "bans_by_input", late)


@plant
def bad_words_are_forgotten_by_a_preemption(patch: Patch) -> None:
    patch.setattr(BadWords, "banned", lambda self, generated: self.single)


def harvest() -> str:
    """Run random workloads until one of them notices; what it said."""
    for seed in range(SEEDS):
        try:
            run_and_check(random_workload(seed))
        except (AssertionError, IndexError, KeyError) as caught:
            return f"{type(caught).__name__}: {caught}"
    return ""


@pytest.mark.parametrize("bug", PLANTS, ids=lambda p: p.name)
def test_a_planted_bug_is_caught(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.sow(monkeypatch)
    if bug.name == "the_waiting_line_is_shuffled_by_chance":
        assert any(_ranks_differ(seed) for seed in range(SEEDS)), "no test noticed"
    else:
        noticed = harvest()
        print(noticed)
        assert noticed, "no test noticed"


def _ranks_differ(seed: int) -> bool:
    first, second = (record_plans(random_workload(seed, count=8)) for _ in range(2))
    return len(first) != len(second) or not all(map(same_plan, first, second))


def test_every_plant_stands_in_the_table() -> None:
    table = (ROOT / "docs" / "lab" / "planted-bugs.md").read_text()
    missing = [p.name for p in PLANTS if f"`{p.name}`" not in table]
    assert not missing
