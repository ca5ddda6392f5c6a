"""Files that `weft convert` writes, read by llama.cpp: the same answers, and in float32 the same probabilities."""

from __future__ import annotations

import pytest

from tests.support.models import llama_cpp
from tests.support.models.engines import TINY
from tests.support.models.llama_cpp_cases import ABORTS, CASES, check_greedy, closeness, logits, tolerance
from tests.support.models.oracle import Oracle, random_tokens
from weft.cli.main import main
from weft.models.gguf.exported_keys import ARCHITECTURES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(llama_cpp.absent("xllamacpp")), reason="pip install --no-deps xllamacpp"),
]

LONG = {
    "rope_type": "llama3",
    "rope_theta": 30000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
WRITTEN = {
    name: case for name, case in CASES.items() if TINY[case[0]].model_class in ARCHITECTURES and name not in ABORTS
} | {
    "llama, stretched": ("llama", CASES["llama"][1] | {"rope_parameters": LONG}),
    "gemma3, bounded logits": ("gemma3", CASES["gemma3"][1] | {"final_logit_softcapping": 3.0}),
    "gemma3, one window for each layer without": (
        "gemma3",
        CASES["gemma3"][1] | {"layer_types": ["sliding_attention", "full_attention"] * 3},
    ),
}


@pytest.fixture(scope="module", params=WRITTEN)
def case(request, tmp_path_factory):
    family, changes = WRITTEN[request.param]
    found = tmp_path_factory.mktemp("written") / "model"
    Oracle(TINY[family].variant(**changes)).save(found)
    llama_cpp.save_tokenizer(found)
    return request.param, found


def test_every_family_that_is_written_has_a_case():
    assert {TINY[family].model_class for family, _ in WRITTEN.values()} == {
        name for name in ARCHITECTURES if "ConditionalGeneration" not in name
    }


@pytest.mark.parametrize("kind", ["off", "q8_0", "q4_k"])
def test_llama_cpp_answers_from_a_written_file_as_weft_does(case, kind, tmp_path):
    name, folder = case
    file, tokens = tmp_path / "model.gguf", random_tokens(70, seed=5)
    assert main(["convert", str(folder), str(file), "--quantize", kind]) == 0
    if kind == "off":
        check_greedy(file, tokens, closeness(name), close=closeness(name))
    else:
        # Both round activations, in blocks of different sizes.
        check_greedy(file, tokens, tolerance(name, float(logits(file, tokens).std())))
