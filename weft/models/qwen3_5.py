"""Qwen3.5, dense or with experts: Qwen3-Next with separate projections. Text part of multimodal checkpoints only."""

from __future__ import annotations

from typing import Any, ClassVar

from weft.models.layers.gated_delta_net import GatedDeltaShape, split_projection
from weft.models.layers.linear import PackedLinear
from weft.models.qwen3_next import Qwen3Next


class Qwen3_5(Qwen3Next):
    revision: ClassVar[int] = 2
    axes: ClassVar[bool] = True
    # Every layer has experts or none has, and their weights are always normalised.
    fixed: ClassVar[dict[str, Any]] = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    renames: ClassVar[tuple[tuple[str, str], ...]] = ((r"^model\.language_model\.", "model."), *Qwen3Next.renames)
    ignored: ClassVar[tuple[str, ...]] = (*Qwen3Next.ignored, r"^(model\.)?visual\.")

    @staticmethod
    def projection(shape: GatedDeltaShape) -> PackedLinear:
        return split_projection(shape)
