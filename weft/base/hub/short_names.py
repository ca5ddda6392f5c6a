"""Short names of published checkpoints, such as `lfm2:1.2b`, and the hub ids that they stand for.

Every option that takes a model takes them; `weft models` lists them.
"""

from __future__ import annotations

SHORT_NAMES = {
    "lfm2:1.2b": "LiquidAI/LFM2-1.2B",
    "lfm2:8b-a1b": "LiquidAI/LFM2-8B-A1B",
    "qwen3.5:9b": "Qwen/Qwen3.5-9B",
    "qwen3.5:35b-a3b": "Qwen/Qwen3.5-35B-A3B",
    "olmo-hybrid:7b": "allenai/Olmo-Hybrid-7B",
    "kimi-linear:48b-a3b": "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    "nemotron-nano:9b-v2": "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    "falcon-h1:7b": "tiiuae/Falcon-H1-7B-Instruct",
    "granite-4.0-h:tiny": "ibm-granite/granite-4.0-h-tiny",
    "granite-4.0-h:small": "ibm-granite/granite-4.0-h-small",
    "gpt-oss:20b": "openai/gpt-oss-20b",
    "gemma-3:12b": "google/gemma-3-12b-it",
    "lfm3:1.7b": "LiquidAI/LFM3-1.7B",
    "gemma-2:9b": "google/gemma-2-9b-it",
    "olmo-2:7b": "allenai/OLMo-2-1124-7B-Instruct",
    "olmo-3:7b": "allenai/Olmo-3-7B-Instruct",
    "phi-4:14b": "microsoft/phi-4",
    "smollm3:3b": "HuggingFaceTB/SmolLM3-3B",
    "mistral-small-3.1:24b": "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "qwen2.5:7b": "Qwen/Qwen2.5-7B-Instruct",
}


def hub_id_of(name: str) -> str:
    """Return the hub id of a short name; any other name unchanged.

    >>> hub_id_of("LFM2:1.2B"), hub_id_of("owner/name")
    ('LiquidAI/LFM2-1.2B', 'owner/name')
    """
    return SHORT_NAMES.get(name.lower(), name)


def short_name_of(hub_id: str) -> str | None:
    """
    >>> short_name_of("openai/gpt-oss-20b"), short_name_of("owner/name")
    ('gpt-oss:20b', None)
    """
    return next((short for short, known in SHORT_NAMES.items() if known == hub_id), None)
