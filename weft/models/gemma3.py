"""Gemma 3 (the text part): five windowed layers per full one, each kind with its own rotation; sandwich norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from weft.device.store import View
from weft.kernels.interface import Batch
from weft.kernels.rotary import Rotation
from weft.kernels.stream import Residual
from weft.models.config import WINDOWED, Config
from weft.models.decoder import DecoderModel, attention_shape, frame, gated_mlp
from weft.models.layers.attention import Attention
from weft.models.layers.norm import RMSNorm
from weft.models.layers.rotary import Rotary
from weft.models.model import Layer


class Gemma3(DecoderModel):
    revision: ClassVar[int] = 2
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^model\.language_model\.", "model."),
        (r"^language_model\.", ""),
    )
    ignored: ClassVar[tuple[str, ...]] = (
        *DecoderModel.ignored,
        r"^(model\.)?vision_tower\.",
        r"^(model\.)?multi_modal_projector\.",
    )

    def __init__(self, fields: Mapping[str, Any], dtype: torch.dtype) -> None:
        config = Config(
            fields,
            head_dim=256,
            num_attention_heads=8,
            num_key_value_heads=4,
            sliding_window=4096,
            vocab_size=262208,
            hidden_activation="gelu_pytorch_tanh",
        )
        config.only(use_bidirectional_attention=False, attn_logit_softcapping=None)
        names = None if config.fields.get("layer_types") is not None else default_layer_types(config)
        blocks = [SandwichBlock(config, dtype, kind) for kind in config.layer_types(WINDOWED, default=names)]
        decoder = frame(config, blocks, None, scale=config.integer("hidden_size") ** 0.5, zero_centred=True)
        super().__init__(config, decoder, tied=config.flag("tie_word_embeddings", default=True))
        self.rotary = nn.ModuleDict(
            {
                "full": Rotary(config.rotary("full_attention", theta=1e6), dtype),
                "sliding": Rotary(config.rotary("sliding_attention", theta_field="rope_local_base_freq"), dtype),
            }
        )
        self.softcap = config.number("final_logit_softcapping", default=None)

    def forward(self, batch: Batch, views: tuple[View, ...]) -> Float[Tensor, "tokens hidden"]:
        rotations = {kind: rotary(batch) for kind, rotary in self.rotary.items()}
        stream = batch.operations.residual(self.model.embed_tokens(batch))
        for layer in self.model.walk():
            layer(stream, rotations, batch, views)
        return stream.finish(self.model.norm)

    def logits(self, hidden: Float[Tensor, "n hidden"], batch: Batch) -> Float[Tensor, "n vocab"]:
        logits = super().logits(hidden, batch)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def default_layer_types(config: Config) -> list[str]:
    pattern = config.integer("sliding_window_pattern", default=6)
    count = config.integer("num_hidden_layers")
    return ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(count)]


class SandwichBlock(Layer):
    """Block with norms before and after both halves."""

    def __init__(self, config: Config, dtype: torch.dtype, kind: str) -> None:
        super().__init__()
        hidden, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
        bias = config.flag("attention_bias", default=False)
        self.kind = kind
        self.self_attn = Attention(
            attention_shape(
                config,
                dtype,
                bias=bias,
                output_bias=bias,
                scale=config.number("query_pre_attn_scalar", default=256) ** -0.5,
                window=config.window(kind == "sliding"),
                norm_eps=eps,
                norm_zero_centred=True,
            )
        )
        self.mlp = gated_mlp(config)
        self.input_layernorm = RMSNorm(hidden, eps, zero_centred=True)
        self.post_attention_layernorm = RMSNorm(hidden, eps, zero_centred=True)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps, zero_centred=True)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps, zero_centred=True)

    def forward(self, stream: Residual, rotations: dict[str, Rotation], batch: Batch, views: tuple[View, ...]) -> None:
        mixed = self.self_attn(stream.read(self.input_layernorm), rotations[self.kind], batch, views)
        stream.add(mixed, norm=self.post_attention_layernorm)
        stream.add(self.mlp(stream.read(self.pre_feedforward_layernorm), batch), norm=self.post_feedforward_layernorm)
