"""`weft doctor --check`: a right model passes, and each planted error is in the table and in the exit status."""

from __future__ import annotations

import pytest
import torch

from tests.support.models.engines import FAMILIES
from tests.support.models.oracle import Oracle
from weft.cli.check.measures import LeftOut, Measure, Measuring, estimated_kl
from weft.cli.check.others import against_lines, transformers_lines
from weft.cli.check.ways import ways
from weft.cli.main import main
from weft.offline.llm import LLM

SETTINGS = {"memory": "32MiB", "threads": 1, "max_length": 1024, "dtype": "float32", "draft": "suffix"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Oracle(FAMILIES["qwen3_5"]).save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(folder):
    with LLM(str(folder), progress=False, **SETTINGS) as found:
        yield found


def by_name(lines):
    found = {line.name: line for line in lines}
    assert found
    return found


def test_all_ways_of_a_right_model_agree(llm):
    found = by_name(ways(llm, llm.options, "float32"))
    assert not any(line.is_wrong for line in found.values() if isinstance(line, Measure))
    assert {"cache hits", "drafts by suffix", "a prompt of 512", "a disk tier"} <= {
        name for name, line in found.items() if isinstance(line, Measure)
    }
    [left_out] = [line for line in found.values() if isinstance(line, LeftOut)]
    assert left_out.name == "prompts of 4096 tokens and more"


def test_transformers_agrees_unless_a_weight_is_wrong(llm, folder):
    right = by_name(transformers_lines(llm, folder, "float32"))
    assert len(right) == 2
    assert not any(line.is_wrong for line in right.values())
    with torch.no_grad():
        next(each for each in llm.model.parameters() if each.ndim == 1 and each.numel() > 8).mul_(1.2)
    wrong = by_name(transformers_lines(llm, folder, "float32"))
    assert wrong["transformers, log-probabilities"].is_wrong


def test_a_wrong_state_under_the_cache_is_seen(llm, monkeypatch):
    original, calls = Measuring.answers, []

    def spoilt(self, *arguments, **more):
        calls.append(1)
        if len(calls) == 2:
            llm.engine._device.store.buffer.zero_()
        return original(self, *arguments, **more)

    monkeypatch.setattr(Measuring, "answers", spoilt)
    lines = ways(llm, llm.options, "float32")
    assert not next(lines).is_wrong
    assert next(lines).is_wrong


def test_fewer_bits_are_measured_against_a_wide_checkpoint(folder, llm):
    alike = by_name(against_lines(llm, llm.options, str(folder)))
    assert alike["KL against it"].found < 1e-6
    with LLM(str(folder), progress=False, quantize="int4", **SETTINGS) as narrow:
        found = by_name(against_lines(narrow, narrow.options, str(folder)))
    assert found["KL against it"].found > 1e-3
    assert found["perplexity"].found != alike["perplexity"].found


def test_a_number_that_is_none_is_wrong():
    assert Measure("any", float("nan"), 1.0).is_wrong
    assert not Measure("any", float("nan"), None).is_wrong
    assert estimated_kl([-1.0], [-3.0]) > 0


@pytest.mark.thorough
def test_the_command_prints_a_table_and_an_exit_status(folder, monkeypatch, capsys):
    options = ["doctor", str(folder), "--check", "--no-self-test", "--memory", "32MiB", "--threads", "1"]
    options += ["--max-length", "1024", "--dtype", "float32"]
    assert main(options) == 0
    assert "cache hits:" in capsys.readouterr().out
    monkeypatch.setattr("weft.cli.check.ways.ways", lambda *_: iter([Measure("planted", 1.0, 0.5)]))
    assert main(options) == 1
    assert "problem: planted: 1 exceeds 5.0e-01" in capsys.readouterr().out
    assert main(["doctor", str(folder), "--against", str(folder)]) == 2
    assert "against needs --check" in capsys.readouterr().err
