"""Tokens to vectors, and vectors to scores over tokens."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from weft.kernels.embedding import look_up
from weft.kernels.linear import for_few_rows, linear, pack
from weft.models.model import Layer


class Embedding(Layer):
    """`scale` multiplies the vectors (Gemma, Granite, Falcon-H1); rounded to their dtype, as they were trained."""

    def __init__(self, vocab: int, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, size), requires_grad=False)
        self.head: Tensor | None = None
        self.stored: Tensor | None = None
        self.twice = False  # whether the head may be kept once more, for few rows
        self.tied = False  # whether the model scores tokens with these vectors
        self.scale = float(torch.tensor(scale, dtype=self.weight.dtype, device="cpu"))

    def forward(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n size"]:
        return look_up(tokens, self.weight, self.scale)

    def scores(self, hidden: Float[Tensor, "n size"]) -> Float[Tensor, "n vocab"]:
        """What a tied model has for a head."""
        if self.head is None:
            # Only tied models need it, so it is made when first asked for: a copy where products want another layout.
            self.head = pack(self.weight)
            own = for_few_rows(self.weight) if self.twice else None
            self.stored = self.weight if own is None else own
        return linear(hidden, self.head, stored=self.stored)

    def initialise(self, generator: torch.Generator) -> None:
        # Numbers of size one, whatever multiplies them; in a tied model logits of size one, as any other head has them.
        # Larger tied vectors would repeat the last token whatever the layers compute.
        size = math.sqrt(self.weight.shape[1]) if self.tied else self.scale
        self.weight.normal_(std=1 / size, generator=generator)
