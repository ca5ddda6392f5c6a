"""What a landed step brings: drafts that were right, tokens that belong to answers, masks of the step after it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import numpy as np

from weft.base.completion import complete
from weft.base.plan import Ints, Landing, Scores
from weft.drafting.policy.choosing import Drafting, RowDrafts
from weft.engine.assembly import PlannedStep
from weft.engine.events import Output, Top
from weft.engine.planner import Planner
from weft.engine.seat_sampling import stacked
from weft.engine.sequence import Sequence
from weft.memory.ledger import Ledger

# A mask that allows the first tokens of the vocabulary.
ANYTHING = np.full(1, -1, np.int32)


def verified_drafts(step: PlannedStep, landing: Landing) -> dict[int, int]:
    """Return, by row, how many drafts equal the tokens that the model chose in their place."""
    if not step.drafts:
        return {}
    # Samples of the rows with drafts are the last ones: these rows end the step.
    chosen = landing.tokens.tolist()
    first, verified = len(chosen) - int(step.plan.drafts.counts.sum()) - len(step.drafts), {}
    for row, row_drafts in step.drafts.items():
        stops, place = step.sequences[row].stop_tokens, first
        for draft in row_drafts.tokens:
            # Nothing follows a stop token, not even a draft that is right.
            if chosen[place] != draft or draft in stops:
                break
            place += 1
        verified[row] = place - first
        first += len(row_drafts.tokens) + 1
    return verified


def undo_refused(step: PlannedStep, verified: dict[int, int], ledger: Ledger, planner: Planner) -> Ints:
    """Take back what was planned for drafts that turned out wrong, and return where each row really ends."""
    plan = step.plan
    rows, accepted = np.array(list(verified)), np.array(list(verified.values()))
    ends = plan.end.copy()
    ends[rows] = plan.start[rows] + 1 + accepted
    void = list(step.void)
    ends[void] = plan.start[void]
    # Rows with a grant are settled one by one.
    inside = np.array([row for row in verified if row not in step.grants], np.int64) if step.grants else rows
    ledger.undo_each(plan.seat[inside], ends[inside], plan.end[inside] - ends[inside])
    planner.undo(plan.seat[rows], plan.drafts.counts[rows] - accepted)
    return ends


def moved_step(step: PlannedStep, ledger: Ledger) -> PlannedStep:
    """Return a landed step with all its drafts, whose rows start where the drafts before them turned out to end."""
    plan = step.plan
    if not plan.drafts.may_move:
        return replace(step, drafts=_landed(step.drafts)) if len(plan.drafts.on_device) else step
    following = np.flatnonzero(plan.drafts.unverified_before)
    refused = np.where(plan.drafts.unverified_before > 0, plan.start - ledger.computed[plan.seat], 0)
    drafts = {row: row_drafts.moved(int(refused[row])) for row, row_drafts in step.drafts.items()}
    # A stop token ends the answer on the host. The device accepts what follows it, and goes on from there.
    void = frozenset(row for row in following.tolist() if step.sequences[row].reason is not None)
    return replace(step, plan=complete(plan, refused, ledger.cell), drafts=_landed(drafts), void=void)


def _landed(drafts: dict[int, RowDrafts]) -> dict[int, RowDrafts]:
    return {row: row_drafts.landed() for row, row_drafts in drafts.items()}


def note_verified(step: PlannedStep, verified: dict[int, int], planner: Planner) -> None:
    """Decide when rows draft again. What else there is to learn can wait for the launch of the next step."""
    for row, accepted in verified.items():
        sequence = step.sequences[row]
        planner.drafts.verified(sequence.seat, sequence, step.drafts[row], accepted, planner.number)


def learn(steps: Iterable[tuple[PlannedStep, dict[int, int]]], drafting: Drafting | None) -> None:
    """Count the drafts of landed steps, and learn from them. The next step is launched: it does not wait for this."""
    for step, verified in steps:
        for row, accepted in verified.items():
            if row in step.void:
                continue
            sequence, row_drafts = step.sequences[row], step.drafts[row]
            sequence.report.drafts.add(row_drafts.drafters, accepted)
            if drafting is not None and sequence.drafting is not None:
                drafting.learn(sequence.drafting, row_drafts, accepted)


def awaited_masks(step: PlannedStep) -> Ints:
    """Return the masks of the samples that depend on the step before, once that has landed."""
    rows, _ = step.plan.samples
    masks = []
    for row in rows[step.plan.sampling.awaiting_mask].tolist():
        sequence = step.sequences[row]
        assert sequence.constraint is not None
        # The token of a sequence that has ended is dropped, and so is one that is sampled without its mask.
        dropped = sequence.reason is not None or sequence.awaits_mask
        masks.append(ANYTHING if dropped else sequence.constraint.mask)
    return stacked(masks)


def without_masks(step: PlannedStep) -> list[Sequence]:
    """Return the sequences of a step in flight whose masks are not found in time."""
    rows, _ = step.plan.samples
    waiting = (step.sequences[row] for row in rows[step.plan.sampling.awaiting_mask].tolist())
    return [sequence for sequence in waiting if sequence.awaits_mask and sequence.reason is None]


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


def drafted_samples(step: PlannedStep, verified: dict[int, int]) -> set[int]:
    """Return the samples that equal accepted drafts. The last sample of a row is the model's own."""
    found: set[int] = set()
    sample = len(step.plan.sampled) - len(verified)
    for row, accepted in verified.items():
        found.update(range(sample, sample + accepted))
        sample += len(step.drafts[row].tokens) + 1
    return found


def take_scores(step: PlannedStep, landing: Landing) -> None:
    """Add the scores of prompt tokens to the reports of their sequences."""
    scores, index = landing.prompt_scores, 0
    for sequence, count in step.scored:
        assert scores is not None
        wanted = sequence.request.params.prompt_logprobs or 0
        # A copy: a view would keep the whole step's scores alive as long as this sequence.
        sequence.report.prompt_scores.add(scores.part(index, index + count, wanted).copy())
        index += count


def take_vectors(step: PlannedStep, landing: Landing) -> None:
    """Add the sums of hidden states to those of their sequences."""
    if landing.vectors is None:
        return
    found = zip(landing.vectors, step.plan.vector_count.tolist(), strict=True)
    for sequence, count in step.vectors:
        for vector, tokens in islice(found, count):
            sequence.report.vector.add(vector, tokens)


def add_scores(output: Output, sequence: Sequence, scores: Scores, index: int, drafted: bool) -> None:
    wanted = sequence.request.params.logprobs
    if wanted is not None:
        output.logprob, output.top = float(scores.chosen[index]), likeliest(scores, index, wanted)
        output.drafted = drafted


def likeliest(scores: Scores, index: int, count: int) -> Top:
    tokens, logprobs = scores.top_token[index, :count].tolist(), scores.top_logprob[index, :count].tolist()
    return list(zip(tokens, logprobs, strict=True))
