"""Steps computed operation by operation. On a CPU, C++ kernels replay the calls of decode-only steps by themselves."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from weft.base.completion import complete
from weft.base.parts import rows_of_one
from weft.base.plan import Plan
from weft.device.staging import StagedValue
from weft.device.upload import upload
from weft.kernels.interface import Batch
from weft.memory.kinds import Kind
from weft.runner.batching import build_batch, build_step
from weft.runner.hidden_states import draft_places
from weft.runner.placed import PlacedModel
from weft.runner.step_sampling import StepSampling


class ComputedStep(NamedTuple):
    """A plan whose layers have been computed. `batch` may be that of a part of it."""

    batch: Batch
    sampling: StepSampling
    inputs: Int[Tensor, " tokens"]
    hidden: Float[Tensor, "tokens hidden"]


class EagerSteps:
    def __init__(self, placed: PlacedModel) -> None:
        self.placed = placed
        self.compute, self.ordered = placed.operations.record_decodes(self.forward)

    def complete(self, plan: Plan) -> Plan:
        """Return the plan with what the step before it decided, as far as the host can read it.

        Where it cannot, recorded steps move rows on the device, and other steps have none that follow drafts.
        """
        placed, states = self.placed, self.placed.computes.states
        if not placed.store.is_host_memory:
            check_complete(plan)
            return plan
        if not plan.drafts.may_move and not len(plan.drafts.on_device):
            return plan
        # Rows of a head start and end earlier by what the model refused.
        refused = states.board.refused if states and placed.computes.is_head else placed.boards.refused
        tokens = states.board.tokens.numpy()[plan.seat] if states else None
        return complete(plan, refused.numpy()[plan.seat], placed.spec.cell, tokens)

    def forward(self, batch: Batch) -> Float[Tensor, "tokens hidden"]:
        """Return the final hidden states of a batch of the model."""
        return self.placed.computes.compute(self.placed.model, batch, self.placed.store.views, None)

    def forward_head(self, batch: Batch, plan: Plan) -> Float[Tensor, "tokens hidden"]:
        """Return the final hidden states of a head's batch."""
        placed = self.placed
        return placed.computes.compute(placed.model, batch, placed.store.views, self.lines_of(plan))

    def lines_of(self, plan: Plan) -> Int[Tensor, " tokens"] | None:
        lines = self.placed.computes.lines(plan)
        return None if lines is None else upload({"lines": lines}, self.placed.device, widen=False)["lines"]

    def batch_of(self, plan: Plan) -> Batch:
        """Return the batch of a plan, or of a part of one."""
        placed = self.placed
        return build_batch(plan, placed.spec, placed.boards.token, placed.device, placed.operations)

    def step_of(self, plan: Plan, others: StagedValue) -> tuple[Batch, Any]:
        """Return the batch of a plan, and the step's other arrays from the same upload."""
        placed = self.placed
        return build_step(plan, placed.spec, placed.boards.token, placed.device, placed.operations, others)

    def upload(self, staged: StagedValue) -> StepSampling:
        """Return a staged sampling with its arrays on the device."""
        found: StepSampling = staged.finish(upload(staged.arrays(), self.placed.device))
        return found

    def read_drafts(self, plan: Plan, ids: Int[Tensor, " tokens"]) -> None:
        """Replace those of a plan's tokens that only the device knows."""
        if len(plan.drafts.on_device):
            states = self.placed.computes.states
            assert states is not None, "drafts are where hidden states are"
            sent = upload({"place": draft_places(plan)}, self.placed.device, widen=False)
            states.board.read(ids, sent["place"])

    def in_order(self, plan: Plan, batch: Batch) -> Float[Tensor, "rows hidden"] | None:
        """Return the final hidden states of rows of one token, each of which may read what the one before it writes.

        None: only recorded steps of C++ kernels can compute them together, and this one is not recorded.
        """
        if self.ordered is None:
            return None
        store = self.placed.store
        # With all drafts that fit, a convolution's ring overwrites inputs that the step's first token reads.
        has_tails = Kind.TAIL in store.unit_bytes
        used = set(map(int, plan.tail)) if has_tails and self.ordered.is_new(batch) else set[int]()
        before = {index: store.unit(Kind.TAIL, index).clone() for index in used}
        hidden = self.ordered.in_order(batch)
        if hidden is None:
            for index, contents in before.items():
                store.unit(Kind.TAIL, index).copy_(contents)
        return hidden


def check_complete(plan: Plan) -> None:
    """Refuse a plan that only a recorded step can complete on the device."""
    assert not plan.drafts.may_move, "only recorded steps have rows that follow drafts in flight"
    ends_move = len(plan.drafts.unverified_inside) > 0
    assert not ends_move, "only recorded steps have rows that end where drafts in flight do"


@runtime_checkable
class Numerics(Protocol):
    """In which passes a plan is computed, and so how its sums are rounded."""

    # Units of each kind, besides those of plans, to which its passes write.
    scratch_units: int
    # Whether recorded steps compute rows with drafts in the same way.
    records_drafts: bool
    # Rows whose logits are computed at once; None: any number.
    logit_rows: int | None

    def compute(self, plan: Plan, staged: StagedValue, steps: EagerSteps) -> ComputedStep:
        """Return a plan, whose staged sampling this is, with its layers computed."""
        ...


class UsualNumerics:
    """One pass for the whole plan."""

    records_drafts = True
    logit_rows: int | None = None

    def __init__(self, scratch_units: int = 0) -> None:
        self.scratch_units = scratch_units

    def compute(self, plan: Plan, staged: StagedValue, steps: EagerSteps) -> ComputedStep:
        single = None if steps.ordered is None else rows_of_one(plan, steps.placed.spec.cell)
        if single is not None:
            batch, sampling = steps.step_of(single, staged)
            hidden = steps.in_order(single, batch)
            if hidden is not None:
                return ComputedStep(batch, sampling, batch.token_ids, hidden)
        batch, sampling = steps.step_of(plan, staged)
        steps.read_drafts(plan, batch.token_ids)
        hidden = steps.forward_head(batch, plan) if steps.placed.computes.is_head else steps.compute(batch)
        return ComputedStep(batch, sampling, batch.token_ids, hidden)
