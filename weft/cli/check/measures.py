"""Answers and scores of built-in texts by one engine, and what their differences amount to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, fsum
from typing import TYPE_CHECKING

from weft.base.sampling import SamplingParams
from weft.cli.check.texts import TEXTS

if TYPE_CHECKING:
    from weft.offline.llm import LLM
    from weft.offline.result import Result

# Sampled tokens of an answer, and tokens of a text without a tokenizer.
ANSWER, DRAWN = 32, 200
SAMPLED = SamplingParams(max_tokens=ANSWER, logprobs=0, seed=1, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Measure:
    """One check. `found` must be at most `limit`; without a limit it is only reported."""

    name: str
    found: float
    limit: float | None
    detail: str = ""

    @property
    def is_wrong(self) -> bool:
        # Written so that a number that is none is wrong.
        return self.limit is not None and not self.found <= self.limit


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A check that was not made, and why."""

    name: str
    why: str


Line = Measure | LeftOut


def estimated_kl(sampler: Sequence[float], other: Sequence[float]) -> float:
    """Estimate KL(sampler | other) by the log-probabilities that both give to tokens which the first has sampled.

    Each term is at least 0, whatever token was sampled.

    >>> estimated_kl([-1.0, -2.0], [-1.0, -2.0]), round(estimated_kl([-1.0], [-2.0]), 3)
    (0.0, 0.368)
    """
    terms = [exp(min(b - a, 80.0)) - 1 - (b - a) for a, b in zip(sampler, other, strict=True)]
    return fsum(terms) / len(terms)


def perplexity(scores: Sequence[float]) -> float:
    """
    >>> round(perplexity([-1.0, -3.0]), 2)
    7.39
    """
    return exp(min(-fsum(scores) / len(scores), 80.0))


class Measuring:
    """Asks one engine, always under new salts unless a hit is wanted."""

    def __init__(self, llm: LLM, salt: str = "check") -> None:
        self.llm = llm
        self._salt, self._salts = salt, 0

    def texts(self, most: int | None = None) -> list[list[int]]:
        """Return the built-in texts as tokens, each as long as fits; drawn tokens if there is no tokenizer."""
        most = min(most or self.llm.config.max_length, self.llm.config.max_length - ANSWER - 1)
        if self.llm.tokenizer is None:
            size = self.llm.vocab_size
            found = [
                [(7 * place * place + 13 * number) % size for place in range(DRAWN)] for number in range(len(TEXTS))
            ]
        else:
            found = [self.llm.tokenizer.encode(text) for text in TEXTS]
        return [tokens[:most] for tokens in found]

    def new_salt(self) -> str:
        self._salts += 1
        return f"{self._salt} {self._salts}"

    def answers(self, prompts: list[list[int]], salt: str, draft: int | None = None) -> list[Result]:
        params = SAMPLED if draft is None else replace(SAMPLED, draft=draft)
        return self.llm.generate(prompts, params, use_tqdm=False, cache_salt=salt)

    def scores(self, prompt: list[int], answer: Sequence[int]) -> list[float]:
        """Return log-probabilities of tokens after a prompt, computed cold."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        [result] = self.llm.generate([*prompt, *answer], params, use_tqdm=False, cache_salt=self.new_salt())
        return [score.logprob for score in (result.prompt_logprobs or [])[len(prompt) :] if score is not None]

    def text_scores(self) -> list[list[float]]:
        return [self.scores(tokens[:1], tokens[1:]) for tokens in self.texts()]

    def kl_to_cold(self, results: Sequence[Result]) -> float:
        """Return the KL of answers to what a cold run gives to the same tokens."""
        given, cold = [], []
        for result in results:
            given += [score.logprob for score in result.logprobs or ()]
            cold += self.scores(result.prompt_token_ids, result.token_ids)
        return estimated_kl(given, cold)
