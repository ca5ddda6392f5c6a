"""Steps recorded as CUDA graphs by size, and replayed for any plan that fits.

Recording runs the model's own code once; a replay costs the host a few microseconds for a model of any depth.
Without a GPU the same steps run eagerly on the same padded inputs, which is how they are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from weft.base.plan import Ints, Plan
from weft.device.store import View
from weft.kernels.interface import Batch, Operations
from weft.models.model import CausalModel
from weft.models.mtp import MtpHead
from weft.runner.cuda.inputs import DecodeInputs
from weft.runner.cuda.padding import Size, StepInputs
from weft.runner.cuda.shared_prefixes import PrefixSharing, members_of, shared_sizes
from weft.runner.passes import ModelPass
from weft.runner.placed import Boards, PlacedModel

# Tokens of short prompts in a recorded step, and decodes beside them. Longer prompts keep a GPU busy for as long as it
# takes to launch their kernels one by one.
PROMPT_TOKENS = (64, 128, 320, 576)
BESIDE = (8, 32, 128)
# Rows of a recorded step with drafts, tokens of a row on average, and a bound of their product. The engine chooses no
# more drafts than fit.
DRAFTING = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DRAFT_WIDTHS = (2, 4, 8)
MOST_DRAFT_TOKENS = 1024
# From this number of rows on, tokens cost more than the weights that all of them share, and so does padding.
MANY_ROWS = 128
WIDTHS_OF_MANY = (3, 6)
# Data types that every library knows, by size.
BITS = {2: torch.int16, 4: torch.int32}
# Rows of prompts and padding: a single prompt need not wait for the padding of three.
LONGER_ALONE, LONGER_BESIDE = 2, 4


def buckets(most: int) -> list[int]:
    """Return the numbers of decodes to record: powers of two, then steps that waste little.

    >>> buckets(40), buckets(256)[-4:]
    ([1, 2, 4, 8, 16, 24, 32, 40], [192, 208, 224, 256])
    """
    fixed = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 256]
    wider = list(range(320, most + 64, 64))
    return [*(rows for rows in [*fixed, *wider] if rows < most), most]


def prompt_sizes(most: int) -> list[Size]:
    """Return the sizes of steps with prompts to record, smallest first; `most` rows decode at once.

    >>> [(size.decodes, size.tokens) for size in prompt_sizes(8)][:3]
    [(0, 64), (8, 64), (0, 128)]
    """
    beside = {min(decodes, most) for decodes in BESIDE}
    sizes = [Size(0, LONGER_ALONE, tokens) for tokens in PROMPT_TOKENS]
    sizes += [Size(decodes, LONGER_BESIDE, tokens) for decodes in beside for tokens in PROMPT_TOKENS]
    return sorted(sizes, key=lambda size: (size.all_tokens, size.tokens))


def draft_sizes(most: int, room: int) -> list[Size]:
    """Return the sizes of steps with drafts to record, if tails have room for drafts; `most` rows decode at once.

    Its rows may have any number of drafts, or none: only their sum counts.

    >>> [(size.longer, size.tokens) for size in draft_sizes(2, 7)]
    [(2, 3), (2, 4), (3, 4), (2, 8), (3, 8), (3, 16)]
    """
    if not room:
        return []
    rows = {min(each, most) for each in DRAFTING}
    widths = {each: DRAFT_WIDTHS + (WIDTHS_OF_MANY if each >= MANY_ROWS else ()) for each in rows}
    shapes = {(each, width) for each in rows for width in widths[each] if each * width <= MOST_DRAFT_TOKENS}
    # Without a plan, one row has two tokens and every other one.
    tokens = {(each, width): max(each * width, each + 2) for each, width in shapes}
    sizes = (Size(0, each + 1, tokens[each, width], each * width, longest=room + 1) for each, width in shapes)
    return sorted(sizes, key=lambda size: (size.tokens, size.longer))


def draft_counts(sizes: Sequence[Size], rows: int) -> list[int]:
    """Return the numbers of drafts, of all rows together, that fill the sizes for these rows, smallest first.

    >>> [draft_counts(draft_sizes(256, 7), rows) for rows in (2, 128, 256, 257)]
    [[2, 6, 14], [128, 256, 384, 640, 896], [256, 512, 768], []]
    """
    most = accumulate((size.most_drafts(rows) for size in sizes), max)
    return [count for count, _ in groupby(most) if count]


def step_sizes(most: int, room: int, drafter: bool = False) -> list[Size]:
    """Return all sizes of steps with longer rows to record, smallest first.

    After a verification, a `drafter` reads as many tokens of a row as were accepted, and samples once. Some rows may
    have more to read.
    """
    drafts = draft_sizes(most, room)
    if drafter:
        drafts = [replace(size, tokens=size.tokens + 1, samples=None, longest=None) for size in drafts]
    sizes = [*prompt_sizes(most), *drafts]
    return sorted(sizes, key=lambda size: (size.all_tokens, size.tokens))


@dataclass(slots=True)
class StepOutput:
    """Results of a step, at the same device addresses after every replay: a line for each sample of its plan.

    In a step of decodes every row has a line, sampled or not.
    """

    logits: Tensor | None  # [samples, vocab]; those of a drafter are not kept
    tokens: Tensor  # [samples] the most likely
    # [tokens] of the step. Those of decodes have the plan's indices; their seats on the board are overwritten.
    inputs: Tensor


class RecordedSteps:
    """Steps recorded for decodes alone and with longer rows. `prompts` are the inputs of the latter, by size.

    If more than one of the `members` of a group of decodes may read a shared prefix together, steps that do so are
    recorded as well.
    """

    def __init__(
        self,
        model: CausalModel,
        views: tuple[View, ...],
        boards: Boards,
        decodes: DecodeInputs,
        prompts: list[StepInputs],
        computes: ModelPass | None = None,
        members: int = 1,
    ) -> None:
        self.computes = ModelPass() if computes is None else computes
        self.model, self.views, self.boards, self.decodes, self.prompts = model, views, boards, decodes, prompts
        self.rows = buckets(decodes.rows)
        # Rows of a drafter may be moved to where pages are not complete.
        self.sharing = (
            PrefixSharing(decodes.spec.cell, members) if members > 1 and not self.computes.is_drafter else None
        )
        self.shared_rows = [] if self.sharing is None else shared_sizes(decodes.rows)
        self._recorded: dict[Hashable, tuple[Callable[[], None], StepOutput]] = {}
        self._drafts_first = sorted(prompts, key=lambda each: each.size.samples is None)
        # By rows and drafts: asked for many times in a plan.
        self._padded: dict[tuple[int, int], int] = {}
        sizes = [each.size for each in prompts if each.size.samples is not None]
        # By rows. If steps with drafts are not recorded, any number of them is computed in the same way.
        self._draft_counts = [draft_counts(sizes, rows) for rows in range(decodes.rows + 1)] if sizes else []

    def builds_on_flight(self, decodes: int, drafting: int, tokens: int) -> bool:
        """Return whether such a step is recorded, also if drafts of some rows find no memory.

        Of a head, it is one that reads as many tokens of rows with drafts in flight.
        """
        if self.computes.is_head:
            return any(each.size.holds(decodes, drafting, tokens, decodes + drafting) for each in self.prompts)
        return any(each.size.holds(decodes, drafting, tokens) for each in self.prompts if each.builds_on_flight)

    def draft_counts(self, rows: int) -> Sequence[int] | None:
        """Return the numbers of drafts that fill the recorded steps for these rows; None: none is for drafts."""
        return self._draft_counts[rows] if self._draft_counts else None

    def replay(self, plan: Plan) -> StepOutput | None:
        """Execute a plan up to its logits, if a recorded step computes everything that it asks for."""
        decodes_only = len(plan.tokens) == plan.rows
        every = len(plan.sampled) == plan.rows
        is_drafter = self.computes.is_drafter
        if plan.reads_prompts or not len(plan.sampled) or not (every or (decodes_only and not is_drafter)):
            return None
        return self.run(plan)

    def run(self, plan: Plan) -> StepOutput | None:
        """Execute a plan up to its logits; return None if it fits no recorded step."""
        frequent = plan.drafts.frequent_only
        if len(plan.tokens) == plan.rows:
            groups = None if self.sharing is None else self.sharing.of(plan)
            if groups is not None:
                rows = next(rows for rows in self.shared_rows if rows >= plan.rows)
                self.decodes.fill(plan, rows, self._lines(plan), groups)
                return self._replay(("shared", rows), lambda: self._decode(rows, is_shared=True))
            rows = next(rows for rows in self.rows if rows >= plan.rows)
            self.decodes.fill(plan, rows, self._lines(plan))
            return self._replay((rows, frequent), lambda: self._decode(rows, frequent))
        decodes = plan.decode_rows
        longest = int((plan.end - plan.start).max())
        shape = (decodes, plan.rows - decodes, len(plan.tokens) - decodes, plan.sample_count, longest)
        inputs = self._smallest(shape, len(plan.drafts.counts) > 0, plan.drafts.may_move)
        if inputs is None:
            return None
        inputs.fill(plan, self._lines(plan))
        output = self._replay((inputs.size, frequent), lambda: self._prompt(inputs, frequent))
        if len(plan.drafts.counts) and decodes < inputs.size.decodes:
            # Without the padding between them, all tokens have the plan's indices.
            tokens = torch.cat([output.inputs[:decodes], output.inputs[inputs.size.decodes :]])
            output = replace(output, inputs=tokens)
        return output

    def padded_tokens(self, rows: int, drafts: int) -> int:
        """Return the tokens of the recorded step that holds these rows, with this number of drafts in all.

        A step that is not recorded counts as larger than all that are: no cost of it is one of theirs.
        """
        if not drafts:
            return next((each for each in self.rows if each >= rows), rows)
        if (found := self._padded.get((rows, drafts))) is None:
            tokens = rows + drafts
            inputs = self._smallest((0, rows, tokens, tokens), True)
            most = max((each.size.all_tokens for each in self.prompts), default=0)
            found = self._padded[rows, drafts] = most + tokens if inputs is None else inputs.size.all_tokens
        return found

    def _smallest(self, shape: tuple[int, ...], drafts: bool, follows: bool = False) -> StepInputs | None:
        """Return the smallest step that holds a plan of this shape.

        With drafts, it is one of those recorded for them if any fits: which rows have the drafts then makes no
        difference, and costs are those of the size that runs.
        """
        steps = self._drafts_first if drafts else self.prompts
        fitting = (each for each in steps if each.size.holds(*shape))
        return next((each for each in fitting if each.builds_on_flight or not follows), None)

    def _lines(self, plan: Plan) -> Ints | None:
        return self.computes.lines(plan)

    def _replay(self, size: Hashable, step: Callable[[], StepOutput]) -> StepOutput:
        if size not in self._recorded:
            return step()
        replay, output = self._recorded[size]
        replay()
        return output

    def _decode(self, rows: int, frequent: bool = False, is_shared: bool = False) -> StepOutput:
        """Run one step on the present inputs. A head may draft among the frequent tokens only.

        `is_shared`: the inputs have groups, whose prefixes are read together.
        """
        inputs = self.decodes
        seat, from_board = inputs.tensor("seat", rows), inputs.tensor("from_board", rows)
        ids = inputs.operations.read_board(self.boards.token, seat, from_board, inputs.tensor("token", rows))
        members = self.sharing.members if is_shared and self.sharing is not None else 1
        batch = inputs.batch(rows, ids, members)
        states = self.computes.states
        if states is None:
            return self._choose(self._compute(batch, None), batch, seat, from_board)
        if self.computes.is_head:
            batch = moved_decodes(batch, inputs.tensor("starts_earlier", rows) * states.board.refused[seat])
        return self._choose(self._compute(batch, inputs.tensor("line", rows)), batch, seat, from_board, frequent)

    def _prompt(self, inputs: StepInputs, frequent: bool = False) -> StepOutput:
        step = inputs.step
        # Nothing may remain of an earlier run.
        batch, boards = replace(step.batch, derived={}), self.boards
        if step.following is not None:
            batch.operations.move_rows(batch, step.following, step.seat, boards.refused, boards.moved)
        # The last row is padding, and may have no token.
        ids, first = batch.token_ids, batch.first[:-2]
        ids[first] = batch.operations.read_board(boards.token, step.seat[:-1], step.from_board[:-1], ids[first])
        answer, states = step.answer, self.computes.states
        board = None if states is None else states.board
        if board is not None and step.on_device is not None and step.ends_earlier is not None:
            board.read(ids, step.on_device)
            answer = answer - step.ends_earlier * board.refused[step.answer_seat] if self.computes.is_head else answer
        hidden = self._compute(batch, step.line)[answer]
        output = self._choose(hidden, batch, step.answer_seat, torch.zeros_like(step.answer_seat), frequent)
        if step.drafts is not None and not self.computes.is_drafter:
            batch.operations.verify_drafts(output.tokens, ids, step.drafts, boards.token, boards.refused)
            self.computes.verified(output.tokens, step.drafts, boards.refused)
        return output

    def _compute(self, batch: Batch, line: Tensor | None) -> Tensor:
        """Return the final hidden states of a step."""
        hidden = self.computes.compute(self.model, batch, self.views, line)
        self.computes.keep(line, hidden)
        return hidden

    def _choose(
        self, hidden: Tensor, batch: Batch, seat: Tensor, continues: Tensor, frequent: bool = False
    ) -> StepOutput:
        """Choose tokens of seats. Those of a head are drafts, and those that `continues` marks not the first ones."""
        self.computes.chosen(hidden, seat)
        logits = self.computes.logits(self.model, hidden, batch, frequent)
        tokens = batch.operations.take_likeliest(logits, self.boards.token, seat)
        self.computes.drafted(tokens, seat, continues)
        return StepOutput(None if self.computes.is_drafter else logits, tokens, batch.token_ids)

    def steps(self) -> list[tuple[Hashable, Callable[[], StepOutput]]]:
        """Return a step of every size with inputs of padding, largest first."""
        self.decodes.fill_with_padding()
        limited = isinstance(self.model, MtpHead) and self.model.frequent < self.model.vocab_size
        steps: list[tuple[Hashable, Callable[[], StepOutput]]] = []
        for frequent in (False, True) if limited else (False,):
            steps += [((each.size, frequent), partial(self._prompt, each, frequent)) for each in self.prompts[::-1]]
            steps += [((rows, frequent), partial(self._decode, rows, frequent)) for rows in self.rows[::-1]]
        steps += [(("shared", rows), partial(self._decode, rows, is_shared=True)) for rows in self.shared_rows[::-1]]
        return steps

    def record_all(self, progress: bool) -> None:
        """Record the largest first: the others then reuse its memory."""
        pool = torch.cuda.graph_pool_handle()
        # `None`: no bar unless standard error is a terminal.
        disable = None if progress else True
        for size, step in tqdm(self.steps(), desc="capturing CUDA graphs", unit="step", disable=disable):
            # Libraries choose their algorithms here, not while recording.
            step()
            torch.cuda.synchronize()
            self._recorded[size] = record(step, pool)


def recorded_steps(placed: PlacedModel, seats: int, cells: int, draft_room: int) -> RecordedSteps:
    """Return the steps of a model, still to be recorded, for `seats` rows of up to `cells` cells.

    `draft_room` is how many drafts of a row a recorded step may have.
    """
    computes, operations = placed.computes, placed.operations
    where = (cells, placed.spec, placed.store.scratch, placed.device, operations, computes.padding_line)
    sizes = step_sizes(seats, draft_room, computes.is_drafter)
    prompts = [StepInputs(size, seats, *where) for size in sizes]
    parts = (placed.model, placed.store.views, placed.boards, DecodeInputs(seats, *where), prompts)
    return RecordedSteps(*parts, computes, members_of(placed.model, operations))


@dataclass(frozen=True, slots=True)
class StepRecording:
    """Wish that steps are recorded, for rows of up to `max_length` tokens. On a CPU (in tests) they run as they are."""

    max_length: int
    progress: bool = False


def record_steps(placed: PlacedModel, seats: int, recording: StepRecording, draft_room: int) -> RecordedSteps:
    """Return the recorded steps of a model."""
    on_gpu = placed.device.type == "cuda"
    if on_gpu:
        warm_mixers(placed.model, placed.operations)
    steps = recorded_steps(placed, seats, -(-recording.max_length // placed.spec.cell), draft_room)
    if on_gpu:
        with torch.inference_mode():
            steps.record_all(recording.progress)
    return steps


def warm_mixers(model: CausalModel, operations: Operations) -> None:
    """Let libraries of the mixers compile in the background, and use what they have compiled."""
    for mixer in model.mixers():
        mixer.warm(operations)


def record(step: Callable[[], StepOutput], pool: Any) -> tuple[Callable[[], None], StepOutput]:
    """Return what repeats a step, and its outputs. Steps that are recorded next reuse the memory of its logits."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = step()
    # The largest tensor of many steps. It is read before the next step is launched, whatever its size.
    logits = None if output.logits is None else borrowed(output.logits)
    return graph.replay, replace(output, logits=logits)


def borrowed(tensor: Tensor) -> Tensor:
    """Return a tensor in the same memory of a GPU that does not own it: the steps recorded next may write there too."""
    bits = tensor.view(BITS[tensor.element_size()])
    return torch.as_tensor(Memory(bits.__cuda_array_interface__), device=tensor.device).view(tensor.dtype)


class Memory:
    """Shape and address of memory on a GPU, for libraries that share it."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface


def moved_decodes(batch: Batch, by: Tensor) -> Batch:
    """Return a step of decodes whose rows start some positions earlier, for layers that have no states."""
    assert batch.full is not None
    assert batch.windowed is None
    start, listed = batch.start - by, batch.full
    page = listed.pages[listed.bounds[:-1] + start // batch.cell]
    rotary = None if batch.rotary is None else batch.rotary - by
    return replace(batch, start=start, positions=start, rotary=rotary, full=replace(listed, write_page=page))
