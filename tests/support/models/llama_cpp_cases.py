"""Tiny models of all families that both Weft and llama.cpp read, in sizes that blocks of 256 fit, and their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.kernels.operations import CPU
from tests.support.models import llama_cpp
from tests.support.models.oracle import DirectRunner
from weft.kernels.choosing import rounding
from weft.models.weights import load_model

VOCABULARY = {"vocab_size": llama_cpp.VOCABULARY}
WIDE = VOCABULARY | {"hidden_size": 256, "intermediate_size": 256}
# Full attention in every fourth layer, which files need not state.
REGULAR = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
# Sizes that blocks of 256 fit, and what the converter asks for.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    # It leaves out a window, which its llama has not.
    "mistral": WIDE | {"sliding_window": None},
    "qwen3": WIDE,
    "qwen3_moe": WIDE | {"moe_intermediate_size": 256},
    "lfm2": WIDE,
    "lfm2_moe": WIDE | {"moe_intermediate_size": 256},
    "qwen3_next": WIDE | REGULAR | {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
    "qwen3_5": WIDE | REGULAR | {"linear_value_head_dim": 64, "linear_key_head_dim": 64},
    "qwen3_5_moe": WIDE
    | REGULAR
    | {
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "linear_value_head_dim": 64,
        "linear_key_head_dim": 64,
    },
    # The scale of queries is left to the program.
    "gemma3": WIDE | {"query_pre_attn_scalar": 32, "vocab_size": llama_cpp.TOKENS},
    "gpt_oss": WIDE,
    "granite_moe_hybrid": WIDE | {"shared_intermediate_size": 256, "mamba_n_heads": 16, "mamba_d_head": 32},
    "falcon_h1": WIDE | {"mamba_d_ssm": 256, "mamba_n_heads": 16},
    # It wants experts or plain feed-forward layers, not both.
    "nemotron_h": WIDE
    | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
        "mamba_num_heads": 32,
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 256,
    },
}
DENSE_NEMOTRON = {
    **FAMILIES["nemotron_h"],
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
}
CASES = {name: (name, changes) for name, changes in FAMILIES.items()} | {
    "nemotron_h dense": ("nemotron_h", DENSE_NEMOTRON),
    "granite dense": (
        "granite_moe_hybrid",
        FAMILIES["granite_moe_hybrid"] | {"num_local_experts": 0, "num_experts_per_tok": 0},
    ),
}
# llama.cpp aborts while it computes this one.
ABORTS = ("nemotron_h dense",)
ANSWER = 12


def closeness(name: str) -> float:
    """Return how near llama.cpp's log-probabilities of a float32 file are: it computes some functions in 16 bits."""
    return 3e-2 if name.startswith("gpt_oss") else 5e-3


def tolerance(name: str, scale: float) -> float:
    """Return by how much a logit of a quantised file may lie below the largest one. Experts may be others."""
    return scale * (0.5 if "moe" in name or name.startswith(("gpt_oss", "nemotron_h", "qwen3_next")) else 0.25)


def logits(file: Path, tokens: list[int], operations: Any = CPU) -> torch.Tensor:
    model, _ = load_model(file, torch.float32, progress=False, operations=operations)
    runner = DirectRunner(model, operations=operations)
    [found] = runner.step([(runner.open(tokens), len(tokens))])
    return found


def check_greedy(file: Path, tokens: list[int], tolerance: float, close: float | None = None) -> None:
    """Check that llama.cpp's answer has the tokens that are likeliest here, but where two are about equally likely.

    `close`: how near log-probabilities of the likeliest tokens have to be.
    """
    reply = llama_cpp.answer(file, tokens, ANSWER)
    theirs = reply["tokens"]
    assert len(theirs) == ANSWER
    # Rounded rows may choose another expert. llama.cpp rounds too, so one of both ways has its choice.
    each = [logits(file, [*tokens, *theirs], way)[len(tokens) - 1 : -1] for way in (rounding(CPU), CPU)]
    own = each[0].log_softmax(-1)
    # It was told to leave this one out.
    each = [found.index_fill(1, torch.tensor(llama_cpp.EOS), -torch.inf) for found in each]
    below = [found.max(-1).values - found.gather(1, torch.tensor(theirs)[:, None])[:, 0] for found in each]
    assert torch.minimum(*below).max() <= tolerance
    assert (torch.minimum(*below) == 0).float().mean() >= 0.5
    if close is not None:
        assert len(reply["likeliest"]) == ANSWER
        for place, pairs in enumerate(reply["likeliest"]):
            assert all(abs(float(own[place, token]) - value) < close for token, value in pairs), place
