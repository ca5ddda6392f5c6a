"""The families that Weft serves, and published checkpoints of each, for people to choose from. No torch.

Any checkpoint of a listed architecture can be served. Those named here have a packaged configuration, from which their
sizes are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# The same name as in weft.builtin, which this package does not import; a test compares.
BUILT_IN = "weft-small"


@dataclass(frozen=True, slots=True)
class ListedFamily:
    """`checkpoints` maps packaged configurations to hub ids; None: the configuration is not a published model's."""

    name: str
    layers: str
    architectures: tuple[str, ...]
    checkpoints: tuple[tuple[str, str | None], ...] = ()


CATALOGUE = (
    ListedFamily("LFM2", "short convolution, attention", ("Lfm2ForCausalLM",), (("lfm2-1.2b", "LiquidAI/LFM2-1.2B"),)),
    ListedFamily(
        "LFM2-MoE",
        "short convolution, attention, experts",
        ("Lfm2MoeForCausalLM",),
        (("lfm2-8b-a1b", "LiquidAI/LFM2-8B-A1B"),),
    ),
    ListedFamily(
        "LFM3",
        "short convolution, sliding windows, attention",
        ("Lfm3ForCausalLM",),
        (("lfm3-1.7b", "LiquidAI/LFM3-1.7B"),),
    ),
    ListedFamily(
        "Qwen3-Next",
        "Gated DeltaNet, attention, experts",
        ("Qwen3NextForCausalLM",),
        (("qwen3-next-mini", None),),
    ),
    ListedFamily(
        "Qwen3.5",
        "Gated DeltaNet, attention, experts in the MoE variants",
        (
            "Qwen3_5ForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        (("qwen3.5-9b", "Qwen/Qwen3.5-9B"), ("qwen3.5-35b-a3b", "Qwen/Qwen3.5-35B-A3B")),
    ),
    ListedFamily(
        "OLMo-Hybrid",
        "Gated DeltaNet, attention",
        ("OlmoHybridForCausalLM",),
        (("olmo-hybrid-7b", "allenai/Olmo-Hybrid-7B"),),
    ),
    ListedFamily(
        "Kimi-Linear",
        "Kimi Delta Attention, latent attention, experts",
        ("KimiLinearForCausalLM",),
        (("kimi-linear-48b-a3b", "moonshotai/Kimi-Linear-48B-A3B-Instruct"),),
    ),
    ListedFamily(
        "Nemotron-H",
        "Mamba2, attention, experts in the MoE variants",
        ("NemotronHForCausalLM",),
        (("nemotron-nano-9b-v2", "nvidia/NVIDIA-Nemotron-Nano-9B-v2"),),
    ),
    ListedFamily(
        "Falcon-H1",
        "Mamba2 and attention in parallel",
        ("FalconH1ForCausalLM",),
        (("falcon-h1-7b", "tiiuae/Falcon-H1-7B-Instruct"),),
    ),
    ListedFamily(
        "Granite 4 hybrid",
        "Mamba2, attention, experts",
        ("GraniteMoeHybridForCausalLM",),
        (
            ("granite-4.0-h-tiny", "ibm-granite/granite-4.0-h-tiny"),
            ("granite-4.0-h-small", "ibm-granite/granite-4.0-h-small"),
        ),
    ),
    ListedFamily(
        "gpt-oss",
        "attention and sliding windows, experts",
        ("GptOssForCausalLM",),
        (("gpt-oss-20b", "openai/gpt-oss-20b"),),
    ),
    ListedFamily(
        "Gemma 3",
        "sliding windows, attention",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        (("gemma-3-12b", "google/gemma-3-12b-it"),),
    ),
    ListedFamily(
        "Gemma 2",
        "sliding windows, attention",
        ("Gemma2ForCausalLM",),
        (("gemma-2-9b", "google/gemma-2-9b-it"),),
    ),
    ListedFamily(
        "OLMo 2 and 3",
        "attention, in OLMo 3 sliding windows",
        ("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
        (("olmo-2-7b", "allenai/OLMo-2-1124-7B-Instruct"), ("olmo-3-7b", "allenai/Olmo-3-7B-Instruct")),
    ),
    ListedFamily(
        "Phi-3 and Phi-4",
        "attention, sliding windows if configured",
        ("Phi3ForCausalLM",),
        (("phi-4", "microsoft/phi-4"),),
    ),
    ListedFamily("SmolLM3", "attention", ("SmolLM3ForCausalLM",), (("smollm3-3b", "HuggingFaceTB/SmolLM3-3B"),)),
    ListedFamily("Llama", "attention", ("LlamaForCausalLM",)),
    ListedFamily(
        "Mistral",
        "attention, sliding windows if configured",
        ("MistralForCausalLM", "Mistral3ForConditionalGeneration"),
        (("mistral-small-3.1-24b", "mistralai/Mistral-Small-3.1-24B-Instruct-2503"),),
    ),
    ListedFamily(
        "Qwen2 and Qwen2.5",
        "attention, sliding windows if configured",
        ("Qwen2ForCausalLM",),
        (("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct"),),
    ),
    ListedFamily("Qwen3", "attention", ("Qwen3ForCausalLM",)),
    ListedFamily("Qwen3-MoE", "attention, experts", ("Qwen3MoeForCausalLM",)),
)


# What published checkpoints state about their weights, where a packaged configuration does not.
STORED: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["self_attn", "mlp.router", "embed_tokens", "lm_head"],
    }
}


def hub_ids() -> Iterator[str]:
    """Yield the ids of all listed checkpoints."""
    return (hub_id for family in CATALOGUE for _, hub_id in family.checkpoints if hub_id is not None)


def published(configuration: str) -> str | None:
    """Return the hub id of the model with a packaged configuration.

    >>> published("lfm2-1.2b"), published("qwen3-next-mini")
    ('LiquidAI/LFM2-1.2B', None)
    """
    return next((hub_id for family in CATALOGUE for name, hub_id in family.checkpoints if name == configuration), None)
