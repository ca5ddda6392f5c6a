"""Cosines and sines of a step's positions, and the rotation by them."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.native import library as native
from weft.kernels.native.embedding import turn
from weft.kernels.plain import rotary as plain
from weft.kernels.rotary import Rotation


def make_rotation(
    positions: Int[Tensor, " tokens"], frequency: Float[Tensor, " half"], scale: float, dtype: torch.dtype
) -> Rotation:
    if native.suits(positions) and dtype in native.DTYPES:
        return Rotation(*turn(positions, frequency, scale, dtype))
    return plain.make_rotation(positions, frequency, scale, dtype)


def rotate(x: Float[Tensor, "tokens heads head_dim"], rotation: Rotation) -> Float[Tensor, "tokens heads head_dim"]:
    """Rotate the first `size` dimensions of every head; the others pass through."""
    size = rotation.cosine.shape[-1]
    turning = x if size == x.shape[-1] else x[..., :size]
    turned = torch.addcmul(turning * rotation.cosine, turning.roll(size // 2, -1), rotation.sine)
    return turned if turning is x else torch.cat((turned, x[..., size:]), -1)
