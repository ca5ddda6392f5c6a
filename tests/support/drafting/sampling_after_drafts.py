"""The sampling of a row after drafts, compared with that of an answer that ends there."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from tests.support.engine.late_masks import HashedConstraint
from tests.support.hashed.rolling import VOCABULARY
from weft.base.plan import Sampling
from weft.base.sampling import SamplingParams
from weft.drafting.policy.choosing import RowDrafts
from weft.engine.request import Request
from weft.engine.seat_sampling import DraftsBefore, SeatSampling
from weft.engine.sequence import Sequence
from weft.memory.keys import PrefixIdentity

CASES = 300


def random_params(random: Random) -> SamplingParams:
    def some(**fields: Any) -> dict[str, Any]:
        return fields if random.random() < 0.4 else {}

    few = lambda count: tuple(random.sample(range(VOCABULARY), count))  # noqa: E731
    return SamplingParams(
        max_tokens=40,
        temperature=random.choice([0.0, 0.7, 1.0]),
        seed=random.randrange(1 << 40),
        **some(top_k=9, top_p=0.9, min_p=0.05),
        **some(repetition_penalty=1.3),
        **some(presence_penalty=0.5, frequency_penalty=1.5),
        **some(min_tokens=random.randint(1, 12)),
        **some(logit_bias=dict.fromkeys(few(3), 2.0)),
        **some(bad_words=tuple(few(random.randint(1, 3)) for _ in range(12))),
        **some(logprobs=random.randint(0, 3)),
        **(some(allowed_token_ids=tuple(range(0, VOCABULARY, 2))) if random.random() < 0.5 else {}),
    )


def sequence_of(request: Request, seed: int, answer: list[int], constrained: bool) -> Sequence:
    constraint = HashedConstraint(seed) if constrained else None
    found = Sequence(0, request, request.params.max_tokens, seed, PrefixIdentity(4), constraint)
    for token in answer:
        found.generated.append(token)
        if constraint is not None:
            constraint.take(token)
    return found


def allowed_tokens(random: Random, seed: int, count: int, constrained: bool) -> list[int]:
    """Return tokens that the constraint of this seed allows, in order."""
    constraint, found = HashedConstraint(seed), []
    for _ in range(count):
        token = random.choice([t for t in range(VOCABULARY) if not constrained or constraint.allows(t)])
        found.append(token)
        if constrained:
            constraint.take(token)
    return found


def sampled(sequence: Sequence, drafts: list[int]) -> Sampling:
    """Return the sampling of a row with drafts: one sample after its last token, and one after each draft."""
    sampling = SeatSampling(1)
    sampling.sit(sequence)
    count = len(drafts) + 1
    ahead = DraftsBefore(
        np.zeros(count, np.int64),
        np.arange(count),
        {0: RowDrafts("test", "test", tuple(drafts), (1.0,) * len(drafts))} if drafts else {},
    )
    starts = np.full(count, sequence.length - 1)
    return sampling.gather(np.zeros(count, np.int64), [sequence] * count, starts, np.zeros(count, np.bool_), ahead)


def facts(found: Sampling, sample: int) -> dict[str, Any]:
    """Return everything that decides what one sample of a step chooses."""
    names = ("temperature", "top_p", "min_p", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty")
    plain: dict[str, Any] = {name: getattr(found, name)[sample].item() for name in (*names, "uniform", "top_logprobs")}
    of_history, of_bias = found.history_row == sample, found.bias_row == sample
    history = zip(found.history_token[of_history].tolist(), found.history_generated[of_history].tolist(), strict=True)
    biases = zip(found.bias_token[of_bias].tolist(), found.bias_value[of_bias].tolist(), strict=True)
    masks = found.mask_bits[found.mask_row == sample].tolist()
    return plain | {"history": list(history), "biases": sorted(biases), "masks": masks, "scored": found.wants_logprobs}


def check_case(seed: int) -> None:
    random = Random(seed)
    params, constrained = random_params(random), random.random() < 0.3
    prompt = np.array([random.randrange(VOCABULARY) for _ in range(random.randint(1, 9))], np.int32)
    request = Request(prompt, params, frozenset(random.sample(range(VOCABULARY), 4)))
    before, count = random.randint(1, 10), random.randint(1, 6)
    tokens = allowed_tokens(random, seed, before + count, constrained)
    answer, drafts = tokens[:before], tokens[before:]
    found = sampled(sequence_of(request, seed, answer, constrained), drafts)
    for place in range(count + 1):
        alone = sampled(sequence_of(request, seed, tokens[: before + place], constrained), [])
        assert facts(found, place) == facts(alone, 0), f"sample {place} of {params}"


def check_every_field() -> None:
    for seed in range(CASES):
        check_case(seed)
