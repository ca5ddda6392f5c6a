"""Engines with the MTP heads of tiny checkpoints, and every guess compared with a plain head."""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch

from tests.support.kernels.operations import CPU
from tests.support.models.engines import Ask, greedy, serve, tokens
from tests.support.models.mtp_oracle import checkpoint
from weft.base.config import EngineConfig
from weft.drafting.head import DraftHead
from weft.drafting.model import DecodedDrafts
from weft.drafting.policy.choosing import Drafting, SequenceDrafts
from weft.drafting.policy.costs import FreeDrafts
from weft.drafting.state_lines import StateLines
from weft.engine.loop import Engine
from weft.memory.ledger import Ledger
from weft.memory.spec import MemorySpec
from weft.models.weights import load_head, load_model
from weft.runner.hidden_states import DraftBoard, HiddenStates
from weft.runner.passes import HeadPass, KeepingPass
from weft.runner.runner import Runner

FAMILIES = ("qwen3_5", "qwen3_next", "nemotron_h", "qwen3_5, yarn beside sections")
ROOM = 3
MEMORY = 32 << 20


class Recording(DraftHead):
    """Records every text with its drafts. If an answer is known, the target is given its tokens, partly garbled."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)
        # Texts, their drafts, and how many tokens those were chosen from.
        self.seen: list[tuple[list[int], list[int], int]] = []
        self.followed = 0
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.random = Random(1)

    @property
    def board(self) -> DraftBoard:
        return self.executor.placed.computes.states.board

    def begin(self, asked, unverified=None):
        texts = {seat: self.text(seat, sequence, unverified) for seat, (sequence, _) in asked.items()}
        found = super().begin(asked, unverified)
        if found is None:
            return None
        guesses, board = dict(found.tokens()), self.board.tokens
        for seat, drafts in guesses.items():
            text, prompt = texts[seat], asked[seat][0].request.prompt.tolist()
            self.seen.append((text, list(drafts), self.frequent_tokens if self.frequent else self.vocab_size))
            self.followed += unverified is not None
            answer = self.answers.get(tuple(prompt))
            if answer is not None:
                known = answer[len(text) - len(prompt) :][: len(drafts)]
                known += [3] * (len(drafts) - len(known))
                guesses[seat] = tuple(3 if self.random.random() < 0.2 else token for token in known)
                board[seat, : len(drafts)] = torch.tensor(guesses[seat], dtype=board.dtype)
        return DecodedDrafts(found.counts, lambda: guesses)

    def text(self, seat, sequence, unverified):
        """What the guesses follow: what the host knows, and with drafts in flight what only the device knows."""
        text = sequence.tokens(0, sequence.length).tolist()
        if unverified is None:
            return text
        board = self.board
        return text + board.tokens[seat, : unverified[seat] + 1 - int(board.refused[seat])].tolist()


class Eager(SequenceDrafts):
    """Drafts of a sequence that never pauses, whatever becomes of them."""

    def pause(self) -> int:
        return 0


class Drafts(Drafting):
    """Drafts all that is offered."""

    def begin(self, prompt, salt, most, prediction, grammar=None):
        return Eager(prompt, salt, self.most, suffixes=False, model=self.model)

    def choose(self, proposals, rows, most):
        return [len(proposal.worth) for proposal in proposals]

    def plans_ahead(self, known, unknown, lost):
        return True


def engine_of(family: str, memory: int = MEMORY, head_memory: int = MEMORY, **settings: object) -> Engine:
    return engine_in(checkpoint(family).folder, memory, head_memory, **settings)


def engine_in(folder: Path, memory: int = MEMORY, head_memory: int = MEMORY, **settings: object) -> Engine:
    """Return an engine that drafts three tokens in every step, and records them."""
    model, _ = load_model(folder, torch.float32, progress=False)
    head = load_head(folder, model, torch.float32, "checkpoint", 0, CPU)
    options = {"max_sequences": 4, "max_tokens_per_step": 96, "max_length": 400, "paranoid": True} | settings
    config = EngineConfig(memory_bytes=memory, **options)
    spec, own = (MemorySpec(each.memories(CPU), draft_room=ROOM) for each in (model, head))
    hidden = HiddenStates(StateLines(4, 1000), head.width, torch.float32)
    runner = Runner(model, spec, memory, 4, threads=1, computes=KeepingPass(hidden))
    of_head = Runner(head, own, head_memory, 4, threads=1, computes=HeadPass(hidden))
    ledger = Ledger(own, head_memory, 4, 400, remember_freed=True)
    parts = (hidden.rows, ledger, of_head, model.vocab_size, 96, True)
    drafter = Recording(*parts, frequent_tokens=head.frequent)
    drafting = Drafts(ROOM, costs=FreeDrafts(), suffixes=False, model=drafter.name)
    return Engine(spec, runner, config, drafting=drafting, draft_model=drafter)


def check_drafts(engine: Engine, family: str, least: int) -> None:
    seen = engine.planner.drafts.model.seen
    assert len(seen) >= least
    # Each takes a whole run of the public implementation.
    for text, drafts, among in seen[:: -(-len(seen) // 12)]:
        assert drafts == checkpoint(family).drafts(text, len(drafts), among), f"after {len(text)} tokens"


def check_entries_of_guesses_do_not_stay_even_if_the_guesses_are_right(family: str) -> None:
    """With the head's output in place of the model's own hidden state, later drafts would differ."""
    ask = Ask(tokens(70, 4), greedy(60))
    [answer] = serve(engine_of(family), [ask])
    engine = engine_of(family)
    engine.planner.drafts.model.answers = {tuple(ask.prompt): answer.tokens}
    assert serve(engine, [ask])[0].tokens == answer.tokens
    counts = engine.planner.drafting.counts
    assert counts.accepted.total() > 20
    assert counts.proposed.total() - counts.accepted.total() > 5
    check_drafts(engine, family, least=15)


def check_hits(engine: Engine) -> None:
    head = engine.planner.drafts.model
    prompt, entries = tokens(150, 1), []
    for salt, more in ((b"one", []), (b"one", [5, 6]), (b"other", [5, 6])):
        launch = head.executor.launch

        def counted(plan, launch=launch):
            entries[-1] += int((plan.end - plan.start)[plan.from_board == 0].sum())
            return launch(plan)

        head.executor.launch = counted
        entries.append(0)
        serve(engine, [Ask(prompt + more, greedy(12), salt=salt)])
        head.executor.launch = launch
    check_drafts(engine, "qwen3_5", least=12)
    assert entries[0] > 150
    assert entries[1] < 60
    assert entries[2] > 150


def check_a_seat_that_was_left_keeps_no_hidden_states() -> None:
    """Otherwise the next sequence there could read those of another one."""
    engine = engine_of("qwen3_5")
    serve(engine, [Ask(tokens(30, 1), greedy(5)), Ask(tokens(90, 2), greedy(9), abort_after=3)])
    hidden = engine.planner.drafts.model.hidden
    assert hidden.first.tolist() == hidden.end.tolist() == [0] * 4
