"""Responses about vectors, in the forms of OpenAI's, vLLM's, Cohere's, Jina's and Ollama's clients."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec

from weft.answers.vectors import Vector
from weft.server.access.rates import Used
from weft.server.front import Front, new_name

Object = dict[str, Any]


class VectorUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, int]


class EmbeddingItem(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[EmbeddingItem]
    model: str
    usage: VectorUsage


class ScoreItem(msgspec.Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ScoreItem]
    usage: VectorUsage


class ClassItem(msgspec.Struct, kw_only=True):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassAnswer(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ClassItem]
    usage: VectorUsage


class RankedDocument(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RerankAnswer(msgspec.Struct, kw_only=True):
    """`usage` is Jina's and vLLM's, `meta` is Cohere's."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: VectorUsage
    meta: Object


def usage_of(used: Used) -> VectorUsage:
    return VectorUsage(
        prompt_tokens=used.prompt,
        total_tokens=used.prompt,
        prompt_tokens_details={"cached_tokens": used.cached},
    )


def embeddings(front: Front, found: Sequence[Vector], used: Used, is_base64: bool) -> EmbeddingAnswer:
    shown = [b64encode(each.astype("<f4").tobytes()).decode() if is_base64 else each.tolist() for each in found]
    data = [EmbeddingItem(index=place, embedding=each) for place, each in enumerate(shown)]
    return EmbeddingAnswer(data=data, model=front.model_name, usage=usage_of(used))


def scores(front: Front, found: Sequence[float], used: Used) -> ScoreAnswer:
    data = [ScoreItem(index=place, score=score) for place, score in enumerate(found)]
    return ScoreAnswer(**heading(front, "score-"), data=data, usage=usage_of(used))


def classes(front: Front, found: Sequence[Sequence[float]], labels: Sequence[str], used: Used) -> ClassAnswer:
    data = [
        ClassItem(index=place, label=labels[probs.index(max(probs))], probs=list(probs), num_classes=len(probs))
        for place, probs in enumerate(found)
    ]
    return ClassAnswer(**heading(front, "classify-"), data=data, usage=usage_of(used))


def ranking(
    front: Front, found: Sequence[float], documents: Sequence[str] | None, most: int | None, used: Used
) -> RerankAnswer:
    """Return the best documents first; of equal ones, the first."""
    order = sorted(range(len(found)), key=lambda place: -found[place])[:most]
    results = [
        RankedDocument(
            index=place,
            relevance_score=found[place],
            document=None if documents is None else {"text": documents[place]},
        )
        for place in order
    ]
    meta = {"api_version": {"version": "2"}, "tokens": {"input_tokens": used.prompt}}
    return RerankAnswer(
        id=new_name("rerank-"), model=front.model_name, results=results, usage=usage_of(used), meta=meta
    )


def heading(front: Front, prefix: str) -> Object:
    return {"id": new_name(prefix), "created": int(time.time()), "model": front.model_name}
