"""MTP head of Qwen3-Next and Qwen3.5: one attention block that guesses the token after the next.

The entry at position p combines the model's final hidden state at p with the embedding of token p + 1. Embedding and
output head are the model's own. A further guess has the head's own output in place of the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.base.errors import ModelError
from weft.kernels.interface import Batch
from weft.memory.device.store import View
from weft.models.config import Config
from weft.models.decoder import Block
from weft.models.layers.linear import Linear
from weft.models.layers.norm import RMSNorm
from weft.models.layers.rotary import Rotary
from weft.models.model import CausalModel
from weft.models.qwen3_next import Qwen3Next, attention, mlp
from weft.models.registry import family_of

COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


class Predictor(nn.Module):
    """The parts of the head under their checkpoint names."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
        self.pre_fc_norm_embedding = RMSNorm(hidden, eps, zero_centred=True)
        self.pre_fc_norm_hidden = RMSNorm(hidden, eps, zero_centred=True)
        self.fc = Linear(2 * hidden, hidden)
        self.layers = nn.ModuleList([Block(attention(config, dtype), mlp(config, 0), hidden, eps, zero_centred=True)])
        self.norm = RMSNorm(hidden, eps, zero_centred=True)


class MtpHead(CausalModel):
    """`base` is the model whose embedding and head it shares; set after both are loaded."""

    ignored: ClassVar[tuple[str, ...]] = (r"^(?!mtp\.)",)
    base: Qwen3Next

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        config = Config(fields)
        self.vocab_size = config.integer("vocab_size")
        self.mtp = Predictor(config, dtype)
        self.rotary = Rotary(config.rotary(partial=0.25), dtype)
        self.mixers()

    @property
    def tied(self) -> bool:
        return False

    def predict(
        self, batch: Batch, views: tuple[View, ...], hidden: Float[Tensor, "tokens hidden"]
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the head's final states for the batch's tokens, each with the hidden state of the token before it."""
        mtp = self.mtp
        embedded = mtp.pre_fc_norm_embedding(self.base.model.embed_tokens(batch), batch)
        joined = torch.cat([embedded, mtp.pre_fc_norm_hidden(hidden, batch)], -1)
        stream = batch.operations.residual(mtp.fc(joined, batch))
        rotation = self.rotary(batch)
        for layer in mtp.layers:
            layer(stream, rotation, batch, views)
        return stream.finish(mtp.norm)

    def logits(self, hidden: Float[Tensor, "n hidden"], batch: Batch) -> Float[Tensor, "n vocab"]:
        return self.base.logits(hidden, batch)


def check_head(config: Mapping[str, Any]) -> None:
    """Raise if a configuration has no MTP head that Weft can compute. Its text part names the number of layers."""
    if not issubclass(family_of(config), Qwen3Next):
        raise ModelError("draft: mtp needs a checkpoint of Qwen3-Next or Qwen3.5 with an MTP head")
    layers = next((config[name] for name in COUNTS if config.get(name) is not None), 1)
    if layers != 1:
        raise ModelError(
            f"draft: mtp needs a checkpoint with an MTP head of one layer, but {COUNTS[0]} is {layers!r}; pass --draft "
            "suffix or off"
        )
