"""What a model's vectors are: embeddings of texts, or the scores of a class head. Every server of a model knows it."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Pooling(StrEnum):
    """Which final hidden states make an embedding."""

    LAST = "last"
    MEAN = "mean"


class ScoreFunction(StrEnum):
    """What makes a score of the output of a class head."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


class VectorFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """`size` is that of a vector, `labels` are the names of its numbers if they are those of a class head.

    `prompts` are texts, by name, that a text may follow; a mean counts their tokens if it `counts_prompts`. `stated`:
    the checkpoint says how embeddings are made. `refused` is why this model has none, `unscored` why it scores nothing.
    """

    size: int
    generates: bool = True  # whether it has a head over the vocabulary
    labels: tuple[str, ...] = ()
    activation: ScoreFunction = ScoreFunction.NONE
    pooling: Pooling = Pooling.LAST
    normalises: bool = True
    counts_prompts: bool = True
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    stated: bool = False
    refused: str | None = None
    unscored: str | None = None
