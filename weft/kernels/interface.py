"""The boundary between models and hardware: a step as layers see it, and the operations that compute it.

Models call operations and never ask about devices. Three packages implement them: `plain` (a few readable lines of
PyTorch each, on any device), `cpu` (PyTorch and C++, tuned for CPUs) and `cuda` (Triton and FlashInfer, a folder for
each operation; modules named `exact` are variants whose bits do not depend on a step's other rows).
`choosing.py` picks a package for each group of operations when a model is loaded.

A step has one encoding, a few small int32 tensors. A compiled kernel computes its indices from where a row starts,
so a recorded step can be replayed for other rows with the same pointers. A backend that wants explicit indices
derives them from `Batch.host` once and caches them in `Batch.derived` for the step's other layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from weft.base.plan import Plan
from weft.device.store import AttentionView, RecurrentView
from weft.kernels.activations import Function
from weft.kernels.attention import AttentionForm, AttentionInputs, LatentInputs
from weft.kernels.experts import ExpertWeights, Routing, SharedExpert
from weft.kernels.following import DraftSamples, FollowingRows
from weft.kernels.formats.stored import Stored
from weft.kernels.recurrent import (
    ChannelDeltaInputs,
    ChannelDeltaShape,
    ConvolutionWeights,
    DeltaInputs,
    DeltaShape,
    SsdInputs,
    SsdShape,
)
from weft.kernels.rotary import Rotation
from weft.kernels.rows import RowPositions
from weft.kernels.stream import Addend, Normed, Residual
from weft.kernels.weight import Weight
from weft.memory.spec import MemorySpec, RecurrentMemory

# Slot value for a state that is not written.
NO_SLOT = -1


# A step --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PageList:
    """Where keys and values are written and read, for full or windowed attention.

    Row r reads `pages[bounds[r] : bounds[r + 1]]`, consecutive cells starting at position `first_position[r]`. A
    token at position p is at index p % cell of its page.
    """

    write_page: Tensor  # [tokens]
    first_position: Tensor  # [rows] a multiple of the cell; 0 for full attention
    bounds: Tensor  # [rows + 1]
    pages: Tensor  # [all]
    # Host copies, for libraries that plan there.
    host_bounds: Tensor  # [rows + 1]
    host_first_position: Tensor  # [rows]


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of decodes whose sequences begin with the same pages, for kernels that read those once per group.

    The members of group g are the rows `order[first[g] : first[g + 1]]`, at most `members`, and need not be adjacent.
    All cells of a prefix are complete, and no member writes there. A row without a group has all its pages in `own`.
    Unused groups come last, without members and pages.
    """

    members: int
    order: Tensor  # [rows]
    first: Tensor  # [groups + 1]
    start: Tensor  # [groups] the last position of the prefix
    prefix: PageSections
    own: PageSections


@dataclass(frozen=True, slots=True)
class PageSections:
    """Sections of `Batch.full.pages`: the i-th has `bounds[i + 1] - bounds[i]` pages, from index `place[i]` on."""

    place: Tensor  # [sections]
    first_position: Tensor  # [sections] of the section's first page
    bounds: Tensor  # [sections + 1]


