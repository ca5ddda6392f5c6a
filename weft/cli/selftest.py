"""Measures whether a cache hit gives the answer of a cold run, on the given model with random prompts.

Samples tokens after a hit, then scores the whole text cold under another salt. If both agree, the log-probabilities of
those tokens are equal up to rounding. The same comparison after replacing the prompt's first cell shows what a wrong
state would look like, so that a pass means something.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING

from weft.base.sampling import SamplingParams

if TYPE_CHECKING:
    from weft.offline.llm import LLM
    from weft.offline.result import Result

ANSWER = 24
# Prefill and decode round differently; these are the largest differences that rounding explains.
KL_LIMIT = {"float32": 1e-6, "bfloat16": 5e-3, "float16": 1e-3}
# A hit may differ from a cold run this many times more than a cold run differs from itself: few tokens are compared.
SLACK = 10
KL_FLOOR = 1e-7


@dataclass(frozen=True, slots=True)
class Comparison:
    """`kl` is the k3 estimate on the sampled tokens, `difference` the largest difference of a log-probability."""

    cached_tokens: int
    difference: float
    kl: float


def compare(result: Result, cold: list[float]) -> Comparison:
    hit = [score.logprob for score in result.logprobs or ()]
    ratios = [before - after for before, after in zip(cold, hit, strict=True)]
    kl = sum(exp(ratio) - 1 - ratio for ratio in ratios) / len(ratios)
    return Comparison(result.cached_tokens, max(map(abs, ratios)), kl)


class SelfTest:
    """Needs an engine with its cache on. Uses its own salts, so it neither sees nor leaves other cached prefixes."""

    def __init__(self, llm: LLM, seed: int = 0) -> None:
        self._llm = llm
        self._chance = random.Random(f"self-test {seed}")
        self._cell = llm.engine.ledger.spec.cell
        self._salts = 0

    def fits(self) -> bool:
        return 5 * self._cell + 3 * ANSWER <= self._llm.config.max_length

    def run(self) -> dict[str, Comparison]:
        """Compare a cold answer, a hit on a prompt, a hit on an answer, and a deliberately wrong state."""
        self._salts += 1
        salt, prompt = f"self-test {self._salts}", self._draw(2 * self._cell + 17)
        cold = self._answer(prompt, salt)
        again = self._answer(prompt, salt)
        # Long enough that the last state lies inside the answer.
        long = self._answer(self._draw(self._cell - 9), salt, self._cell + 20)
        follow_up = [*long.prompt_token_ids, *long.token_ids, *self._draw(9)]
        after = self._answer(follow_up, salt)
        other = [*self._draw(self._cell), *again.prompt_token_ids[self._cell :]]
        return {
            "cold": compare(cold, self._score(cold.prompt_token_ids, cold.token_ids)),
            "prefill-hit": compare(again, self._score(again.prompt_token_ids, again.token_ids)),
            "decode-hit": compare(after, self._score(after.prompt_token_ids, after.token_ids)),
            "wrong state": compare(again, self._score(other, again.token_ids)),
        }

    def _draw(self, length: int) -> list[int]:
        return [self._chance.randrange(self._llm.vocab_size) for _ in range(length)]

    def _answer(self, prompt: list[int], salt: str, length: int = ANSWER) -> Result:
        params = SamplingParams(max_tokens=length, logprobs=0, seed=1, ignore_eos=True)
        return self._llm.generate(prompt, params, use_tqdm=False, cache_salt=salt)[0]

    def _score(self, prompt: list[int], answer: list[int]) -> list[float]:
        """Return the answer's log-probabilities, computed cold."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        self._salts += 1
        salt = f"self-test {self._salts}"
        [result] = self._llm.generate([*prompt, *answer], params, use_tqdm=False, cache_salt=salt)
        scores = result.prompt_logprobs or []
        return [score.logprob for score in scores[len(prompt) :] if score is not None]


def allowed(found: dict[str, Comparison]) -> float:
    """Return the KL that rounding explains: how much a cold run differs from its own scores, with some slack."""
    return max(KL_FLOOR, SLACK * found["cold"].kl)


def complaints(found: dict[str, Comparison], dtype: str) -> list[str]:
    """Return the problems in words; empty if there are none."""
    limit, wrong = allowed(found), []
    for name in ("prefill-hit", "decode-hit"):
        each = found[name]
        if not each.cached_tokens:
            wrong.append(f"{name}: nothing was reused, so nothing was tested")
        if not each.kl <= limit:
            wrong.append(f"{name}: KL {each.kl:.1e} against a cold run exceeds {limit:.1e}: the cache is wrong")
    if not found["cold"].kl <= KL_LIMIT[dtype]:
        wrong.append(f"cold: decode and prefill differ by KL {found['cold'].kl:.1e}, more than {dtype} explains")
    return wrong


def can_tell(found: dict[str, Comparison]) -> bool:
    """Return whether a wrong state would show; a model that hardly looks back cannot tell."""
    return found["wrong state"].kl > allowed(found)
