"""Embeddings and classes: what to ask the engine for, and what its vectors mean. For HTTP and for `LLM`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weft.base.errors import InvalidField, RequestError
from weft.base.grid import CELL
from weft.base.sampling import SamplingParams
from weft.base.vectors import Pooling, ScoreFunction, VectorFacts
from weft.engine.events import Report
from weft.text.tokenizer import Tokenizer

Vector = NDArray[np.float32]


def need_embeddings(facts: VectorFacts) -> None:
    """Raise if a model has no embeddings."""
    if facts.refused is not None:
        raise RequestError(f"this model's embeddings are not supported: {facts.refused}")
    if facts.labels:
        raise RequestError("this model has a class head and no embeddings; use /v1/score, /v1/rerank or /classify")


def need_classes(facts: VectorFacts) -> None:
    """Raise if a model has no class head."""
    if not facts.labels:
        raise RequestError("this model has no class head; use one whose architecture is named SequenceClassification")


def capabilities(facts: VectorFacts) -> list[str]:
    """Return what a model can be asked for.

    >>> capabilities(VectorFacts(8)), capabilities(VectorFacts(1, generates=False, labels=("a",)))
    (['generation', 'embeddings', 'scores'], ['classes', 'scores'])
    """
    found = ["generation"] if facts.generates else []
    found += ["classes"] if facts.labels else ["embeddings"] if facts.refused is None else []
    scores = len(facts.labels) == 1 or (not facts.labels and (facts.refused is None or not facts.stated))
    scores = scores and facts.unscored is None
    return [*found, *(["scores"] if scores else [])]


def prompt_named(facts: VectorFacts, name: str | None, field: str = "prompt_name") -> str:
    """Return the text to put before a text: the prompt of this name, or the model's default, or nothing."""
    chosen = facts.default_prompt if name is None else name
    if chosen is None:
        return ""
    if chosen not in facts.prompts:
        known = ", ".join(sorted(facts.prompts)) or "none"
        raise InvalidField(field, f"must be one of the model's prompts ({known}), got {chosen!r:.80}")
    return facts.prompts[chosen]


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> int:
    """Return how many tokens of a text are those of the prompt that it begins with."""
    if not prompt:
        return 0
    tokens = tokenizer.encode(prompt)
    return len(tokens) - (tokens[-1] in tokenizer.vocabulary.special)


def snapshot_of(tokens: int, length: int) -> tuple[int, ...]:
    """Return the position after a prompt of `tokens` tokens that is worth keeping, if it fills a cell."""
    return (min(tokens, length),) if tokens >= CELL else ()


def vector_params(facts: VectorFacts, length: int, before: int = 0) -> SamplingParams:
    """Return the parameters that ask for the vector of a text of `length` tokens, of which `before` are a prompt's."""
    first = length - 1
    if not facts.labels and facts.pooling is Pooling.MEAN:
        first = 0 if facts.counts_prompts else min(before, first)
    return SamplingParams(max_tokens=0, vector_from=first)


def check_dimensions(facts: VectorFacts, dimensions: int | None, field: str = "dimensions") -> None:
    if dimensions is not None and not 1 <= dimensions <= facts.size:
        raise InvalidField(field, f"must be from 1 to {facts.size}, the size of this model's vectors, got {dimensions}")


def vector_of(report: Report) -> Vector:
    """Return what an engine has computed for a request that has ended."""
    mean = report.vector.mean
    if mean is None:
        raise RequestError("the engine returned no vector", 503)
    return mean


def embedding(
    facts: VectorFacts, vector: Vector, dimensions: int | None = None, normalise: bool | None = None
) -> Vector:
    """Return an embedding: the first `dimensions` of a vector, with length one if the model or the caller says so."""
    found = vector[:dimensions]
    return normalised(found) if (facts.normalises if normalise is None else normalise) else found


def normalised(vector: Vector) -> Vector:
    """
    >>> normalised(np.array([3, 4], np.float32)).tolist(), normalised(np.zeros(1, np.float32)).tolist()
    ([0.6000000238418579, 0.800000011920929], [0.0])
    """
    wide = vector.astype(np.float64)
    return (wide / max(float(np.sqrt(wide @ wide)), 1e-12)).astype(np.float32)


def probabilities(facts: VectorFacts, logits: Vector) -> list[float]:
    """Return the scores of the classes.

    >>> facts = VectorFacts(2, labels=("a", "b"), activation=ScoreFunction.SOFTMAX)
    >>> probabilities(facts, np.array([1, 1], np.float32))
    [0.5, 0.5]
    """
    wide = logits.astype(np.float64)
    if facts.activation is ScoreFunction.SOFTMAX:
        powers = np.exp(wide - wide.max())
        wide = powers / powers.sum()
    elif facts.activation is ScoreFunction.SIGMOID:
        # Neither power overflows.
        wide = np.exp(np.minimum(wide, 0)) / (1 + np.exp(-np.abs(wide)))
    return [float(each) for each in wide]


def cosine(first: Vector, second: Vector) -> float:
    return float(normalised(first).astype(np.float64) @ normalised(second).astype(np.float64))


def cached_tokens(reports: Sequence[Report]) -> int:
    return sum(report.cached_tokens for report in reports)
