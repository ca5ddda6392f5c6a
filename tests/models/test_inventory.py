"""What weights take in memory: by format, and by what one token reads."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch

from tests.support.kernels.operations import PLAIN
from tests.support.models.engines import FAMILIES
from tests.support.models.oracle import config_of
from weft.base.options import Options
from weft.cli.main import main
from weft.fleet.totals import difference
from weft.kernels.formats.quantising import AS_STORED, Quantising
from weft.models import configurations
from weft.models.shapes import shape_of
from weft.models.weights import load_model
from weft.start.engine_process import load_engine

FP8 = Quantising("fp8")


def saved(family: str, folder) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(config_of(FAMILIES[family])))
    return file


@pytest.mark.parametrize("quantising", [AS_STORED, FP8])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "nemotron_h", "lfm2", "gpt_oss", "kimi_linear"])
def test_what_a_configuration_promises_is_what_a_loaded_model_takes(family, quantising, tmp_path):
    file = saved(family, tmp_path)
    model, _ = load_model(
        file, torch.bfloat16, progress=False, weights="dummy", operations=PLAIN, quantising=quantising
    )
    planned = shape_of(file, quantising).weights
    # Other orders of outputs repeat a few scales.
    assert model.held.bytes == pytest.approx(planned.bytes, rel=0.02)
    assert model.held.decode_bytes == pytest.approx(planned.decode_bytes, rel=0.02)
    assert model.held.total == sum(each.numel() * each.element_size() for each in model.parameters())
    assert ("fp8" in planned.bytes) == (quantising is FP8)


def test_one_token_reads_its_experts_and_no_embedding(tmp_path):
    tiny = FAMILIES["qwen3_5_moe"]
    file = saved("qwen3_5_moe", tmp_path)
    model, config = load_model(file, torch.bfloat16, progress=False, weights="dummy", operations=PLAIN)
    sizes = {name: each.numel() * each.element_size() for name, each in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    chosen, among = config["num_experts_per_tok"], config["num_experts"]
    assert 0 < chosen < among
    read = model.held.total - experts * (among - chosen) // among - sizes["model.embed_tokens.weight"]
    assert model.held.decode_bytes == read, tiny


def test_published_sizes_are_those_of_the_published_files():
    """Files of gpt-oss-20b have 13.76 GB, and 4-bit experts among 16-bit numbers."""
    [row] = [
        model
        for family in models("--quantize", "off")["families"]
        for model in family["models"]
        if model["name"] == "gpt-oss-20b"
    ]
    assert row["weights_bytes"] == pytest.approx(13.76e9, rel=0.003)
    assert set(row["weights_by_format"]) == {"mxfp4", "bfloat16"}
    wide, small = (shape_of(configurations.find("qwen3.5-35b-a3b"), each).weights for each in (AS_STORED, FP8))
    # Published: 8.57 bits for each number, of which Weft leaves out vision and the MTP head.
    assert 8.1 < 16 * small.total / wide.total < 8.6
    assert small.decode_bytes < 0.6 * wide.decode_bytes


def models(*arguments: str) -> dict:
    with redirect_stdout(StringIO()) as text:
        assert main(["models", "--json", *arguments]) == 0
    return json.loads(text.getvalue())


@pytest.mark.thorough
def test_sizes_of_quantised_models_come_with_their_command():
    rows = {model["name"]: model for family in models("--quantize", "fp8")["families"] for model in family["models"]}
    assert rows["qwen3.5-9b"]["command"].endswith(" --quantize fp8")
    assert rows["qwen3.5-9b"]["weights_by_format"]["fp8"] > rows["qwen3.5-9b"]["weights_by_format"]["bfloat16"]
    assert not rows["gpt-oss-20b"]["command"].endswith("fp8")


def test_doctor_says_formats_and_the_floor(tmp_path, capsys):
    file = saved("qwen3_5", tmp_path)
    options = ["--weights", "dummy", "--memory", "8MiB", "--max-length", "640", "--quantize", "fp8", "--no-self-test"]
    assert main(["doctor", str(file), *options]) == 0
    text = capsys.readouterr().out
    [weights] = [line for line in text.splitlines() if line.startswith("  weights:") and "GB" in line]
    assert " fp8" in weights
    assert " float32" in weights
    assert "GB read per token: " in text
    assert "fp8, as given" in text


def test_replicas_that_quantise_differently_are_not_one_fleet(tmp_path):
    file = saved("llama", tmp_path)
    infos = []
    for quantize in ("off", "fp8"):
        options = Options(model=str(file), weights="dummy", memory="8MiB", quantize=quantize)
        engine, info = load_engine(options, progress=False)
        engine.close()
        infos.append(info)
    held = [info.settings["weights"] for info in infos]
    assert ["fp8" in each["bytes"] for each in held] == [False, True]
    assert all(0 < each["decode_bytes"] < sum(each["bytes"].values()) for each in held)
    assert difference(infos[0], infos[0]) is None
    assert difference(infos[0], infos[1]) == "quantize is 'fp8' instead of None"
