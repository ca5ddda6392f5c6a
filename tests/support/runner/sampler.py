"""The sampler's plain definition, one row at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from hypothesis import strategies as st

from tests.support.kernels.operations import CPU
from weft.base.plan import Captures, Plan, Sampling
from weft.device.upload import upload
from weft.runner.sampler import sample
from weft.runner.step_sampling import StepSampling, stage_sampling

VOCAB = 40


@dataclass
class Row:
    """One row's wishes, in words that the plain definition and the plan are both made from."""

    logits: np.ndarray
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.5
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    board: int | None = None
    bias: dict[int, float] = field(default_factory=dict)
    bans: list[tuple[int, int]] = field(default_factory=list)  # a token, and the input after which it is banned
    allowed: list[int] | None = None


def ints(values) -> np.ndarray:
    return np.array(list(values), dtype=np.int32)


def floats(values) -> np.ndarray:
    return np.array(list(values), dtype=np.float32)


def sampling_of(rows: list[Row]) -> Sampling:
    seen = [(i, t, 0) for i, r in enumerate(rows) for t in r.prompt]
    seen += [(i, t, 1) for i, r in enumerate(rows) for t in r.answer]
    bias = [(i, t, v) for i, r in enumerate(rows) for t, v in r.bias.items()]
    bans = [(i, t, newest) for i, r in enumerate(rows) if r.board is not None for t, newest in r.bans]
    masked = [(i, r.allowed) for i, r in enumerate(rows) if r.allowed is not None]
    bits = np.zeros((len(masked), 64), np.uint8)
    for line, (_, allowed) in enumerate(masked):
        bits[line, allowed] = 1
    return Sampling(
        temperature=floats(r.temperature for r in rows),
        top_k=ints(r.top_k for r in rows),
        top_p=floats(r.top_p for r in rows),
        min_p=floats(r.min_p for r in rows),
        uniform=floats(r.uniform for r in rows),
        top_logprobs=ints(0 for _ in rows),
        repetition_penalty=floats(r.repetition for r in rows),
        presence_penalty=floats(r.presence for r in rows),
        frequency_penalty=floats(r.frequency for r in rows),
        history_row=ints(i for i, _, _ in seen),
        history_token=ints(t for _, t, _ in seen),
        history_generated=ints(g for _, _, g in seen),
        bias_row=ints(i for i, _, _ in bias),
        bias_token=ints(t for _, t, _ in bias),
        bias_value=floats(v for _, _, v in bias),
        all_greedy=False,
        wants_logprobs=False,
        mask_row=ints(i for i, _ in masked),
        mask_bits=np.packbits(bits, axis=-1, bitorder="little").view(np.int32),
        ban_row=ints(i for i, _, _ in bans),
        ban_token=ints(t for _, t, _ in bans),
        ban_input=ints(newest for _, _, newest in bans),
    )


def plan_of(rows: list[Row]) -> Plan:
    """A step of one-token rows whose seats are their numbers in reverse."""
    n = len(rows)
    none = ints([])
    return Plan(
        number=0,
        seat=ints(range(n - 1, -1, -1)),
        start=ints([5] * n),
        end=ints([6] * n),
        tokens=ints([0] * n),
        from_board=ints(r.board is not None for r in rows),
        read_slot=ints([0] * n),
        tail=ints([0] * n),
        page_table=np.zeros((n, 1), np.int32),
        window_table=np.zeros((n, 0), np.int32),
        window_first=ints([0] * n),
        captures=Captures(none, none, none),
        sampled=ints(range(n)),
        sampling=sampling_of(rows),
        score_index=none,
        score_token=none,
        score_top=0,
    )


def choices_of(plan: Plan, vocab_size: int) -> StepSampling:
    staged = stage_sampling(plan, vocab_size)
    return staged.finish(upload(dict(staged.arrays()), "cpu"))


