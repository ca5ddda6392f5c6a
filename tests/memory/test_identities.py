"""No engine reads states of another model, of other code or of another tenant, wherever they were stored."""

from __future__ import annotations

import logging
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.models.identities import (
    CACHED,
    ON_DISK,
    OTHER_CODE,
    OTHER_MODELS,
    OTHERS,
    WAYS,
    answered,
    check_reads_nothing,
    checkpoint,
    contract,
    copy_of,
    filled_file,
    other_engine,
)
from tests.support.servers.backends import in_loop
from tests.support.servers.fake_engines import fake_info
from tests.support.servers.fake_members import Clock, FakeMember, turns
from tests.support.tiers.disk_blocks import IDENTITY, LAYOUT, UNIT_BYTES, FlakyBlocks, content, header
from tests.support.tiers.salts import check_salts_in_a_store, check_salts_of_transfers, check_salts_on_disk
from weft.base.errors import InvalidOption
from weft.fleet.backend import FleetBackend
from weft.fleet.member import Member
from weft.fleet.pairing import PrefillPool
from weft.kernels.choosing import REVISIONS
from weft.memory.identity import Identity
from weft.memory.kinds import Kind
from weft.memory.spec import MemorySpec
from weft.memory.tiers.disk import format as disk_format
from weft.memory.tiers.disk.file import DiskFile, open_file
from weft.memory.tiers.disk.format import BLOCK, ENTRY, KINDS, DiskLayout, checksum, is_earlier, read_layout
from weft.models.identity import identity_of, revisions_of
from weft.models.lfm2 import Lfm2
from weft.models.sharding import Shard
from weft.models.weights import load_model

# models and code ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_the_same_engine_reads_what_was_stored(way):
    assert WAYS[way](checkpoint()).tokens == CACHED


