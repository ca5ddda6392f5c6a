"""Bugs of memory tiers, planted and caught by random workloads. `docs/lab/planted-bugs.md` has the table."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.hashed.chained import run_chained
from tests.support.hashed.drops import DroppingEngine
from tests.support.hashed.tiered import TieredDevice, run_tiered, tiered_workload
from tests.support.simulated_tiers import check_turns
from tests.support.tiers.disk_copies import check_headers_follow_payloads
from tests.support.tiers.disk_opening import FOREIGN, check_refused
from tests.support.tiers.disk_requests import check_pieces_have_one_owner
from tests.support.tiers.disk_syncs import check_failed_syncs
from tests.support.tiers.disk_tier import power_loss, run_on_disk
from tests.support.tiers.load_choice import check_second_turns
from tests.support.tiers.unit_headers import check_file, check_store
from weft.base.copies import CopyPlan, Direction, Run, UnitLabel
from weft.memory import dropping
from weft.memory.cache import Cache
from weft.memory.capacity import Room
from weft.memory.keys import Key
from weft.memory.kinds import Kind
from weft.memory.ledger import Ledger
from weft.memory.removal import Hidden
from weft.memory.tiers import loads, saves, units
from weft.memory.tiers.disk import file as disk_file
from weft.memory.tiers.disk.block_file import BlockFile
from weft.memory.tiers.disk.file import DiskFile, WantedUnit
from weft.memory.tiers.disk.format import ENTRY, UnitHeader, decode
from weft.memory.tiers.disk.reused_memory import ReusedMemory
from weft.memory.tiers.load_choice import LoadChoice
from weft.memory.tiers.loads import Loads
from weft.memory.tiers.remote import tier as remote_tier
from weft.memory.tiers.tiers import Tiers
from weft.memory.trie import Node

SEEDS = 400
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Plant:
    name: str
    sow: Callable[[Patch], None]
    check: Callable[[int], object]


PLANTS: list[Plant] = []


def in_host_memory(seed: int) -> None:
    run_tiered(tiered_workload(seed), seed)


def on_disk(seed: int) -> None:
    run_on_disk(seed, power_loss)


def with_two_plans(seed: int) -> None:
    check_headers_follow_payloads()


def with_requests_at_once(seed: int) -> None:
    check_pieces_have_one_owner()


def with_foreign_files(seed: int) -> None:
    for name in FOREIGN:
        with TemporaryDirectory() as folder:
            check_refused(name, Path(folder))


def with_wrong_headers(seed: int) -> None:
    check_file()
    check_store()


def with_failed_syncs(seed: int) -> None:
    check_failed_syncs(seed)


def with_drops(seed: int) -> None:
    run_chained(seed, DroppingEngine)


def with_many_loads(seed: int) -> None:
    check_second_turns()


def with_turns(seed: int) -> None:
    check_turns()


def plant(check: Callable[[int], None]) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def planted(sow: Callable[[Patch], None]) -> Callable[[Patch], None]:
        PLANTS.append(Plant(sow.__name__, sow, check))
        return sow

    return planted


def seen_before_it_ran(patch: Patch, direction: Direction) -> None:
    original = TieredDevice.copied

    def copied(self, ticket, wait):
        return 1e-6 if ticket.plan.direction is direction else original(self, ticket, wait)

    patch.setattr(TieredDevice, "copied", copied)


@plant(in_host_memory)
def a_save_reads_a_page_after_its_release(patch: Patch) -> None:
    seen_before_it_ran(patch, Direction.SAVE)


@plant(in_host_memory)
def a_load_is_published_before_its_event(patch: Patch) -> None:
    seen_before_it_ran(patch, Direction.LOAD)


@plant(in_host_memory)
def a_save_does_not_own_the_state_that_it_reads(patch: Patch) -> None:
    patch.setattr(saves, "share_point", lambda cache, point: None)
    patch.setattr(saves, "release_point", lambda cache, point: None)


@plant(in_host_memory)
def a_state_comes_with_window_pages_of_another_position(patch: Patch) -> None:
    def mixed(key, position, origin, upper, lower, hits):
        window = lower.window[1:] + lower.window[:1]
        return units.PointCopy(key, position, origin, upper, replace(lower, window=window), hits)

    patch.setattr(loads, "PointCopy", mixed)


@plant(in_host_memory)
def a_point_is_loaded_without_its_window(patch: Patch) -> None:
    original = units.point_copies
    patch.setattr(units, "point_copies", lambda *both: [c for c in original(*both) if c.kind != Kind.WINDOW])


@plant(in_host_memory)
def neighbours_are_joined_that_are_apart_in_host_memory(patch: Patch) -> None:
    def runs(self):
        joined: list[Run] = []
        for kind, upper, lower in self.units:
            if joined and (kind, upper) == (joined[-1].kind, joined[-1].upper + joined[-1].length):
                joined[-1] = joined[-1]._replace(length=joined[-1].length + 1)
            else:
                joined.append(Run(kind, upper, lower, 1))
        return iter(joined)

    patch.setattr(CopyPlan, "runs", runs)


@plant(in_host_memory)
def a_cancelled_load_keeps_its_pins(patch: Patch) -> None:
    def leave(self, waiter):
        for load in self._active.values():
            load.waiters.discard(waiter)

    patch.setattr(Loads, "leave", leave)
    patch.setattr(Loads, "plan", lambda self: None)


@plant(on_disk)
def a_header_on_disk_is_believed_though_its_unit_was_overwritten(patch: Patch) -> None:
    patch.setattr(disk_file, "checksum", lambda data: 0)


def unlike(patch: Patch, field: str) -> None:
    """Let a header on disk say anything about a field."""
    original = disk_file.difference

    def difference(unit: WantedUnit, header: UnitHeader | None, found: int) -> str | None:
        wanted = unit if header is None else replace(unit, **{field: getattr(header, field)})
        return original(wanted, header, found)

    patch.setattr(disk_file, "difference", difference)


@plant(with_wrong_headers)
def a_unit_on_disk_is_used_under_another_key(patch: Patch) -> None:
    unlike(patch, "key")


@plant(with_wrong_headers)
def a_unit_on_disk_is_used_as_one_of_another_kind(patch: Patch) -> None:
    unlike(patch, "kind")


@plant(with_wrong_headers)
def a_unit_on_disk_is_used_at_another_position(patch: Patch) -> None:
    unlike(patch, "position")


@plant(with_wrong_headers)
def an_object_of_a_store_is_used_under_another_key(patch: Patch) -> None:
    original = remote_tier.decode_unit

    def decode_unit(data: bytes, kind: Kind, label: UnitLabel, size: int) -> memoryview:
        header = decode(memoryview(data)[:ENTRY])
        return original(data, kind, label if header is None else label._replace(key=header.key), size)

    patch.setattr(remote_tier, "decode_unit", decode_unit)


@plant(with_two_plans)
def a_header_is_written_when_other_payloads_are_durable(patch: Patch) -> None:
    stage = DiskFile.stage

    def stage_and_sync(self, units, cleared=()):
        staging = stage(self, units, cleared)
        self.sync()
        return staging

    def commit(self, staging):
        self._write_entries([((each.kind, each.unit), each.encode()) for each in staging.headers])

    patch.setattr(DiskFile, "stage", stage_and_sync)
    patch.setattr(DiskFile, "commit", commit)


@plant(with_requests_at_once)
def a_piece_of_memory_is_returned_before_its_bytes_are_copied(patch: Patch) -> None:
    original = ReusedMemory.piece

    @contextmanager
    def piece(self):
        with original(self) as taken:
            pass
        yield taken

    patch.setattr(ReusedMemory, "piece", piece)


@plant(with_foreign_files)
def a_file_gets_its_size_before_its_header_is_read(patch: Patch) -> None:
    original = disk_file.FileBlocks

    def sized(path: Path) -> BlockFile:
        blocks = original(path)
        blocks.grow(1 << 20)
        return blocks

    patch.setattr(disk_file, "FileBlocks", sized)


@plant(with_failed_syncs)
def a_sync_vouches_for_what_one_before_it_has_lost(patch: Patch) -> None:
    patch.setattr(DiskFile, "make_durable", lambda self, failed_syncs: self.sync())


@plant(with_drops)
def a_dropped_prefix_is_hit_until_it_is_gone(patch: Patch) -> None:
    patch.setattr(dropping, "LOOKS_PER_STEP", 1)
    patch.setattr(Hidden, "covers", lambda self, keys, tenant: False)


@plant(with_drops)
def a_dropped_prefix_is_published_again(patch: Patch) -> None:
    patch.setattr(dropping, "LOOKS_PER_STEP", 1)
    patch.setattr(Ledger, "publishable", lambda self, lease, computed: computed)


@plant(with_many_loads)
def loads_compete_with_computing_that_starts_at_once(patch: Patch) -> None:
    patch.setattr(LoadChoice, "ahead_tokens", property(lambda self: 0, lambda self, tokens: None), raising=False)


@plant(with_many_loads)
def requests_that_wait_for_loads_need_no_room(patch: Patch) -> None:
    patch.setattr(Room, "__add__", lambda self, other: self)


@plant(with_turns)
def host_memory_does_not_know_that_turns_went_past_a_point(patch: Patch) -> None:
    def opened(self: Tiers, keys: list[Key], limit: int, node: Node | None) -> None:
        for link in self.links:
            link.lower.looked_up(None, keys, link.lower.match(keys, limit))

    patch.setattr(Tiers, "opened", opened)


@plant(with_turns)
def host_memory_takes_a_point_that_stands_in_for_one_that_is_wanted(patch: Patch) -> None:
    patch.setattr(Cache, "lost_state", lambda self, keys, miss: None)


@pytest.mark.parametrize("bug", PLANTS, ids=lambda p: p.name)
def test_a_planted_tier_bug_is_caught(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.sow(monkeypatch)
    for seed in range(SEEDS):
        try:
            bug.check(seed)
        except (AssertionError, KeyError, IndexError, ValueError, pytest.fail.Exception):
            return
    pytest.fail(f"{SEEDS} workloads did not notice")