def choose(rows: list[Row]) -> list[int]:
    plan = plan_of(rows)
    inputs = torch.tensor([r.board or 0 for r in rows])
    logits = torch.from_numpy(np.stack([r.logits for r in rows]).astype(np.float32))
    return sample(logits, choices_of(plan, logits.shape[-1]), inputs, CPU).tolist()


def plain_logits(row: Row) -> np.ndarray:
    """Masks, penalties, bias and bans by definition."""
    logits = row.logits.astype(np.float64).copy()
    if row.allowed is not None:
        logits[[token for token in range(len(logits)) if token not in row.allowed]] = -np.inf
    answer = row.answer + ([] if row.board is None else [row.board])
    for token in set(row.prompt + answer):
        logits[token] = logits[token] / row.repetition if logits[token] > 0 else logits[token] * row.repetition
    for token in set(answer):
        logits[token] -= row.presence + row.frequency * answer.count(token)
    for token, value in row.bias.items():
        logits[token] += value
    for token, newest in row.bans:
        logits[token] += -1e30 if newest == row.board else 0
    return logits


def plain_distribution(row: Row) -> np.ndarray:
    """What a row draws from, by definition."""
    logits = plain_logits(row)
    if row.temperature == 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    weights = np.exp((logits - logits.max()) / row.temperature)
    kept = [t for t in np.argsort(-weights, kind="stable") if weights[t] >= row.min_p * weights.max()]
    kept = kept[: row.top_k or None]
    total, mass, nucleus = weights[kept].sum(), 0.0, []
    for token in kept:
        if row.top_p < 1 and mass >= row.top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    result = np.zeros(len(logits))
    result[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return result


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda x: float(np.float32(x)))


@st.composite
def rows(draw) -> Row:
    seed = draw(st.integers(0, 2**32 - 1))
    token = st.integers(0, VOCAB - 1)
    off_or = lambda off, strategy: draw(st.one_of(st.just(off), strategy))  # noqa: E731
    return Row(
        logits=np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32),
        temperature=off_or(0.0, numbers(0.05, 5)),
        top_k=off_or(0, st.integers(1, VOCAB + 5)),
        top_p=off_or(1.0, numbers(0.01, 0.99)),
        min_p=off_or(0.0, numbers(0.01, 1)),
        uniform=draw(st.integers(0, 2**24 - 1)) / 2**24,
        repetition=off_or(1.0, numbers(0.5, 2)),
        presence=off_or(0.0, numbers(-2, 2)),
        frequency=off_or(0.0, numbers(-2, 2)),
        prompt=draw(st.lists(token, max_size=6)),
        answer=draw(st.lists(token, max_size=6)),
        board=draw(st.one_of(st.none(), st.integers(0, 3), token)),
        bias=draw(st.dictionaries(token, st.one_of(st.just(-np.inf), numbers(-50, 50)), max_size=4)),
        bans=draw(st.lists(st.tuples(token, st.integers(0, 3)), max_size=4)),
        allowed=draw(st.one_of(st.none(), st.lists(token, min_size=6, max_size=20))),
    )


def is_right(row: Row, token: int) -> bool:
    """Whether the token is the inverse of the row's cumulative distribution at its random number, give or take rounding
    of that number and of what the filters keep."""
    probable = plain_distribution(row)
    upper = probable.cumsum()[token]
    return upper - probable[token] - 2e-5 <= row.uniform <= upper + 2e-5 and probable[token] > 0


def is_borderline(row: Row) -> bool:
    """Whether rounding may change what the filters keep, or who is likeliest."""
    small, large = (plain_distribution(shaken(row, by)) for by in (-1e-5, 1e-5))
    return bool(((small > 0) != (large > 0)).any())


def shaken(row: Row, by: float) -> Row:
    top_p = row.top_p if row.top_p == 1 else row.top_p * (1 + by)
    return replace(row, top_p=top_p, min_p=min(1.0, row.min_p * (1 + by)))
