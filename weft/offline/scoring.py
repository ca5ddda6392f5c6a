"""Scores of documents for queries, by rerankers that answer with one of two words (Qwen3-Reranker).

The two words are scored as the next token of the same prompt, so a score is exact, not sampled. Prompts share their
instruction and query, and both words share all of it: the prefix cache computes each once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.base.errors import InvalidField, RequestError
from weft.offline.asking import AnyPrompt, Params
from weft.offline.result import Result
from weft.offline.sampling import GenerationParams
from weft.text.prompts import NO_TOKENIZER
from weft.text.tokenizer import Tokenizer

# What Qwen3-Reranker was trained with.
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class Score:
    """The probability of the first word against the second."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of one document. `num_cached_tokens` of its prompt were not computed again."""

    prompt_token_ids: list[int]
    outputs: Score
    num_cached_tokens: int


class Generating(Protocol):
    tokenizer: Tokenizer | None

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: Params,
        use_tqdm: bool,
        *,
        cache_salt: str | None,
    ) -> list[Result]: ...


def score(
    llm: Generating,
    queries: str | Sequence[str],
    documents: str | Sequence[str],
    use_tqdm: bool,
    instruction: str,
    answers: tuple[str, str],
    cache_salt: str | None,
) -> list[ScoringOutput]:
    if llm.tokenizer is None:
        raise RequestError(NO_TOKENIZER)
    tokenizer, words = llm.tokenizer, [word_of(llm.tokenizer, each) for each in answers]
    before, after = tokenizer.encode(BEFORE, special=False), tokenizer.encode(AFTER, special=False)
    bodies = [
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        for query, document in pairs_of(queries, documents)
    ]
    prompts = [[*before, *body, *after] for body in tokenizer.encode_all(bodies, special=False)]
    asked = [[*prompt, word] for prompt in prompts for word in words]
    params = [GenerationParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=len(each) - 2) for each in asked]
    results = llm.generate(asked, params, use_tqdm, cache_salt=cache_salt)
    return [
        ScoringOutput(prompt, Score(share(last_logprob(yes), last_logprob(no))), yes.cached_tokens)
        for prompt, yes, no in zip(prompts, results[::2], results[1::2], strict=True)
    ]


def pairs_of(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pair one query with all documents, or each of several with its own.

    >>> pairs_of("q", ["a", "b"])
    [('q', 'a'), ('q', 'b')]
    """
    several = [documents] if isinstance(documents, str) else list(documents)
    asking = [queries] * len(several) if isinstance(queries, str) else list(queries)
    asking = asking * len(several) if len(asking) == 1 else asking
    if len(asking) != len(several):
        raise InvalidField("queries", f"must be one, or as many as the {len(several)} documents; got {len(asking)}")
    if not all(isinstance(each, str) for each in (*asking, *several)):
        raise InvalidField("documents", "and queries must be strings")
    return list(zip(asking, several, strict=True))


def word_of(tokenizer: Tokenizer, word: str) -> int:
    tokens = tokenizer.encode(word, special=False)
    if len(tokens) != 1:
        raise InvalidField("answers", f"must be words of one token each; {word!r:.80} has {len(tokens)}")
    return tokens[0]


def last_logprob(result: Result) -> float:
    assert result.prompt_logprobs is not None
    last = result.prompt_logprobs[-1]
    assert last is not None
    return last.logprob


def share(yes: float, no: float) -> float:
    """Return the probability of one of two log-probabilities, whatever their size.

    >>> share(-1.0, -1.0), share(-800.0, 0.0)
    (0.5, 0.0)
    """
    least = math.exp(-abs(yes - no))
    return (1.0 if yes >= no else least) / (1.0 + least)
