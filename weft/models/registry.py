"""Map from architectures to families. Families are imported on first use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from weft.base.errors import ModelError
from weft.models.config import shown
from weft.models.heads import HeadKind, causal_name
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


# Families of encoders, by the beginnings of their architectures: what they compute for a token depends on later ones.
BIDIRECTIONAL = re.compile(
    r"(Modern|Nomic|Jina|Distil|Deberta|Camem|Flau|Mega|Mobile|Squeeze|Euro|Neo|Ro|XLMRo|Al)*Bert|Roberta|XLMRoberta"
    r"|Deberta|Electra|MPNet|Gte|NewModel|NewFor|T5Encoder|Longformer|BigBird|NVEmbed|Lfm2Bidirectional|LlamaBidirectional",
    re.IGNORECASE,
)


def head_kind(config: Mapping[str, Any]) -> HeadKind:
    """Return the head of a configuration's architecture."""
    stated = config.get("architectures")
    names = [name for name in stated if isinstance(name, str)] if isinstance(stated, list) else []
    known = [name for name in names if name in FAMILIES or causal_name(name)[0] in FAMILIES]
    return HeadKind.VOCABULARY if not known or known[0] in FAMILIES else causal_name(known[0])[1]


def family_of(config: Mapping[str, Any]) -> type[CausalModel]:
    """Return the class that serves a configuration's architecture."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json: architectures must be a list of names, got {shown(names)}")
    for name in names:
        if (entry := FAMILIES.get(name) or FAMILIES.get(causal_name(name)[0])) is not None:
            module, family = entry
            found: type[CausalModel] = getattr(import_module(f"weft.models.{module}"), family)
            return found
        if BIDIRECTIONAL.match(name):
            raise ModelError(
                f"architecture {name:.200} is not supported: it looks ahead, and Weft computes causal models"
            )
    given = " ".join(", ".join(names).split())[:200]
    asked = f"architecture {given} is not supported" if names else "config.json has no architectures"
    raise ModelError(f"{asked}; supported are {', '.join(sorted(FAMILIES))}")
