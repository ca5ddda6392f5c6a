"""Tiny checkpoints with an MTP head, and a plain implementation of the head.

The public implementation ignores `mtp.*`, so the oracle is written here: hidden states from that implementation's
model, then the head in a few lines of PyTorch, from nothing for every draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests.support.models.hybrid_models import HYBRIDS, QWEN3_5_YARN
from tests.support.models.oracle import Oracle, scatter

NEMOTRON = HYBRIDS["nemotron_h"].variant({"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]})
TINY = HYBRIDS | {
    "nemotron_h": NEMOTRON,
    "qwen3_5, yarn beside sections": QWEN3_5_YARN,
    "qwen3_5, one layer": HYBRIDS["qwen3_5"].variant(num_hidden_layers=1, layer_types=["full_attention"]),
    "nemotron_h, latent experts in groups": NEMOTRON.variant(
        {"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "*E"},
        moe_latent_size=24,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    ),
}


@dataclass(frozen=True)
class Checkpoint:
    """A tiny checkpoint of the public implementation with an MTP head added."""

    oracle: Oracle
    folder: Path
    head: dict[str, Tensor]

    @torch.no_grad()
    def drafts(self, text: list[int], count: int, among: int | None = None) -> list[int]:
        """Draft the tokens after a text of which the model has computed all but the last, `among` the first ones."""
        model = self.oracle.model
        states = model.model(input_ids=torch.tensor([text[:-1]]), use_cache=False).last_hidden_state[0]
        found: list[int] = []
        for _ in range(count):
            outputs = self.head_states(states, text[1:] + found)
            found.append(int(model.lm_head(outputs[-1])[:among].argmax()))
            # The next entry continues from the head's own output.
            states = torch.cat([states, outputs[-1:]])
        return found

    def head_states(self, hidden: Tensor, following: list[int]) -> Tensor:
        config, w = self.oracle.model.config, self.head
        x = self.oracle.model.model.embed_tokens(torch.tensor(following))
        joined = [self.norm(x, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")]
        x = torch.cat(joined, -1) @ w["mtp.fc.weight"].T
        x = x + self.attend(self.norm(x, "layers.0.input_layernorm"), config)
        x = x + self.mlp(self.norm(x, "layers.0.post_attention_layernorm"), config)
        return self.norm(x, "norm")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.head[f"mtp.{name}.weight"], self.oracle.model.config.rms_norm_eps)

    def attend(self, x: Tensor, config: object) -> Tensor:
        heads, kv, size, n = config.num_attention_heads, config.num_key_value_heads, config.head_dim, len(x)
        q, k, v = (x @ self.head[f"mtp.layers.0.self_attn.{name}_proj.weight"].T for name in "qkv")
        q, gate = q.view(n, heads, 2 * size).chunk(2, -1)
        q = self.rotate(self.norm(q, "layers.0.self_attn.q_norm"), config)
        k = self.rotate(self.norm(k.view(n, kv, size), "layers.0.self_attn.k_norm"), config)
        k, v = (each.view(n, kv, size).repeat_interleave(heads // kv, 1) for each in (k, v))
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
        return (mixed * gate.sigmoid()).reshape(n, -1) @ self.head["mtp.layers.0.self_attn.o_proj.weight"].T

    def rotate(self, x: Tensor, config: object) -> Tensor:
        rotary = self.oracle.model.model.rotary_emb
        size = 2 * len(rotary.inv_freq)
        angle = torch.arange(len(x))[:, None, None] * rotary.inv_freq
        cosine, sine = angle.cos() * rotary.attention_scaling, angle.sin() * rotary.attention_scaling
        one, two = x[..., : size // 2], x[..., size // 2 : size]
        turned = [one * cosine - two * sine, two * cosine + one * sine]
        return torch.cat([*turned, x[..., size:]], -1)

    def gated(self, x: Tensor, name: str) -> Tensor:
        gate, up, down = (self.head[f"mtp.layers.0.mlp.{name}{each}_proj.weight"] for each in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def mlp(self, x: Tensor, config: object) -> Tensor:
        if "mtp.layers.0.mlp.gate.weight" not in self.head:
            return self.gated(x, "")
        weight, chosen = (x @ self.head["mtp.layers.0.mlp.gate.weight"].T).softmax(-1).topk(config.num_experts_per_tok)
        weight = weight / weight.sum(-1, keepdim=True)
        routed = [
            sum(w * self.gated(row, f"experts.{e}.") for w, e in zip(ws, es.tolist()))
            for row, ws, es in zip(x, weight, chosen)
        ]
        shared = self.gated(x, "shared_expert.")
        return torch.stack(routed) + (x @ self.head["mtp.layers.0.mlp.shared_expert_gate.weight"].T).sigmoid() * shared


class NemotronCheckpoint(Checkpoint):
    """A head of Nemotron: a block of attention without positions, and one of experts."""

    def head_states(self, hidden: Tensor, following: list[int]) -> Tensor:
        config, w = self.oracle.model.config, self.head
        x = self.oracle.model.get_input_embeddings()(torch.tensor(following))
        joined = torch.cat([self.norm(x, "layers.0.enorm"), self.norm(hidden, "layers.0.hnorm")], -1)
        x = joined @ w["mtp.layers.0.eh_proj.weight"].T
        x = x + self.attend(self.norm(x, "layers.0.norm"), config)
        x = x + self.mlp(self.norm(x, "layers.1.norm"), config)
        return self.norm(x, "layers.1.final_layernorm")

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.oracle.model.config.layer_norm_epsilon
        return F.rms_norm(x, x.shape[-1:], self.head[f"mtp.{name}.weight"], eps)

    def attend(self, x: Tensor, config: object) -> Tensor:
        heads, kv, size, n = config.num_attention_heads, config.num_key_value_heads, config.head_dim, len(x)
        q, k, v = (x @ self.head[f"mtp.layers.0.mixer.{name}_proj.weight"].T for name in "qkv")
        k, v = (each.view(n, kv, size).repeat_interleave(heads // kv, 1) for each in (k, v))
        q, k, v = (each.view(n, heads, size).transpose(0, 1) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(n, -1)
        return mixed @ self.head["mtp.layers.0.mixer.o_proj.weight"].T

    def squared(self, x: Tensor, name: str) -> Tensor:
        up, down = (self.head[f"mtp.layers.1.mixer.{name}.{each}_proj.weight"] for each in ("up", "down"))
        return (x @ up.T).relu().square() @ down.T

    def mlp(self, x: Tensor, config: object) -> Tensor:
        w = {name.removeprefix("mtp.layers.1.mixer."): tensor for name, tensor in self.head.items()}
        scores = (x @ w["gate.weight"].T).sigmoid()
        chosen = scores + w["gate.e_score_correction_bias"]
        # The groups with the largest sum of their two best experts stay.
        groups = chosen.view(len(x), config.n_group, -1)
        kept = groups.topk(2, -1).values.sum(-1).topk(config.topk_group).indices
        masked = torch.zeros_like(groups[..., 0]).scatter(1, kept, 1.0)[..., None] * torch.ones_like(groups)
        experts = chosen.masked_fill(masked.view_as(chosen) == 0, 0.0).topk(config.num_experts_per_tok).indices
        weight = scores.gather(1, experts)
        weight = config.routed_scaling_factor * weight / weight.sum(-1, keepdim=True)
        latent = x @ w["fc1_latent_proj.weight"].T if "fc1_latent_proj.weight" in w else x
        routed = torch.stack(
            [
                sum(share * self.squared(row, f"experts.{e}") for share, e in zip(shares, es.tolist()))
                for row, shares, es in zip(latent, weight, experts)
            ]
        )
        routed = routed @ w["fc2_latent_proj.weight"].T if "fc2_latent_proj.weight" in w else routed
        return routed + self.squared(x, "shared_experts")


def nemotron_shapes(config: object) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published Nemotron head."""
    hidden, inner = config.hidden_size, config.num_attention_heads * config.head_dim
    keys, latent = config.num_key_value_heads * config.head_dim, config.moe_latent_size
    norms = ("layers.0.enorm", "layers.0.hnorm", "layers.0.norm", "layers.1.norm", "layers.1.final_layernorm")
    found: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (hidden,)) | {"layers.0.eh_proj": (hidden, 2 * hidden)}
    found |= {"layers.0.mixer.q_proj": (inner, hidden), "layers.0.mixer.o_proj": (hidden, inner)}
    found |= {f"layers.0.mixer.{name}_proj": (keys, hidden) for name in "kv"}
    parts = {f"experts.{e}": (config.moe_intermediate_size, latent or hidden) for e in range(config.n_routed_experts)}
    parts["shared_experts"] = (config.moe_shared_expert_intermediate_size, hidden)
    for part, (width, size) in parts.items():
        found |= {f"layers.1.mixer.{part}.up_proj": (width, size), f"layers.1.mixer.{part}.down_proj": (size, width)}
    if latent:
        found |= {
            "layers.1.mixer.fc1_latent_proj": (latent, hidden),
            "layers.1.mixer.fc2_latent_proj": (hidden, latent),
        }
    named = {f"mtp.{name}.weight": shape for name, shape in found.items()}
    router = "mtp.layers.1.mixer.gate."
    experts = config.n_routed_experts
    return named | {f"{router}weight": (experts, hidden), f"{router}e_score_correction_bias": (experts,)}


