"""A checkpoint as a GGUF file: names, orders and values that other programs expect, the inverse of `names.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.base.errors import ModelError
from weft.base.gguf.header import Header
from weft.base.gguf.writing import NewTensor, write
from weft.kernels.formats.block_types import BLOCK_TYPES
from weft.models.config import checkpoint_config, text_part
from weft.models.gguf.configuration import FileKeys
from weft.models.gguf.exported_keys import architecture_of, keys_of, rotation_factors
from weft.models.gguf.names import ROOT, TABLES, DeltaSizes, Derived, Rows, grouped, halves
from weft.models.gguf.stating import check_stated
from weft.models.mtp import head_of
from weft.models.weights import Entry, Files, build, catalogue, checkpoint_files

KINDS = ("off", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k")
EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
NUMBERED = re.compile(r"^(model|mtp)\.layers\.(\d+)\.(.+)$")
# Matrices that are never quantised, and in mixtures those that get more bits.
PLAIN = re.compile(r"norm|ffn_gate_inp|conv1d|shortconv\.conv")
DELICATE = re.compile(r"ssm_(alpha|beta|ba)\.")
LARGER = re.compile(r"attn_v\.|ffn_down|^output\.")
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

Read = Callable[[], list[Tensor]]
Made = list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Given:
    """Tensors of the checkpoint that make one or several of the file: their name, and what they become."""

    own: str
    entries: tuple[str, ...]
    make: Callable[..., Made]


def export(folder: Path, target: Path, kind: str, more: Mapping[str, Any], written: Callable[[int], object]) -> None:
    """Write a checkpoint. `more`: metadata of the tokenizer. `kind`: the type of matrices, one of `KINDS`."""
    config = text_part(checkpoint_config(folder))
    arch = architecture_of(config)
    model = build(config, torch.bfloat16, declare=True)
    entries = dict(catalogue(checkpoint_files(folder), model))
    to_come = 0
    if arch.startswith(("qwen35", "qwen3next")):
        head = build(config, torch.bfloat16, declare=True, family=head_of(config))
        found = catalogue(checkpoint_files(folder), head)
        entries |= {name: each for name, each in found.items() if name.startswith("mtp.")}
        to_come = len({match[2] for name in found if (match := NUMBERED.match(name)) and match[1] == "mtp"})
    keys = keys_of(config, arch, to_come)
    metadata = {"general.architecture": arch, "general.alignment": 32, **keys, **more}
    if kind != "off":
        metadata["general.quantization_version"] = 2
    exporter = Exporter(FileKeys(Header(folder, metadata, {}, 0)), config)
    tensors = list(exporter.tensors(entries, Files(entries), kind))
    check_stated(config, metadata, tensors, target)
    write(target, metadata, tensors, written)


class Exporter:
    """What a file of one model calls its tensors, and how it stores them."""

    def __init__(self, keys: FileKeys, config: Mapping[str, Any]) -> None:
        self.keys, self.config, self.arch = keys, config, keys.arch
        self.table = TABLES[self.arch]
        # Later stems are those of heads that predict further tokens. Families whose norm before the second half has a
        # name of its own are written with it: other programs look for no other one.
        self.stems = {own: stem for stem, own in reversed(list(self.table.names.items()))}
        if "post_attention_norm" in self.table.names:
            self.stems[self.table.names["post_attention_norm"]] = "post_attention_norm"
        self.root = {own: stem for stem, own in {**ROOT, **self.table.whole}.items()}

    def tensors(self, entries: Mapping[str, Entry], files: Files, kind: str) -> Iterator[NewTensor]:
        """Return what to write; tensors are read when their content is asked for."""
        factors = rotation_factors(self.config, self.keys.integer("rope.dimension_count") // 2)
        if factors is not None:
            yield NewTensor("rope_freqs.weight", "F32", factors.shape, lambda: factors.view(np.uint8).data)
        is_tied = "lm_head.weight" not in entries
        for given in self.given(entries):

            def read(given: Given = given) -> Made:
                return given.make(*[files.whole(name) for name in given.entries])

            sized = given.make(*[torch.empty(entries[name].shape, device="meta") for name in given.entries])
            dtype = stored_dtype(entries[given.entries[0]])
            for number, (name, tensor) in enumerate(sized):
                own = type_of(name, tuple(tensor.shape), kind, dtype, is_tied)
                yield NewTensor(name, own, tuple(tensor.shape), partial(content, read, number, own))

    def given(self, entries: Mapping[str, Entry]) -> Iterator[Given]:
        single: dict[tuple[str, str], dict[int, str]] = {}
        for name in entries:
            found = EXPERT.match(name)
            if found is None:
                yield Given(name, (name,), partial(self.made, name))
            else:
                single.setdefault((found[1], found[3]), {})[int(found[2])] = name
        for (place, which), names in single.items():
            block = self.block(f"{place}.x")[0]
            own = f"{block}ffn_{which}_exps.weight"

            def stack(*each: Tensor, own: str = own) -> Made:
                return [(own, torch.stack(each))]

            yield Given(f"{place}.{which}", tuple(names[n] for n in sorted(names)), stack)

    def block(self, own: str) -> tuple[str, str]:
        """Return the beginning of a tensor's name in the file, and the rest of the model's own."""
        found = NUMBERED.match(own)
        if found is not None:
            number = int(found[2]) + (self.keys.layers if found[1] == "mtp" else 0)
            return f"blk.{number}.", found[3]
        return (f"blk.{self.keys.layers}.", own.removeprefix("mtp.")) if own.startswith("mtp.") else ("", own)

    def made(self, own: str, tensor: Tensor) -> Made:
        """Return what a tensor of the model is in the file, by name."""
        block, rest = self.block(own)
        stem, ending = split(rest)
        if not block:
            if stem not in self.root:
                raise ModelError(f"{own} has no name in GGUF files of {self.arch}")
            return [(f"{self.root[stem]}{ending}", self.changed(stem, ending, tensor))]
        several = self.several(block, stem, ending, tensor)
        if several is not None:
            return several
        name = self.stems.get(stem)
        if name is None:
            raise ModelError(f"{own} has no name in GGUF files of {self.arch}")
        return [(f"{block}{name}{file_ending(stem, ending)}", self.changed(stem, ending, tensor))]

    def several(self, block: str, stem: str, ending: str, tensor: Tensor) -> Made | None:
        """Return what becomes several tensors of the file."""
        gate, up = (f"{block}ffn_{name}_exps" for name in ("gate", "up"))
        experts = self.table.experts
        if stem in (f"{experts}.gate_up_proj", f"{experts}.gate_up_proj_bias"):
            file = ".bias" if stem.endswith("_bias") else ".weight"
            if self.arch == "gpt-oss":
                # Gates and gated values alternate; matrices are [experts, inputs, outputs].
                tensor = tensor if file == ".bias" else tensor.transpose(1, 2)
                return [(f"{gate}{file}", tensor[:, ::2]), (f"{up}{file}", tensor[:, 1::2])]
            first, second = tensor.chunk(2, 1)
            return [(f"{gate}{file}", first), (f"{up}{file}", second)]
        if stem in (f"{experts}.down_proj", f"{experts}.down_proj_bias", f"{experts}.up_proj"):
            file, which = ".bias" if stem.endswith("_bias") else ".weight", stem.rpartition(".")[2].partition("_")[0]
            turned = self.arch == "gpt-oss" and file == ".weight"
            return [(f"{block}ffn_{which}_exps{file}", tensor.transpose(1, 2) if turned else tensor)]
        if self.arch == "granitehybrid" and stem in ("mlp.input_linear", "mlp.down_proj"):
            shared = "_shexp" if self.keys.get("expert_count") else ""
            if stem == "mlp.down_proj":
                return [(f"{block}ffn_down{shared}{ending}", tensor)]
            first, second = tensor.chunk(2)
            return [(f"{block}ffn_gate{shared}{ending}", first), (f"{block}ffn_up{shared}{ending}", second)]
        if stem == "self_attn.in_proj_qkv":
            return [(f"{block}attn_qkv{ending}", self.regrouped("in_proj_qkv", tensor))]
        if stem == "self_attn.in_proj_qkvz":
            sizes = DeltaSizes.of(self.keys)
            own = sizes.value_heads // sizes.key_heads * sizes.value_dim
            state = sizes.keys // sizes.key_heads
            parts = tensor.unflatten(0, (sizes.key_heads, -1)).split([state, state, own, own], 1)
            q, k, v, z = (part.flatten(0, 1) for part in parts)
            return [(f"{block}attn_qkv{ending}", torch.cat((q, k, v))), (f"{block}attn_gate{ending}", z)]
        return None

    def changed(self, stem: str, ending: str, tensor: Tensor) -> Tensor:
        """Return a tensor with the values, shape and order that files have."""
        last = stem.rpartition(".")[2]
        is_mamba = self.arch.startswith(("granite", "nemotron"))
        if last == "A_log":
            tensor = -tensor.float().exp()
        elif last.startswith("conv") and ending == ".weight" and tensor.ndim == 3:
            tensor = tensor[:, 0]
        elif last == "shared_expert_gate":
            tensor = tensor.reshape(-1)
        elif self.table.plus_one and (last.endswith("norm") or "_norm_" in last) and stem != "self_attn.norm":
            tensor = tensor.float() + 1
        if is_mamba and last in ("A_log", "D"):
            tensor = tensor.reshape(-1, 1)
        if is_mamba and stem in ("self_attn.norm", "mixer.norm"):
            tensor = tensor.reshape(self.keys.integer("ssm.group_count"), -1)
        if self.table.interleaved and last in ("q_proj", "k_proj"):
            order = halves(tensor.shape[0], self.keys.integer("attention.key_length"))
            tensor = tensor if order is None else moved(tensor, order.argsort(), 0)
        return self.regrouped(last, tensor)

    def regrouped(self, last: str, tensor: Tensor) -> Tensor:
        """Return heads of values in turn over the heads of keys."""
        if not self.arch.startswith("qwen35"):
            return tensor
        found = grouped(self.keys, Derived("", (Rows(""),)), last)
        if found.order is not None:
            tensor = moved(tensor, found.order.argsort(), 0)
        return tensor if found.inputs is None else moved(tensor, found.inputs.argsort(), 1)


def moved(tensor: Tensor, order: Tensor, dim: int) -> Tensor:
    return tensor if tensor.is_meta else tensor.index_select(dim, order)


def split(name: str) -> tuple[str, str]:
    """
    >>> split("a.q_proj.weight"), split("a.A_log")
    (('a.q_proj', '.weight'), ('a.A_log', ''))
    """
    for ending in (".weight", ".bias"):
        if name.endswith(ending):
            return name.removesuffix(ending), ending
    return name, ""


def file_ending(stem: str, ending: str) -> str:
    """Return what follows a stem in the file. Some parameters have an ending there that they lack in checkpoints."""
    last = stem.rpartition(".")[2]
    if last in ("dt_bias", "expert_bias", "e_score_correction_bias"):
        return ".bias"
    return ".weight" if last == "sinks" else ending


def stored_dtype(entry: Entry) -> torch.dtype:
    """Return the dtype in which a tensor is kept."""
    found = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(entry.dtype)
    if found is None:
        raise ModelError(f"{entry.name} is stored as {entry.dtype}; only checkpoints of 16 or 32 bits can be converted")
    return found


def type_of(name: str, shape: Sequence[int], kind: str, dtype: torch.dtype, is_tied: bool) -> str:
    """Return a tensor's type in the file.

    >>> names = ("a.weight", "attn_v.weight", "x_norm.weight")
    >>> [type_of(name, (8, 512), "q4_k", torch.bfloat16, False) for name in names]
    ['Q4_K', 'Q6_K', 'F32']
    """
    if len(shape) < 2 or not name.endswith(".weight") or PLAIN.search(name):
        return "F32"
    is_larger = LARGER.search(name) is not None or (is_tied and name == "token_embd.weight")
    wanted = {
        "off": [],
        "q4_k": ["Q6_K" if is_larger else "Q4_K", "Q8_0"],
        "q5_k": ["Q6_K" if is_larger else "Q5_K", "Q8_0"],
        "q6_k": ["Q6_K", "Q8_0"],
    }.get(kind, [kind.upper()])
    if wanted and DELICATE.search(name):
        wanted = ["Q8_0"]
    return next((each for each in wanted if shape[-1] % BLOCK_TYPES[each].numbers == 0), DTYPES[dtype])


def content(read: Callable[[], Made], number: int, kind: str) -> memoryview:
    """Return the bytes of a tensor in its type."""
    tensor = read()[number][1]
    if kind in BLOCK_TYPES:
        found = BLOCK_TYPES[kind].encode(tensor).tensors[0]
    else:
        dtype = next(dtype for dtype, name in DTYPES.items() if name == kind)
        found = tensor.to(dtype).contiguous().view(-1).view(torch.uint8)
    return found.contiguous().view(-1).numpy().data
