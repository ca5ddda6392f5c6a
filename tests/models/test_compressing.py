"""`weft convert`: a quantised copy has the numbers of `--quantize`, and other tools read it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.kernels.operations import PLAIN
from tests.support.models.engines import FAMILIES
from tests.support.models.oracle import DirectRunner, Oracle, random_tokens
from tests.support.models.quantised import FP8, quantise
from weft.base.errors import ModelError
from weft.cli.convert import OF_FOLDERS
from weft.cli.main import main
from weft.kernels.formats.quantising import AS_STORED, Quantising
from weft.kernels.formats.stored import DENSE, Dense, Format, Stored
from weft.kernels.formats.written import WrittenFormat, by_channel
from weft.models.compressing import compress
from weft.models.model import MatrixLayer
from weft.models.weights import load_model

TO = OF_FOLDERS
PROMPT = 70
WIDER = {"intermediate_size": 384, "hidden_size": 256}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    found: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in found:
            tiny = FAMILIES[family].variant(**WIDER) if family in ("llama", "qwen3_5") else FAMILIES[family]
            found[family] = Oracle(tiny).save(tmp_path_factory.mktemp(family))
        return found[family]

    return folder


def load(folder: Path, quantising: Quantising = AS_STORED):
    return load_model(folder, torch.float32, progress=False, operations=PLAIN, quantising=quantising)[0]


def answer(model) -> torch.Tensor:
    runner = DirectRunner(model, operations=PLAIN)
    [logits] = runner.step([(runner.open(random_tokens(PROMPT, seed=1)), PROMPT)])
    return logits


def names_of(model) -> set[str]:
    layers = [layer for layer in model.modules() if isinstance(layer, MatrixLayer)]
    return {part.format.name for layer in layers for name in layer.matrix_names() for part in layer.parts_of(name)}


@dataclass(frozen=True, slots=True)
class Halved(WrittenFormat, Dense):
    """A format that the package does not have: numbers in 16 bits, those of gates under another statement."""

    is_gate: bool = False
    name: str = "halved 1"

    def for_others(self, outputs: int, inputs: int) -> Format:
        return DENSE if outputs == inputs else self

    def encode(self, matrix):
        return Stored(self, (matrix.half(),), *matrix.shape)

    def spelled(self, stored):
        return {"weight_halved": stored.tensors[0]}

    def stating(self):
        return by_channel("halved", "gate" if self.is_gate else "other", 16)


def test_the_writer_writes_a_format_that_it_does_not_know(saved, tmp_path, monkeypatch):
    def format_of(self, name, outputs, inputs, tied=False):
        return Halved(is_gate="gate_proj" in name) if ".mlp." in name or "o_proj" in name else DENSE

    monkeypatch.setattr(Quantising, "format_of", format_of)
    folder = saved("llama")
    compress(folder, tmp_path / "copy", Quantising("fp8"))
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "copy"))
    halved = {name for name in before if ".mlp." in name}
    assert halved
    assert {name: after[f"{name}_halved"].tolist() for name in halved} == {
        name: before[name].half().tolist() for name in halved
    }
    assert after.keys() - {f"{name}_halved" for name in halved} == before.keys() - halved
    stated = json.loads((tmp_path / "copy" / "config.json").read_text())["quantization_config"]
    assert stated["format"] == "halved"
    kinds = {group["weights"]["type"]: group["targets"] for group in stated["config_groups"].values()}
    assert {f"{name}.weight" for name in kinds["gate"]} == {name for name in halved if "gate_proj" in name}
    assert {f"{name}.weight" for name in [*kinds["gate"], *kinds["other"]]} == halved


@pytest.mark.parametrize("kind", TO)
def test_a_copy_has_the_numbers_of_quantising_while_loading(kind, saved, tmp_path):
    """All groups and blocks are whole in this model. Copies of others have smaller groups, or no blocks."""
    written = compress(saved("qwen3_5"), tmp_path / "copy", Quantising(kind))
    assert written.bytes_after < 0.75 * written.bytes_before
    copy, loaded = load(tmp_path / "copy"), load(saved("qwen3_5"), Quantising(kind))
    assert names_of(copy) == names_of(loaded) != {"dense"}
    torch.testing.assert_close(answer(copy), answer(loaded), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next", "nemotron_h", "lfm2", "gpt_oss"])
def test_copies_of_every_family_are_read(family, kind, saved, tmp_path):
    written = compress(saved(family), tmp_path / "copy", Quantising(kind))
    assert bool(written.fused) == (family == "gpt_oss")
    plain, found = answer(load(saved(family))), answer(load(tmp_path / "copy"))
    assert 0 < float((found - plain).norm() / plain.norm()) < (0.8 if kind == "int4" else 0.1)


def test_a_copy_in_several_files_has_an_index_and_the_tokenizer(saved, tmp_path):
    source = tmp_path / "given"
    source.mkdir()
    tensors = load_file(saved("lfm2") / "model.safetensors")
    names, files = sorted(tensors), {}
    for number in (0, 1):
        own = {name: tensors[name] for name in names[number::2]}
        save_file(own, source / f"model-{number}.safetensors")
        files |= dict.fromkeys(own, f"model-{number}.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (source / "config.json").write_text((saved("lfm2") / "config.json").read_text())
    (source / "tokenizer.json").write_text("{}")
    compress(source, tmp_path / "copy", Quantising("int8"))
    compress(saved("lfm2"), tmp_path / "whole", Quantising("int8"))
    assert (tmp_path / "copy" / "tokenizer.json").read_text() == "{}"
    assert torch.equal(answer(load(tmp_path / "copy")), answer(load(tmp_path / "whole")))


def test_nothing_is_left_of_a_copy_that_fails(saved, tmp_path):
    small, _ = quantise(saved("llama"), tmp_path, FP8["blocks"])
    with pytest.raises(ModelError, match="is quantised already; pass a checkpoint in 16 bits"):
        compress(small, tmp_path / "out" / "copy", Quantising("fp8"))
    file = saved("llama") / "model.safetensors"
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((saved("llama") / "config.json").read_text())
    (broken / "model.safetensors").write_bytes(file.read_bytes()[:-64])
    with pytest.raises(ModelError, match="cannot read"):
        compress(broken, tmp_path / "out" / "copy", Quantising("int4"))
    (tmp_path / "out").mkdir(exist_ok=True)
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(ModelError, match="exists already; pass a new folder"):
        compress(saved("llama"), broken, Quantising("int4"))


def test_the_command_writes_a_copy_and_says_what_is_wrong(saved, tmp_path, capsys):
    out = tmp_path / "copy"
    assert main(["convert", str(saved("lfm2")), str(out), "--quantize", "int4"]) == 0
    assert "matrices in int4" in capsys.readouterr().out
    assert load(out)
    assert main(["convert", str(saved("lfm2")), str(tmp_path / "other")]) == 2
    assert "or pass --quantize int4 or int8 or fp8 or mxfp4" in capsys.readouterr().err
    assert main(["convert", str(saved("lfm2")), str(tmp_path / "a.gguf"), "--quantize", "int4"]) == 2
    assert "--quantize int4 is for folders" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", TO)
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_transformers_reads_a_copy(family, kind, saved, tmp_path):
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    compress(saved(family), tmp_path / "copy", Quantising(kind))
    tokens = random_tokens(PROMPT, seed=1)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype=torch.float32).eval()
    # Blocks of MXFP4 become bfloat16, which holds all their numbers.
    oracle = oracle.float()
    with torch.no_grad():
        wanted = oracle(torch.tensor([tokens])).logits[0, -1]
    found = answer(load(tmp_path / "copy"))
    torch.testing.assert_close(found[-1] if found.ndim > 1 else found, wanted, rtol=2e-3, atol=2e-3)
