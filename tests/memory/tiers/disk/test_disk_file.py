"""Whatever happens to the disk tier's file, a read returns the bytes that were written, or says that it cannot."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Event
from time import sleep

import pytest

from tests.support.fences import ROOT
from tests.support.tiers.disk_blocks import IDENTITY, LAYOUT, UNIT_BYTES, FlakyBlocks, content, header
from tests.support.tiers.disk_file import Writer, check_found, fresh, read, saving
from weft.base.copies import Direction
from weft.base.errors import CopyFailed, InvalidOption
from weft.base.tenants import tenant_digest
from weft.memory.arena import Arena
from weft.memory.kinds import Kind
from weft.memory.tiers.disk import file as disk_file
from weft.memory.tiers.disk.file import DamagedUnit, DiskFile, open_file
from weft.memory.tiers.disk.format import BLOCK, ENTRY, WHOLE, DiskLayout, ModelPart, decode, read_layout
from weft.memory.tiers.disk.tier import DiskCopies


def keys_of(file: DiskFile) -> dict[bytes, tuple[Kind, int]]:
    return {each.key: (each.kind, each.unit) for each in file.found}


def write(file: DiskFile, kind: Kind, unit: int, key: bytes) -> None:
    file.write([(header(kind, unit, key), memoryview(content(key, kind)))])


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are larger than a piece, and none is a multiple of it."""
    monkeypatch.setattr(disk_file, "PIECE_BYTES", BLOCK)


@pytest.mark.usefixtures("in_pieces")
def test_a_unit_is_written_and_read_in_pieces_beside_each_other():
    file, blocks = fresh()
    units = [(kind, unit, bytes([unit]) * 32) for unit, kind in enumerate(UNIT_BYTES, 20)]
    contents = {(kind, unit): memoryview(content(key, kind)) for kind, unit, key in units}
    copies = DiskCopies(file, lambda kind, unit: contents[kind, unit])
    plan = saving(*units)
    flight = copies.copy(plan)
    while copies.copied(flight, wait=True) is None:
        pass
    assert all(content(key, kind) in bytes(blocks.durable) for kind, _, key in units)
    contents = {place: memoryview(bytearray(len(each))) for place, each in contents.items()}
    flight = copies.copy(replace(plan, direction=Direction.LOAD))
    while copies.copied(flight, wait=True) is None:
        pass
    assert all(contents[kind, unit] == content(key, kind) for kind, unit, key in units)
    copies.close()


@pytest.mark.usefixtures("in_pieces")
def test_when_a_write_has_failed_none_of_its_pieces_is_under_way():
    file, blocks = fresh()
    first, last = (LAYOUT.offset_of(Kind.STATE, 2) + place for place in (0, 4 * BLOCK))
    release = Event()

    def fail(offset: int, size: int) -> None:
        if offset == first:
            raise OSError(errno.EIO, "a bad sector")
        if offset == last:
            assert release.wait(60)

    def land() -> None:
        while copies.copied(flight, wait=True) is None:
            pass

    blocks.fail = fail
    copies = DiskCopies(file, lambda kind, unit: memoryview(content(b"k" * 32, kind)))
    flight = copies.copy(saving((Kind.STATE, 2, b"k" * 32)))
    # The caller must not learn of the failure, and release the unit, while another piece still reads it.
    assert all(copies.copied(flight, wait=True) is None for _ in range(50))
    release.set()
    with pytest.raises(CopyFailed, match="a bad sector"):
        land()
    copies.close()


def test_a_window_page_of_another_position_is_not_read():
    file, _ = fresh()
    file.write(
        [(replace(header(Kind.WINDOW, 1, b"k" * 32), position=128), memoryview(content(b"k" * 32, Kind.WINDOW)))]
    )
    into = memoryview(bytearray(UNIT_BYTES[Kind.WINDOW]))
    file.read(Kind.WINDOW, 1, b"k" * 32, into, position=128)
    with pytest.raises(DamagedUnit, match="belongs at token 128, not 192"):
        file.read(Kind.WINDOW, 1, b"k" * 32, into, position=192)


@pytest.mark.parametrize(
    ("made", "opened", "message"),
    [
        (ModelPart(0, 2), WHOLE, "holds units of rank 0 of 2, but this server needs those of a whole model"),
        (WHOLE, ModelPart(0, 2), "holds units of a whole model, but this server needs those of rank 0 of 2"),
        (ModelPart(1, 2), ModelPart(1, 4), "holds units of rank 1 of 2, but this server needs those of rank 1 of 4"),
    ],
)
def test_a_file_of_another_parallel_shape_is_refused_by_name(made, opened, message):
    blocks = FlakyBlocks(LAYOUT.size_bytes)
    assert DiskFile(blocks, replace(LAYOUT, part=made)).layout.part == made
    DiskFile(blocks, replace(LAYOUT, part=made))
    with pytest.raises(InvalidOption, match=message):
        DiskFile(blocks, replace(LAYOUT, part=opened))