def shapes(config: object) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a published head."""
    if config.model_type == "nemotron_h":
        return nemotron_shapes(config)
    hidden, size = config.hidden_size, config.head_dim
    inner, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    norms += ("layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    found: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (hidden,)) | {"fc": (hidden, 2 * hidden)}
    found |= {f"layers.0.self_attn.{name}_norm": (size,) for name in "qk"}
    found |= {"layers.0.self_attn.q_proj": (2 * inner, hidden), "layers.0.self_attn.o_proj": (hidden, inner)}
    found |= {f"layers.0.self_attn.{name}_proj": (keys, hidden) for name in "kv"}
    experts = getattr(config, "num_experts", 0)
    parts = (
        {"": config.intermediate_size} if not experts else {"shared_expert.": config.shared_expert_intermediate_size}
    )
    parts |= {f"experts.{number}.": config.moe_intermediate_size for number in range(experts)}
    for part, width in parts.items():
        found |= {f"layers.0.mlp.{part}{name}_proj": (width, hidden) for name in ("gate", "up")}
        found[f"layers.0.mlp.{part}down_proj"] = (hidden, width)
    if experts:
        found |= {"layers.0.mlp.gate": (experts, hidden), "layers.0.mlp.shared_expert_gate": (1, hidden)}
    return {f"mtp.{name}.weight": shape for name, shape in found.items()}


@cache
def checkpoint(family: str) -> Checkpoint:
    oracle = Oracle(TINY[family])
    folder = oracle.save(Path(mkdtemp()))
    generator = torch.Generator().manual_seed(5)
    head = {name: torch.zeros(shape) for name, shape in shapes(oracle.model.config).items()}
    for name, tensor in head.items():
        scatter(name, tensor, generator, -1, tied=False)
    save_file(load_file(folder / "model.safetensors") | head, folder / "model.safetensors")
    return (NemotronCheckpoint if "nemotron" in family else Checkpoint)(oracle, folder, head)
