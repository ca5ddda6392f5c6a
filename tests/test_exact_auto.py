"""`--exact auto`: a table in the repository decides, never a measurement at start."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests import tiny_model
from weft import LLM, exact_costs
from weft.base.errors import InvalidOption
from weft.base.options import Options
from weft.cli.main import main, parse
from weft.exact_costs import COSTS, MOST, Cost, decide

CHEAP = Cost("a model", "2026-01-01", 0.02, -0.1, 0.0, MOST)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], "auto"), (["--exact"], True), (["--no-exact"], False), (["--exact", "on"], True), (["--exact=off"], False),
        (["--exact", "auto"], "auto"), (["--exact", "--seed", "3"], True), (["--exact", "some-model"], True),
    ],
)  # fmt: skip
def test_the_switch_needs_no_value(given: list[str], wanted: bool | str) -> None:
    found = parse(["doctor", *given])
    assert found.exact == wanted
    assert found.model == ("some-model" if "some-model" in given else None)


def test_other_values_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--exact=perhaps"])
    assert "must be one of on, off, auto, got 'perhaps'" in capsys.readouterr().err
    for wrong in ("on", 1, None):
        with pytest.raises(InvalidOption, match=r'must be True, False or "auto"'):
            Options(exact=wrong)  # type: ignore[arg-type]


def test_only_a_family_with_every_column_at_most_3_percent_is_exact_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        ("a GPU", "cheap"): CHEAP,
        ("a GPU", "dear"): replace(CHEAP, rows_32=0.031),
        ("a GPU", "unknown"): replace(CHEAP, one_row=None),
    }
    monkeypatch.setattr(exact_costs, "COSTS", table)
    assert decide("a GPU", "cheap", "bfloat16") == (
        True,
        "on: it costs a model +3.0% at a prompt of 8,192 tokens on a GPU",
    )
    for asked, reason in {
        ("a GPU", "dear", "bfloat16"): "+3.1% at 32 rows",
        ("a GPU", "unknown", "bfloat16"): "not measured for 1 row",
        ("a GPU", "cheap", "float16"): "cheap in float16 on a GPU was not measured",
        ("another GPU", "cheap", "bfloat16"): "on another GPU was not measured",
        ("a GPU", "cheap", "bfloat16", "ranks are not supported"): "ranks are not supported",
    }.items():
        exact, why = decide(*asked)
        assert not exact
        assert why.startswith("off: ")
        assert reason in why


def test_an_engine_asks_the_table_and_says_what_it_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**tiny_model.OPTIONS, "memory": "32MiB", "threads": 1, "max_length": 1024, "max_sequences": 8}
    with LLM(**options) as llm:
        assert llm.config.exact is False
    family = json.loads((tiny_model.FOLDER / "config.json").read_text())["model_type"]
    monkeypatch.setattr(exact_costs, "COSTS", {("cpu", family): CHEAP})
    options["dtype"] = "bfloat16"
    with LLM(**options) as llm:
        assert llm.config.exact is True
        assert llm.config.form
    with LLM(**options, exact=False) as llm:
        assert llm.config.exact is False


def test_the_table_names_packaged_models() -> None:
    from weft.models import configurations

    assert {cost.model for cost in COSTS.values()} <= set(configurations.names())
