"""Random traffic with a draft model beside the target, on the rolling-hash device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

from tests.support.drafting.scripted import drafted_workload
from tests.support.hashed.rolling import VOCABULARY, RollingDevice
from tests.support.hashed.workloads import Run, Workload, check_answers, run_workload, tight_memory
from weft.drafting.model import DraftModel
from weft.drafting.policy.choosing import Drafting
from weft.drafting.policy.costs import FreeDrafts
from weft.engine.loop import Engine
from weft.memory.ledger import Ledger
from weft.memory.spec import MemorySpec


class Garbled(DraftModel):
    """Changes guesses at random. `right` is the number of guesses of each seat before the first change."""

    def __init__(self, *args: object, seed: int) -> None:
        super().__init__(*args, paranoid=True)
        self.random = Random(f"garble {seed}")
        self.right: dict[int, int] = {}
        self.guessed = self.accepted = 0

    def draft(self, rows):
        found = super().draft(rows)
        for seat, tokens in found.items():
            wrong = [self.random.random() < 0.2 for _ in tokens]
            self.right[seat] = next((place for place, each in enumerate(wrong) if each), len(tokens))
            found[seat] = tuple((t + each) % VOCABULARY for t, each in zip(tokens, wrong))
            self.guessed += len(tokens)
        return found


class Checking(Engine):
    """Checks that exactly the guesses before the first change are accepted."""

    def verify(self, step, landing):
        verified = super().verify(step, landing)
        model = self.planner.drafts.model
        for row, accepted in verified.items():
            right = min(model.right[int(step.plan.seat[row])], len(step.drafts[row].tokens))
            assert accepted == right, f"{right} guesses were right, {accepted} were accepted"
            model.accepted += accepted
        return verified


def draft_model(workload: Workload, spec: MemorySpec, seed: int) -> Garbled:
    random, config = Random(f"model {seed}"), workload.config
    spec = replace(spec, draft_room=workload.spec.draft_room)
    memory = tight_memory(spec, workload.arrivals, random.choice([1.0, 1.3, 4.0]))
    ledger = Ledger(spec, memory, config.max_sequences, config.max_length + 8, cache=config.cache, remember_freed=True)
    device = RollingDevice(spec, memory, config.max_sequences, lazy=random.random() < 0.5)
    return Garbled(ledger, device, VOCABULARY, random.choice([1, 7, 64]), seed=seed)


def run_with(workload: Workload, model: DraftModel, engine: type[Engine] = Engine) -> Run:
    drafting = Drafting(workload.spec.draft_room, costs=FreeDrafts(), suffixes=False, model=model.name)
    run = run_workload(workload, partial(engine, drafting=drafting, draft_model=model))
    check_answers(workload, run)
    assert not model.ledger.leases
    model.flush()
    assert model.ledger.arena.used_slabs == 0, "something of the draft model is still owned"
    return run


def run_perfect(seed: int, **overrides: object) -> Garbled:
    """A draft model that computes the same as the target: its guesses are right unless they are garbled."""
    workload = drafted_workload(seed, **overrides)
    free = [replace(a, stop=frozenset(), bad_words=(), allowed=None) for a in workload.arrivals]
    workload = replace(workload, arrivals=free)
    model = draft_model(workload, workload.spec, seed)
    run_with(workload, model, Checking)
    return model


def check_perfect_guesses(seeds: int = 20) -> None:
    guessed = accepted = 0
    for seed in range(seeds):
        model = run_perfect(seed)
        guessed, accepted = guessed + model.guessed, accepted + model.accepted
    assert accepted > 3 * seeds
    assert guessed - accepted > seeds
