"""`--exact auto`: a table in the repository decides, never a measurement at start."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.models import tiny_model
from weft import LLM
from weft.base.errors import InvalidOption, OptionError
from weft.base.options import Options
from weft.cli.main import COMMANDS, collected, main, parse, read_options
from weft.kernels import choosing
from weft.kernels.choosing import choose, everywhere, why_not_exact
from weft.kernels.interface import Operations
from weft.models.weights import build
from weft.start import exact_costs, loading
from weft.start.exact_costs import COSTS, MOST, Cost, decide

CHEAP = Cost("a model", "2026-01-01", 0.02, -0.1, 0.0, MOST)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], "auto"), (["--exact"], True), (["--no-exact"], False), (["--exact", "on"], True), (["--exact=off"], False),
        (["--exact", "auto"], "auto"), (["--exact", "--seed", "3"], True), (["--exact", "some-model"], True),
    ],
)  # fmt: skip
def test_the_switch_needs_no_value(given: list[str], wanted: bool | str) -> None:
    found = vars(parse(["doctor", *given]))
    doctor = COMMANDS[found.pop("command")]
    options = read_options(doctor.options, collected(doctor, found).values)
    assert options.exact == wanted
    assert options.model == ("some-model" if "some-model" in given else None)


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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has every library; nothing is run on it."""
    monkeypatch.setattr(choosing, "declines", lambda device: None)
    monkeypatch.setattr(choosing, "device_name", lambda device: "a GPU")


class Trials:
    """Measurements of a GPU's room, which fail for exact operations, or for all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, all_fail: bool = False) -> None:
        self.seen: list[bool] = []
        self.all_fail = all_fail
        monkeypatch.setattr(loading, "measure", self.measure)

    def measure(self, model: Any, drafter: Any, operations: Operations, options: Options, progress: bool) -> Any:
        self.seen.append(operations.is_exact)
        assert options.exact is operations.is_exact
        return "ptxas ended" if operations.is_exact or self.all_fail else b"room"


def tried(exact: bool, is_auto: bool) -> Any:
    config = json.loads((tiny_model.FOLDER / "config.json").read_text())
    model = build(config, torch.bfloat16, "meta")
    chosen = choose("cuda", torch.bfloat16, model.memories, exact=exact)
    options = Options(model=str(tiny_model.FOLDER), exact=exact)
    return loading.tried(chosen, model, None, options, "cuda", torch.bfloat16, is_auto, progress=False)


def test_exact_kernels_that_fail_are_given_up_where_nobody_asked_for_them(
    gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trials = Trials(monkeypatch)
    chosen, options, room = tried(exact=True, is_auto=True)
    assert trials.seen == [True, False]
    assert (chosen.all_by("cuda"), options.exact, room) == (True, False, b"room")
    assert "exact: off: ptxas ended" in caplog.text
    with pytest.raises(OptionError, match="exact answers are not available: ptxas ended"):
        tried(exact=True, is_auto=False)


def test_where_all_kernels_fail_plain_operations_are_left(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(monkeypatch, all_fail=True)
    chosen, options, room = tried(exact=True, is_auto=True)
    assert trials.seen == [True, False]
    assert (chosen.all_by("plain"), options.exact, room) == (True, False, None)


def test_both_packages_prepare_weights_alike() -> None:
    """Or the usual one could not take over a model that was loaded for the other."""
    exact, usual = choosing.assemble(choosing.exact_packages()), everywhere("cuda")
    assert exact.prepare is usual.prepare
    assert exact.prepare_experts is usual.prepare_experts


def test_what_declines_exact_kernels_is_a_reason_for_auto(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_exact("cuda", torch.bfloat16) is None
    assert "this is float32" in str(why_not_exact("cuda:1", torch.float32))
    assert why_not_exact("cpu", torch.float32) is None
    load = choosing.import_module

    def broken(name: str) -> Any:
        if name.endswith(".exact"):
            raise ImportError("no such kernel")
        return load(name)

    monkeypatch.setattr(choosing, "import_module", broken)
    assert "no such kernel" in str(why_not_exact("cuda", torch.bfloat16))
    monkeypatch.setattr(loading, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(exact_costs, "COSTS", {("a GPU", "lfm2"): CHEAP})
    monkeypatch.setattr(loading, "checkpoint_config", lambda path: {"model_type": "lfm2"})
    options = Options(model=str(tiny_model.FOLDER))
    assert loading.decided(options, tiny_model.FOLDER, "cuda", torch.bfloat16).exact is False
    monkeypatch.setattr(choosing, "import_module", load)
    assert loading.decided(options, tiny_model.FOLDER, "cuda", torch.bfloat16).exact is True


def test_the_table_names_packaged_models() -> None:
    from weft.models import configurations

    assert {cost.model for cost in COSTS.values()} <= set(configurations.names())
