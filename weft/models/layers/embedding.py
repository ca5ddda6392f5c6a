"""Tokens to vectors, and vectors to scores over tokens."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.kernels.interface import Batch
from weft.kernels.weight import Weight
from weft.models.model import Layer


class Embedding(Layer):
    """`scale` multiplies the vectors (Gemma, Granite, Falcon-H1); rounded to their dtype, as they were trained."""

    def __init__(self, vocab: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, size), requires_grad=False)
        self.head: Weight | None = None
        self.twice = False  # whether the head may be kept once more, for few rows
        self.tied = False  # whether the model scores tokens with these vectors
        self.scale = float(torch.tensor(scale, dtype=self.weight.dtype, device="cpu"))

    def forward(self, batch: Batch) -> Float[Tensor, "tokens size"]:
        return batch.operations.look_up(batch.token_ids, self.weight, self.scale)

    def scores(self, hidden: Float[Tensor, "n size"], batch: Batch) -> Float[Tensor, "n vocab"]:
        """Return the scores of a tied model, whose head these vectors are."""
        if self.head is None:
            # Only tied models need it, so it is made when first asked for: a copy where matmuls want another layout.
            made = batch.operations.prepare(Weight(self.weight), self.twice)
            # The vectors are kept as they are, so few rows may read them.
            self.head = Weight(made.matrix, few=self.weight if made.few is None else made.few)
        return batch.operations.linear(hidden, self.head)

    def initialise(self, generator: torch.Generator) -> None:
        # Numbers of size one, whatever multiplies them; in a tied model logits of size one, as any other head has them.
        # Larger tied vectors would repeat the last token whatever the layers compute.
        size = math.sqrt(self.weight.shape[1]) if self.tied else self.scale
        self.weight.normal_(std=1 / size, generator=generator)