@pytest.mark.parametrize("other", OTHER_MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_another_model_reads_nothing_and_a_refusal_says_what_differs(way, other):
    found = check_reads_nothing(way, other)
    if way in ("disk", "prefix file"):
        assert re.search(OTHERS[other][1], found.refusal)
    elif way == "transfer":
        assert "another model (configuration, weights, dtypes or layout)" in found.refusal
    else:
        # Its objects have other names.
        assert found.answer


@pytest.mark.parametrize("other", OTHER_CODE)
@pytest.mark.parametrize("way", WAYS)
def test_other_code_reads_nothing_and_goes_on(way, other, caplog):
    with caplog.at_level(logging.INFO, "weft"):
        found = check_reads_nothing(way, other)
    if way == "transfer":
        assert "another computation: 'Lfm2 1, " in found.refusal
        return
    if way == "prefix file":
        assert re.search(OTHERS[other][1], found.refusal)
        return
    # The engine has started, and has answered.
    assert found.answer == answered(checkpoint()).answer
    said = {
        "disk": "is emptied, because its states cannot be used: it was computed by",
        "store": "only states computed",
    }
    assert len([line for line in caplog.messages if said[way] in line]) == 1


def test_a_file_that_other_code_has_left_is_used_again(caplog):
    path = copy_of(filled_file())
    with other_engine("newer family") as folder:
        assert [answered(folder, disk=str(path), **ON_DISK).tokens for _ in range(2)] == [0, CACHED]
    # And back again, as after an upgrade that was taken back.
    assert [answered(checkpoint(), disk=str(path), **ON_DISK).tokens for _ in range(2)] == [0, CACHED]
    assert len([line for line in caplog.messages if "is emptied" in line]) == 2


def test_exact_answers_are_named_if_a_file_was_written_without_them():
    path = copy_of(filled_file())
    refusal = answered(checkpoint(), disk=str(path), exact=True, **ON_DISK).refusal
    assert "belongs to another model: it was written with --exact off, which is on here; delete it" in refusal
    assert path.read_bytes() == filled_file().read_bytes()


def test_an_identity_does_not_depend_on_how_operations_keep_weights():
    """With memory to spare, weights are kept twice, and in another layout."""
    made = [load_model(checkpoint(), torch.float32, progress=False, spare_bytes=n, identify=True) for n in (0, 1 << 40)]
    assert made[0][0].weights_digest == made[1][0].weights_digest


def test_exact_answers_depend_on_what_the_code_computes():
    """Their form, which is a part of every key, has all numbers."""
    before = contract(checkpoint(), exact=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lfm2, "revision", 7)
        after = contract(checkpoint(), exact=True)
    assert before.form.replace("Lfm2 1", "Lfm2 7") == after.form
    assert after.form.count("Lfm2 7") == 2, "once for all engines, and once in the form of exact ones"


def test_revisions_name_the_family_and_every_package():
    model, _ = load_model(checkpoint(), torch.float32, progress=False)
    assert revisions_of(model) == "Lfm2 1, " + ", ".join(f"{name} {number}" for name, number in REVISIONS.items())


def test_a_file_of_an_exact_engine_that_named_its_cells_in_another_way_is_emptied(caplog):
    """None of them would be found."""
    model, _ = load_model(checkpoint(), torch.float32, progress=False)
    now, blocks = revisions_of(model, exact=True), FlakyBlocks(LAYOUT.size_bytes)
    assert now == f"{revisions_of(model)}, exact keys 2"
    before = replace(LAYOUT, identity=replace(IDENTITY, revisions=revisions_of(model), exact=True))
    file = DiskFile(blocks, before)
    file.write([(header(Kind.PAGE, 0, b"k" * 32), memoryview(content(b"k" * 32, Kind.PAGE)))])
    assert DiskFile(blocks, before).found
    assert not DiskFile(blocks, replace(LAYOUT, identity=replace(before.identity, revisions=now))).found
    assert "is emptied, because its states cannot be used: it was computed by" in caplog.text


# earlier files --------------------------------------------------------------------------------------------------------


def earlier(layout: DiskLayout) -> bytes:
    """Return a superblock of the version before, whose files do not say by which code they were written."""
    sizes = [layout.unit_bytes.get(kind, 0) for kind in KINDS]
    numbers = (layout.slab_bytes, layout.slabs, *sizes)
    body = struct.pack("<8sII32sQQQQQ", b"WEFTTIER", 1, ENTRY, b"f" * 32, *numbers)
    return (body + struct.pack("<Q", checksum(body))).ljust(BLOCK, b"\0")


def test_a_file_of_an_earlier_version_is_emptied_if_its_units_have_the_same_sizes(caplog, monkeypatch):
    blocks = FlakyBlocks(LAYOUT.size_bytes)
    with monkeypatch.context() as patch:
        patch.setattr(disk_format, "VERSION", 1)
        file = DiskFile(blocks, LAYOUT)
        file.write([(header(Kind.PAGE, 0, b"k" * 32), memoryview(content(b"k" * 32, Kind.PAGE)))])
    blocks.write(0, earlier(LAYOUT))
    assert read_layout(earlier(LAYOUT)) is None
    file = DiskFile(blocks, LAYOUT)
    assert file.found == []
    assert not any(blocks.now[BLOCK:])
    assert "is emptied, because its states cannot be used: it was written by an earlier version" in caplog.text
    assert DiskFile(blocks, LAYOUT).layout == LAYOUT


def test_a_file_of_an_earlier_version_with_other_units_is_refused_and_not_changed():
    other = DiskLayout.of(IDENTITY, UNIT_BYTES | {Kind.PAGE: 6000}, 1 << 20)
    blocks = FlakyBlocks(LAYOUT.size_bytes)
    blocks.write(0, earlier(other))
    before = bytes(blocks.now)
    assert not is_earlier(earlier(other), LAYOUT)
    with pytest.raises(InvalidOption, match="is no disk tier of this version"):
        DiskFile(blocks, LAYOUT)
    assert bytes(blocks.now) == before


def test_a_real_file_that_is_emptied_has_its_size_and_none_of_its_bytes(tmp_path: Path):
    path, key = tmp_path / "tier", b"k" * 32
    file = open_file(path, LAYOUT)
    file.write([(header(Kind.PAGE, 0, key), memoryview(content(key, Kind.PAGE)))])
    file.close()
    newer = replace(LAYOUT, identity=replace(IDENTITY, revisions="Tiny 2, plain 1"))
    file = open_file(path, newer)
    assert (file.found, file.damaged) == ([], 0)
    file.close()
    assert path.stat().st_size == LAYOUT.size_bytes
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == newer.encode().ljust(LAYOUT.size_bytes, b"\0")


@pytest.mark.parametrize("field", ["configuration", "weights", "layout", "revisions", "exact"])
def test_every_part_of_an_identity_changes_its_fingerprint(field):
    other = {"revisions": "Tiny 2, plain 1", "exact": True}.get(field, b"x" * 16)
    changed = replace(IDENTITY, **{field: other})
    assert changed.fingerprint != IDENTITY.fingerprint
    assert IDENTITY.is_outdated_by(changed) is (field == "revisions")
    assert not IDENTITY.is_outdated_by(Identity(b"x" * 16, *[b"y" * 16] * 2, "Tiny 2"))


def test_a_rank_has_an_identity_of_its_own():
    model, config = load_model(checkpoint(), torch.float32, progress=False, identify=True)
    spec = MemorySpec(())
    found = {identity_of(model, config, spec, shard=Shard(rank, 2)).fingerprint for rank in range(2)}
    found.add(identity_of(model, config, spec).fingerprint)
    assert len(found) == 3


# tenants --------------------------------------------------------------------------------------------------------------


def test_a_longer_salt_reads_nothing_of_its_beginning_from_disk_and_prefix_files(tmp_path):
    check_salts_on_disk(tmp_path)


def test_a_longer_salt_reads_nothing_of_its_beginning_from_a_store():
    check_salts_in_a_store()


def test_a_longer_salt_reads_nothing_of_its_beginning_that_was_sent():
    check_salts_of_transfers()


# a rolling upgrade ----------------------------------------------------------------------------------------------------


async def member_with(name: str, revisions: str | None, role: str) -> Member:
    known = {} if revisions is None else {"revisions": revisions}
    backend = FakeMember(fake_info(exact=False, role=role, **known))
    await backend.start()
    member = Member(name, backend, Clock())
    member.readmit()
    return member


@in_loop
async def test_a_prefill_engine_with_other_code_is_left_out_and_one_line_says_why(caplog):
    known = {"old": "Tiny 1", "new": "Tiny 2", "before": None}
    old, new, before = [await member_with(name, revisions, "prefill") for name, revisions in known.items()]
    decode, pool = await member_with("decode", "Tiny 2", "decode"), PrefillPool()
    for _ in range(3):
        assert pool.fitting([old, new, before], decode) == [new]
    assert [line for line in caplog.messages if "cannot send prefixes" in line] == [
        "prefill engine old computes Tiny 1 and cannot send prefixes to decode, which computes Tiny 2; use one version "
        "of Weft",
        "prefill engine before computes an earlier version and cannot send prefixes to decode, which computes Tiny 2; "
        "use one version of Weft",
    ]
    # Two of the version before agree, as far as a router can know; they compare more themselves.
    assert pool.fitting([before], await member_with("decode", None, "decode")) == [before]


@in_loop
async def test_replicas_with_other_code_serve_together_and_one_line_says_that_they_share_nothing(caplog):
    members = [FakeMember(fake_info(exact=False, revisions=f"Tiny {number}")) for number in (1, 2)]
    fleet = FleetBackend([("old", members[0]), ("new", members[1])], check_seconds=None)
    await fleet.start()
    await turns()
    assert all(member.takes_requests for member in fleet.members)
    lines = [line for line in caplog.messages if "they exchange no states" in line]
    assert len(lines) == 1
    assert "computes Tiny 1" in lines[0]
    assert "computes Tiny 2" in lines[0]
    await fleet.stop(0)
