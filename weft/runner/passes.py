"""What is computed of a plan: a model alone, a model whose states an MTP head reads, the head itself, a draft model."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from weft.base.plan import Ints, Plan
from weft.device.store import View
from weft.kernels.following import DraftSamples
from weft.kernels.interface import Batch
from weft.models.model import CausalModel
from weft.models.mtp import MtpHead
from weft.runner.hidden_states import HiddenStates


class ModelPass:
    """A model without an MTP head. `is_drafter`: all its samples are drafts, the most likely tokens."""

    # Where the model's hidden states are kept, if a head reads them.
    states: HiddenStates | None = None
    # Whether it is the head.
    is_head = False

    def __init__(self, is_drafter: bool = False) -> None:
        self.is_drafter = is_drafter

    @property
    def padding_line(self) -> int | None:
        """The line of hidden states for tokens of padding."""
        return None if self.states is None else self.states.rows.padding

    def lines(self, plan: Plan) -> Ints | None:
        """Return the line of hidden states of each token of a plan. Called once for each launch."""
        return None

    def compute(
        self, model: CausalModel, batch: Batch, views: tuple[View, ...], lines: Int[Tensor, " tokens"] | None
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the final states of a batch."""
        hidden: Tensor = model(batch, views)
        return hidden

    def keep(self, lines: Int[Tensor, " tokens"] | None, hidden: Float[Tensor, "tokens hidden"]) -> None:
        """Keep the final states of a step."""

    def chosen(self, hidden: Float[Tensor, "samples hidden"], seat: Int[Tensor, " samples"]) -> None:
        """Take note of the states from which samples of seats are chosen."""

    def logits(
        self, model: CausalModel, hidden: Float[Tensor, "n hidden"], batch: Batch, frequent: bool
    ) -> Float[Tensor, "n vocab"]:
        """Return the logits of all tokens, or of the `frequent` ones."""
        found: Tensor = model.logits(hidden, batch)
        return found

    def drafted(self, tokens: Int[Tensor, " n"], seat: Int[Tensor, " n"], continues: Int[Tensor, " n"]) -> None:
        """Take note of drafts of seats. Those that `continues` marks are not the first ones."""

    def verified(self, tokens: Int[Tensor, " samples"], rows: DraftSamples, refused: Int[Tensor, " seats"]) -> None:
        """Take note of the samples of rows with drafts, and of how many drafts were wrong."""


class KeepingPass(ModelPass):
    """A model whose head is to read the final states of its tokens."""

    states: HiddenStates

    def __init__(self, states: HiddenStates) -> None:
        super().__init__()
        self.states = states

    def lines(self, plan: Plan) -> Ints:
        return self.states.rows.place(plan)

    def keep(self, lines: Int[Tensor, " tokens"] | None, hidden: Float[Tensor, "tokens hidden"]) -> None:
        assert lines is not None
        self.states.write(lines, hidden)

    def verified(self, tokens: Int[Tensor, " samples"], rows: DraftSamples, refused: Int[Tensor, " seats"]) -> None:
        self.states.board.verified(tokens, rows, refused)


class HeadPass(ModelPass):
    """An MTP head. A row's tokens are those after its positions; its drafts stay on the board of the hidden states.

    A row whose token is on the board continues from the head's own output at its last sample, any other row from the
    model's hidden states.
    """

    states: HiddenStates
    is_head = True

    def __init__(self, states: HiddenStates) -> None:
        super().__init__(is_drafter=True)
        self.states = states

    def lines(self, plan: Plan) -> Ints:
        return self.states.rows.find(plan)

    def compute(
        self, model: CausalModel, batch: Batch, views: tuple[View, ...], lines: Int[Tensor, " tokens"] | None
    ) -> Float[Tensor, "tokens hidden"]:
        assert isinstance(model, MtpHead)
        assert lines is not None
        return model.predict(batch, views, self.states.read(lines))

    def chosen(self, hidden: Float[Tensor, "samples hidden"], seat: Int[Tensor, " samples"]) -> None:
        self.states.write(seat + self.states.rows.own, hidden)

    def logits(
        self, model: CausalModel, hidden: Float[Tensor, "n hidden"], batch: Batch, frequent: bool
    ) -> Float[Tensor, "n vocab"]:
        assert isinstance(model, MtpHead)
        return model.frequent_logits(hidden, batch) if frequent else model.logits(hidden, batch)

    def drafted(self, tokens: Int[Tensor, " n"], seat: Int[Tensor, " n"], continues: Int[Tensor, " n"]) -> None:
        self.states.board.drafted(tokens, seat, continues)
