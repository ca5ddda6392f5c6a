"""A prefix travels from one server's file to another's, and nothing else does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.models.engines import Ask, serve, tokens
from tests.support.tiers.disk_blocks import LAYOUT, FlakyBlocks, content, header
from tests.support.tiers.disk_tier import DISK_BYTES, disk_engine
from weft.base.errors import InvalidOption
from weft.cli.main import main
from weft.memory.kinds import Kind
from weft.memory.tiers.disk.file import DiskFile
from weft.memory.tiers.disk.prefix_file import export_prefix, import_prefix

KEYS = [bytes([number]) * 32 for number in range(1, 6)]


def source() -> DiskFile:
    """A file with a path of three pages, a state at the second, and another path."""
    file = DiskFile(FlakyBlocks(LAYOUT.size_bytes), LAYOUT)
    path = list(zip(KEYS[:3], [None, *KEYS[:2]], range(3), strict=True))
    units = [(header(Kind.PAGE, unit, key, parent), key) for key, parent, unit in path]
    units += [(header(Kind.STATE, 20, KEYS[1]), KEYS[1]), (header(Kind.PAGE, 4, KEYS[3]), KEYS[3])]
    file.write([(each, memoryview(content(key, each.kind))) for each, key in units])
    file.reread()
    assert len(file.found) == 5
    return file


def test_an_imported_prefix_has_its_path_and_points_and_no_others(tmp_path: Path) -> None:
    file, out = source(), tmp_path / "prefix"
    assert export_prefix(file, KEYS[2][:8], out) == 4
    assert out.stat().st_mode & 0o777 == 0o600
    other = DiskFile(FlakyBlocks(LAYOUT.size_bytes), LAYOUT)
    assert import_prefix(other, out) == 4
    other.reread()
    assert {(each.kind, each.key) for each in other.found} == {
        *((Kind.PAGE, key) for key in KEYS[:3]),
        (Kind.STATE, KEYS[1]),
    }
    for each in other.found:
        into = bytearray(each.size)
        other.read(each.kind, each.unit, each.key, memoryview(into))
        assert bytes(into) == content(each.key, each.kind)
    assert import_prefix(other, out) == 0, "what is there already is not added again"


@pytest.mark.parametrize("place", [0, 20, 60, 4096 + 30, 4096 + 250, 4096 + 256 + 1000])
def test_a_damaged_prefix_file_is_refused(place: int, tmp_path: Path) -> None:
    file, out = source(), tmp_path / "prefix"
    export_prefix(file, KEYS[2][:8], out)
    raw = bytearray(out.read_bytes())
    raw[place] ^= 1
    out.write_bytes(raw)
    other = DiskFile(FlakyBlocks(LAYOUT.size_bytes), LAYOUT)
    with pytest.raises(InvalidOption, match="import_from"):
        import_prefix(other, out)
    other.reread()
    assert not other.found
    out.write_bytes(raw[:5000])
    with pytest.raises(InvalidOption, match="import_from"):
        import_prefix(other, out)


def test_another_models_prefix_and_a_file_that_exists_are_refused(tmp_path: Path) -> None:
    file, out = source(), tmp_path / "prefix"
    export_prefix(file, KEYS[2][:8], out)
    layout = replace(LAYOUT, identity=replace(LAYOUT.identity, weights=b"g" * 16))
    other = DiskFile(FlakyBlocks(layout.size_bytes), layout)
    with pytest.raises(InvalidOption, match="another model: the weights or their dtype differ"):
        import_prefix(other, out)
    with pytest.raises(InvalidOption, match="cannot be created"):
        export_prefix(file, KEYS[2][:8], out)
    with pytest.raises(InvalidOption, match="0 have"):
        export_prefix(file, KEYS[4][:8], tmp_path / "other")


def test_a_deployment_starts_with_the_prefix_that_the_command_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, out, second = tmp_path / "first", tmp_path / "prefix", tmp_path / "second"
    asked = [Ask(tokens(300, 1)), Ask(tokens(300, 2))]
    engine = disk_engine("falcon_h1", first)
    before = [serve(engine, [ask])[0] for ask in asked]
    keys = engine.ledger.tiers.links[0].upper.trie.nodes
    engine.close()
    key = next(k for k, node in keys.items() if node.depth == 4 and node.resume is not None)
    assert main(["cache", str(first), "--prefix", key.hex()[:16], "--export-to", str(out)]) == 0
    assert main(["cache", str(second), "--import-from", str(out)]) == 2
    assert "size must be given" in capsys.readouterr().err
    assert main(["cache", str(second), "--import-from", str(out), "--size", str(DISK_BYTES), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["imported_units"] >= 5
    engine = disk_engine("falcon_h1", second)
    after = [serve(engine, [ask])[0] for ask in asked]
    engine.close()
    assert [a.tokens for a in after] == [a.tokens for a in before]
    assert sorted(a.report.loaded_tokens for a in after) == [0, 256]
