"""Keyword arguments of vLLM's and SGLang's classes mean what their flags mean, or are refused with advice."""

from __future__ import annotations

from argparse import ArgumentParser

import pytest

from weft import EngineArgs, OptionError
from weft.base.aliases import SERVER
from weft.base.options import Options
from weft.offline.keywords import KNOWN, keyword, options_of


def changed(**given) -> dict[str, object]:
    found, default = options_of(given), Options()
    return {name: value for name, value in vars(found).items() if value != getattr(default, name)}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"model": "m", "tokenizer": "t"}, {"model": "m", "tokenizer": "t"}),
        ({"model_path": "m", "tokenizer_path": "t"}, {"model": "m", "tokenizer": "t"}),
        ({"max_model_len": 4096, "max_num_seqs": 8}, {"max_length": 4096, "max_sequences": 8}),
        ({"context_length": 4096, "max_running_requests": 8}, {"max_length": 4096, "max_sequences": 8}),
        ({"max_num_batched_tokens": 512}, {"max_tokens_per_step": 512}),
        ({"tensor_parallel_size": 2}, {"tensor_parallel": 2}),
        ({"gpu_memory_utilization": 0.5}, {"memory_fraction": 0.5}),
        ({"mem_fraction_static": 0.5}, {"memory_fraction": 0.5}),
        ({"enable_prefix_caching": True}, {}),
        ({"enable_prefix_caching": False}, {"cache": False}),
        ({"disable_radix_cache": True}, {"cache": False}),
        ({"disable_radix_cache": False}, {}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "torch.bfloat16"}, {"dtype": "bfloat16"}),
        ({"load_format": "dummy", "seed": 5}, {"weights": "dummy", "seed": 5}),
        ({"random_seed": 5, "async_scheduling": False}, {"seed": 5, "depth": 0}),
        ({"quantization": None, "trust_remote_code": False, "revision": None}, {}),
        ({"enforce_eager": True, "swap_space": 4, "disable_log_stats": True}, {}),
        ({"block_size": 64, "pipeline_parallel_size": 1, "kv_cache_dtype": "auto"}, {}),
    ],
)
def test_keywords_mean_what_their_flags_mean(given, found):
    assert changed(**given) == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_modl_len": 1}, r"unknown argument 'max_modl_len'; did you mean max_model_len\?"),
        ({"zzz": 1}, "unknown argument 'zzz'$"),
        ({"trust_remote_code": True}, "trust_remote_code: Weft never runs code"),
        ({"block_size": 16}, "block_size=16: a cell, the unit of reuse, is 64 tokens"),
        ({"pipeline_parallel_size": 2}, "use --tensor-parallel"),
        ({"load_format": "gguf_from_moon"}, "load_format='gguf_from_moon': must be one of"),
        ({"enforce_eager": "yes"}, "enforce_eager must be True or False"),
        ({"max_model_len": 1024, "max_length": 2048}, "both set max_length"),
    ],
)
def test_what_cannot_be_honoured_raises_with_advice(given, message):
    with pytest.raises(OptionError, match=message):
        options_of(given)


def test_a_keyword_without_effect_is_logged_with_the_reason(caplog):
    options_of({"swap_space": 4, "reasoning_parser": "qwen3"})
    assert "swap_space: preempted sequences find their prefixes in the cache" in caplog.text
    assert "reasoning_parser: only weft serve uses it" in caplog.text


def test_every_flag_of_the_table_is_a_keyword():
    flags = [name for alias in SERVER for name in alias.names if name.startswith("--")]
    assert {keyword(flag) for flag in flags} <= set(KNOWN)


def test_arguments_of_a_command_line_become_an_engines():
    parser = ArgumentParser()
    parser.add_argument("--prompts", type=int)
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="somewhere")
    args = parser.parse_args(["--max-model-len", "77", "--gpu-memory-utilization", "0.5", "--enforce-eager"])
    options = EngineArgs.from_cli_args(args).options
    assert (options.model, options.max_length, options.memory_fraction) == ("somewhere", 77, 0.5)


@pytest.mark.parametrize("name", ["exact", "cache", "paranoid"])
@pytest.mark.parametrize("value", [True, False])
def test_yes_and_no_keep_their_meaning(name, value):
    assert getattr(options_of({name: value}), name) is value
