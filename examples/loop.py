"""What an engine does, as one program: plan a step, launch it, settle it, and reuse what it has computed.

Run it with `python examples/loop.py`. It serves the model that ships with Weft, on Weft's own memory (`Ledger`) and
runner, and leaves out what an engine adds: sampling, drafts, preemption, two steps at a time, tiers below the device's
memory, a server. `docs/tour.md` follows a request through those.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from weft import builtin
from weft.base.plan import Captures, Ints, Landing, Plan, Sampling
from weft.kernels.choosing import choose
from weft.memory.keys import Key, PrefixIdentity
from weft.memory.lease import Grant, Lease
from weft.memory.ledger import Ledger
from weft.memory.spec import MemorySpec
from weft.models.weights import load_model
from weft.runner.runner import Runner
from weft.text.tokenizer import load_tokenizer

MEMORY_BYTES, MAX_LENGTH = 64 << 20, 1024
SEATS, TOKENS_PER_STEP = 4, 256  # sequences that run at the same time, and what they may compute in a step


@dataclass(eq=False)
class Sequence:
    """A prompt and its answer. While it runs, a lease holds its memory."""

    tokens: Ints  # of the prompt, then of the answer
    prompt: int
    most: int  # tokens to generate
    keys: list[Key]  # names of its cells of 64 tokens: each depends on all tokens up to the cell's end
    lease: Lease = field(init=False)


Row = tuple[Sequence, Grant]  # computes tokens [grant.start, grant.end), in memory that the grant names


class Loop:
    def __init__(self) -> None:
        model, _ = load_model(builtin.FOLDER, torch.float32, progress=False)
        operations = choose("cpu", torch.float32, model.memories).operations
        # What each layer must remember, in numbers: bytes of a page, of a state, of a tail.
        spec = MemorySpec(model.memories(operations))
        # The ledger decides who owns which bytes and touches none; the runner computes and decides nothing.
        self.ledger = Ledger(spec, MEMORY_BYTES, SEATS, MAX_LENGTH)
        self.runner = Runner(model, spec, MEMORY_BYTES, SEATS, operations=operations)
        self.identity = PrefixIdentity(spec.cell)
        self.waiting, self.running = deque[Sequence](), list[Sequence]()

    def add(self, prompt: list[int], most: int) -> Sequence:
        tokens = np.array(prompt, np.int32)
        self.waiting.append(Sequence(tokens, len(tokens), most, self.identity.keys(tokens)))
        return self.waiting[-1]

    def step(self) -> None:
        """Compute the next tokens of the running sequences."""
        self.admit()
        rows = self.choose()
        plan = self.plan(rows)
        flight = self.runner.launch(plan)
        self.settle(rows, plan, self.runner.land(flight))

    def admit(self) -> None:
        """Open leases. Each begins at the deepest cached state: a hit copies nothing, the state is read in place."""
        while self.waiting and len(self.running) < SEATS:
            sequence = self.waiting.popleft()
            seat = min(set(range(SEATS)) - self.ledger.leases.keys())
            # At least one token must be computed, to get its logits.
            lease = self.ledger.open(seat, sequence.keys, sequence.prompt, limit=sequence.prompt - 1)
            assert lease is not None, "out of memory"
            sequence.lease = lease
            self.running.append(sequence)

    def choose(self) -> list[Row]:
        """Give each decoding sequence its one token and share the rest of the step among prompts; get their memory."""
        counts, left = dict[Sequence, int](), TOKENS_PER_STEP
        for sequence in sorted(self.running, key=self.missing):
            counts[sequence] = min(self.missing(sequence), left)
            left -= counts[sequence]
        # Rows of one token come first: kernels compute them together.
        chosen = sorted((sequence for sequence in counts if counts[sequence]), key=lambda each: counts[each] > 1)
        for sequence in chosen:
            end = int(self.ledger.planned[sequence.lease.seat]) + counts[sequence]
            assert self.ledger.advance(sequence.lease, end) is not None, "out of memory"
        # With the memory that is left, the step also keeps states from which other requests can continue.
        grants = self.ledger.snapshot([sequence.lease for sequence in chosen])
        return [(sequence, grants[sequence.lease.seat]) for sequence in chosen]

    def missing(self, sequence: Sequence) -> int:
        """Return how many known tokens are not planned yet: one, if the sequence decodes."""
        return len(sequence.tokens) - int(self.ledger.planned[sequence.lease.seat])

    def plan(self, rows: list[Row]) -> Plan:
        """Return the step as one frozen value of integers: everything that the runner will know."""
        seats = np.array([sequence.lease.seat for sequence, _ in rows], np.int32)
        start, end = np.array([(grant.start, grant.end) for _, grant in rows], np.int32).T
        # A state is written once, to a fresh slot, where a row completes a cell. After that it is only read.
        states = [(row, state.position, state.slot) for row, (_, grant) in enumerate(rows) for state in grant.captures]
        sampled = [row for row, (sequence, grant) in enumerate(rows) if grant.end == len(sequence.tokens)]
        none, zeros = np.zeros(0, np.int32), np.zeros_like(seats)
        return Plan(
            0, seats, start, end,
            tokens=np.concatenate([sequence.tokens[grant.start : grant.end] for sequence, grant in rows]),
            from_board=zeros,  # an engine plans before the last tokens have landed: the device reads them on its board
            read_slot=np.array([grant.read_slot or 0 for _, grant in rows], np.int32),
            tail=self.ledger.tail[seats], page_table=self.ledger.page_table[seats],
            window_table=np.zeros((len(rows), 0), np.int32), window_first=zeros,  # for layers with sliding windows
            captures=Captures(*np.array(states, np.int32).reshape(-1, 3).T),
            sampled=np.array(sampled, np.int32), sampling=Sampling.greedy(len(sampled)),
            score_index=none, score_token=none, score_top=0,
        )  # fmt: skip

    def settle(self, rows: list[Row], plan: Plan, landing: Landing) -> None:
        """Publish the cells and states that the step has computed, and take the sampled tokens."""
        for sequence, grant in rows:
            named = len(sequence.keys) * self.ledger.cell
            above = sequence.keys[-1] if sequence.keys else None
            sequence.keys += self.identity.keys(sequence.tokens[named : grant.end], above)
            self.ledger.settle(sequence.lease, grant, grant.end)
        for row, token in zip(plan.sampled, landing.tokens, strict=True):
            sequence = rows[row][0]
            sequence.tokens = np.append(sequence.tokens, token)
            if len(sequence.tokens) == sequence.prompt + sequence.most:
                # What only this sequence needed is free; what it computed stays cached.
                self.ledger.close(sequence.lease)
                self.running.remove(sequence)


def main() -> None:
    loop, tokenizer = Loop(), load_tokenizer(builtin.FOLDER)
    assert tokenizer is not None
    story = "Once upon a time there was a small boat that wanted to see the open sea. " * 12
    for ends in ["One day the wind", "The boat met a fish"], ["One day the wind", "A bird came"]:
        sequences = [loop.add(tokenizer.encode(story + end), most=24) for end in ends]
        while loop.waiting or loop.running:
            loop.step()
        for each in sequences:
            print(f"{each.lease.miss.cached} of {each.prompt} prompt tokens were cached: {each.lease.miss.sentence}")
            print(f"    {tokenizer.decode(each.tokens[each.prompt :].tolist())!r}")


if __name__ == "__main__":
    main()
