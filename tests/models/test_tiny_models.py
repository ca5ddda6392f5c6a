"""The tiny models of the tests: answers follow from their layers, so that comparing answers can fail.

A model whose likeliest token is nearly certain, or does not depend on some layer, agrees with any implementation of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.support.models.engines import FAMILIES, TINY, dummy_model
from tests.support.models.oracle import DirectRunner, Oracle, random_tokens
from weft.models import registry

LARGEST_MEAN_PROBABILITY = 0.3
PROMPT = random_tokens(86, seed=3)
# Of the prompt, at its end, the number of beginnings whose next token is looked at.
CHOICES = 16
Logits = Callable[[list[int]], Tensor]


def dummy_logits(model: nn.Module) -> Logits:
    def logits(tokens: list[int]) -> Tensor:
        runner = DirectRunner(model)
        return runner.step([(runner.open(tokens), len(tokens))])[0]

    return logits


def mean_top_probability(logits: Logits) -> float:
    return float(logits(PROMPT).softmax(-1).amax(-1).mean())


def greedy_choices(logits: Logits) -> list[int]:
    """The likeliest tokens after several beginnings of the prompt, in one pass."""
    return logits(PROMPT)[-CHOICES:].argmax(-1).tolist()


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every decoder layer; an image encoder has no part in answers about text."""
    for name, layers in model.named_modules():
        if name.endswith("layers") and "vision" not in name and "visual" not in name:
            yield from ((f"{name}.{number}", layer) for number, layer in enumerate(layers))


@torch.no_grad()
def layers_without_effect(model: nn.Module, logits: Logits) -> list[str]:
    """The layers whose matrices can be drawn anew without a change of a greedy choice."""
    choices, silent = greedy_choices(logits), []
    generator = torch.Generator().manual_seed(1)
    for name, layer in layers_of(model):
        matrices = [parameter for parameter in layer.parameters() if parameter.ndim >= 2]
        before = [matrix.clone() for matrix in matrices]
        for matrix in matrices:
            matrix.copy_(torch.randn(matrix.shape, generator=generator) * matrix.std())
        if greedy_choices(logits) == choices:
            silent.append(name)
        for matrix, kept in zip(matrices, before, strict=True):
            matrix.copy_(kept)
    assert greedy_choices(logits) == choices, "the layers have their own matrices again, so choices must be the first"
    return silent


def test_every_architecture_has_a_tiny_model():
    assert {tiny.model_class for tiny in TINY.values()} == set(registry.FAMILIES)


@pytest.mark.parametrize("name", TINY)
def test_every_layer_decides_a_tiny_models_answer_and_no_token_is_certain(name):
    oracle = Oracle(TINY[name])
    assert mean_top_probability(oracle.logits) < LARGEST_MEAN_PROBABILITY
    assert layers_without_effect(oracle.model, oracle.logits) == []


@pytest.mark.parametrize("name", [*FAMILIES, *(name for name in TINY if ", tied" in name)])
def test_every_layer_decides_a_dummy_models_answer_and_no_token_is_certain(name):
    model = dummy_model(TINY[name])
    assert mean_top_probability(dummy_logits(model)) < LARGEST_MEAN_PROBABILITY
    assert layers_without_effect(model, dummy_logits(model)) == []
