"""Token embeddings, and logits from a tied embedding."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from weft.kernels.formats.stored import Stored
from weft.kernels.interface import Batch, Operations
from weft.kernels.weight import Weight
from weft.models.layers.linear import Linear
from weft.models.model import MatrixLayer, Source, declared
from weft.models.sharding import Shard, current_shard


class Embedding(MatrixLayer):
    """Token embedding of this rank's part of the vocabulary; other tokens have the embedding zero.

    `scale` multiplies the vectors (Gemma, Granite, Falcon-H1), rounded to their dtype as in
    training.
    """

    def __init__(self, vocab: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.cut, rows = current_shard().padded(vocab)
        self.weight = declared(rows, size)
        self.size, self.dtype = size, self.weight.dtype
        self.table: Stored | None = None  # once filled
        # The weights as matmuls read them, once filled, if the model is tied.
        self.head: Weight | None = None
        self.tied = False  # whether the embedding is also the head
        self.scale = float(torch.tensor(scale, dtype=self.weight.dtype, device="cpu"))

    def forward(self, batch: Batch) -> Float[Tensor, "tokens size"]:
        table = self.parts_of("weight")[0] if self.table is None else self.table
        return batch.operations.look_up(batch.token_ids, table, self.scale, self.dtype)

    def scores(self, hidden: Float[Tensor, "n size"], batch: Batch) -> Float[Tensor, "n vocab"]:
        """Return this rank's logits of a tied model, whose head is this embedding."""
        return batch.operations.linear(hidden, self.head_weights)

    @property
    def head_weights(self) -> Weight:
        return Weight(self.parts_of("weight")) if self.head is None else self.head

    def prepare(self, operations: Operations, twice: bool = False) -> None:
        """Convert the head of a tied model to the fastest formats: a copy, if look-ups need another one."""
        parts = self.parts_of("weight")
        if len(parts) > 1:
            # Unused entries at the end may be stored apart.
            parts = (Stored.of(torch.cat([part.decode().to(self.dtype) for part in parts])),)
            self.store("weight", parts)
        if self.tied:
            self.head = operations.prepare(Weight(parts), twice)
        self.table = operations.prepare_table(parts[0], self.head)
        if self.table is not parts[0]:
            self.store("weight", (self.table,))

    def initialise(self, generator: torch.Generator) -> None:
        # Unit-size values after scaling; in a tied model unit-size logits, like those of any other head. Larger tied
        # vectors would make the model repeat the last token, regardless of its layers.
        size = math.sqrt(self.size) if self.tied else self.scale
        self.weight.normal_(std=1 / size, generator=generator)

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        yield Source(prefix + "weight", padded_rows(self.weight, self.cut.kept), cut=self.cut)


class VocabularyHead(Linear):
    """Logits of this rank's part of the vocabulary. Every rank has as many rows; the last ones may be unused."""

    def __init__(self, hidden: int, vocab: int, shard: Shard) -> None:
        cut, rows = shard.padded(vocab)
        super().__init__(hidden, rows)
        self.cut = cut

    def checkpoint_sources(self, prefix: str) -> Iterator[Source]:
        yield Source(prefix + "weight", padded_rows(self.weight, self.cut.kept), cut=self.cut)


def padded_rows(weight: Tensor, used: int) -> Tensor:
    """Return the used rows, after filling the others with zeros."""
    weight[used:].zero_()
    return weight[:used]
