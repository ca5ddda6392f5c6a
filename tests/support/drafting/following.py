"""Random traffic whose rows follow drafts in flight, and what it leaves in the cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from random import Random
from unittest.mock import patch

from tests.support.drafting.scripted import ScriptedDrafting
from tests.support.hashed.rolling import RollingDevice, mix
from tests.support.hashed.workloads import Run, Workload, check_answers, drive, random_workload, tight_memory
from weft.base.plan import Plan
from weft.engine.loop import Engine
from weft.memory.keys import Key, PrefixIdentity
from weft.memory.kinds import Kind


class Tally(RollingDevice):
    """Counts what happens to rows that follow drafts in flight. In steps with `most` tokens of such rows, they may."""

    def __init__(self, most: int, *args: object) -> None:
        super().__init__(*args)
        self.most = most
        self.met: Counter[str] = Counter()

    def builds_on_flight(self, decodes: int, drafting: int, tokens: int) -> bool:
        self.met["too large"] += tokens > self.most
        return tokens <= self.most

    def placed(self, plan: Plan) -> Plan:
        found = super().placed(plan)
        if len(plan.drafts.unverified_before):
            behind, moved = plan.drafts.unverified_before > 0, plan.start - found.start
            self.met["follows"] += int(behind.sum())
            self.met["moved"] += int((moved > 0).sum())
            self.met["cell before"] += int((found.start // self.spec.cell < plan.start // self.spec.cell).sum())
            self.met["not captured"] += len(plan.captures.row) - len(found.captures.row)
            self.met["captured"] += sum(bool(moved[row]) for row in found.captures.row.tolist())
        return found


def following_workload(seed: int, count: int) -> Workload:
    """Few requests with long answers that arrive almost together, so that most steps have no prompts."""
    random = Random(f"following {seed}")
    workload = random_workload(seed, count, depth=1, exact=False)
    spec = replace(workload.spec, draft_room=random.randint(1, 5))
    arrivals = []
    for arrival in workload.arrivals:
        changes = {
            "count": random.randint(1, 10 * spec.cell),
            "step": random.choice([0, 0, 9]),
            "seed": random.choice([None, random.getrandbits(40)]),
            "bad_words": arrival.bad_words if random.random() < 0.2 else (),
            "abort_after": random.randint(0, 20) if random.random() < 0.2 else None,
            "stop": frozenset[int](),
        }
        arrival = replace(arrival, **changes)
        if random.random() < 0.3:
            arrival = replace(arrival, stop=frozenset(random.sample(arrival.answer(spec), 1)))
        arrivals.append(arrival)
    config = replace(
        workload.config,
        memory_bytes=tight_memory(spec, arrivals, random.choice([1.0, 1.3, 2.0, 4.0, 8.0, 8.0])),
        max_length=max(len(a.prompt) + a.count for a in arrivals),
        max_sequences=random.choice([1, 4, 8]),
        max_tokens_per_step=random.choice([8, 24, 64]),
    )
    return Workload(spec, arrivals, config, workload.lazy)


def noting(texts: dict[Key, tuple[int, ...]]) -> Callable[..., list[Key]]:
    """Return a method that computes the keys of cells and notes the text up to each of them."""
    original = PrefixIdentity.keys

    def keys(self, tokens, after=None, decoded_from=None):
        found = original(self, tokens, after, decoded_from)
        for number, key in enumerate(found):
            texts[key] = texts.get(after, ()) + tuple(tokens[number * self.cell : (number + 1) * self.cell].tolist())
            after = key
        return found

    return keys


def check_cached(run: Run, texts: dict[Key, tuple[int, ...]]) -> None:
    """Every cell and checkpoint in the cache holds what its name says."""
    spec, memory = run.engine.ledger.spec, run.device.memory
    for node in run.engine.ledger.cache.trie.nodes.values():
        entry = state = last = 0
        entries = []
        for token in texts[node.key]:
            entry, state, last = mix(entry, token), mix(state, mix(last, token)), token
            entries.append(entry)
        if spec.page_bytes:
            assert memory[Kind.PAGE][node.page].tolist() == entries[-spec.cell :], "a cell holds another text"
        if spec.state_bytes and node.resume is not None:
            assert memory[Kind.STATE][node.resume.slot].tolist() == [state, last], "a checkpoint is of another text"


def run_following(seed: int, count: int = 4) -> Counter[str]:
    workload = following_workload(seed, count)
    answers = {tuple(a.prompt): a.answer(workload.spec) for a in workload.arrivals}
    drafting = ScriptedDrafting(answers, workload.spec.draft_room, seed)
    most = 4 if seed % 4 == 1 else workload.config.max_tokens_per_step
    device = Tally(most, workload.spec, workload.config.memory_bytes, workload.config.max_sequences, workload.lazy)
    texts: dict[Key, tuple[int, ...]] = {}
    with patch.object(PrefixIdentity, "keys", noting(texts)):
        run = Run(partial(Engine, drafting=drafting)(workload.spec, device, workload.config), device)
        drive(workload, run)
    check_cached(run, texts)
    check_answers(workload, run)
    return device.met + Counter({"preempted": run.engine.planner.preemptions})
