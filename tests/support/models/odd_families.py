"""Odd configurations of the families of other engines' users: sizes and options that published models may yet have.

    python -m tests.support.models.odd_families

prints the worst error of log-probabilities of every family against the public implementation, as a table.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from torch import Tensor

from tests.support.models.hybrid_models import LFM3
from tests.support.models.oracle import DirectRunner, Pair, Tiny, make_pair, random_tokens
from tests.support.models.plain_models import GEMMA2, MISTRAL, OLMO2, OLMO3, PHI3, QWEN2, SMOLLM3, VISION

COUNT = 24
# A prompt in two chunks that end anywhere, then single tokens past the end of a cell.
CHUNKS = (57, 66, *[1] * 10)
Fields = dict[str, Any]
WINDOWED = ("full_attention", "sliding_attention")


def shape(random: Random) -> Fields:
    """Return sizes that fit each other, none of them usual."""
    heads = random.choice((1, 2, 3, 4, 6))
    groups = random.choice([each for each in range(1, heads + 1) if heads % each == 0])
    size = random.choice((8, 12, 16, 20, 32, 48))
    return {
        "hidden_size": heads * size,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": random.choice((33, 96, 130)),
        "num_hidden_layers": random.choice((1, 2, 3, 5)),
        "vocab_size": random.choice((97, 256, 301)),
        "tie_word_embeddings": random.random() < 0.5,
    }


def rotation(random: Random) -> Fields:
    theta = {"rope_theta": random.choice((500.0, 1e4, 1e6))}
    kinds: list[Fields] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 64},
    ]
    return theta | random.choice(kinds)


def window(random: Random) -> int:
    return random.choice((1, 2, 17, 63, 64, 65, 500))


def eps(random: Random) -> float:
    return random.choice((1e-6, 1e-5, 1e-2))


def head_dim(random: Random) -> int:
    return random.choice((8, 18, 32, 64))


def layers(random: Random, sizes: Fields, kinds: tuple[str, ...]) -> list[str]:
    return random.choices(kinds, k=sizes["num_hidden_layers"])


def qwen2(random: Random) -> Tiny:
    sizes = shape(random) | {"rope_parameters": rotation(random), "rms_norm_eps": eps(random)}
    sizes |= {"use_sliding_window": random.random() < 0.5, "sliding_window": window(random)}
    return QWEN2.variant(**sizes, max_window_layers=random.choice((0, 1, 2)), head_dim=head_dim(random))


def phi3(random: Random) -> Tiny:
    sizes = shape(random) | {"rms_norm_eps": eps(random), "sliding_window": random.choice((None, window(random)))}
    size = sizes["hidden_size"] // sizes["num_attention_heads"]
    share = random.choice([each for each in (0.25, 0.5, 0.75, 1.0) if size * each % 2 == 0])
    turned: Fields = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    if random.random() < 0.6:
        pairs = range(int(size * share) // 2)
        turned |= {"rope_type": "longrope", "factor": random.choice((0.5, 2.0, 32.0))}
        turned |= {"short_factor": [1 + pair / 20 for pair in pairs], "long_factor": [1.5 + pair for pair in pairs]}
    # All sequences here are within the original context, or longer.
    original = random.choice((16, 2048))
    return PHI3.variant(**sizes, rope_parameters=turned, original_max_position_embeddings=original)


def smollm3(random: Random) -> Tiny:
    sizes = shape(random) | {"rope_parameters": rotation(random), "rms_norm_eps": eps(random)}
    sizes |= {"no_rope_layers": [random.randrange(2) for _ in range(sizes["num_hidden_layers"])]}
    sizes |= {"use_sliding_window": random.random() < 0.5, "sliding_window": window(random)}
    biases = {"attention_bias": random.random() < 0.5, "mlp_bias": random.random() < 0.5}
    return SMOLLM3.variant(**sizes, **biases)


def olmo2(random: Random) -> Tiny:
    sizes = shape(random) | {"rope_parameters": rotation(random), "rms_norm_eps": eps(random)}
    return OLMO2.variant(**sizes, attention_bias=random.random() < 0.5)


def olmo3(random: Random) -> Tiny:
    sizes = shape(random) | {"rms_norm_eps": eps(random), "sliding_window": window(random)}
    turned = {kind: rotation(random) for kind in WINDOWED}
    return OLMO3.variant(**sizes, layer_types=layers(random, sizes, WINDOWED), rope_parameters=turned)


def gemma2(random: Random) -> Tiny:
    sizes = shape(random) | {"rope_parameters": rotation(random), "rms_norm_eps": eps(random)}
    bounds = {f"{each}_logit_softcapping": random.choice((None, 0.5, 5.0)) for each in ("attn", "final")}
    sizes |= {"head_dim": head_dim(random), "query_pre_attn_scalar": random.choice((7, 32, 256))}
    sizes |= {"sliding_window": window(random), "attention_bias": random.random() < 0.5}
    return GEMMA2.variant(**sizes, **bounds, layer_types=layers(random, sizes, WINDOWED))


def mistral3(random: Random) -> Tiny:
    sizes = shape(random) | {"rms_norm_eps": eps(random), "head_dim": head_dim(random)}
    outer = {"image_token_index": 3, "tie_word_embeddings": sizes.pop("tie_word_embeddings")}
    text = MISTRAL.settings | sizes | {"model_type": "mistral", "sliding_window": random.choice((None, window(random)))}
    vision = VISION | {"head_dim": 16, "model_type": "pixtral"}
    parts = {"text_config": text | {"rope_parameters": rotation(random)}, "vision_config": vision}
    return Tiny("Mistral3Config", "Mistral3ForConditionalGeneration", parts | outer)


def lfm3(random: Random) -> Tiny:
    sizes = shape(random) | {"norm_eps": eps(random), "head_dim": random.choice((8, 20, 32)), "pad_token_id": 0}
    share = random.choice((0.2, 0.5, 1.0))
    full: list[Fields] = [
        {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": share},
        {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": share, "factor": 3.0},
        # As released: whole heads are rotated.
        {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": share},
        rotation(random),
    ]
    flags = ("use_attention_gate", "use_sandwich_norm", "attention_bias", "conv_bias")
    return LFM3.variant(
        **sizes,
        **{flag: random.random() < 0.5 for flag in flags},
        conv_L_cache=random.choice((2, 3, 7, 9)),
        sliding_window=window(random),
        layer_types=layers(random, sizes, ("conv", *WINDOWED)),
        rope_parameters={"sliding_attention": rotation(random), "full_attention": random.choice(full)},
    )


FAMILIES: dict[str, Callable[[Random], Tiny]] = {
    "Qwen2 and Qwen2.5": qwen2,
    "Phi-3 and Phi-4": phi3,
    "Gemma 2": gemma2,
    "Mistral Small 3.1 (text)": mistral3,
    "SmolLM3": smollm3,
    "OLMo 2": olmo2,
    "OLMo 3": olmo3,
    "LFM3": lfm3,
}


def configurations(family: str, count: int = COUNT) -> list[Tiny]:
    return [FAMILIES[family](Random(f"{family} {number}")) for number in range(count)]


def worst_error(tiny: Tiny) -> float:
    """Return the largest difference of log-probabilities, over all tokens after every position."""
    with tempfile.TemporaryDirectory() as folder:
        pair = make_pair(tiny, Path(folder))
    tokens = random_tokens(sum(CHUNKS), seed=5, vocabulary=pair.model.vocab_size)
    return float((answered(pair, tokens) - pair.oracle.logits(tokens).log_softmax(-1)).abs().max())


def answered(pair: Pair, tokens: list[int]) -> Tensor:
    runner = DirectRunner(pair.model)
    sequence = runner.open(tokens)
    for chunk in CHUNKS:
        runner.step([(sequence, chunk)])
    return sequence.all_logits.log_softmax(-1)


def main() -> None:
    print("| family | configurations | worst error of a log-probability |\n|---|---|---|")
    for family in FAMILIES:
        errors = [worst_error(tiny) for tiny in configurations(family)]
        print(f"| {family} | {len(errors)} | {max(errors):.1e} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
