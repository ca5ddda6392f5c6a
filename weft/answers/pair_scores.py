"""Scores of documents for queries, in three ways: by a class head, by embeddings, or by a word of the answer.

A reranker that answers with a word (Qwen3-Reranker) has two words scored as the next token of the same prompt, so a
score is exact, not sampled. Prompts share their instruction and query, and both words share all of it: the prefix cache
computes each once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from weft.answers.vectors import cosine, need_embeddings, probabilities, prompt_named, vector_of, vector_params
from weft.base.errors import InvalidField, RequestError
from weft.base.sampling import SamplingParams
from weft.base.vectors import VectorFacts
from weft.engine.events import Report
from weft.text.prompts import Tokens
from weft.text.tokenizer import Tokenizer

# What Qwen3-Reranker was trained with.
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
ANSWERS = ("yes", "no")
# Names of the prompts of queries and documents, the first that a model has.
QUERY_PROMPTS, DOCUMENT_PROMPTS = ("query", "search_query"), ("document", "passage", "search_document")

Pair = tuple[str, str]


class Way(StrEnum):
    """How a model scores pairs."""

    HEAD = "head"
    COSINE = "cosine"
    WORDS = "words"


def way_of(facts: VectorFacts) -> Way:
    if facts.unscored is not None:
        raise RequestError(f"this model scores nothing: {facts.unscored}")
    if facts.labels:
        if len(facts.labels) != 1:
            raise RequestError(f"this model's head has {len(facts.labels)} classes and does not score; use /classify")
        return Way.HEAD
    if facts.stated or not facts.generates:
        need_embeddings(facts)
        return Way.COSINE
    return Way.WORDS


@dataclass(frozen=True, slots=True)
class PairScore:
    """The score of a pair, the tokens of its prompt, and how many of them were cached."""

    score: float
    tokens: list[int]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PairScorer:
    """Scores pairs of a query and a document. `words` are the two answers of a model that scores by words."""

    facts: VectorFacts
    tokenizer: Tokenizer
    instruction: str = INSTRUCTION
    words: tuple[str, str] = ANSWERS
    way: Way = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "way", way_of(self.facts))

    def texts(self, pairs: Sequence[Pair]) -> list[list[int]]:
        """Return the prompts of pairs as token ids. For embeddings, queries come first: one if all are equal."""
        if self.way is Way.HEAD:
            return [self.tokenizer.encode_pair(*pair) for pair in pairs]
        if self.way is Way.COSINE:
            queries = [query for query, _ in pairs]
            texts = [
                self._prompt(QUERY_PROMPTS) + each for each in (queries[:1] if len(set(queries)) == 1 else queries)
            ]
            return self.tokenizer.encode_all(texts + [self._prompt(DOCUMENT_PROMPTS) + text for _, text in pairs])
        start, end = (self.tokenizer.encode(text, special=False) for text in (BEFORE, AFTER))
        bodies = [
            f"<Instruct>: {self.instruction}\n<Query>: {query}\n<Document>: {document}" for query, document in pairs
        ]
        return [[*start, *body, *end] for body in self.tokenizer.encode_all(bodies, special=False)]

    def asked(self, prompts: Sequence[Tokens]) -> list[tuple[Tokens, SamplingParams]]:
        """Return what to ask the engine for: one request or two for each prompt."""
        if self.way is not Way.WORDS:
            return [(prompt, vector_params(self.facts, len(prompt))) for prompt in prompts]
        ids = [word_of(self.tokenizer, each) for each in self.words]
        asked = [np.append(prompt, np.int32(word)).astype(np.int32) for prompt in prompts for word in ids]
        return [
            (each, SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=len(each) - 2))
            for each in asked
        ]

    def scores(self, count: int, prompts: Sequence[Tokens], reports: Sequence[Report]) -> list[PairScore]:
        """Return the scores of `count` pairs from the reports of the requests that were `asked`, in the same order."""
        if self.way is Way.COSINE:
            queries = len(prompts) - count
            vectors = [vector_of(report) for report in reports]
            found = [cosine(vectors[0 if queries == 1 else place], vectors[queries + place]) for place in range(count)]
            prompts, reports = prompts[queries:], reports[queries:]
        elif self.way is Way.HEAD:
            found = [probabilities(self.facts, vector_of(report))[0] for report in reports]
        else:
            found = [share(last_logprob(yes), last_logprob(no)) for yes, no in zip(reports[::2], reports[1::2])]
            reports = reports[::2]
        return [
            PairScore(score, prompt.tolist(), report.cached_tokens)
            for score, prompt, report in zip(found, prompts, reports, strict=True)
        ]

    def _prompt(self, names: Sequence[str]) -> str:
        return prompt_named(self.facts, next((name for name in names if name in self.facts.prompts), None))


def pairs_of(
    queries: str | Sequence[str], documents: str | Sequence[str], names: tuple[str, str] = ("queries", "documents")
) -> list[Pair]:
    """Pair one query with all documents, or each of several with its own.

    >>> pairs_of("q", ["a", "b"])
    [('q', 'a'), ('q', 'b')]
    """
    several = [documents] if isinstance(documents, str) else list(documents)
    asking = [queries] * len(several) if isinstance(queries, str) else list(queries)
    asking = asking * len(several) if len(asking) == 1 else asking
    if len(asking) != len(several):
        raise InvalidField(names[0], f"must be one, or as many as the {len(several)} {names[1]}; got {len(asking)}")
    if not all(isinstance(each, str) for each in (*asking, *several)):
        raise InvalidField(names[1], f"and {names[0]} must be strings")
    return list(zip(asking, several, strict=True))


def word_of(tokenizer: Tokenizer, word: str) -> int:
    tokens = tokenizer.encode(word, special=False)
    if len(tokens) != 1:
        raise InvalidField("answers", f"must be words of one token each; {word!r:.80} has {len(tokens)}")
    return tokens[0]


def last_logprob(report: Report) -> float:
    [last] = report.prompt_scores
    return last.logprob


def share(yes: float, no: float) -> float:
    """Return the probability of one of two log-probabilities, whatever their size.

    >>> share(-1.0, -1.0), share(-800.0, 0.0)
    (0.5, 0.0)
    """
    least = math.exp(-abs(yes - no))
    return (1.0 if yes >= no else least) / (1.0 + least)
