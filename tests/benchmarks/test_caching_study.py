"""The study behind docs/lab/caching.md: every file that one of its commands writes can be made into tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest

from benchmarks import caching
from benchmarks.caching_tables import all_tables

# One result with the fields of every kind of entry.
RESULT = {
    "requests": 10, "hit_tokens": 96, "oracle_tokens": 100, "shared_tokens": 100, "snapshots": {"end": 12},
    "seconds": 2.0, "ttft_p50": 0.5, "ttft_p90": 0.75, "before": 0.8, "during": 0.9, "after": 1.0,
}  # fmt: skip
COMMANDS: dict[str, list[Callable]] = {
    "goals": [caching.second_sighting, caching.no_sharing, caching.scan],
    "ample": [lambda study: caching.ample(study, "traces")],
    "matrix": [lambda study: caching.matrix(study, "", ["tuned"], ["lfm2-1.2b"], (0.5,), ["scan"], ["value", "lru"])],
}


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study whose measurements take no time; names of entries are those of the program."""
    monkeypatch.setattr(caching.Study, "add", lambda self, name, measure: self.results.setdefault(name, RESULT))
    return caching.Study(str(tmp_path / "study.json"))


def tables(study, monkeypatch, capsys) -> str:
    """Return what `python -m benchmarks.caching tables FILE` prints."""
    study.path.write_text(json.dumps(study.results))
    monkeypatch.setattr(sys, "argv", ["caching", "tables", str(study.path)])
    caching.main()
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_commands_file_has_a_table(study, monkeypatch, capsys, command):
    for measure in COMMANDS[command]:
        measure(study)
    printed = tables(study, monkeypatch, capsys)
    heading, cells = ("Tuned", "96%") if command == "matrix" else ("Goals", "96.0%")
    assert f"### {heading}" in printed
    assert cells in printed
    assert printed.count("###") == 1


def test_goals_have_a_row_for_each_model_and_what_was_found(study, monkeypatch, capsys):
    for measure in COMMANDS["goals"]:
        measure(study)
    study.results["no sharing/lfm2-1.2b/cache off"] = RESULT | {"seconds": 1.99}
    printed = tables(study, monkeypatch, capsys)
    rows = [line for line in printed.splitlines() if line.startswith("| ") and not line.startswith("| what")]
    assert len(rows) == len(caching.MODELS) * (1 + 1 + 3)
    assert "| no sharing at all, lfm2-1.2b | ≤ 1 % of throughput lost | 0.50% |" in rows
    assert (
        "| second sighting of a prefix of 128 to 8,000 tokens, lfm2-1.2b | ≥ 95 % of the shared full cells | 96.0% |"
        in rows
    )
    assert any("scan through a warm cache, lfm2-1.2b, lru" in row and "80%, 90%, 100%" in row for row in rows)


def test_a_file_without_entries_of_a_table_is_refused():
    with pytest.raises(SystemExit, match="no entry"):
        all_tables({"something else": RESULT})
