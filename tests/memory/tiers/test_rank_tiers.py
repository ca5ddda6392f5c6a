"""Tiers of a model that is cut over ranks: every rank copies its own part, and a copy counts when all have made it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.models.engines import TINY, model_of, spec_of, tokens
from tests.support.models.oracle import Oracle
from tests.support.tiers.disk_blocks import IDENTITY
from tests.support.tiers.disk_tier import save_all
from weft import LLM, SamplingParams
from weft.base.config import EngineConfig
from weft.base.copies import CopyPlan, Direction
from weft.base.errors import CopyFailed, EngineStopped, InvalidOption, OptionError
from weft.base.options import Options
from weft.cli.main import main
from weft.memory.captures import Origin
from weft.memory.kinds import Kind
from weft.memory.tiers.disk.file import DiskFile, open_existing, open_file, rows_of_first
from weft.memory.tiers.disk.format import DiskLayout, ModelPart, UnitHeader
from weft.runner.ranks.channel import CopyEnded, CopyUnits
from weft.runner.ranks.leading import LeadingRunner
from weft.runner.ranks.part import LoadedPart
from weft.runner.ranks.processes import RankProcesses
from weft.runner.runner import Runner

OPTIONS = {"memory": "16MiB", "max_length": 512, "threads": 1, "device": "cpu", "dtype": "float32", "progress": False}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
PROMPTS = [tokens(200, 1), tokens(140, 2)]


def answers(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """The tokens of all prompts, and how many tokens of each were loaded."""
    found = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
    return [each.token_ids for each in found], [each.loaded_tokens for each in found]


def evict_all(llm: LLM) -> None:
    """Let the device evict everything, once it is saved."""
    save_all(llm.engine)
    llm.engine.ledger.cache.clear()


def damage(path: Path) -> None:
    """Change a byte in every block of a file's units."""
    file = open_existing(path)
    first = file.layout.payload_offset
    file.close()
    damaged = bytearray(path.read_bytes())
    for place in range(first + 1000, len(damaged), 4096):
        damaged[place] ^= 1
    path.write_bytes(damaged)


@pytest.mark.thorough
def test_two_ranks_answer_from_their_files_and_compute_what_is_damaged_in_one(tmp_path):
    folder, path = Oracle(TINY["falcon_h1"]).save(tmp_path / "model"), tmp_path / "tier"
    with LLM(str(folder), **OPTIONS) as llm:
        cold, _ = answers(llm)
    disk = {"disk": str(path), "disk_size": "16MiB"}
    with LLM(str(folder), tensor_parallel=2, **disk, **OPTIONS) as llm:
        assert answers(llm) == (cold, [0, 0])
        evict_all(llm)
        assert answers(llm) == (cold, [192, 128])
    # The first rank's units are whole, but none counts without the second one's.
    damage(ModelPart(1, 2).path(path))
    with LLM(str(folder), tensor_parallel=2, **disk, **OPTIONS) as llm:
        assert answers(llm) == (cold, [0, 0])
        [link] = llm.engine.ledger.tiers.links
        assert link.failures == 2
        evict_all(llm)
        assert answers(llm) == (cold, [192, 128])
    with pytest.raises(InvalidOption, match=r"tier holds units of rank 0 of 2, but this server needs"):
        LLM(str(folder), **disk, **OPTIONS)


RANK = """
import socket, sys
from pathlib import Path
from weft.runner.ranks.channel import Join, LoadPart, PartJoined, PartLoaded, PartUnloadable, ToRank, rank_channel

channel = rank_channel(socket.socket(fileno=int(sys.argv[2])))
rank = channel.receive(LoadPart).rank
channel.send(PartLoaded())
channel.receive(Join)
channel.send(PartJoined() if rank == 1 else PartUnloadable("its file belongs to another model", True))
Path(sys.argv[1]).write_text(repr(channel.receive(ToRank)))
"""


def test_no_rank_begins_where_one_refuses_its_file(tmp_path):
    others = RankProcesses(3, [sys.executable, "-c", RANK, str(tmp_path / "told")])
    try:
        others.load(Options())
        others.join(EngineConfig(memory_bytes=1 << 20), 0, 1)
        with pytest.raises(OptionError, match="rank 2: its file belongs to another model"):
            others.begin()
    finally:
        others.close()
    assert not (tmp_path / "told").exists()


def test_a_drop_that_was_interrupted_on_another_rank_ends_when_its_file_is_opened(tmp_path):
    path, part = tmp_path / "tier.rank1", ModelPart(1, 2)

    def opened() -> DiskFile:
        before = path.read_bytes() if path.exists() else None
        runner = Runner(model_of("llama"), spec_of("llama"), 1 << 20, 4, threads=1)
        runner.tiers.add_disk(tmp_path / "tier", 1 << 20, IDENTITY, part)
        # No file is changed before all ranks have opened theirs.
        assert before in (None, path.read_bytes())
        LoadedPart(runner.model, runner.operations, "cpu", 1, 2, disk=tmp_path / "tier").begin(runner)
        return runner.tiers.disk

    file = opened()
    file.doom([(Kind.PAGE, 0)])
    file.close()
    file = open_existing(path)
    assert file.doomed == [(Kind.PAGE, 0)]
    file.close()
    opened().close()
    file = open_existing(path)
    assert file.doomed == []
    file.close()


