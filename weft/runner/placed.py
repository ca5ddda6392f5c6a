"""A model on a device, with all that its steps share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from weft.device.store import Store
from weft.kernels.interface import Operations
from weft.memory.spec import MemorySpec
from weft.models.model import CausalModel
from weft.runner.passes import ModelPass


class Boards(NamedTuple):
    """What steps leave for the next ones, by seat; one more line is that of padding."""

    token: Int[Tensor, " seats"]  # sampled last
    refused: Int[Tensor, " seats"]  # wrong drafts of the last row
    moved: Int[Tensor, " seats"]  # positions by which the present row was moved for them

    @classmethod
    def empty(cls, seats: int, device: torch.device) -> Boards:
        token = torch.zeros(seats + 1, dtype=torch.int64, device=device)
        return cls(token, *(torch.zeros(seats + 1, dtype=torch.int32, device=device) for _ in range(2)))


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model, what computes it, where it keeps its memory, and what is computed of its plans."""

    model: CausalModel
    spec: MemorySpec
    operations: Operations
    device: torch.device
    store: Store
    boards: Boards
    computes: ModelPass
