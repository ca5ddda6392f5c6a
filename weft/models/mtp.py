"""MTP heads of published checkpoints: a few blocks more that draft the token after the next.

The entry at position p combines the model's final hidden state at p with the embedding of token p + 1. Embedding and
output head are the model's own. A further draft has the head's own output in place of the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.base.errors import ModelError
from weft.device.store import View
from weft.kernels.interface import Batch
from weft.kernels.stream import Residual
from weft.models.config import Config, shown
from weft.models.decoder import Block, DecoderModel
from weft.models.layers.linear import Linear
from weft.models.layers.norm import RMSNorm
from weft.models.layers.rotary import Rotary
from weft.models.model import CausalModel, Layer
from weft.models.nemotron_h import NemotronH, SingleBlock, SparseSquaredMLP, listed_blocks
from weft.models.nemotron_h import attention as nemotron_attention
from weft.models.qwen3_next import Qwen3Next, attention, mlp
from weft.models.registry import family_of

COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


class MtpHead(CausalModel):
    """`base` is the model whose embedding and head it shares; set after both are loaded."""

    ignored: ClassVar[tuple[str, ...]] = (r"^(?!mtp\.)",)
    base: DecoderModel
    # How many of the first tokens drafts are chosen from where text consists of them; 0: of all. A draft then reads a
    # part of the output head.
    limit = 0

    @property
    def tied(self) -> bool:
        return False

    @property
    def width(self) -> int:
        """The size of a hidden state."""
        return self.base.model.embed_tokens.size

    def predict(
        self, batch: Batch, views: tuple[View, ...], hidden: Float[Tensor, "tokens hidden"]
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the head's final states for the batch's tokens, each with the hidden state of the token before it."""
        raise NotImplementedError

    @property
    def frequent(self) -> int:
        """The number of tokens that most text consists of: the first ones, as merges are numbered by frequency."""
        return self.limit if 0 < 2 * self.limit <= self.vocab_size else self.vocab_size

    def logits(self, hidden: Float[Tensor, "n hidden"], batch: Batch) -> Float[Tensor, "n vocab"]:
        return self.base.logits(hidden, batch)

    def frequent_logits(self, hidden: Float[Tensor, "n hidden"], batch: Batch) -> Float[Tensor, "n frequent"]:
        """Return the logits of the frequent tokens."""
        return self.base.first_logits(hidden, batch, self.frequent)


