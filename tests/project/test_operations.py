"""What the pages for operators say exists: tests, options, alerts."""

from __future__ import annotations

import re

import pytest

from tests.support.documents import unknown
from tests.support.fences import ROOT
from weft.server.http.connections import RESERVED_DESCRIPTORS
from weft.server.http.protocol import MAX_PIPELINED, State
from weft.server.settings import Limits

SECURITY = (ROOT / "docs" / "security.md").read_text()
RULES = (ROOT / "docs" / "lab" / "security-rules.md").read_text()
OPERATIONS = (ROOT / "docs" / "operate.md").read_text()


def test_every_rule_of_security_names_a_test_that_exists() -> None:
    assert unknown(RULES) == []
    rules = re.findall(r"^\| (?!rule ).* \|$", RULES, re.MULTILINE)
    assert len(rules) > 80
    for rule in rules:
        assert "::test_" in rule or "planted-bugs.md" in rule, rule


def test_security_lists_the_open_routes() -> None:
    from weft.server.access.guard import OPEN_ROUTES
    from weft.server.page import PAGE_ROUTES

    section = SECURITY.partition("## Routes that answer without a key")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^    (\w+) (/\S*)$", section, re.MULTILINE)) == OPEN_ROUTES + PAGE_ROUTES


def test_files_that_security_names_exist() -> None:
    for row in re.findall(r"^\| .* \|$", RULES, re.MULTILINE):
        for name in re.findall(r"`([\w/]+\.py)`", row.split("|")[2]):
            assert (ROOT / name).exists() or [*(ROOT / "weft").rglob(f"**/{name}")], name


def test_the_deadlines_and_bounds_of_connections_are_those_of_the_code() -> None:
    about = SECURITY.partition("## Connections")[2].partition("\n## ")[0]
    limits = Limits()
    deadlines = re.findall(r"^\| [^|]+ \| `(\w+)`[^|]* \| (\d+) \|", about, re.MULTILINE)
    assert [(name, int(seconds)) for name, seconds in deadlines] == [
        (name, getattr(limits, name)) for name, _ in deadlines
    ]
    assert {state.value for state in State} - {None} <= {name for name, _ in deadlines}
    for name, number in re.findall(r"`(connections\w*)` \((\d+)\)", about):
        assert getattr(limits, name) == int(number)
    assert f"`linger_bytes` ({limits.linger_bytes >> 20} MiB)" in about
    assert f"up to {MAX_PIPELINED} requests" in about
    assert f"reserves {RESERVED_DESCRIPTORS} descriptors" in " ".join(about.split())


def test_options_that_operations_names_exist() -> None:
    known = (ROOT / "docs" / "cli.md").read_text()
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", OPERATIONS))
    assert len(options) > 10
    assert sorted(option for option in options if f"`{option}" not in known) == []


def test_alerts_that_operations_names_exist() -> None:
    alerts = (ROOT / "deploy" / "prometheus-alerts.yml").read_text()
    named = set(re.findall(r"`(Weft[A-Z]\w+)`", OPERATIONS))
    assert named <= set(re.findall(r"alert: (\w+)", alerts))


def test_every_reason_of_a_miss_is_explained() -> None:
    from weft.memory.misses import Reason

    for reason in Reason:
        if reason is not Reason.NOTHING_MORE:
            assert f"| `{reason.value}` |" in OPERATIONS


@pytest.mark.thorough
def test_the_benchmark_of_http_runs() -> None:
    from benchmarks.http import measure

    alone = measure("lockstep", "/v1/completions", streams=4, tokens=10, profile=None)
    assert 1 <= alone["tokens_per_chunk"] < 2, "a token of its own is a chunk of its own"
    assert alone["server_us_per_stream"] > 0
    whole = measure("paced", "/v1/chat/completions", streams=4, tokens=10, profile=None)
    assert 0 < whole["tokens_per_second"] < 4 / 0.01, "an engine of 100 steps a second offers no more"
