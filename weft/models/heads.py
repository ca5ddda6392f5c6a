"""Checkpoints without a head over the vocabulary: those with a class head, and those with none, for embeddings.

Both are a causal model's decoder. Names of architectures say which: `Qwen3ForSequenceClassification`, `Qwen3Model`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from weft.base.errors import ModelError
from weft.models.config import shown
from weft.models.layers.linear import Linear
from weft.models.model import CausalModel

MOST_LABELS = 4096
MOST_LABEL_CHARACTERS = 256
# How configurations say that the embedding is also the head.
TIES = ("tie_word_embeddings", "tie_embedding")
ENDS = re.compile(r"(?P<family>\w+?)(Text)?(?P<end>ForSequenceClassification|Model)")


class HeadKind(StrEnum):
    VOCABULARY = "vocabulary"
    CLASSES = "classes"
    NONE = "none"


def causal_name(architecture: str) -> tuple[str, HeadKind]:
    """Return the architecture with a head over the vocabulary that an architecture shares its decoder with.

    >>> [causal_name(name)[0] for name in ("Gemma3TextModel", "Qwen3ForSequenceClassification", "Lfm2ForCausalLM")]
    ['Gemma3ForCausalLM', 'Qwen3ForCausalLM', 'Lfm2ForCausalLM']
    """
    found = ENDS.fullmatch(architecture)
    if found is None:
        return architecture, HeadKind.VOCABULARY
    return f"{found['family']}ForCausalLM", HeadKind.NONE if found["end"] == "Model" else HeadKind.CLASSES


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes. Transformers leaves them out if there are two without names."""
    stated = config.get("id2label")
    if stated is None:
        count = config.get("num_labels", 2)
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_LABELS:
            raise ModelError(f"config.json: num_labels must be from 1 to {MOST_LABELS}, got {shown(count)}")
        return tuple(f"LABEL_{number}" for number in range(count))
    if not isinstance(stated, Mapping) or not 1 <= len(stated) <= MOST_LABELS:
        raise ModelError(f"config.json: id2label must name 1 to {MOST_LABELS} classes, got {shown(stated)}")
    names = [stated.get(str(number)) for number in range(len(stated))]
    if not all(isinstance(name, str) and len(name) <= MOST_LABEL_CHARACTERS for name in names):
        raise ModelError(f"config.json: id2label must map 0, 1, ... to names, got {shown(stated)}")
    return tuple(map(str, names))


def without_vocabulary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the decoder alone: no weights of a head are expected."""
    return {**config, **{name: True for name in TIES if name in config or name == TIES[0]}}


def add_head(model: CausalModel, head: HeadKind, config: Mapping[str, Any]) -> None:
    """Give a decoder its class head, if it has one. Its outputs are whole on every rank."""
    model.generates = head is HeadKind.VOCABULARY
    if head is HeadKind.CLASSES:
        model.score = Linear(config["hidden_size"], len(labels_of(config)))