@dataclass(frozen=True, slots=True)
class HostStep:
    """The step on the host. A recorded step has none: it is replayed for rows that were unknown at recording."""

    plan: Plan
    rows: RowPositions
    spec: MemorySpec


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything that layers need to know about a step, and the operations that compute it.

    Tensors are int32. The leading `decodes` rows have one token each. The others are cut at the grid into *pieces*:
    the tokens of one row in one cell, in order.
    """

    operations: Operations
    tokens: int
    rows: int
    decodes: int
    pieces: int
    most_pieces: int  # maximum of any row
    longest: int  # tokens of the longest row
    farthest: int  # greatest end of any row
    cell: int
    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens] where a token lies in its sequence: in pages, tails and cells
    start: Tensor  # [rows] position of the first new token
    first: Tensor  # [rows + 1] packed index of each row's first new token, then the total
    slot: Tensor  # [rows] checkpoint at the start of the row's cell; valid only if start >= cell
    tail: Tensor  # [rows]
    closing: Tensor  # [rows] slot for the state if the row is a decode whose token closes its cell, or NO_SLOT
    piece_row: Tensor  # [pieces]
    piece_position: Tensor  # [pieces] where the piece's cell starts, a multiple of the cell
    piece_slot: Tensor  # [pieces] slot for the state at the end of the piece's cell, or NO_SLOT
    first_piece: Tensor  # [rows - decodes + 1] first piece of row decodes + i
    full: PageList | None
    windowed: PageList | None
    # On the host.
    host_start: Tensor  # [rows]
    host_first: Tensor  # [rows + 1]
    host: HostStep | None
    # [tokens] the positions to rotate by, where they differ from those in memory. None: they are the same.
    rotary: Tensor | None = None
    # None: every row reads all of its pages. A kernel may ignore it.
    shared: SharedPrefixes | None = None
    # Values that kernels derive from a step once and share among its layers, each under its own key.
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def only_decodes(self) -> bool:
        """Return whether every row has one new token."""
        return self.decodes == self.rows

    @property
    def rotary_positions(self) -> Int[Tensor, " tokens"]:
        """Return what rotations, and nothing else, take for the positions of tokens."""
        return self.positions if self.rotary is None else self.rotary

    def pages(self, window: int | None) -> PageList:
        """Return the pages for layers with this window."""
        listed = self.full if window is None else self.windowed
        assert listed is not None
        return listed


# Operations ----------------------------------------------------------------------------------------------------------


class OrderedDecodes(Protocol):
    """Computes decode-only steps in which rows may be of one sequence: each sees those before it."""

    def in_order(self, batch: Batch) -> Tensor | None:
        """Return the final hidden states; None if this step cannot be computed so, and tails may be overwritten."""

    def is_new(self, batch: Batch) -> bool:
        """Return whether `in_order` may return None and overwrite tails: no step with as many rows was recorded."""


class DecodeSteps(NamedTuple):
    """Ways to compute steps of a model: any step, and where that is possible decodes in order."""

    compute: Callable[[Batch], Tensor]
    ordered: OrderedDecodes | None = None


@runtime_checkable
class Operations(Protocol):
    """Operations that models and samplers compute with.

    An operation that takes `out` fills and returns it, if given. Rows of `out` need not be adjacent: it may be a
    slice of a wider matrix. So may inputs. Operations never wait for a device.
    """

    # Some read memory as only a CPU can; some give a row the same bits in every batch.
    for_cpu: bool
    is_exact: bool

    # embedding

    def prepare_table(self, table: Stored, head: Weight | None) -> Stored:
        """Return a loaded table as look-ups read it. `head`: the same matrix as matmuls read it, if a model is tied."""

    def look_up(self, tokens: Int[Tensor, " n"], table: Stored, scale: float, dtype: torch.dtype) -> Tensor:
        """Return rows of the table, times `scale`. `dtype` is that of the result if the table must be decoded."""

    # linear

    def prepare(self, weight: Weight, twice: bool) -> Weight:
        """Return loaded weights in the fastest formats for matmuls; `twice`: also in a second one for few rows."""

    def linear(self, x: Normed, weight: Weight) -> Float[Tensor, "*n outputs"]: ...

    def linear_into_stream(self, x: Normed, weight: Weight) -> Addend:
        """Multiply for the residual stream. The result may be partial sums, which the stream adds up."""

    def activated_linear(self, x: Normed, weight: Weight, activation: Function, parts: int) -> Normed:
        """Return the activation of a matmul; with two parts side by side, activation(first) * second.

        The matmul that reads it may compute it.
        """

    # norm

    def residual(self, x: Float[Tensor, "tokens hidden"]) -> Residual: ...

    def rows_of(self, x: Normed) -> Float[Tensor, "n size"]:
        """Return a block's input as plain rows, for code outside these operations."""

    def rms_norm(self, x: Float[Tensor, "*n size"], weight: Float[Tensor, " size"], eps: float) -> Tensor: ...

    def gated_rms_norm(
        self,
        x: Float[Tensor, "*n size"],
        gate: Float[Tensor, "*n size"],
        weight: Float[Tensor, " size"],
        eps: float,
        groups: int,
        gate_first: bool,
        out: Tensor | None,
    ) -> Float[Tensor, "*n size"]:
        """Return norm(x) * silu(gate), or norm(x * silu(gate)) if the gate comes first, in the dtype of the gate.

        Each of `groups` equal parts of a row is normed separately.
        """

    # activation

    def gated_product(self, gate: Tensor, x: Tensor, activation: Function, out: Tensor | None = None) -> Tensor:
        """Return activation(gate) * x."""

    def add(self, x: Float[Tensor, "n size"], y: Float[Tensor, "n size"]) -> Float[Tensor, "n size"]:
        """Return x + y, possibly in the memory of x."""

    # rotary

    def make_rotation(
        self, positions: Int[Tensor, " tokens"], frequency: Float[Tensor, " half"], scale: float, dtype: torch.dtype
    ) -> Rotation: ...

    # attention

    def attend(
        self, inputs: AttentionInputs, batch: Batch, view: AttentionView, out: Tensor | None = None
    ) -> Float[Tensor, "tokens inner"]:
        """Norm heads, rotate, write pages, attend and gate: everything between a layer's two projections."""

    def warm_attention(self, forms: Sequence[AttentionForm], dtype: torch.dtype) -> None:
        """Compile what layers of these forms need, so that no step waits for compilation."""

    def prefix_members(self, form: AttentionForm, dtype: torch.dtype) -> int:
        """Return how many decodes read a shared prefix together in layers of this form; 1 if each reads its own."""

    # latent attention

    def attend_latents(
        self, inputs: LatentInputs, batch: Batch, view: AttentionView, out: Tensor | None = None
    ) -> Float[Tensor, "tokens inner"]:
        """Write latents and shared keys to their pages and attend, with the keys and values that they expand to."""

    # convolution

    def causal_conv(
        self, x: Float[Tensor, "tokens channels"], weights: ConvolutionWeights, batch: Batch, view: RecurrentView
    ) -> Float[Tensor, "tokens channels"]: ...

    def short_conv(
        self, x: Normed, projection: Weight, weights: ConvolutionWeights, batch: Batch, view: RecurrentView
    ) -> Float[Tensor, "tokens channels"]:
        """Return after * conv(before * value), where the projection of x holds before, after and value (LFM2)."""

    # ssd

    def ssd_memory(self, shape: SsdShape, dtype: str) -> RecurrentMemory:
        """Return a Mamba2 layer's memory, in the layout that `ssd` reads."""

    def ssd(
        self, inputs: SsdInputs, batch: Batch, view: RecurrentView, out: Tensor | None = None
    ) -> Float[Tensor, "tokens heads head_dim"]: ...

    # gated delta

    def gated_delta_memory(self, shape: DeltaShape, dtype: str) -> RecurrentMemory:
        """Return a gated delta layer's memory, in the layout that `gated_delta` reads."""

    def gated_delta(
        self, inputs: DeltaInputs, batch: Batch, view: RecurrentView
    ) -> Float[Tensor, "tokens value_heads value_dim"]: ...

    # channel delta

    def channel_delta_memory(self, shape: ChannelDeltaShape, dtype: str) -> RecurrentMemory:
        """Return the memory of a delta layer with decays by channel, in the layout that `channel_delta` reads."""

    def channel_delta(
        self, inputs: ChannelDeltaInputs, batch: Batch, view: RecurrentView
    ) -> Float[Tensor, "tokens heads value_dim"]: ...

    # experts

    def prepare_experts(self, layer: ExpertWeights, twice: bool) -> ExpertWeights:
        """Return loaded weights in the fastest formats for `experts`; `twice`: also in a second one for few rows."""

    def score_experts(self, x: Normed, weight: Weight) -> Float[Tensor, "tokens experts"]:
        """Return the logits of a router with float32 weights, in float32 (Nemotron-H)."""

    def route_softmax(self, logits: Float[Tensor, "tokens experts"], k: int, renormalise: bool) -> Routing:
        """Choose the k most likely experts; on request, renormalize their probabilities to sum to 1 (Qwen)."""

    def route_top(self, logits: Float[Tensor, "tokens experts"], k: int) -> Routing:
        """Choose the k best experts; probabilities are over those only (gpt-oss, Granite)."""

    def route_sigmoid(
        self,
        logits: Float[Tensor, "tokens experts"],
        k: int,
        bias: Float[Tensor, " experts"] | None = None,
        groups: int = 1,
        kept_groups: int = 1,
        renormalise: bool = True,
        scaling: float = 1.0,
        eps: float = 1e-20,
    ) -> Routing:
        """Choose by independent scores; `bias` affects the choice, not the weights (LFM2-MoE, Nemotron-H).

        With several groups, only experts of the `kept_groups` groups whose best two score highest can be chosen.
        """

    def experts(
        self, x: Normed, routing: Routing, layer: ExpertWeights, shared: SharedExpert | None = None
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the weighted sum of the chosen experts, plus the shared expert's output if there is one."""

    # together

    def run_together(self, x: Tensor, one: Callable[[], object], *others: Callable[[], object]) -> None:
        """Run independent pieces of work, concurrently where that is faster. `x` has the rows.

        The caller keeps inputs shared by several of them alive until this returns.
        """

    def side_by_side(self, like: Float[Tensor, "rows any"], sizes: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Allocate one matrix for adjacent outputs; return it, and the columns of each output as a view."""

    def record_decodes(self, compute: Callable[[Batch], Tensor]) -> DecodeSteps:
        """Return ways to compute steps that may record decode-only ones and replay their calls without Python.

        `compute` returns the final hidden states of a step, always of the same model on the same memory.
        """

    # ranks

    def add_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks of a tensor-parallel group; alone, x itself."""

    def gather_ranks(self, x: Float[Tensor, "n part"], size: int) -> Float[Tensor, "n size"]:
        """Return the first `size` of all ranks' columns side by side; alone, x itself."""

    # sampling

    def for_sampling(self, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        """Return logits in the dtype that the operations below expect."""

    def likeliest(self, logits: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
        """Return the token with the greatest logit, the first among equals."""

    def take_likeliest(
        self, logits: Float[Tensor, "rows vocab"], board: Int[Tensor, " seats"], seat: Int[Tensor, " rows"]
    ) -> Int[Tensor, " rows"]:
        """Return the most likely tokens as 32-bit integers, and write them to their rows' seats on the board."""

    def read_board(
        self,
        board: Int[Tensor, " seats"],
        seat: Int[Tensor, " rows"],
        from_board: Int[Tensor, " rows"],
        known: Int[Tensor, " rows"],
    ) -> Int[Tensor, " rows"]:
        """Return the token at a row's seat where `from_board` is not 0, and the known token elsewhere."""

    # following

    def verify_drafts(
        self,
        tokens: Int[Tensor, " samples"],
        inputs: Int[Tensor, " tokens"],
        rows: DraftSamples,
        board: Int[Tensor, " seats"],
        refused: Int[Tensor, " seats"],
    ) -> None:
        """Leave on the board the sample after the last right draft of each row, and how many of them were wrong."""

    def move_rows(
        self,
        batch: Batch,
        rows: FollowingRows,
        seat: Int[Tensor, " rows"],
        refused: Int[Tensor, " seats"],
        moved: Int[Tensor, " seats"],
    ) -> None:
        """Let rows start where the drafts before them turned out to end: change the batch in place.

        `moved` gets the number of positions by which the row of each seat was moved.
        """

    # sampling of restricted and random tokens

    def restrict(self, logits: Float[Tensor, "n vocab"], allowed: UInt8[Tensor, "n bytes"]) -> Float[Tensor, "n vocab"]:
        """Return float32 logits with minus infinity for every token whose bit is not set, lowest bit of a byte first.

        The logits are not modified.
        """

    def draw(self, logits: Float[Tensor, "draws vocab"], draws: Any) -> Int[Tensor, " draws"]:
        """Return a random token for each row, drawn from those that the filters keep."""

    def score(
        self, logits: Float[Tensor, "n vocab"], chosen: Int[Tensor, " n"], top: int
    ) -> tuple[Float[Tensor, " n"], Int[Tensor, "n top"], Float[Tensor, "n top"]]:
        """Return log-probabilities of the chosen tokens, and the `top` most likely tokens with theirs (at temperature
        1).
        """

    def digest(self, logits: Float[Tensor, "n vocab"]) -> Int[Tensor, " n"]:
        """Return 64 bits for each row that depend on every bit of its logits, in any company."""
