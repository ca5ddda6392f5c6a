"""What a model must remember, declared by its layers in plain numbers.

A mixer declares one memory. All of them together determine the bytes of a page, a window page, a state and a tail; no
other part of Weft asks what kind of layers a model has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from weft.base.grid import CELL, cells_covering

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
# Pages of these dtypes hold codes, and for each head of a token an exponent.
CODES = ("fp8", "int8")
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a state, or of a tail per remembered token.

    The tokens of a tail are contiguous within each of the first `apart` dimensions: with one, head by head. If a tail
    has room for `whole_cells`, a cell never continues at its beginning, and is read as one piece, drafts or not.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    apart: int = 0
    # Not in the repr, which fingerprints contain: tails are never stored.
    whole_cells: bool = field(default=False, repr=False)

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class AttentionMemory:
    """Keys and values of one attention layer; with a window, only of the last `window` tokens.

    With a `latent`, values are not stored: a token's value is the first `latent` features of its key. Pages of codes
    have a byte for each number and one for each head of a token (`weft/kernels/pages.py`).
    """

    kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None
    # Not in the repr, which fingerprints contain: files of models without latents stay valid.
    latent: int | None = field(default=None, repr=False)

    @property
    def bytes_per_token(self) -> int:
        stored = 2 if self.latent is None else 1
        return stored * self.kv_heads * (self.head_dim * ITEM_BYTES[self.dtype] + (self.dtype in CODES))


@dataclass(frozen=True, slots=True)
class RecurrentMemory:
    """Memory of a recurrent layer: `state` is one checkpoint, `tail` what each token of the open cell adds.

    `conv_width` is the width of its causal convolution: the part "conv" of the state has the width - 1 inputs before
    the checkpoint, and the tail's part "conv" is a shorter ring than the others.
    """

    state: tuple[Part, ...]
    tail: tuple[Part, ...]
    conv_width: int


Memory = AttentionMemory | RecurrentMemory


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# Without slots: what follows from the memories is computed once, because every request asks for it.
@dataclass(frozen=True)
class MemorySpec:
    """All memories of a model, in the order of its mixers.

    `draft_room` is the number of tokens by which a tail may be rolled back beyond the open cell.
    """

    memories: tuple[Memory, ...]
    cell: int = CELL
    draft_room: int = 0

    def ring(self, memory: RecurrentMemory, part: Part) -> int:
        """Return how many tokens a tail keeps of a part; the token at position p is at index p % ring."""
        kept = memory.conv_width - 1 if part.name == "conv" else self.cell
        kept += self.draft_room
        return cells_covering(kept, self.cell) * self.cell if part.whole_cells else kept

    def part_bytes(self, memory: RecurrentMemory, part: Part) -> int:
        return aligned(part.bytes * self.ring(memory, part))

    @cached_property
    def window(self) -> int | None:
        """The longest sliding window, which window pages must cover."""
        windows = [m.window for m in self.memories if isinstance(m, AttentionMemory) and m.window is not None]
        return max(windows, default=None)

    @cached_property
    def window_cells(self) -> int:
        """Number of window pages that a resume point keeps."""
        return cells_covering(self.window - 1, self.cell) if self.window else 0

    def attention_bytes(self, windowed: bool) -> int:
        own = [m for m in self.memories if isinstance(m, AttentionMemory) and (m.window is not None) == windowed]
        return sum(m.bytes_per_token * self.cell for m in own)

    @cached_property
    def page_bytes(self) -> int:
        return self.attention_bytes(windowed=False)

    @cached_property
    def window_page_bytes(self) -> int:
        return self.attention_bytes(windowed=True)

    @cached_property
    def state_bytes(self) -> int:
        own = [m for m in self.memories if isinstance(m, RecurrentMemory)]
        return sum(aligned(part.bytes) for m in own for part in m.state)

    @cached_property
    def tail_bytes(self) -> int:
        own = [m for m in self.memories if isinstance(m, RecurrentMemory)]
        return sum(self.part_bytes(m, part) for m in own for part in m.tail)

    @cached_property
    def conv_width(self) -> int:
        """The width of the model's convolutions (one per model), 1 without any."""
        return max((m.conv_width for m in self.memories if isinstance(m, RecurrentMemory)), default=1)
