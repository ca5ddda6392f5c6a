"""`weft models` lists what can be served, with sizes from the same shapes as the engine's; misspelt names get hints."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.support.models.gguf_files import write
from weft import builtin
from weft.base.errors import ModelError
from weft.base.gguf.header import TYPES
from weft.base.gguf.report import DECODED, REFUSED
from weft.cli.doctor import DoctorOptions, describe_file
from weft.cli.main import build_parser, main
from weft.kernels.formats.block_types import BLOCK_TYPES
from weft.kernels.native.stored import name_of
from weft.memory.spec import MemorySpec
from weft.models import configurations, finding
from weft.models.catalogue import BUILT_IN, CATALOGUE, hub_ids
from weft.models.config import read_config
from weft.models.finding import find_checkpoint
from weft.models.hints import similar_id
from weft.models.registry import FAMILIES
from weft.models.shapes import shape_of


def test_the_catalogue_lists_the_registered_architectures_and_the_packaged_configurations():
    listed = [name for family in CATALOGUE for name in family.architectures]
    assert sorted(listed) == sorted(FAMILIES)
    packaged = [name for family in CATALOGUE for name, _ in family.checkpoints]
    assert sorted(packaged) == configurations.names()
    assert builtin.NAME == BUILT_IN


def test_every_checkpoint_stands_in_the_family_of_its_architecture():
    for family in CATALOGUE:
        for name, _ in family.checkpoints:
            [architecture] = read_config(configurations.find(name))["architectures"]
            assert architecture in family.architectures


def listed(capsys: pytest.CaptureFixture[str]) -> dict:
    assert main(["models", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_sizes_are_those_of_the_engine(capsys):
    found = listed(capsys)
    by_name = {model["name"]: model for family in found["families"] for model in family["models"]}
    assert sorted(by_name) == configurations.names()
    nemotron = by_name["nemotron-nano-9b-v2"]
    shape = shape_of(configurations.find("nemotron-nano-9b-v2"))
    spec = MemorySpec(shape.memories)
    # Some vectors have 32 bits.
    assert nemotron["weights_bytes"] == shape.weights.total == pytest.approx(2 * shape.parameters, rel=1e-3)
    assert shape.weights.total == pytest.approx(17.8e9, rel=0.01)
    assert nemotron["context_bytes_per_token"] * 64 == spec.page_bytes
    assert nemotron["bytes_per_sequence"] == 2 * spec.state_bytes + spec.tail_bytes
    gemma = by_name["gemma-3-12b"]
    assert (gemma["state_bytes"], gemma["bytes_per_sequence"]) == (0, 18 * 64 * 327680)
    assert found["built_in"]["parameters"] == pytest.approx(23e6, rel=0.05)


def test_every_command_is_one_that_weft_accepts(capsys):
    found = listed(capsys)
    models = [model for family in found["families"] for model in family["models"]]
    for model in [*models, found["built_in"]]:
        program, *arguments = shlex.split(model["command"])
        assert program == "weft"
        chosen = vars(build_parser().parse_args(arguments))
        assert (chosen["command"], chosen.get("model")) == ("serve", arguments[1] if len(arguments) > 1 else None)


def test_the_list_for_people_has_every_model_command_and_architecture(capsys):
    found = listed(capsys)
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    for family in found["families"]:
        assert all(name in text for name in family["architectures"])
        assert all(model["name"] in text and model["command"] in text for model in family["models"])
    assert "weft-small" in text


# names that cannot be loaded ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("weft-smal", "did you mean weft-small?"),
        ("lfm2-1.2", "did you mean lfm2-1.2b?"),
        ("LFM2-1.2B", "pass LiquidAI/LFM2-1.2B for the published weights, or add --weights dummy"),
        ("xyzzy", "'owner/name'; packaged configurations"),
    ],
)
def test_a_misspelt_model_gets_a_hint(name, hint):
    with pytest.raises(ModelError) as found:
        find_checkpoint(name, with_weights=True)
    assert hint in str(found.value)


def test_a_misspelt_hub_id_gets_a_hint_and_a_right_one_none():
    assert similar_id("LiquidAi/LFM2-1.2") == "; did you mean LiquidAI/LFM2-1.2B?"
    assert {similar_id(each) for each in (*hub_ids(), "xyzzy/plugh")} == {""}


def test_a_file_is_described_by_its_header(tmp_path, capsys):
    file = write(
        tmp_path / "model.gguf",
        {"general.architecture": "lfm2", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "lfm2"},
        {"a.weight": ("Q8_0", (4, 64), bytes(272)), "b.weight": ("Q2_K", (1, 256), bytes(84))},
    )
    assert main(["models", str(file)]) == 0
    lines = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    found = {name: text.strip() for name, text in lines.items()}
    assert found["family"] == "lfm2"
    assert found["types"] == "Q8_0 76.4%, Q2_K 23.6% of the bytes"
    assert found["slow"].startswith("Q2_K (23.6%) is decoded for each step")
    assert found["tokenizer"] == "gpt2 lfm2"
    assert found["fit"].startswith("fits: 0.68 GiB for weights and program")
    assert main(["models", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "lfm2"


def test_doctor_describes_a_file_of_the_hub_and_a_tag_chooses_it(tmp_path, monkeypatch, capsys):
    file = write(
        tmp_path / "model-Q8_0.gguf", {"general.architecture": "lfm2"}, {"a.weight": ("Q8_0", (4, 64), bytes(272))}
    )
    monkeypatch.setattr(finding, "file_names", lambda repository: ["model-F16.gguf", file.name])
    monkeypatch.setattr(finding, "snapshot", lambda repository, names: tmp_path if names == [file.name] else None)
    describe_file(DoctorOptions(model="owner/name:Q8_0"))
    assert "Q8_0 100.0% of the bytes" in capsys.readouterr().out
    describe_file(DoctorOptions(model="owner/name"))
    assert capsys.readouterr().out == ""


def test_what_is_no_file_is_refused_in_one_line(tmp_path, capsys):
    assert main(["models", str(tmp_path)]) == 2
    assert "is neither a GGUF file nor a folder with one" in capsys.readouterr().err


def test_types_that_are_called_slow_are_those_without_kernels():
    fast = {kind for kind, format in BLOCK_TYPES.items() if name_of(format) is not None}
    assert set(DECODED) == set(BLOCK_TYPES) - fast
    assert all(kind in BLOCK_TYPES or kind.startswith(REFUSED) for kind, size, _ in TYPES.values() if size > 1)
