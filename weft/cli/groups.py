"""How `--help` of each command presents its options: titles of groups, and examples.

An option that no group names is shown under "options", or under "engine" if the command inherits it. A test compares
the names with the options, and parses the examples.
"""

from __future__ import annotations

from collections.abc import Mapping

Groups = Mapping[str, str]

ENGINE: Groups = {
    "model and device": "tokenizer chat_template device dtype weights threads tensor_parallel expert_parallel",
    "memory and cache": (
        "memory memory_fraction host_memory disk disk_size remote max_length cache eviction capture_every "
        "prefix_key trusted_prefix_keys verify_import"
    ),
    "scheduling": "max_sequences max_tokens_per_step max_step_ms depth order draft draft_vocabulary",
    "reproducing and debugging": "seed exact paranoid",
}
FRONT: Groups = {
    "address": "host port uds uds_mode ssl_certfile ssl_keyfile ssl_keyfile_password_file allowed_host "
    "trusted_proxy cors_origin",
    "access": "api_key api_key_file admin_key admin_key_file requests_per_minute tokens_per_minute open_health page "
    "usage_file",
    "limits": "max_open_requests max_body max_answers batch_folder limit",
    "answers": "served_model_name alias tool_parser reasoning_parser sse_keep_alive",
    "log": "log_level log_format log_requests otlp_traces_endpoint",
}
SERVE: Groups = {
    "models": "models models_memory keep_alive",
    **FRONT,
    "processes": "in_process replicas drain_seconds restart_engine engine_timeout front_timeout",
    "fleet": "fleet_listen fleet_secret kv_events role prefill_replicas arrivals transfer transfer_listen",
}
GROUPS: Mapping[str, Groups] = {
    "serve": SERVE,
    "config": SERVE,
    "route": {
        "replicas": "replica replicas_file fleet_secret replica_timeout",
        "model": "model tokenizer chat_template",
        **FRONT,
        "processes": "drain_seconds front_timeout",
    },
    "chat": {
        "server": "url api_key",
        "conversation": "system max_tokens temperature stats history",
    },
    "generate": {"answers": "raw from_ max_tokens temperature stream stats"},
    "bench": {
        "server": "api_key model",
        "workload": "workload form prompts input_length output_length spread groups prefix_length document_length "
        "turns trace trace_speed trace_scale vocabulary seed",
        "requests": "request_rate concurrency ignore_eos temperature warmup timeout_seconds",
        "report": "json progress",
    },
    "simulate": {
        "traffic": "workload trace requests rate trace_speed seed",
        "model and memory": "model memory calibrate max_sequences max_tokens_per_step max_length stride",
        "fleet": "replicas router",
        "cache": "cache eviction without capture_every alpha oracle",
        "tiers": "host_memory disk_size host_rate disk_read_rate disk_write_rate",
        "report": "explain json plot progress",
    },
}
# What `--help` shows of the engine's options, and of those of the commands that have many; --help-all shows the rest.
COMMON: Mapping[str, str] = {
    "engine": "chat_template device dtype memory max_length max_sequences exact draft disk disk_size tensor_parallel",
    "serve": "model models host port api_key_file served_model_name tool_parser reasoning_parser log_level replicas",
    "route": "replica replicas_file fleet_secret model host port api_key_file log_level log_format",
}
COMMON = {**COMMON, "config": f"{COMMON['serve']} show"}
EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "route": (
        "weft route tcp://10.0.0.1:8100 tcp://10.0.0.2:8100 --fleet-secret secret",
        "weft route --replicas-file replicas --fleet-secret secret --model LiquidAI/LFM2-1.2B",
    ),
    "batch": ("weft batch requests.jsonl answers.jsonl --model LiquidAI/LFM2-1.2B",),
    "serve": (
        "weft serve",
        "weft serve LiquidAI/LFM2-1.2B --port 8080 --api-key-file keys",
        "weft serve ./checkpoint --memory 8GiB --max-length 32768 --log-format json",
        "weft serve lfm2-1.2b --weights dummy",
        "weft serve --replicas 2",
        "weft serve --model small=lfm2:1.2b --model large=./checkpoint,memory=8GiB --alias gpt-4o=large",
        "weft serve --config weft.yaml",
    ),
    "config": (
        "weft config --config weft.yaml",
        "WEFT_PORT=8080 weft config --show --memory 8GiB",
    ),
    "chat": (
        "weft chat",
        "weft chat lfm2:1.2b --system 'Answer in one sentence.'",
        "weft chat --url http://127.0.0.1:8000",
    ),
    "generate": (
        "weft generate 'What is the capital of France?'",
        "weft generate --raw 'Once upon a time' --max-tokens 64",
        "weft generate --model LiquidAI/LFM2-1.2B < question.txt",
    ),
    "bench": (
        "weft bench http://127.0.0.1:8000 --prompts 200 --input-length 512 --output-length 128",
        "weft bench --workload multi-turn --turns 8 --concurrency 32 --json result.json",
    ),
    "simulate": (
        "weft simulate --workload coding --memory 10% --explain",
        "weft simulate --model nemotron-nano-9b-v2 --memory 40GiB --eviction value --eviction lru",
        "weft simulate --workload tools --replicas 4 --router state --router round-robin",
    ),
    "doctor": ("weft doctor", "weft doctor LiquidAI/LFM2-1.2B --dtype bfloat16"),
    "convert": (
        "weft convert LiquidAI/LFM2-1.2B lfm2-q4_k.gguf --quantize q4_k",
        "weft convert LiquidAI/LFM2-1.2B lfm2-int4 --quantize int4",
        "weft convert model-Q8_0.gguf folder",
    ),
    "cache": (
        "weft cache tier",
        "weft cache tier --list 20",
        "weft cache tier --verify",
        "weft cache tier --drop all",
    ),
    "trace": (
        "weft trace --out trace.json",
        "weft trace http://10.0.0.1:8000 --seconds 30",
    ),
    "models": ("weft models", "weft models --json", "weft models model-Q4_K_M.gguf"),
    "pull": ("weft pull lfm2:1.2b", "weft pull owner/name:Q4_K_M"),
    "completion": (
        "source <(weft completion bash)",
        "weft completion zsh > ~/.zfunc/_weft",
        "weft completion fish > ~/.config/fish/completions/weft.fish",
    ),
}


OTHER = "engine"


def titles(groups: Groups) -> list[str]:
    """Return the titles of a command's groups in the order of its help."""
    return list(dict.fromkeys([*groups, *ENGINE, OTHER]))


def title_of(name: str, groups: Groups, own: bool) -> str | None:
    """Return the title of the group that an option is shown in; None: the options without a group."""
    for title, names in {**groups, **({} if own else ENGINE)}.items():
        if name in names.split():
            return title
    return None if own else OTHER


def is_common(command: str, option: str, own: bool) -> bool:
    """Return whether `--help` shows an option, which is the command's own or the engine's."""
    shown = COMMON.get(command) if own else COMMON["engine"]
    return shown is None or option in shown.split()
