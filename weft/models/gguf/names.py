"""Which tensors of a GGUF file are which of the model's own, and what undoes what converters did to them.

The table of each family maps the middle of a name (`blk.3.attn_q.weight`) to the model's own (`self_attn.q_proj`).
Converters merge, split and reorder rows, which is undone on rows of any type of blocks. They also change plain numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from weft.base.errors import ModelError
from weft.models.gguf.configuration import FileKeys


@dataclass(frozen=True, slots=True)
class Rows:
    """Some adjacent outputs of a tensor of the file; by default all."""

    tensor: str
    start: int = 0
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor of the model: outputs of tensors of the file, one after another, in another order."""

    name: str
    parts: tuple[Rows, ...]
    # Outputs are this dimension.
    dim: int = -2
    order: Tensor | None = None
    # For each of the model's inputs, its place in the file.
    inputs: Tensor | None = None
    # Of plain numbers: computed from the parts, before they are put in order; and the final shape.
    values: Callable[..., Tensor] | None = None
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None
    # Plain numbers of experts are stored as [experts, inputs, outputs].
    by_input: bool = False


@dataclass(frozen=True, slots=True)
class FamilyNames:
    """Names of a family: the middle of a tensor's name in the file, and in the model."""

    names: Mapping[str, str]
    # Norms whose weights are stored plus one.
    plus_one: bool = False
    # Rows of queries and keys, whose halves are interleaved.
    interleaved: bool = False
    experts: str = "mlp.experts"
    whole: Mapping[str, str] = field(default_factory=dict)