def test_what_only_another_rank_has_after_a_crash_is_erased_when_its_file_is_opened(tmp_path):
    """The first rank does not know it, so a drop would leave its bytes."""
    sizes, parts = {Kind.PAGE: 4096, Kind.STATE: 4096}, [ModelPart(rank, 2) for rank in range(2)]
    layouts = [DiskLayout.of(IDENTITY, sizes, 1 << 20, part) for part in parts]
    first, second = (open_file(each.part.path(tmp_path / "tier"), each) for each in layouts)
    payload = memoryview(b"s" * 4096)

    def header(kind: Kind, unit: int, key: bytes, position: int = 64) -> UnitHeader:
        return UnitHeader(kind, unit, position, key * 32, None, b"t" * 16, Origin.REGULAR, 4096, 0)

    both = [header(Kind.PAGE, 0, b"a"), header(Kind.PAGE, 1, b"b"), header(Kind.STATE, 2, b"b")]
    only = [header(Kind.PAGE, 3, b"c"), header(Kind.STATE, 4, b"d")]
    first.write([(each, payload) for each in [*both, header(Kind.PAGE, 3, b"e"), header(Kind.PAGE, 9, b"f")]])
    second.write([(each, payload) for each in [*both, *only]])
    second.doom([(Kind.PAGE, 1)])
    second.reread()
    second.erase_all_but(rows_of_first(tmp_path / "tier", second.layout))
    second.reread()
    assert [(each.kind, each.unit) for each in second.found] == [(Kind.PAGE, 0), (Kind.STATE, 2)]
    second.close()
    first.close()
    assert (tmp_path / "tier.rank1").read_bytes().count(b"s" * 4096) == 2
    assert (tmp_path / "tier").read_bytes().count(b"s" * 4096) == 5


def test_a_ranks_file_is_shown_as_such_and_not_exported(tmp_path, capsys):
    path = tmp_path / "tier.rank1"
    open_file(path, DiskLayout.of(IDENTITY, {Kind.PAGE: 4096}, 1 << 20, ModelPart(1, 2))).close()
    assert main(["cache", str(path)]) == 0
    assert ", rank 1 of 2" in capsys.readouterr().out
    assert main(["cache", str(path), "--prefix", "00" * 8, "--export-to", str(tmp_path / "out")]) == 2
    assert "needs the file of a whole model; this one holds rank 1 of 2" in capsys.readouterr().err


def test_a_tenant_is_dropped_from_the_files_of_all_ranks(tmp_path, capsys):
    path, tenant, payload = tmp_path / "tier", b"t" * 16, memoryview(bytes(range(256)) * 16)
    others = [ModelPart(rank, 3).path(path) for rank in (1, 2)]
    for rank, place in enumerate([path, *others]):
        file = open_file(place, DiskLayout.of(IDENTITY, {Kind.PAGE: 4096}, 1 << 20, ModelPart(rank, 3)))
        header = UnitHeader(Kind.PAGE, 0, 64, b"k" * 32, None, tenant, Origin.REGULAR, size=0, checksum=0)
        # After a crash, the first rank's file may lack what another one has.
        file.write([(header, payload)] if rank else [], [])
        file.close()
    assert main(["cache", str(others[0]), "--drop", tenant.hex()]) == 2
    assert "needs the first rank's file" in capsys.readouterr().err
    assert main(["cache", str(path), "--drop", tenant.hex(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dropped_units"] == 2
    assert not any(bytes(payload) in place.read_bytes() for place in others)


# Copies of the group --------------------------------------------------------------------------------------------------


class FakeOthers:
    """Other ranks whose reports a test sets."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.sent: list[object] = []
        self.reports: list[CopyEnded] | None = None

    def send(self, message: object) -> None:
        self.sent.append(message)

    def copied(self, ticket: int, wait: bool) -> list[CopyEnded] | None:
        return self.reports


class FakeOwn:
    """A first rank whose copies end as a test says."""

    def __init__(self) -> None:
        self.result: float | CopyFailed | None = None
        self.tiers = self

    def copy(self, plan: CopyPlan) -> str:
        return "flight"

    def copied(self, flight: str, wait: bool) -> float | None:
        assert flight == "flight"
        if isinstance(self.result, CopyFailed):
            raise self.result
        return self.result


@pytest.fixture
def group() -> SimpleNamespace:
    own, others = FakeOwn(), FakeOthers()
    device = LeadingRunner(own, others)
    return SimpleNamespace(own=own, others=others, device=device, plan=CopyPlan(7, Direction.SAVE, (), 0, level=1))


def test_a_copy_has_landed_when_all_ranks_have_made_it(group):
    flight = group.device.copy(group.plan)
    assert group.others.sent == [CopyUnits(0, group.plan)]
    assert group.device.copied(flight, wait=False) is None
    group.own.result = 0.5
    assert group.device.copied(flight, wait=False) is None
    group.own.result, group.others.reports = None, [CopyEnded(0, 0.75)]
    assert group.device.copied(flight, wait=False) is None
    group.own.result = 0.5
    assert group.device.copied(flight, wait=False) == 0.75


def test_a_copy_that_failed_on_one_rank_has_failed_but_only_when_no_rank_copies_any_more(group):
    flight = group.device.copy(group.plan)
    group.own.result = CopyFailed("here")
    assert group.device.copied(flight, wait=False) is None
    group.others.reports = [CopyEnded(0, 0.1)]
    with pytest.raises(CopyFailed, match="here"):
        group.device.copied(flight, wait=False)
    group.own.result, group.others.reports = 0.5, [CopyEnded(0, 0.0, "rank 1: there")]
    with pytest.raises(CopyFailed, match="rank 1: there"):
        group.device.copied(flight, wait=False)


def test_a_group_without_one_of_its_ranks_copies_nothing(group):
    group.others.failure = "rank 1 has ended"
    with pytest.raises(EngineStopped, match="rank 1 has ended"):
        group.device.copy(group.plan)
