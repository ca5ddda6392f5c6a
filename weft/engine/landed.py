"""What a landed step brings: the tokens that belong to answers, and the likeliest ones beside them."""

from __future__ import annotations

from collections.abc import Iterable

from weft.base.plan import Landing, Scores
from weft.engine.assembly import PlannedStep
from weft.engine.events import Top


def accepted_tokens(step: PlannedStep, landing: Landing, verified: dict[int, int]) -> Iterable[tuple[int, int, int]]:
    """Return (sample, row, token) for each token of an answer; samples after a wrong draft belong to none."""
    tokens, rows = landing.tokens.tolist(), step.plan.sampled.tolist()
    if not verified:
        return zip(range(len(tokens)), rows, tokens, strict=True)
    # Rows with drafts are the last ones.
    others = len(rows) - len(verified)
    found = list(zip(range(others), rows, tokens))
    sample = others
    for row, accepted in verified.items():
        found += [(each, row, tokens[each]) for each in range(sample, sample + accepted + 1)]
        sample += len(step.drafts[row].tokens) + 1
    return found


def likeliest(scores: Scores, index: int, count: int) -> Top:
    tokens, logprobs = scores.top_token[index, :count].tolist(), scores.top_logprob[index, :count].tolist()
    return list(zip(tokens, logprobs, strict=True))
