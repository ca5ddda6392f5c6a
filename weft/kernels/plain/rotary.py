"""Cosines and sines of a step's positions, and the rotation by them."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from weft.kernels.rotary import Rotation


def make_rotation(
    positions: Int[Tensor, " tokens"], frequency: Float[Tensor, " half"], scale: float, dtype: torch.dtype
) -> Rotation:
    angle = positions.float().unsqueeze(1) * frequency
    cosine, sine = angle.cos() * scale, angle.sin() * scale
    return Rotation(
        torch.cat((cosine, cosine), -1).to(dtype).unsqueeze(1), torch.cat((-sine, sine), -1).to(dtype).unsqueeze(1)
    )


def rotate(x: Float[Tensor, "tokens heads head_dim"], rotation: Rotation) -> Float[Tensor, "tokens heads head_dim"]:
    """Rotate the first `size` dimensions of every head; the others pass through."""
    size = rotation.cosine.shape[-1]
    turning, passing = x[..., :size], x[..., size:]
    turned = turning * rotation.cosine + turning.roll(size // 2, -1) * rotation.sine
    return torch.cat((turned, passing), -1)