def test_a_superblock_with_a_damaged_byte_is_none():
    layout = replace(LAYOUT, part=ModelPart(1, 2))
    whole = layout.encode()
    assert read_layout(whole) == layout
    for place in range(len(whole.rstrip(b"\0"))):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        assert read_layout(damaged) is None


@pytest.mark.parametrize("seed", range(40))
def test_after_a_loss_of_power_every_unit_is_whole_or_known_to_be_damaged(seed: int) -> None:
    random = Random(seed)
    file, blocks = fresh()
    writer = Writer(file, random)
    for _ in range(random.randint(1, 60)):
        writer.write()
        if random.random() < 0.1:
            file.sync()
    blocks.lose_power(random)
    check_found(DiskFile(blocks, LAYOUT))


def test_what_was_synced_before_a_loss_of_power_is_found_after_it() -> None:
    file, blocks = fresh()
    writer = Writer(file, Random(1))
    for _ in range(80):
        writer.write()
    file.sync()
    blocks.lose_power(Random(2))
    after = DiskFile(blocks, LAYOUT)
    assert keys_of(after) == writer.live
    assert check_found(after) == (len(writer.live), 0)
    assert after.damaged == 0


def test_a_header_written_before_its_payload_is_durable_does_no_harm() -> None:
    file, blocks = fresh()
    write(file, Kind.STATE, 0, b"a" * 32)
    file.sync()
    # The worst order: the new header is durable, and nothing of the new payload.
    new = replace(header(Kind.STATE, 0, b"b" * 32), size=UNIT_BYTES[Kind.STATE], checksum=7)
    blocks.write(LAYOUT.entry_of(Kind.STATE, 0), new.encode())
    with pytest.raises(DamagedUnit):
        read(DiskFile(blocks, LAYOUT), Kind.STATE, 0, b"b" * 32)


def test_a_stale_header_over_bytes_of_another_unit_is_found_out() -> None:
    file, blocks = fresh()
    write(file, Kind.PAGE, 3, b"a" * 32)
    stale = bytes(blocks.now[LAYOUT.entry_of(Kind.PAGE, 3) :][:ENTRY])
    write(file, Kind.PAGE, 3, b"b" * 32)
    blocks.write(LAYOUT.entry_of(Kind.PAGE, 3), stale)
    after = DiskFile(blocks, LAYOUT)
    assert list(keys_of(after)) == [b"a" * 32]
    with pytest.raises(DamagedUnit):
        read(after, Kind.PAGE, 3, b"a" * 32)
    assert after.damaged == 1


@pytest.mark.parametrize("seed", range(60))
def test_a_flipped_bit_anywhere_never_returns_wrong_bytes(seed: int) -> None:
    random = Random(seed)
    file, blocks = fresh()
    writer = Writer(file, random)
    for _ in range(20):
        writer.write()
    places = [0, LAYOUT.entry_of(*random.choice(list(writer.live.values())))]
    places += [LAYOUT.offset_of(*random.choice(list(writer.live.values())))]
    anywhere = random.randrange(LAYOUT.size_bytes)
    place = anywhere if random.random() < 0.3 else random.choice(places) + random.randrange(100)
    blocks.now[place] ^= 1 << random.randrange(8)
    try:
        after = DiskFile(blocks, LAYOUT)
    except InvalidOption:
        assert place < BLOCK, "only a damaged superblock is refused"
        return
    whole, _ = check_found(after)
    assert whole >= len(writer.live) - 1
    # A bit of free space belongs to no unit, though it may look like the remains of a header.
    assert after.damaged >= len(writer.live) - whole


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_write_that_fails_leaves_the_units_before_it(code: int) -> None:
    file, blocks = fresh()
    write(file, Kind.PAGE, 0, b"a" * 32)

    def fail(offset: int, size: int) -> None:
        if offset >= LAYOUT.payload_offset:
            raise OSError(code, os.strerror(code))

    blocks.fail = fail
    with pytest.raises(OSError, match=os.strerror(code)):
        write(file, Kind.PAGE, 1, b"b" * 32)
    after = DiskFile(blocks, LAYOUT)
    assert list(keys_of(after)) == [b"a" * 32]
    assert check_found(after) == (1, 0)


