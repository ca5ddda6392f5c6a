"""Flags of other engines' servers and benchmarks and their equivalents here: two tables, also shown in docs/cli.md.

Rewrites arguments before they are parsed. A flag that has no effect here is accepted with a note. A flag that Weft
cannot honour is refused, because a server that silently ignores a setting is worse than one that does not start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weft.base.errors import OptionError

# Stands for values that pass through unchanged.
ANY = "*"


@dataclass(frozen=True, slots=True)
class Alias:
    """`to` is our replacement ("{}" is the value); `values` renames or restricts values; `refused` gives the reason."""

    names: tuple[str, ...]
    to: tuple[str, ...] = ()
    takes_value: bool = True
    values: Mapping[str, str] = field(default_factory=lambda: {ANY: ANY})
    note: str = ""
    refused: str = ""


def value(names: str, to: str, values: Mapping[str, str] | None = None, note: str = "") -> Alias:
    """Return an alias for a flag with a value that Weft has under another name."""
    return Alias(tuple(names.split()), (to, "{}"), values=values or {ANY: ANY}, note=note)


def switch(names: str, to: str, note: str = "") -> Alias:
    """Return an alias for a flag without a value that Weft can express."""
    return Alias(tuple(names.split()), tuple(to.split()), takes_value=False, note=note)


def ignored(names: str, note: str, takes_value: bool = False) -> Alias:
    return Alias(tuple(names.split()), takes_value=takes_value, note=note)


def only(names: str, values: str, refused: str) -> Alias:
    """Return an alias for a flag that has no effect with these values and is refused with any other."""
    return Alias(tuple(names.split()), values=dict.fromkeys(values.split(), ""), refused=refused)


def refused(names: str, why: str, takes_value: bool = False) -> Alias:
    return Alias(tuple(names.split()), takes_value=takes_value, values={}, refused=why)


# Methods of other engines whose checkpoints say themselves how they are stored.
READ = (
    "mxfp4", "gpt_oss_mxfp4", "mxfp8", "compressed-tensors", "modelopt", "modelopt_fp8", "modelopt_fp4",
    "modelopt_mixed", "w8a8_fp8", "gptq", "gptq_marlin", "awq", "awq_marlin", "auto-round", "none",
)  # fmt: skip

SERVER = (
    value("--model-path", "--model"),
    value("--tokenizer-path", "--tokenizer"),
    value("--max-model-len --context-length", "--max-length", {"-1": "auto", ANY: ANY}),
    value("--max-num-seqs --max-running-requests", "--max-sequences"),
    value("--max-num-batched-tokens --chunked-prefill-size", "--max-tokens-per-step"),
    value("--dtype", "--dtype", {"half": "float16", "float": "float32", ANY: ANY}),
    value("--load-format", "--weights", {"dummy": "dummy", "auto": "checkpoint", "safetensors": "checkpoint"}),
    value("--schedule-policy", "--order", {"lpm": "prefix", "fcfs": "fcfs"}),
    value("--scheduling-policy", "--order", {"fcfs": "fcfs", "priority": "fcfs"}, "priorities are always honoured"),
    value("--random-seed", "--seed"),
    value(
        "--tool-call-parser",
        "--tool-parser",
        {
            "qwen": "hermes",
            "qwen25": "hermes",
            "llama3": "llama3_json",
            "phi4_mini_json": "phi4",
            "openai": "harmony",
            "gpt-oss": "harmony",
            ANY: ANY,
        },
    ),
    value(
        "--reasoning-parser",
        "--reasoning-parser",
        {"qwen3": "think", "deepseek_r1": "think", "deepseek-r1": "think", "gpt-oss": "harmony", ANY: ANY},
    ),
    value("--uvicorn-log-level", "--log-level"),
    switch("--enable-prefix-caching", "--cache"),
    switch("--no-enable-prefix-caching --disable-radix-cache", "--no-cache"),
    switch("--disable-overlap-schedule --no-async-scheduling", "--depth 0"),
    switch("--async-scheduling", "--depth 1"),
    value("--tensor-parallel-size --tp-size --tp -tp", "--tensor-parallel"),
    switch("--enable-expert-parallel", "--expert-parallel"),
    only("--data-parallel-size --dp-size --dp -dp", "1", "use --replicas"),
    only("--pipeline-parallel-size --pp-size --pp -pp", "1", "use --tensor-parallel"),
    only("--expert-parallel-size --ep-size --ep", "1", "use --tensor-parallel with --expert-parallel"),
    value("--kv-cache-dtype", "--kv-dtype", {"fp8_e4m3": "fp8", "auto": "auto", "fp8": "fp8", "int8": "int8"}),
    only("--block-size --page-size", "64", "a cell, the unit of reuse, is 64 tokens"),
    value("--gpu-memory-utilization --mem-fraction-static", "--memory-fraction"),
    ignored("--enforce-eager --disable-cuda-graph", "decode steps on a GPU always use CUDA graphs"),
    ignored("--enable-auto-tool-choice", "a model with tools may always call them"),
    ignored("--enable-metrics", "/metrics is always served"),
    ignored("--enable-cache-report", "cached tokens are always reported"),
    switch("--disable-log-requests --no-enable-log-requests --disable-uvicorn-access-log", "--no-log-requests"),
    switch("--enable-log-requests", "--log-requests"),
    ignored("--disable-log-stats", "statistics are not logged; /metrics has them"),
    ignored("--skip-server-warmup", "there is no warm-up"),
    ignored("--enable-ssl-refresh", "certificates are reloaded on SIGHUP"),
    refused(
        "--ssl-keyfile-password",
        "the process list would show the password; use --ssl-keyfile-password-file",
        takes_value=True,
    ),
    refused("--ssl-ca-certs --ssl-cert-reqs", "client certificates are not supported; use a proxy", takes_value=True),
    refused("--trust-remote-code", "Weft never runs code from a model's folder"),
    Alias(
        ("--quantization", "-q"),
        ("--quantize", "{}"),
        values={"fp8": "fp8", "fp8_per_block": "fp8", "int8": "int8"} | dict.fromkeys(READ, "off"),
        note="activations keep 16 bits without --activations fp8; formats of checkpoints are read from them",
        refused="--quantize fp8, int8, int4 or mxfp4 quantises, and other weights are read as stored (docs/formats.md)",
    ),
    ignored("--fp8-gemm-backend --moe-runner-backend --moe-backend", "kernels are chosen by Weft", takes_value=True),
    refused("--quantization-param-path --kv-cache-scales", "the KV cache has no scales", takes_value=True),
    refused("--calculate-kv-scales", "the KV cache has no scales"),
    refused("--torchao-config --modelopt-quant --quantization-config", "use --quantize", takes_value=True),
    refused("--enable-lora", "LoRA adapters are not supported"),
    refused("--lora-modules --lora-paths", "LoRA adapters are not supported", takes_value=True),
    refused("--speculative-algorithm --speculative-config", "use --draft", takes_value=True),
    only("--tokenizer-mode", "auto", "tokenizer.json is what is read"),
    only("--model-impl", "auto weft", "there is one implementation of each family"),
    only(
        "--runner --task --convert",
        "auto none generate pooling embed embedding score classify",
        "only text, embeddings, scores and classes are computed",
    ),
    ignored("--is-embedding", "embeddings are served without it"),
    only("--distributed-executor-backend", "mp uni", "ranks are processes of this machine; see --tensor-parallel"),
    only("--cpu-offload-gb", "0 0.0", "weights stay on the device; --host-memory keeps prefixes"),
    only("--logprobs-mode", "raw_logprobs", "log-probabilities are those of the model, before temperature"),
    ignored("--swap-space", "preempted sequences find their prefixes in the cache", takes_value=True),
    ignored("--max-logprobs", "20 is the bound of every request", takes_value=True),
    ignored("--enable-chunked-prefill --no-enable-chunked-prefill", "prompts are chunked by --max-tokens-per-step"),
    ignored("--skip-tokenizer-init", "prompts may be token ids; pass detokenize=False for answers without text"),
    ignored("--disable-custom-all-reduce", "the transport between ranks is chosen by itself"),
    ignored("--max-seq-len-to-capture --cuda-graph-max-bs", "CUDA graphs are recorded as needed", takes_value=True),
    ignored("--compilation-config -O", "kernels are compiled when they are first needed", takes_value=True),
    ignored(
        "--guided-decoding-backend --structured-outputs-backend --grammar-backend", "there is one", takes_value=True
    ),
    ignored("--attention-backend", "kernels are chosen by what the device can run; see weft doctor", takes_value=True),
    refused("--revision --tokenizer-revision", "download that revision and pass its folder", takes_value=True),
    refused("--download-dir", "set HF_HUB_CACHE", takes_value=True),
    refused("--hf-overrides --json-model-override-args", "edit the folder's config.json", takes_value=True),
    refused("--limit-mm-per-prompt", "only text is supported", takes_value=True),
    refused("--num-gpu-blocks-override --max-total-tokens", "use --memory", takes_value=True),
    refused("--kv-transfer-config", "use --role and --transfer", takes_value=True),
    refused("--enable-sleep-mode", "weights stay loaded"),
)
BENCHMARK = (
    value("--base-url", "--url"),
    value("--num-prompts", "--prompts"),
    refused("--requests --num-requests", "did you mean --num-prompts?", takes_value=True),
    value("--max-concurrency", "--concurrency"),
    value("--request-rate", "--request-rate", {"inf": "0", ANY: ANY}),
    value("--random-input-len --random-input --gsp-question-len", "--input-length"),
    value("--random-output-len --random-output --gsp-output-len", "--output-length"),
    value("--gsp-num-groups", "--groups"),
    value("--gsp-system-prompt-len", "--prefix-length"),
    refused("--gsp-prompts-per-group", "pass the total with --prompts", takes_value=True),
    value(
        "--dataset-name",
        "--workload",
        {"random": "random", "generated-shared-prefix": "generated-shared-prefix", "mooncake": "trace"},
    ),
    value("--dataset-path", "--trace"),
    value("--backend", "--form", dict.fromkeys(("openai", "vllm", "sglang-oai"), "auto") | {"openai-chat": "chat"}),
    value("--output-file --result-filename", "--json"),
    switch("--disable-tqdm", "--no-progress"),
    switch("--disable-ignore-eos", "--no-ignore-eos"),
)


def translate(arguments: Sequence[str], aliases: Sequence[Alias]) -> tuple[list[str], list[str]]:
    """Return Weft's arguments in place of other engines', and the notes to print about them.

    >>> translate(["--max-model-len", "4096", "--disable-radix-cache"], SERVER)
    (['--max-length', '4096', '--no-cache'], [])
    """
    translated: list[str] = []
    notes: list[str] = []
    left = iter(arguments)
    by_name = {name: alias for alias in aliases for name in alias.names}
    for given in left:
        if given == "--":
            return [*translated, given, *left], notes
        name, equals, told = given.partition("=")
        alias = by_name.get(name)
        if alias is None:
            translated.append(given)
            continue
        if alias.takes_value and not equals:
            told = _next(name, left)
        translated += _ours(alias, name, told)
        if alias.note:
            notes.append(f"{name}: {alias.note}")
    return translated, notes


def _next(name: str, left: Iterator[str]) -> str:
    found = next(left, None)
    if found is None:
        raise OptionError(f"{name} needs a value")
    return found


def _ours(alias: Alias, name: str, told: str) -> list[str]:
    if not alias.takes_value:
        if alias.refused or told:
            raise OptionError(f"{name}: {alias.refused or 'takes no value'}")
        return list(alias.to)
    renamed = alias.values.get(told, alias.values.get(ANY))
    if renamed is None:
        known = ", ".join(alias.values)
        raise OptionError(f"{name} {told}: {alias.refused or f'must be one of {known}'}")
    return [part.replace("{}", told if renamed == ANY else renamed) for part in alias.to]


def table(aliases: Sequence[Alias]) -> list[str]:
    """Return the aliases as rows of a Markdown table."""
    rows = ["| flag | here |", "|---|---|"]
    for alias in aliases:
        names = ", ".join(f"`{name}`" for name in alias.names)
        rows.append(f"| {names} | {'; '.join(_meanings(alias))} |")
    return rows


def _meanings(alias: Alias) -> Iterator[str]:
    named = {told: ours for told, ours in alias.values.items() if told != ANY}
    if alias.to and not alias.takes_value:
        yield f"`{' '.join(alias.to)}`"
    elif alias.to:
        if ANY in alias.values:
            yield f"`{alias.to[0]}`"
        for told, ours in named.items():
            yield f"`{told}`: `{alias.to[0]} {ours}`"
    elif named:
        yield f"{' or '.join(f'`{told}`' for told in named)} accepted"
    if alias.note:
        yield alias.note if alias.to else f"accepted without effect: {alias.note}"
    if alias.refused:
        yield f"refused: {alias.refused}" if not named else f"others refused: {alias.refused}"
