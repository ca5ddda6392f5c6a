"""Scores of documents for queries, as `LLM` and `AsyncLLM` return them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Score:
    """How well a document answers a query."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of one document. `num_cached_tokens` of its prompt were not computed again."""

    prompt_token_ids: list[int]
    outputs: Score
    num_cached_tokens: int
