"""What a landed step brings: the tokens that belong to answers, and the likeliest ones beside them."""

from __future__ import annotations

from collections.abc import Iterable

from weft.base.plan import Landing, Scores
from weft.engine.assembly import PlannedStep
from weft.engine.events import Top


def accepted_tokens(step: PlannedStep, landing: Landing, verified: dict[int, int]) -> Iterable[tuple[int, int, int]]:
    """Return (sample, row, token) for each token of an answer; samples after a wrong draft belong to none."""
    tokens = landing.tokens.tolist()
    if not verified:
        return zip(range(len(tokens)), step.plan.sampled.tolist(), tokens, strict=True)
    found, sample = [], 0
    for row in step.plan.sampled.tolist():
        taken = verified.get(row, 0) + 1
        found += [(each, row, tokens[each]) for each in range(sample, sample + taken)]
        sample += len(step.drafts[row].tokens) + 1 if row in verified else 1
    return found


def likeliest(scores: Scores, index: int, count: int) -> Top:
    tokens, logprobs = scores.top_token[index, :count].tolist(), scores.top_logprob[index, :count].tolist()
    return list(zip(tokens, logprobs, strict=True))
