"""Embeddings and classes of texts, as `LLM` and `AsyncLLM` return them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.answers.pair_scores import Pair, PairScorer
from weft.answers.vectors import (
    check_dimensions,
    embedding,
    need_classes,
    need_embeddings,
    probabilities,
    prompt_named,
    prompt_tokens,
    snapshot_of,
    vector_of,
    vector_params,
)
from weft.base.errors import InvalidField, RequestError
from weft.base.sampling import SamplingParams
from weft.base.vectors import VectorFacts
from weft.engine.events import Report
from weft.offline.scoring import Score, ScoringOutput
from weft.text.prompts import NO_TOKENIZER, Prompt, Tokens, as_list, encode_prompts
from weft.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EmbeddingVector:
    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one text. `num_cached_tokens` of it were not computed again."""

    prompt_token_ids: list[int]
    outputs: EmbeddingVector
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Classes:
    """The probability of each class, and the name of the likeliest one."""

    probs: list[float]
    label: str


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The classes of one text. `num_cached_tokens` of it were not computed again."""

    prompt_token_ids: list[int]
    outputs: Classes
    num_cached_tokens: int


class AskedVector(NamedTuple):
    """One request to the engine."""

    tokens: Tokens
    params: SamplingParams
    snapshots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VectorCalls:
    """Turns calls into requests, and what the engine reports of these into results."""

    facts: VectorFacts
    tokenizer: Tokenizer | None
    vocab_size: int

    def texts(
        self, prompts: Prompt | Sequence[Prompt], dimensions: int | None, prompt_name: str | None
    ) -> list[AskedVector]:
        """Return what to ask for embeddings of texts, after the prompt of this name."""
        need_embeddings(self.facts)
        check_dimensions(self.facts, dimensions)
        before, listed = prompt_named(self.facts, prompt_name), as_list(prompts)
        if prompt_name is not None and not all(isinstance(each, str) for each in listed):
            raise InvalidField("prompt_name", "goes before texts; put its tokens before token ids yourself")
        count = prompt_tokens(self.known_tokenizer, before) if before else 0
        return [
            AskedVector(tokens, vector_params(self.facts, len(tokens), own), snapshot_of(own, len(tokens)))
            for tokens, own in self._encoded(listed, before, count)
        ]

    def classes(self, prompts: Prompt | Sequence[Prompt]) -> list[AskedVector]:
        need_classes(self.facts)
        return [
            AskedVector(tokens, vector_params(self.facts, len(tokens)))
            for tokens, _ in self._encoded(as_list(prompts), "", 0)
        ]

    def pairs(self, scorer: PairScorer, pairs: Sequence[Pair]) -> tuple[list[Tokens], list[AskedVector]]:
        """Return the prompts of pairs, and what to ask to score them."""
        prompts = encode_prompts(scorer.texts(pairs), self.tokenizer, self.vocab_size)
        return prompts, [AskedVector(*each) for each in scorer.asked(prompts)]

    @property
    def known_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(NO_TOKENIZER)
        return self.tokenizer

    def _encoded(self, prompts: Sequence[Prompt], before: str, count: int) -> list[tuple[Tokens, int]]:
        """Return the tokens of texts, and how many of them are those of the prompt before."""
        whole = [before + each if isinstance(each, str) else each for each in prompts]
        tokens = encode_prompts(whole, self.tokenizer, self.vocab_size)
        return [(own, count if isinstance(each, str) else 0) for own, each in zip(tokens, prompts, strict=True)]

    def embedded(
        self, asked: Sequence[AskedVector], reports: Sequence[Report], dimensions: int | None
    ) -> list[EmbeddingOutput]:
        return [
            EmbeddingOutput(
                each.tokens.tolist(),
                EmbeddingVector(embedding(self.facts, vector_of(report), dimensions).tolist()),
                report.cached_tokens,
            )
            for each, report in zip(asked, reports, strict=True)
        ]

    def classified(self, asked: Sequence[AskedVector], reports: Sequence[Report]) -> list[ClassificationOutput]:
        found = [probabilities(self.facts, vector_of(report)) for report in reports]
        return [
            ClassificationOutput(
                each.tokens.tolist(),
                Classes(probs, self.facts.labels[probs.index(max(probs))]),
                report.cached_tokens,
            )
            for each, probs, report in zip(asked, found, reports, strict=True)
        ]


def scored(scorer: PairScorer, count: int, prompts: Sequence[Tokens], reports: Sequence[Report]) -> list[ScoringOutput]:
    return [
        ScoringOutput(each.tokens, Score(each.score), each.cached_tokens)
        for each in scorer.scores(count, prompts, reports)
    ]