@pytest.mark.parametrize("seed", range(30))
def test_a_write_that_stops_in_the_middle_never_leaves_wrong_bytes(seed: int) -> None:
    """Of a header or of a payload, at any write of a batch; later writes succeed again, as on a disk with room."""
    random = Random(f"torn {seed}")
    file, blocks = fresh()
    writer = Writer(file, random)
    failed = 0
    for _ in range(60):
        blocks.tear = random if random.random() < 0.3 else None
        try:
            writer.write()
        except OSError:
            failed += 1
    assert failed
    if seed % 2:
        blocks.lose_power(random)
    check_found(DiskFile(blocks, LAYOUT))


def test_an_erased_unit_leaves_no_byte() -> None:
    file, blocks = fresh()
    write(file, Kind.STATE, 1, b"a" * 32)
    file.erase([(Kind.STATE, 1)])
    assert not any(blocks.durable[BLOCK:])
    assert not DiskFile(blocks, LAYOUT).found


@pytest.mark.parametrize("seed", range(20))
def test_units_that_are_doomed_are_never_found_again_and_the_rest_of_them_is_known(seed: int) -> None:
    random = Random(f"doomed {seed}")
    file, blocks = fresh()
    writer = Writer(file, random)
    for _ in range(40):
        writer.write()
    gone = random.sample(sorted(writer.live), len(writer.live) // 2)
    units = [writer.live.pop(key) for key in gone]
    file.doom(units)
    # Power may be lost in the middle of any part.
    done = random.randrange(len(units))
    file.erase(units[:done])
    blocks.tear = random
    with suppress(OSError):
        file.erase(units[done:])
    blocks.tear = None
    blocks.lose_power(random)
    after = DiskFile(blocks, LAYOUT)
    assert keys_of(after) == writer.live
    assert set(after.doomed) <= set(units)
    after.erase(after.doomed)
    for kind, unit in units:
        place = LAYOUT.offset_of(kind, unit)
        assert not any(blocks.now[place : place + LAYOUT.padded[kind]])
    assert DiskFile(blocks, LAYOUT).doomed == []


def test_a_header_is_decoded_as_it_was_encoded_and_tenants_differ() -> None:
    known = replace(header(Kind.WINDOW, 9, b"k" * 32, b"p" * 32), size=3000, checksum=1 << 63)
    assert decode(known.encode()) == known
    assert len(known.encode()) == ENTRY
    assert tenant_digest(b"one") != tenant_digest(b"other")


def test_units_of_all_kinds_have_their_own_entries() -> None:
    arena = Arena(LAYOUT.padded, LAYOUT.slabs * LAYOUT.slab_bytes)
    taken = [(kind, unit) for kind in UNIT_BYTES for _ in range(12) if (unit := arena.take(kind)) is not None]
    places = [LAYOUT.entry_of(*each) for each in taken]
    assert len(set(places)) == len(places) == 36
    assert max(places) + ENTRY <= LAYOUT.payload_offset


# real files


def test_a_file_serves_after_a_restart_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    file = open_file(path, LAYOUT)
    writer = Writer(file, Random(3))
    for _ in range(50):
        writer.write()
    file.close()
    assert path.stat().st_mode & 0o777 == 0o600
    after = open_file(path, LAYOUT)
    assert keys_of(after) == writer.live
    assert check_found(after) == (len(writer.live), 0)
    after.close()


@pytest.mark.parametrize("direct", [True, False])
def test_short_reads_and_writes_are_continued(direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random, path = Random(4), tmp_path / "tier"
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    pwrite, preadv = os.pwrite, os.preadv
    short = {"writes": 0, "reads": 0}

    def part(size: int) -> int:
        return random.choice([1, size // 2, size // BLOCK // 2 * BLOCK, size]) or size

    def short_write(file: int, data: memoryview, offset: int) -> int:
        count = part(len(data))
        short["writes"] += count < len(data)
        # Direct writes are whole blocks; a shorter one is what the kernel would have written of it.
        return pwrite(file if count % BLOCK == 0 else buffered[0], data[:count], offset)

    def short_read(file: int, into: list[memoryview], offset: int) -> int:
        count = part(len(into[0]))
        short["reads"] += count < len(into[0])
        return preadv(file if count % BLOCK == 0 else buffered[0], [into[0][:count]], offset)

    file = open_file(path, LAYOUT)
    buffered = [os.open(path, os.O_RDWR)]
    monkeypatch.setattr(os, "pwrite", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    writer = Writer(file, Random(3))
    for _ in range(40):
        writer.write()
    file.close()
    after = open_file(path, LAYOUT)
    assert keys_of(after) == writer.live
    assert check_found(after) == (len(writer.live), 0)
    assert min(short.values()) > 20
    after.close()
    os.close(buffered[0])


def test_two_servers_cannot_use_one_file(tmp_path: Path) -> None:
    first = open_file(tmp_path / "tier", LAYOUT)
    with pytest.raises(InvalidOption, match="in use by another process"):
        open_file(tmp_path / "tier", LAYOUT)
    first.close()
    open_file(tmp_path / "tier", LAYOUT).close()


def test_another_models_file_is_refused_by_name_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    open_file(path, LAYOUT).close()
    before = path.read_bytes()
    for changes, named in (
        ({"configuration": b"g" * 16}, "the configuration differs"),
        ({"weights": b"g" * 16}, "the weights or their dtype differ"),
        ({"layout": b"g" * 16}, "the layout of memory differs"),
        ({"exact": True}, "it was written with --exact off, which is on here"),
        ({"weights": b"g" * 16, "revisions": "Tiny 2"}, "it was computed by Tiny 1, plain 1, and this is Tiny 2"),
    ):
        with pytest.raises(InvalidOption, match=f"belongs to another model: .*{named}"):
            open_file(path, replace(LAYOUT, identity=replace(IDENTITY, **changes)))
    with pytest.raises(InvalidOption, match="disk_size must be the one"):
        open_file(path, DiskLayout.of(IDENTITY, UNIT_BYTES, LAYOUT.size_bytes // 2))
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", ["link", "open to others", "something else", "folder"])
def test_a_path_that_is_not_ours_is_refused(kind: str, tmp_path: Path) -> None:
    path, target = tmp_path / "tier", tmp_path / "target"
    if kind == "link":
        target.touch()
        path.symlink_to(target)
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        path.chmod(0o644 if kind == "open to others" else 0o600)
        path.write_bytes(b"precious" * 100)
    with pytest.raises(InvalidOption, match="disk"):
        open_file(path, LAYOUT)
    if kind not in ("link", "folder"):
        assert path.read_bytes().startswith(b"precious")


def test_a_file_that_does_not_fit_is_refused_and_leaves_the_disk_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tier"

    def fallocate(file: int, offset: int, size: int) -> None:
        os.truncate(file, size // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", fallocate)
        with pytest.raises(InvalidOption, match=r"disk_size of \d+ bytes does not fit: No space left on device"):
            open_file(path, LAYOUT)
    assert path.stat().st_size == 0
    open_file(path, LAYOUT).close()


def test_a_truncated_file_loses_only_what_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    file = open_file(path, LAYOUT)
    write(file, Kind.PAGE, 0, b"a" * 32)
    last = LAYOUT.slabs * LAYOUT.slab_bytes // LAYOUT.padded[Kind.PAGE] - 1
    write(file, Kind.PAGE, last, b"z" * 32)
    file.close()
    os.truncate(path, LAYOUT.payload_offset + LAYOUT.slab_bytes)
    after = open_file(path, LAYOUT)
    assert check_found(after) == (1, 1)
    after.close()


def kill_writers(folder: Path, rounds: int, seed: int = 5) -> tuple[int, int]:
    """Kill a process that writes, at a random moment, and check what it left; again and again, on one file.

    Return how many units were whole and how many were known to be damaged, over all rounds.
    """
    path, random = folder / "tier", Random(seed)
    whole = damaged = 0
    for _ in range(rounds):
        command = [sys.executable, "-m", "tests.support.tiers.disk_writer", str(path), str(random.getrandbits(32))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as writer:
            assert writer.stdout is not None
            for _ in range(random.randint(1, 40)):
                assert writer.stdout.readline(), "the writer could not start"
            # A batch takes about as long, so that any of its writes may be the last.
            sleep(random.uniform(0, 4e-3))
            writer.kill()
        file = open_file(path, LAYOUT)
        found = check_found(file)
        assert found[0] > 0
        # Units of the batches that were under way, and no others; most often none.
        assert file.damaged <= 24
        whole, damaged = whole + found[0], damaged + file.damaged
        file.close()
    return whole, damaged


@pytest.mark.thorough
def test_a_killed_writer_leaves_only_whole_units(tmp_path: Path) -> None:
    kill_writers(tmp_path, 3)


@pytest.mark.slow
def test_a_thousand_killed_writers_leave_only_whole_units(tmp_path: Path) -> None:
    whole, damaged = kill_writers(tmp_path, 1000)
    print(f"1,000 kills: {whole} units read whole, {damaged} known to be damaged, none wrong")