COMMON = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
CONV = {f"shortconv.{name}": f"self_attn.{name}" for name in ("conv", "in_proj", "out_proj")}
MAMBA = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_dt": "dt_bias",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
DELTA = {
    "attn_gate": "self_attn.in_proj_z",
    "ssm_alpha": "self_attn.in_proj_a",
    "ssm_beta": "self_attn.in_proj_b",
    "ssm_ba": "self_attn.in_proj_ba",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    **{name: f"self_attn.{own}" for name, own in MAMBA.items()},
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
    # No head with an embedding or output of its own is supported: these names are then reported.
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head",
}
NEMOTRON = {
    "attn_norm": "norm",
    **{name: own.replace("self_attn", "mixer") for name, own in COMMON.items() if own.startswith("self_attn")},
    **{name: f"mixer.{own}" for name, own in MAMBA.items()},
    **{f"ffn_{name}": f"mixer.{name}_proj" for name in ("up", "down")},
    **{f"ffn_{name}_shexp": f"mixer.shared_experts.{name}_proj" for name in ("up", "down")},
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
}
KIMI = {
    **{f"ssm_{name}": f"self_attn.{name}_proj" for name in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
    "ssm_a": "self_attn.A_log",
    "ssm_dt": "self_attn.dt_bias",
    **{f"ssm_conv1d_{name}": f"self_attn.{name}_conv1d" for name in "qkv"},
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
}
GRANITE = {
    **{name: f"self_attn.{own}" for name, own in MAMBA.items()},
    "ffn_gate_inp": "mlp.router",
    "ffn_down_shexp": "mlp.down_proj",
}
FALCON = {
    **{name: f"mamba.{own}" for name, own in MAMBA.items()},
    "ffn_norm": "pre_ff_layernorm",
    **{f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
}
GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OLMO = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
PHI = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
GPT_OSS = {"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"}
LFM2 = {**CONV, "exp_probs_b": "mlp.expert_bias"}
ROOT = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}

TABLES = {
    "llama": FamilyNames(COMMON, interleaved=True),
    "mistral": FamilyNames(COMMON, interleaved=True),
    "qwen2": FamilyNames(COMMON),
    "phi3": FamilyNames(COMMON | PHI),
    "smollm3": FamilyNames(COMMON, interleaved=True),
    "olmo2": FamilyNames(COMMON | OLMO),
    "gemma2": FamilyNames(COMMON | GEMMA, plus_one=True),
    "qwen3": FamilyNames(COMMON),
    "qwen3moe": FamilyNames(COMMON),
    "lfm2": FamilyNames(COMMON | LFM2, whole={"token_embd_norm": "model.norm"}),
    "lfm2moe": FamilyNames(COMMON | LFM2, whole={"token_embd_norm": "model.norm"}),
    "qwen3next": FamilyNames(COMMON | DELTA, plus_one=True),
    "qwen35": FamilyNames(COMMON | DELTA, plus_one=True),
    "qwen35moe": FamilyNames(COMMON | DELTA, plus_one=True),
    "gemma3": FamilyNames(COMMON | GEMMA, plus_one=True),
    "gpt-oss": FamilyNames(COMMON | GPT_OSS),
    "granitehybrid": FamilyNames(COMMON | GRANITE, interleaved=True),
    "falcon-h1": FamilyNames(COMMON | FALCON),
    "nemotron_h": FamilyNames(NEMOTRON, interleaved=True, experts="mixer.experts"),
    "nemotron_h_moe": FamilyNames(NEMOTRON, interleaved=True, experts="mixer.experts"),
    "kimi-linear": FamilyNames(COMMON | KIMI),
}
# Tensors that say nothing that a configuration does not, or only what other programs need.
LEFT_OUT = re.compile(r"^rope_freqs\.|^rope_factors|\.input_scale$")
BLOCK = re.compile(r"^blk\.(\d{1,5})\.(.+?)(\.weight|\.bias)?$")
# Tensors that several of the file are put together to.
JOINED = {"ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps", "attn_k_b", "attn_v_b", "attn_qkv"}


def derived(keys: FileKeys) -> Iterator[Derived]:
    """Return the model's tensors, by its own names. What no table names keeps its name, so that it is reported."""
    table = TABLES[keys.arch]
    root, count = {**ROOT, **table.whole}, keys.layers
    for name in keys.header.tensors:
        if LEFT_OUT.search(name):
            continue
        found = BLOCK.match(name)
        if found is None:
            stem, _, ending = name.rpartition(".")
            yield simple(keys, table, f"{root[stem]}.{ending}" if stem in root else name, name)
            continue
        number, stem, ending = int(found[1]), found[2], found[3] or ""
        if (keys.arch, stem) == ("qwen3next", "attn_gate"):
            continue
        if (stem in JOINED and stem not in table.names) or (keys.arch == "granitehybrid" and stem in GRANITE_PAIRS):
            continue
        own = table.names.get(stem)
        yield simple(
            keys, table, name if own is None else own_place(keys, number, own, stem) + own_ending(own, ending), name
        )
    for number in range(count + keys.heads_to_come):
        yield from joined(keys, table, number)


GRANITE_PAIRS = {"ffn_gate", "ffn_up", "ffn_gate_shexp", "ffn_up_shexp"}
# Parameters whose own names have no ending.
BARE = ("A_log", "D", "dt_bias", "sinks", "expert_bias", "e_score_correction_bias")


def own_ending(own: str, ending: str) -> str:
    return "" if own.rpartition(".")[2] in BARE else ending or ".weight"


def own_place(keys: FileKeys, number: int, own: str, stem: str) -> str:
    """Return the model's own name of a tensor of a block: of the model, or of a head that predicts further tokens."""
    if number < keys.layers:
        return f"model.layers.{number}.{own}"
    if keys.arch.startswith("nemotron"):
        return nemotron_head(own, stem)
    return f"mtp.{own}" if stem.startswith("nextn.") else f"mtp.layers.{number - keys.layers}.{own}"


def nemotron_head(own: str, stem: str) -> str:
    """Return where a tensor of a Nemotron head is: two blocks, which files have as one."""
    special = {"nextn.shared_head_norm": "mtp.layers.1.final_layernorm", "post_attention_norm": "mtp.layers.1.norm"}
    if stem in special:
        return special[stem]
    second = stem.startswith(("ffn", "exp_"))
    return f"mtp.layers.{int(second)}.{own}"


def simple(keys: FileKeys, table: FamilyNames, own: str, name: str) -> Derived:
    """Return a tensor that is one of the file."""
    found = Derived(own, (Rows(name),), dim=-1 if len(keys.tensor(name).shape) < 2 else -2)
    last = own.removesuffix(".weight").rpartition(".")[2]
    if last == "A_log":
        # Kimi's has more dimensions.
        shape = one_in_front if keys.arch == "kimi-linear" else flat
        found = replace(found, values=lambda decay: (-decay).log(), shape=shape)
    elif last in ("D", "dt_bias") or own.endswith(("mamba.norm.weight", "mixer.norm.weight", "self_attn.norm.weight")):
        found = replace(found, shape=flat)
    elif last in ("conv", "conv1d", "q_conv1d", "k_conv1d", "v_conv1d") and own.endswith(".weight"):
        found = replace(found, dim=-2, shape=single_channel)
    elif last == "shared_expert_gate":
        found = replace(found, shape=lambda shape: (1, shape[-1]))
    elif (table.plus_one and last.endswith("norm")) or last.startswith("pre_fc_norm"):
        found = replace(found, values=lambda weight: weight - 1)
    if table.interleaved and last in ("q_proj", "k_proj"):
        rows, size = keys.tensor(name).shape[0], head_size(keys)
        found = replace(found, order=halves(rows, size))
    if keys.arch.startswith("qwen35"):
        found = grouped(keys, found, last)
    return found


def flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (-1,)


def one_in_front(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, 1, -1, 1)


def single_channel(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (-1, 1, shape[-1])


def head_size(keys: FileKeys) -> int:
    heads = max(1, keys.largest("attention.head_count"))
    return keys.integer(
        "attention.key_length", keys.integer("rope.dimension_count", keys.integer("embedding_length") // heads)
    )


def halves(rows: int, size: int) -> Tensor | None:
    """Return the order of rows that puts the first of all pairs of a head before the second ones.

    >>> halves(8, 4).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    if not size or rows % size or size % 2:
        return None
    return torch.arange(rows).view(-1, size // 2, 2).transpose(1, 2).reshape(-1)


def by_key_head(key_heads: int, value_heads: int, width: int) -> Tensor:
    """Return the order of rows that puts the values of a key's head together. Files have those of all keys in turn.

    >>> by_key_head(2, 4, 1).tolist()
    [0, 2, 1, 3]
    """
    return torch.arange(value_heads * width).view(-1, key_heads, width).transpose(0, 1).reshape(-1)


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    key_heads: int
    value_heads: int
    keys: int  # rows of all queries, and of all keys
    value_dim: int

    @staticmethod
    def of(keys: FileKeys) -> DeltaSizes:
        key_heads, value_heads = keys.integer("ssm.group_count"), keys.integer("ssm.time_step_rank")
        inner, state = keys.integer("ssm.inner_size"), keys.integer("ssm.state_size")
        if not 0 < key_heads <= value_heads <= inner <= 1 << 20 or value_heads % key_heads or inner % value_heads:
            raise ModelError(
                f"{keys.header.path}: {value_heads} heads of values must be a multiple of {key_heads} of keys, and "
                f"divide {inner} channels"
            )
        return DeltaSizes(key_heads, value_heads, key_heads * state, inner // value_heads)

    def order(self, width: int, before: int = 0) -> Tensor:
        """Return the order of values after rows that stay where they are."""
        own = by_key_head(self.key_heads, self.value_heads, width)
        return torch.cat((torch.arange(before), before + own))


def grouped(keys: FileKeys, found: Derived, last: str) -> Derived:
    """Put heads of values in the order of the heads of keys that they belong to."""
    sizes = DeltaSizes.of(keys)
    if sizes.key_heads == sizes.value_heads:
        return found
    if last in ("A_log", "dt_bias", "in_proj_a", "in_proj_b"):
        return replace(found, order=sizes.order(1))
    if last == "in_proj_z":
        return replace(found, order=sizes.order(sizes.value_dim))
    if last in ("conv1d", "in_proj_qkv"):
        return replace(found, order=sizes.order(sizes.value_dim, 2 * sizes.keys))
    if last == "out_proj":
        return replace(found, inputs=sizes.order(sizes.value_dim))
    return found


def joined(keys: FileKeys, table: FamilyNames, number: int) -> Iterator[Derived]:
    """Return a block's tensors that are put together from several of the file, or parts of one."""

    def there(*stems: str, ending: str = ".weight") -> tuple[Rows, ...] | None:
        names = [f"blk.{number}.{stem}{ending}" for stem in stems]
        return tuple(map(Rows, names)) if all(map(keys.has, names)) else None

    def place(own: str, stem: str) -> str:
        return own_place(keys, number, own, stem)

    experts, is_gpt = table.experts, keys.arch == "gpt-oss"
    down = there("ffn_down_exps")
    if down is not None:
        yield Derived(place(f"{experts}.down_proj", "ffn"), down, by_input=is_gpt)
    first = there("ffn_gate_up_exps") or there("ffn_gate_exps", "ffn_up_exps")
    if first is not None:
        channels = sum(keys.tensor(part.tensor).shape[-2] for part in first)
        # Gates and gated values alternate in checkpoints of gpt-oss.
        order = torch.arange(channels).view(2, -1).T.reshape(-1) if is_gpt else None
        yield Derived(place(f"{experts}.gate_up_proj", "ffn"), first, order=order, by_input=is_gpt)
    elif (up := there("ffn_up_exps")) is not None:
        yield Derived(place(f"{experts}.up_proj", "ffn"), up)
    if is_gpt and (bias := there("ffn_gate_exps", "ffn_up_exps", ending=".bias")) is not None:
        channels = sum(keys.tensor(part.tensor).shape[-1] for part in bias)
        order = torch.arange(channels).view(2, -1).T.reshape(-1)
        yield Derived(place(f"{experts}.gate_up_proj_bias", "ffn"), bias, dim=-1, order=order)
    if is_gpt and (bias := there("ffn_down_exps", ending=".bias")) is not None:
        yield Derived(place(f"{experts}.down_proj_bias", "ffn"), bias, dim=-1)
    if keys.arch == "granitehybrid":
        pair = there("ffn_gate_shexp", "ffn_up_shexp") or there("ffn_gate", "ffn_up")
        if pair is not None:
            yield Derived(place("mlp.input_linear.weight", "ffn"), pair)
    latent = there("attn_k_b", "attn_v_b")
    if latent is not None:
        yield Derived(place("self_attn.kv_b_proj.weight", "attn"), latent, values=expansions)
    for ending in (".weight", ".bias"):
        fused = there("attn_qkv", ending=ending)
        if fused is not None and "attn_qkv" not in table.names:
            yield from attention_of(keys, table, number, fused[0].tensor, ending)


def expansions(keys: Tensor, values: Tensor) -> Tensor:
    """Return the expansions of latents to keys and values of all heads, as one matrix."""
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


def attention_of(keys: FileKeys, table: FamilyNames, number: int, name: str, ending: str) -> Iterator[Derived]:
    """Return queries, keys and values, which a file may have as one."""
    if "self_attn.in_proj_z" in table.names.values() and keys.has(f"blk.{number}.ssm_a"):
        own = own_place(keys, number, f"self_attn.in_proj_qkv{ending}", "attn")
        found = Derived(own, (Rows(name),))
        if keys.arch == "qwen3next":
            yield from qwen3_next_projection(keys, number, name)
        else:
            yield grouped(keys, found, "in_proj_qkv")
        return
    heads, size = keys.each("attention.head_count"), head_size(keys)
    groups = keys.each("attention.head_count_kv")
    layer = min(number, keys.layers - 1)
    rows = keys.tensor(name).shape[0]
    key_rows = groups[layer] * size
    # Gated attention has a gate for each query.
    ends = (rows - 2 * key_rows, rows - key_rows, rows)
    start = 0
    for letter, end in zip("qkv", ends):
        if not start < end <= rows or not heads[layer]:
            raise ModelError(f"{keys.header.path}: {name} has {rows} rows, which do not fit its heads")
        own = own_place(keys, number, table.names[f"attn_{letter}"], "attn") + ending
        order = halves(end - start, size) if table.interleaved and letter != "v" else None
        yield Derived(own, (Rows(name, start, end),), dim=-2 if ending == ".weight" else -1, order=order)
        start = end


def qwen3_next_projection(keys: FileKeys, number: int, name: str) -> Iterator[Derived]:
    """Return the input projection of a delta layer: queries, keys, values and gates of each head of keys in turn."""
    sizes, gate = DeltaSizes.of(keys), f"blk.{number}.attn_gate.weight"
    heads, own = sizes.key_heads, sizes.value_heads // sizes.key_heads * sizes.value_dim
    stored = torch.arange(2 * sizes.keys + 2 * heads * own)
    pieces = stored.split([sizes.keys, sizes.keys, heads * own, heads * own])
    order = torch.cat([piece.view(heads, -1) for piece in pieces], 1).reshape(-1)
    place = own_place(keys, number, "self_attn.in_proj_qkvz.weight", "attn")
    yield Derived(place, (Rows(name), Rows(gate)), order=order)
