"""Every family from a GGUF file: the tensors of the checkpoint that it was made from, and quantised ones as stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.kernels.operations import CPU, PLAIN
from tests.support.models.engines import TINY
from tests.support.models.gguf_files import convert, names_of, widened
from tests.support.models.oracle import DirectRunner, Oracle, random_tokens
from weft import LLM, SamplingParams
from weft.kernels.choosing import rounding
from weft.kernels.formats.rounded import INTEGERS
from weft.models.identity import revisions_of, rows_in
from weft.models.model import MatrixLayer
from weft.models.weights import load_model

FAMILIES = [
    "llama", "mistral", "qwen3", "qwen3_moe", "lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma3",
    "qwen2", "phi3", "smollm3", "olmo2", "olmo3", "gemma2", "gpt_oss", "granite_moe_hybrid", "nemotron_h",
    "kimi_linear",
]  # fmt: skip
# What changes in a tiny model so that blocks of 256 fit.
WIDE = {"hidden_size": 256, "intermediate_size": 256}
MIXED = {
    "llama": WIDE,
    "lfm2": WIDE,
    "qwen3_5": WIDE | {"linear_value_head_dim": 64},
    "granite_moe_hybrid": WIDE | {"shared_intermediate_size": 256, "mamba_n_heads": 16, "mamba_d_head": 32},
    "gpt_oss": WIDE,
    "lfm2_moe": WIDE | {"moe_intermediate_size": 256},
}
K_TYPES = ("Q4_K", "Q6_K", "Q5_K", "Q8_0", "Q3_K", "Q2_K", "IQ4_XS", "BF16")
SMALL_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "F16")


# What files leave to the program: the scale of queries is that of the size of a head.
STATED = {"gemma2": {"query_pre_attn_scalar": 32}, "gemma3": {"query_pre_attn_scalar": 32}}


GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)


def saved(family: str, folder: Path, **changes: object) -> Path:
    return Oracle(TINY[family].variant(**STATED.get(family, {}), **changes)).save(folder / family)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_in_float32_is_the_checkpoint_that_it_was_made_from(family, tmp_path):
    folder = saved(family, tmp_path)
    expected, _ = load_model(folder, torch.float32, progress=False)
    found, _ = load_model(convert(folder, tmp_path / "model.gguf"), torch.float32, progress=False)
    ours, theirs = dict(found.state_dict()), dict(expected.state_dict())
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        # The rate of decay is a logarithm that was undone.
        exact = "A_log" not in name
        assert exact or (ours[name] - tensor).abs().max() < 1e-6
        assert not exact or torch.equal(ours[name], tensor), name
    tokens = random_tokens(70, seed=2)
    for own, other in zip(logits(found, tokens), logits(expected, tokens)):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_a_file_whose_factors_are_folded_computes_what_the_checkpoint_does(tmp_path):
    folder = saved("falcon_h1", tmp_path)
    found, _ = load_model(convert(folder, tmp_path / "model.gguf"), torch.float32, progress=False)
    expected, _ = load_model(folder, torch.float32, progress=False)
    tokens = random_tokens(70, seed=2)
    for own, other in zip(logits(found, tokens), logits(expected, tokens)):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def logits(model, tokens, operations=CPU):
    runner = DirectRunner(model, operations=operations)
    sequence = runner.open(tokens)
    return runner.step([(sequence, len(tokens))])


@pytest.mark.parametrize("types", [K_TYPES, SMALL_TYPES], ids=["blocks of 256", "blocks of 32"])
@pytest.mark.parametrize("family", MIXED)
def test_a_mixture_of_types_computes_what_its_numbers_do(family, types, tmp_path):
    folder = saved(family, tmp_path, **MIXED[family])
    file = convert(folder, tmp_path / "small.gguf", names_of(types))
    tokens = random_tokens(70, seed=3)
    wide, _ = load_model(widened(file, tmp_path / "wide.gguf"), torch.float32, progress=False, operations=PLAIN)
    [expected] = logits(wide, tokens, PLAIN)
    for operations in (PLAIN, CPU):
        small, _ = load_model(file, torch.float32, progress=False, operations=operations)
        parts = [part for layer in small.modules() if isinstance(layer, MatrixLayer) for part in layer.stored_parts()]
        assert len({part.format.name for part in parts}) > 3
        [found] = logits(small, tokens, operations)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    rounded, _ = load_model(file, torch.float32, progress=False, operations=rounding(CPU, {INTEGERS}))
    [found] = logits(rounded, tokens, rounding(CPU, {INTEGERS}))
    # Rounded scores may choose another expert.
    assert 0 < (found - expected).norm() / expected.norm() < (0.5 if "moe" in family or family == "gpt_oss" else 0.15)
    assert rows_in(rounded) == {INTEGERS}
    assert not rows_in(small)
    assert revisions_of(rounded) == f"{revisions_of(small)}, rows of integers 1"


def test_rows_are_rounded_unless_an_option_says_otherwise(tmp_path):
    file = convert(saved("llama", tmp_path, **WIDE), tmp_path / "small.gguf", names_of(K_TYPES))
    settings = {"memory": "32MiB", "threads": 1, "max_length": 256, "progress": False}
    with LLM(str(file), **settings) as llm:
        assert llm.config.revisions.endswith("rows of integers 1")
        [default] = llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
    with LLM(str(file), activations="wide", **settings) as llm:
        assert "integers" not in llm.config.revisions
        [wide] = llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
    assert default.logprobs[0].logprob != wide.logprobs[0].logprob
    assert abs(default.logprobs[0].logprob - wide.logprobs[0].logprob) < 0.5
