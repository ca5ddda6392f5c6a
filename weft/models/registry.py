"""Map from architectures to families. Families are imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from weft.base.errors import ModelError
from weft.models.config import shown
from weft.models.model import CausalModel

# The name in config.json's `architectures` -> (module, class)
FAMILIES = {
    "LlamaForCausalLM": ("llama", "Llama"),
    "MistralForCausalLM": ("mistral", "Mistral"),
    "Mistral3ForConditionalGeneration": ("mistral", "Mistral"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "Qwen3Moe"),
    "Phi3ForCausalLM": ("phi3", "Phi3"),
    "SmolLM3ForCausalLM": ("smollm3", "SmolLM3"),
    "Olmo2ForCausalLM": ("olmo2", "Olmo2"),
    "Olmo3ForCausalLM": ("olmo2", "Olmo3"),
    "Gemma2ForCausalLM": ("gemma2", "Gemma2"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma3"),
    "Gemma3ForConditionalGeneration": ("gemma3", "Gemma3"),
    "GptOssForCausalLM": ("gpt_oss", "GptOss"),
    "Lfm2ForCausalLM": ("lfm2", "Lfm2"),
    "Lfm2MoeForCausalLM": ("lfm2_moe", "Lfm2Moe"),
    "Lfm3ForCausalLM": ("lfm3", "Lfm3"),
    "Qwen3NextForCausalLM": ("qwen3_next", "Qwen3Next"),
    "Qwen3_5ForCausalLM": ("qwen3_5", "Qwen3_5"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "Qwen3_5"),
    "Qwen3_5MoeForCausalLM": ("qwen3_5", "Qwen3_5"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5", "Qwen3_5"),
    "OlmoHybridForCausalLM": ("olmo_hybrid", "OlmoHybrid"),
    "KimiLinearForCausalLM": ("kimi_linear", "KimiLinear"),
    "NemotronHForCausalLM": ("nemotron_h", "NemotronH"),
    "FalconH1ForCausalLM": ("falcon_h1", "FalconH1"),
    "GraniteMoeHybridForCausalLM": ("granite_moe_hybrid", "GraniteMoeHybrid"),
}


def family_of(config: Mapping[str, Any]) -> type[CausalModel]:
    """Return the class that serves a configuration's architecture."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json: architectures must be a list of names, got {shown(names)}")
    for name in names:
        if name in FAMILIES:
            module, family = FAMILIES[name]
            found: type[CausalModel] = getattr(import_module(f"weft.models.{module}"), family)
            return found
    given = " ".join(", ".join(names).split())[:200]
    asked = f"architecture {given} is not supported" if names else "config.json has no architectures"
    raise ModelError(f"{asked}; supported are {', '.join(sorted(FAMILIES))}")