class Predictor(nn.Module):
    """The parts of a Qwen head under their checkpoint names."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
        self.pre_fc_norm_embedding = RMSNorm(hidden, eps, zero_centred=True)
        self.pre_fc_norm_hidden = RMSNorm(hidden, eps, zero_centred=True)
        self.fc = Linear(2 * hidden, hidden)
        self.layers = nn.ModuleList([Block(attention(config, dtype), mlp(config, 0), hidden, eps, zero_centred=True)])
        self.norm = RMSNorm(hidden, eps, zero_centred=True)


class QwenHead(MtpHead):
    """One attention block of Qwen3-Next or Qwen3.5."""

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        config = Config(fields)
        config.only(mtp_use_dedicated_embeddings=False)
        self.vocab_size = config.integer("vocab_size")
        self.mtp = Predictor(config, dtype)
        family = family_of(fields)
        assert issubclass(family, Qwen3Next)
        self.rotary = Rotary(config.rotary(partial=0.25, axes=family.axes), dtype)
        self.mixers()

    def predict(
        self, batch: Batch, views: tuple[View, ...], hidden: Float[Tensor, "tokens hidden"]
    ) -> Float[Tensor, "tokens hidden"]:
        mtp = self.mtp
        embedded = mtp.pre_fc_norm_embedding(self.base.model.embed_tokens(batch), batch)
        joined = torch.cat([embedded, mtp.pre_fc_norm_hidden(hidden, batch)], -1)
        stream = batch.operations.residual(mtp.fc(joined, batch))
        rotation = self.rotary(batch)
        for layer in mtp.layers:
            layer(stream, rotation, batch, views)
        return stream.finish(mtp.norm)


class FirstBlock(SingleBlock):
    """The block of a Nemotron head that joins the hidden state with the embedding."""

    def __init__(self, mixer: nn.Module, hidden: int, eps: float) -> None:
        super().__init__(mixer, hidden, eps)
        self.enorm = RMSNorm(hidden, eps)
        self.hnorm = RMSNorm(hidden, eps)
        self.eh_proj = Linear(2 * hidden, hidden)

    def join(
        self, embedded: Float[Tensor, "tokens hidden"], hidden: Float[Tensor, "tokens hidden"], batch: Batch
    ) -> Residual:
        joined = torch.cat([self.enorm(embedded, batch), self.hnorm(hidden, batch)], -1)
        return batch.operations.residual(self.eh_proj(joined, batch))


class LastBlock(SingleBlock):
    """The block of a Nemotron head that ends with the final norm."""

    def __init__(self, mixer: nn.Module, hidden: int, eps: float) -> None:
        super().__init__(mixer, hidden, eps)
        self.final_layernorm = RMSNorm(hidden, eps)


class NemotronBlocks(Layer):
    """Blocks of a Nemotron head under their checkpoint names."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.integer("hidden_size"), config.number("layer_norm_epsilon", "norm_eps", default=1e-5)
        builders = {"attention": nemotron_attention, "moe": SparseSquaredMLP}
        parts = [builders[kind](config, dtype) for kind in nemotron_blocks(config)]
        kinds = [FirstBlock, *[SingleBlock] * (len(parts) - 2), LastBlock]
        self.layers = nn.ModuleList(kind(part, hidden, eps) for kind, part in zip(kinds, parts, strict=True))


class NemotronHead(MtpHead):
    """Blocks of Nemotron-H, an attention block and then experts in all published checkpoints. None has positions."""

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        config = Config(fields)
        self.vocab_size = config.integer("vocab_size")
        self.mtp = NemotronBlocks(config, dtype)
        self.mixers()

    def predict(
        self, batch: Batch, views: tuple[View, ...], hidden: Float[Tensor, "tokens hidden"]
    ) -> Float[Tensor, "tokens hidden"]:
        layers = self.mtp.layers
        first, last = layers[0], layers[-1]
        assert isinstance(first, FirstBlock)
        assert isinstance(last, LastBlock)
        stream = first.join(self.base.model.embed_tokens(batch), hidden, batch)
        for layer in layers:
            layer(stream, None, batch, views)
        return stream.finish(last.final_layernorm)


HEADS: dict[type[CausalModel], type[MtpHead]] = {Qwen3Next: QwenHead, NemotronH: NemotronHead}


def nemotron_blocks(config: Config) -> list[str]:
    """Return the block types of a Nemotron head, which a configuration names as those of the model."""
    words = config.listing("mtp_layers_block_type", default=[])
    found = listed_blocks(config, "mtp_layers_block_type", words, "mtp_hybrid_override_pattern")
    found = found or ["attention", "moe"]
    if set(found) != {"attention", "moe"}:
        raise ModelError(
            f"draft: mtp needs an MTP head of attention and experts, but its blocks are {', '.join(found)}; pass "
            "--draft suffix or off"
        )
    return found


def head_of(config: Mapping[str, Any]) -> type[MtpHead]:
    """Return the class of a configuration's MTP head; raise if there is none that Weft can compute."""
    family = family_of(config)
    found = next((head for base, head in HEADS.items() if issubclass(family, base)), None)
    if found is None:
        raise ModelError("draft: mtp needs a checkpoint of Qwen3-Next, Qwen3.5 or Nemotron-H with an MTP head")
    name = next((name for name in COUNTS if config.get(name) is not None), COUNTS[0])
    if config.get(name, 1) != 1:
        raise ModelError(
            f"draft: mtp needs a checkpoint with an MTP head of one layer, but {name} is {shown(config[name])}; pass "
            "--draft suffix or off"
        )
    return found
