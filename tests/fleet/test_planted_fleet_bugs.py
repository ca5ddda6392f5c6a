"""Bugs of a fleet, planted from outside and caught by mirrored workloads. `docs/lab/planted-bugs.md` has the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from tests.support.hashed.mirrored import run_mirrored
from tests.support.hashed.tiered import tiered_workload
from tests.support.hashed.workloads import random_workload
from tests.support.tiers.planted_keys import plant_identity
from weft.fleet.index import PointIndex
from weft.memory import journal
from weft.memory.cache import Cache
from weft.memory.journal import CacheChanges, Journal, Tier

SEEDS = 60
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Plant:
    name: str
    sow: Callable[[Patch], None]
    loss: float


PLANTS: list[Plant] = []


def plant(loss: float = 0.0) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def add(sow: Callable[[Patch], None]) -> Callable[[Patch], None]:
        PLANTS.append(Plant(sow.__name__, sow, loss))
        return sow

    return add


@plant()
def an_evicted_point_is_not_reported(patch: Patch) -> None:
    original = Cache.changed
    patch.setattr(Cache, "changed", lambda self, node, held, point: held and original(self, node, held, point))


@plant()
def a_page_without_its_state_counts_as_a_resume_point(patch: Patch) -> None:
    original = Journal.note
    patch.setattr(
        Journal, "note", lambda self, tier, key, tokens, held, point: original(self, tier, key, tokens, held, True)
    )


@plant()
def a_point_in_host_memory_counts_as_one_on_the_device(patch: Patch) -> None:
    original = Journal.note

    def note(self, tier, key, tokens, held, point):
        original(self, Tier.DEVICE if point else tier, key, tokens, held, point)

    patch.setattr(Journal, "note", note)


@plant()
def the_salt_is_not_part_of_the_key(patch: Patch) -> None:
    plant_identity(patch, lambda identity: replace(identity, salt=b""))


@plant()
def the_search_takes_keys_for_prefix_closed(patch: Patch) -> None:
    original = PointIndex.deepest

    def deepest(self, keys, mirrors):
        known = next((depth for depth, key in enumerate(keys) if not self.masks.get(key, 0) & 1), len(keys))
        return original(self, keys[:known], mirrors)

    patch.setattr(PointIndex, "deepest", deepest)


@plant(loss=0.2)
def a_gap_in_the_numbers_is_ignored(patch: Patch) -> None:
    original = PointIndex.apply

    def apply(self, mirror, changes):
        known = mirror.next is not None and changes.epoch == mirror.epoch and not changes.fresh
        return original(self, mirror, replace(changes, first=mirror.next) if known else changes)

    patch.setattr(PointIndex, "apply", apply)


@plant(loss=0.2)
def a_stream_that_starts_over_does_not_forget_what_was_there(patch: Patch) -> None:
    original = PointIndex.apply

    def apply(self, mirror, changes):
        if changes.fresh and mirror.epoch == changes.epoch:
            mirror.next, changes = changes.first, replace(changes, fresh=False)
        return original(self, mirror, changes)

    patch.setattr(PointIndex, "apply", apply)


@pytest.mark.parametrize("bug", PLANTS, ids=lambda p: p.name)
def test_a_planted_fleet_bug_is_caught(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.sow(monkeypatch)
    for seed in range(SEEDS):
        workload = tiered_workload(seed) if seed % 2 else random_workload(seed, cache=True)
        try:
            run_mirrored(workload, seed, bug.loss)
        except AssertionError:
            return
    pytest.fail(f"{bug.name} was not noticed in {SEEDS} workloads")


def test_with_one_epoch_for_all_a_restarted_engine_leaves_a_stale_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the epoch is for: the new engine's numbers happen to continue the old one's."""

    def mirror_after_a_restart() -> set[bytes]:
        index, ledgers = PointIndex(), [run_mirrored(random_workload(seed, cache=True), seed) for seed in (2, 4)]
        mirror = index.add()
        old, new = (Journal(engine.ledger) for engine in ledgers)
        old.restart()
        new.restart()
        first = old.take()
        assert first is not None
        index.apply(mirror, first)
        lost = new.take(len(first.keys))
        later = CacheChanges(new.epoch, lost.next, False, (b"new",), (4,), bytes([Tier.DEVICE]), b"\1")
        return set(index.held(mirror)) if index.apply(mirror, later) else set()

    assert mirror_after_a_restart() == set()
    monkeypatch.setattr(journal.secrets, "randbits", lambda bits: 7)
    assert len(mirror_after_a_restart()) > 1
