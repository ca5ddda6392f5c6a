"""Random models of about 100M parameters, saved once in a cache folder as checkpoints for all engines.

Weights have a standard deviation of 1/sqrt(fan_in), so that every layer affects the logits and a wrong state is
visible.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB = 32768
PAD, BOS, EOS = 0, 1, 2
FINISHED = "complete.json"


@dataclass(frozen=True, slots=True)
class Family:
    """Class names of a transformers model, and its configuration except the vocabulary."""

    config: str
    model: str
    values: dict[str, Any]


SIZES = {"hidden_size": 768, "tie_word_embeddings": True, "max_position_embeddings": 8192}

FAMILIES = {
    "lfm2": Family(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "intermediate_size": 2048,
            "block_auto_adjust_ff_dim": False,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "conv_L_cache": 3,
            "layer_types": ["conv", "conv", "full_attention"] * 4,
        },
    ),
    # The shape of SmolLM2-135M, with the vocabulary of all models here.
    "smollm2": Family(
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
    ),
    "granite": Family(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            "intermediate_size": 2048,
            "shared_intermediate_size": 2048,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "num_hidden_layers": 10,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "layer_types": (["linear_attention"] * 4 + ["full_attention"]) * 2,
            "mamba_n_heads": 24,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "logits_scaling": 6.0,
        },
    ),
    "qwen35": Family(
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            "intermediate_size": 1792,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 6,
            "linear_num_value_heads": 6,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
        },
    ),
}


def checkpoint(name: str, cache: Path, stored: str = "float32") -> Path:
    """Return the folder of a family's random model with weights of dtype `stored`; create it if needed."""
    folder = cache / "checkpoints" / (name if stored == "float32" else f"{name}-{stored}")
    recipe = {"vocab_size": VOCAB, **SIZES, **FAMILIES[name].values}
    done = folder / FINISHED
    if done.exists() and json.loads(done.read_text())["recipe"] == recipe:
        return folder
    import torch

    shutil.rmtree(folder, ignore_errors=True)
    model = _build(FAMILIES[name], recipe)
    model.to(getattr(torch, stored)).save_pretrained(folder)
    _save_tokenizer(folder)
    parameters = sum(p.numel() for p in model.parameters())
    done.write_text(json.dumps({"recipe": recipe, "parameters": parameters}))
    return folder


def parameters_of(folder: Path) -> int:
    return int(json.loads((folder / FINISHED).read_text())["parameters"])


def _build(family: Family, recipe: dict[str, Any]) -> Any:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    config = getattr(transformers, family.config)(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, **recipe)
    torch.manual_seed(0)
    model = getattr(transformers, family.model)._from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            # Vectors (norms, decays, dt biases) keep their initial values.
            if weight.ndim >= 2:
                fan_in = weight.shape[-1]
                weight.copy_(torch.randn(weight.shape, generator=generator) / math.sqrt(fan_in))
    return model.eval()


def _save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of single bytes. Prompts are token ids, but the converter of llama.cpp needs a tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<bos>", "<eos>"]
    vocabulary = {text: index for index, text in enumerate(specials)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    # llama.cpp refuses a vocabulary without any merge.
    vocabulary["\u0120t"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\u0120", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=specials[PAD], bos_token=specials[BOS], eos_token=specials[EOS]
    )
    wrapped.save_pretrained(folder)
