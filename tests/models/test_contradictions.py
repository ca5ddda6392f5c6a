"""A configuration that says two things, or one that Weft does not compute, is refused by name, never half read.

Where the public implementation gives a combination one meaning, the tests of parity compare it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import tiny_model
from tests.support.models.golden_cases import FAMILIES, fields_of
from tests.support.models.hybrid_models import QWEN3_5
from tests.support.models.oracle import Oracle
from weft import LLM
from weft.base.errors import ModelError, OptionError
from weft.models.config import text_part
from weft.models.mtp import head_of
from weft.models.weights import build, load_model

THETA = {"rope_theta": 5000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LISTED = {"full_attn_layers": [3], "kda_layers": [1, 2], "num_heads": 4, "head_dim": 8}
KEYED = {"full_attention": THETA, "sliding_attention": THETA}
CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_parameters": THETA | YARN, "rope_scaling": LINEAR}, "rope_parameters and rope_scaling must be"),
    ("llama", {"rope_parameters": THETA | YARN, "rope_scaling": YARN}, "rope_parameters and rope_scaling must be"),
    ("llama", {"rope_parameters": LINEAR | {"type": "yarn"}}, "rope_type is 'linear', but type is 'yarn'"),
    ("llama", {"rope_parameters": THETA | YARN, "rope_theta": 777.0}, "rope_theta is 777.0, but the rotary parameters"),
    ("llama", {"rope_parameters": YARN, "original_max_position_embeddings": 100}, "is 100, but the rotary parameters"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1"),
    ("llama", {"rope_parameters": KEYED}, "rope_parameters must not have 'full_attention'"),
    ("llama", {"rope_parameters": THETA | {"mrope_section": [4, 2, 2]}}, "has no 'mrope_section'"),
    ("llama", {"rope_parameters": LINEAR | {"attention_factor": 1.5}}, "rope type linear .* has no 'attention_factor'"),
    ("llama", {"rope_parameters": THETA | {"factor": 2.0}}, "rope type default .* has no 'factor'"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "must have factor"),
    ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
    ("llama", {"rope_parameters": YARN, "max_position_embeddings": None}, "yarn needs max_position_embeddings"),
    ("llama", {"hidden_act": "silu", "hidden_activation": "gelu"}, "hidden_act is 'silu', but hidden_activation"),
    ("llama", {"layer_types": ["sliding_attention"] * 3}, "layer_types must agree with the architecture"),
    ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types must agree with sliding_window"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "sliding_attention, which needs use_sliding_window"),
    ("qwen3_moe", {"layer_types": ["sliding_attention"] * 3}, "layer_types must agree with use_sliding_window"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
    ("gemma3", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be false"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null"),
    ("gemma3", {"hidden_act": "silu"}, "hidden_act is 'silu', but hidden_activation"),
    ("gemma3", {"sliding_window": None}, "must have sliding_window"),
    ("gemma3", {"rope_parameters": THETA | YARN}, "must have an object for each type of layers"),
    ("gemma3", {"rope_parameters": KEYED, "rope_scaling": LINEAR}, "rope_parameters and rope_scaling must be"),
    ("gemma3", {"rope_parameters": KEYED, "rope_local_base_freq": 7.0}, "rope_local_base_freq is 7.0, but the rotary"),
    ("gpt_oss", {"hidden_act": "gelu"}, 'hidden_act must be "silu"'),
    ("gpt_oss", {"num_experts": 8}, "num_local_experts is 4, but num_experts"),
    ("lfm2", {"full_attn_idxs": [0]}, "layer_types must agree with full_attn_idxs"),
    ("lfm2", {"tie_embedding": True, "tie_word_embeddings": False}, "tie_embedding is True, but tie_word_embeddings"),
    ("mistral", {"model_type": "ministral3"}, 'model_type must be "mistral"'),
    ("qwen2", {"attention_bias": False}, "attention_bias must be true"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "needs use_sliding_window and a window"),
    ("phi3", {"rope_parameters": YARN}, "rope type of this architecture must be default or longrope"),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}}, "have 8 entries"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_mscale": 1.2}}, "longrope has no 'short_mscale'"),
    ("phi3", {"layer_types": ["full_attention"] * 3}, "layer_types must agree with sliding_window"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must have a 0 or 1 for each of 3 layers"),
    ("smollm3", {"layer_types": ["sliding_attention"] * 3}, "needs use_sliding_window and a window"),
    ("olmo2", {"layer_types": ["sliding_attention"] * 3}, "layer_types must agree with the architecture"),
    ("olmo3", {"rope_parameters": THETA}, "rope_parameters must have an object for each type of layers"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
    ("lfm3", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0,
      "partial_rotary_factor": 0.5}}}, "partial_rotary_factor of rope type 'linear' must be 1"),
    ("lfm3", {"rope_parameters": {"full_attention": {"rope_type": "proportional", "beta_fast": 2.0}}},
     "proportional has no 'beta_fast'"),
    ("lfm3", {"rope_parameters": None, "rope_scaling": YARN}, "rope_scaling must be null"),
    ("qwen3_next", {"full_attention_interval": 2}, "layer_types must agree with full_attention_interval"),
    ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate must be true"),
    ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob must be true"),
    ("qwen3_5_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers must be \[\]"),
    ("qwen3_5_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step must be 1"),
    ("qwen3_5", {"rope_parameters": YARN | {"mrope_section": [4, 4]}}, "mrope_section must have 3 entries"),
    ("olmo_hybrid", {"rope_parameters": None}, "must have rope_theta in rope_parameters"),
    ("kimi_linear", {"layer_types": ["full_attention"] * 3, "linear_attn_config": LISTED}, "must agree with full_attn"),
    ("kimi_linear", {"use_grouped_topk": False}, "use_grouped_topk must be true"),
    ("kimi_linear", {"num_shared_experts": 1, "n_shared_experts": 2}, "num_shared_experts is 1, but n_shared_experts"),
    ("nemotron_h", {"attention_bias": True}, "attention_bias must be false"),
    ("nemotron_h", {"sliding_window": 64}, "sliding_window must be null"),
    ("nemotron_h", {"hybrid_override_pattern": "MMMMM"}, "must name the same blocks"),
    ("nemotron_h", {"num_hidden_layers": 7}, "num_hidden_layers must be 5"),
    ("nemotron_h", {"mamba_n_groups": 4}, "mamba_n_groups is 4, but n_groups"),
    ("falcon_h1", {"mamba_d_head": 8}, "mamba_d_head must be 16"),
    ("falcon_h1", {"attn_layer_indices": [0]}, "attn_layer_indices must be null"),
    ("granite_moe_hybrid", {"mamba_d_head": 8}, "mamba_d_head must be 16"),
    ("granite_moe_hybrid", {"position_embedding_type": "alibi"}, "position_embedding_type must be one of nope, rope"),
    ("granite_moe_hybrid", {"normalization_function": "layernorm"}, 'normalization_function must be "rmsnorm"'),
]  # fmt: skip


@pytest.mark.parametrize(("family", "fields", "message"), CONTRADICTIONS)
def test_a_configuration_that_says_two_things_is_refused_by_name(family, fields, message):
    base = fields_of(FAMILIES[family])
    build(base, torch.float32, "meta")
    with pytest.raises(ModelError, match=message):
        build(base | fields, torch.float32, "meta")


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"rope_parameters": THETA | YARN, "rope_scaling": THETA | YARN, "rope_theta": 5000.0}),
        ("llama", {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}}),
        ("llama", {"rope_scaling": {"type": "mrope", "rope_type": "default"}}),
        ("qwen3", {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 1}),
        ("gemma3", {"use_bidirectional_attention": False, "hidden_act": "gelu_pytorch_tanh"}),
        ("nemotron_h", {"hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5}),
        ("falcon_h1", {"mamba_d_head": "auto"}),
        ("granite_moe_hybrid", {"layers_block_type": ["linear_attention", "full_attention", "linear_attention"]}),
    ],
)
def test_what_is_said_twice_with_one_value_is_read(family, fields):
    build(fields_of(FAMILIES[family]) | fields, torch.float32, "meta")


@pytest.mark.parametrize(("outer", "inner"), [(None, True), (True, False), (False, True)])
def test_a_multimodal_configuration_ties_its_embedding_as_it_says_outside(outer, inner):
    fields = {"architectures": ["Qwen3_5ForConditionalGeneration"]}
    fields |= {"text_config": QWEN3_5.settings | {"tie_word_embeddings": inner}}
    fields |= {} if outer is None else {"tie_word_embeddings": outer}
    assert build(text_part(fields), torch.float32, "meta").tied is bool(outer)


def test_a_head_with_its_own_embedding_is_refused():
    fields = fields_of(QWEN3_5) | {"mtp_use_dedicated_embeddings": True}
    with pytest.raises(ModelError, match="mtp_use_dedicated_embeddings must be false"):
        build(fields, torch.float32, "meta", family=head_of(fields))


@pytest.mark.parametrize("stated", [{"quantization_config": {"bits": 4}}, {"compression_config": {"format": "packed"}}])
def test_weights_that_are_quantised_in_a_way_that_is_not_named_are_refused(stated, tmp_path: Path):
    folder = Oracle(FAMILIES["llama"]).save(tmp_path)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | stated))
    with pytest.raises(ModelError, match="quant_method null is not supported"):
        load_model(folder, torch.float32, progress=False)


def test_a_dynamic_rotation_is_refused_where_it_would_change_with_the_length(tmp_path: Path):
    fields = fields_of(FAMILIES["llama"]) | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields | {"max_position_embeddings": 256}))
    options = tiny_model.OPTIONS | {"model": str(file), "tokenizer": None, "memory": "16MiB", "device": "cpu"}
    LLM(**options, max_length=256, progress=False).close()
    with pytest.raises(OptionError, match="rope type dynamic is not supported beyond; pass at most 256"):
        LLM(**options, max_length=512, progress=False)
