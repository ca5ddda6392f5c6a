"""The MTP head of the model that comes with Weft: its guesses, and that it changes no answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.support.drafting.mtp import engine_in
from tests.support.models.engines import Ask, greedy, serve
from tests.support.models.mtp_oracle import Checkpoint
from weft import builtin
from weft.base.options import Options
from weft.start.loading import chosen_draft
from weft.text.tokenizer import load_tokenizer

QUESTIONS = ("Tell me a short story about a fox.", "What is an umbrella for?", "Count from 3 to 12.")
MEMORY = 64 << 20
# 27 of 51 guesses are right. Luck would find one in thousands.
LEAST = 0.4


@pytest.fixture(scope="module")
def served():
    """An engine that has drafted in every step of three greedy answers, and those answers."""
    tokenizer = load_tokenizer(builtin.FOLDER)
    prompts = [tokenizer.encode(f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n") for said in QUESTIONS]
    asks = [Ask(prompt, greedy(40)) for prompt in prompts]
    engine = engine_in(builtin.FOLDER, MEMORY, MEMORY)
    return engine, [ask.prompt + found.tokens for ask, found in zip(asks, serve(engine, asks))], prompts


@pytest.fixture(scope="module")
def oracle():
    """The head in a few lines of PyTorch, beside the public implementation of the model."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(builtin.FOLDER, dtype=torch.float32).eval()
    head = {name: tensor.float() for name, tensor in load_file(builtin.FOLDER / "mtp.safetensors").items()}
    return Checkpoint(SimpleNamespace(model=model), builtin.FOLDER, head)


def test_auto_means_the_head_on_a_gpu():
    options = Options(draft="auto")
    assert [chosen_draft(options, builtin.FOLDER, device)[0] for device in ("cuda", "cpu")] == ["mtp", "suffix"]


@pytest.mark.thorough
@torch.no_grad()
def test_answers_are_those_of_the_model(served, oracle):
    _, texts, prompts = served
    for text, prompt in zip(texts, prompts):
        logits = oracle.oracle.model(input_ids=torch.tensor([text[:-1]]), use_cache=False).logits[0]
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == text[len(prompt) :]


@pytest.mark.thorough
def test_guesses_are_those_of_a_plain_implementation(served, oracle):
    seen = served[0].planner.drafts.model.seen
    assert len(seen) >= 20
    for text, drafts, _ in seen[:: len(seen) // 8]:
        assert drafts == oracle.drafts(text, len(drafts)), f"after {len(text)} tokens"


def test_guesses_are_mostly_what_the_model_says(served):
    counts = served[0].planner.drafting.counts
    proposed, accepted = counts.proposed["mtp", 1], counts.accepted["mtp", 1]
    assert proposed >= 20
    assert accepted >= LEAST * proposed, f"{accepted} of {proposed}"
