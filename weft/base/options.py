"""The engine's options, and how they resolve to a configuration without any "auto" left.

One dataclass field is the name, type, default and help of an option; keyword arguments, the command line and the
documentation are derived from it. `resolve` is pure: it reads only its arguments, and returns its decisions with
reasons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from weft.base.config import MOST_DRAFTS, EngineConfig
from weft.base.errors import InvalidOption
from weft.base.refused import CPU, GPU, refuse

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
AUTO_MEMORY_BYTES = 4 << 30
AUTO_MAX_LENGTH = 32768
PAGE_BYTES = 4096
# More bytes than any machine can address.
MOST_BYTES = 1 << 60
MOST_RANKS = 64
MOST_STEP_MS = 600_000.0
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
# The meaning of "auto" by device. A GPU step carries more tokens and is planned while the previous step runs. On a GPU
# without kernels of its own ("plain") a step keeps all scores and states of its tokens, so it has few.
AUTO_COUNTS = {
    "max_sequences": {"cpu": 64, "cuda": 256, "plain": 16},
    "max_tokens_per_step": {"cpu": 2048, "cuda": 8192, "plain": 256},
    "depth": {"cpu": 0, "cuda": 1, "plain": 1},
}
WEIGHTS = ("checkpoint", "dummy")
QUANTISED = ("off", "fp8", "int8", "int4", "mxfp4", "q8_0", "q4_k")
KV_DTYPES = ("auto", "fp8", "int8")
STATE_DTYPES = ("float32", "bfloat16", "int8")
ACTIVATIONS = ("auto", "fp8", "wide")
ORDERS = ("fcfs", "prefix")
DRAFT_OPTIONS = ("auto", "off", "suffix", "mtp")
# Drafters that are known by name and not supported.
REFUSED_DRAFTERS = ("dflash", "dspark", "eagle", "medusa")
# `--max-step-ms auto`: 50 ms between tokens read as fluent, and three decode steps leave two thirds of the time to
# prompts where decodes alone take longer.
AUTO_STEP_MS, AUTO_STEP_DECODES = 50.0, 3.0
# Drafts that a row verifies in a step at most, by device. A tail has room for them, so they take memory.
DRAFT_TOKENS = {"cpu": MOST_DRAFTS, "cuda": 7, "plain": 7}


def option(default: Any, help: str, choices: tuple[str, ...] = (), metavar: str = "") -> Any:
    """Return a field of an options class. `metavar` names the value in the help; default: the name's last word."""
    return field(default=default, metadata={"help": help, "choices": choices, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which model to run, and how."""

    model: str | None = option(None, "model folder or hub id; default: weft-small, which ships with Weft")
    tokenizer: str | None = option(None, "folder or hub id of a tokenizer to use instead of the model's own")
    chat_template: str | None = option(
        None, "file with a Jinja chat template to use instead of the model's own", metavar="FILE"
    )
    device: str = option("auto", "device to run on; auto: a GPU if one is available", DEVICES)
    dtype: str = option("auto", "data type of the weights; auto: as stored in the checkpoint", DTYPES)
    quantize: str = option(
        "off",
        "quantise the matrices of a 16-bit checkpoint while it loads, except routers, gates, embedding and head: fp8, "
        "int8 with a scale for each output, int4 in groups of 128, mxfp4, or GGUF's q8_0 and q4_k (docs/formats.md)",
        QUANTISED,
    )
    quantize_head: bool = option(False, "with --quantize, the output head too")
    kv_dtype: str = option(
        "auto",
        "data type of cached keys and values; int8, fp8: eight bits, with a power of two for each token and head "
        "(docs/formats.md); auto: that of the model",
        KV_DTYPES,
    )
    state_dtype: str = option(
        "float32",
        "data type of cached states; int8: eight bits, with a scale for each 32 numbers (docs/formats.md)",
        STATE_DTYPES,
    )
    activations: str = option(
        "auto",
        "what is multiplied with stored weights; auto: on CPUs, with weights of up to 8 bits but not FP8, 8-bit "
        "integers with a scale for each 32; fp8: with FP8 weights, FP8 with a scale for each 128; wide: the dtype of "
        "the model (docs/formats.md)",
        ACTIVATIONS,
    )
    weights: str = option("checkpoint", "dummy: random weights, made from the model's configuration alone", WEIGHTS)
    memory: str | int = option(
        "auto",
        "size of KV cache and states, such as 2GiB; auto: half of free memory up to 4GiB; on a GPU: what "
        "--memory-fraction leaves; auto/2: half of what auto is, for two servers on one machine",
    )
    memory_fraction: float = option(0.9, "share of GPU memory for weights, activations, KV cache and states together")
    host_memory: str | int = option(
        "off",
        "size of host memory for what a GPU's memory evicts, such as 64GiB; auto: half of free memory; off: none",
    )
    disk: str | None = option(
        None,
        "file that keeps what memory evicts, also across restarts; protect it like prompts",
        metavar="PATH",
    )
    disk_size: str | int | None = option(None, "size of that file, such as 500GiB; allocated at the first start")
    remote: str | None = option(
        None,
        "S3-compatible store that keeps what memory evicts and that servers share, such as s3://bucket/prefix; "
        "endpoint and credentials come from the AWS_* environment variables; needs weft-serve[remote]",
        metavar="URL",
    )
    max_sequences: int | str = option("auto", "sequences that run at once; others wait. auto: 64, on a GPU 256")
    max_tokens_per_step: int | str = option(
        "auto", "tokens computed in one step; longer prompts are split into chunks. auto: 2048, on a GPU 8192"
    )
    max_step_ms: str | float = option(
        "off",
        "time in ms between tokens of running streams: prompt chunks beside them are sized by measured step times; "
        "auto: 50, or three decode steps if that is more; off: only --max-tokens-per-step bounds chunks",
        metavar="MS|auto|off",
    )
    max_length: str | int = option("auto", "maximum tokens of prompt plus answer; auto: what model and memory allow")
    cache: bool = option(True, "reuse the cached prefixes of earlier requests")
    depth: int | str = option("auto", "steps in flight while the next one is planned, 0 or 1. auto: 0, on a GPU 1")
    order: str = option(
        "fcfs", "scheduling order; fcfs: first come, first served; prefix: longest cached prefix first", ORDERS
    )
    eviction: str = option(
        "value",
        "eviction policy: value (learned), lru (last use) or flops (recency and work)",
        ("value", "lru", "flops"),
    )
    capture_every: int = option(0, "distance in tokens between the states to keep; 0: derived from the size of a state")
    retain_share: float = option(
        0.25,
        "share of memory that the prefixes which one API key retains may take (docs/past.md); 0: none are retained",
    )
    prefix_key: str | None = option(
        None, "file with the key that signs prompts saved to files; weft cache --make-key makes one", metavar="FILE"
    )
    trusted_prefix_keys: str | None = option(
        None,
        "file with keys, one on each line: prompts in files that one of them has signed are loaded",
        metavar="FILE",
    )
    verify_import: str | float = option(
        "off",
        "with --exact: which share of a loaded prompt is computed again, and must have the same bits, such as all or "
        "0.1",
        metavar="all|off|SHARE",
    )
    exact: bool | str = option(
        "auto",
        "the same bits for the same tokens, whatever is cached, batched or chunked (docs/exact.md); auto: on where it "
        "was measured to cost at most 3%",
    )
    draft: str = option(
        "auto",
        "speculative decoding: guess tokens and verify them in one step; suffix: from earlier text and predictions; "
        "mtp: by the checkpoint's own head; auto: mtp on a GPU if the checkpoint has a head, else suffix; a folder or "
        "hub id: by a smaller model with the same tokenizer",
        metavar="auto|off|suffix|mtp|MODEL",
    )
    draft_vocabulary: int = option(
        1 << 16,
        "tokens that an MTP head drafts from while text consists of them: the first ones of a vocabulary at least "
        "twice as large; 0: all",
        metavar="TOKENS",
    )
    tensor_parallel: int = option(
        1,
        "processes over which the model is cut, each with a part of every layer (docs/parallel.md); --memory and "
        "--threads are those of each",
        metavar="RANKS",
    )
    expert_parallel: bool = option(
        False, "with --tensor-parallel, on CPUs: each rank holds whole experts, not parts of every expert"
    )
    paranoid: bool = option(False, "audit every step and fill freed memory with NaN (slow)")
    seed: int = option(0, "seed for requests that set none")
    threads: int = option(0, "CPU threads; 0: one for each core that this process may use")

    def __post_init__(self) -> None:
        for each in fields(self):
            value, choices = getattr(self, each.name), each.metadata["choices"]
            if choices and value not in choices:
                raise InvalidOption(each.name, f"must be one of {', '.join(choices)}, got {value!r}")
        if not isinstance(self.draft, str) or not self.draft or self.draft.lower() in REFUSED_DRAFTERS:
            raise InvalidOption(
                "draft",
                f"must be one of {', '.join(DRAFT_OPTIONS)}, or the folder or hub id of a draft model, got "
                f"{self.draft!r}; DFlash, DSpark, EAGLE and Medusa are not supported",
            )
        for name in AUTO_COUNTS:
            count(name, getattr(self, name), "cpu")
        if not isinstance(self.retain_share, float | int) or not 0 <= self.retain_share <= 1:
            raise InvalidOption("retain_share", f"must be from 0 to 1, got {self.retain_share!r}")
        share = self.memory_fraction
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise InvalidOption("memory_fraction", f"must be greater than 0 and at most 1, got {share!r}")
        for name in ("capture_every", "seed", "threads", "tensor_parallel", "draft_vocabulary"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidOption(name, f"must be an integer, got {value!r}")
        if self.exact != "auto" and not isinstance(self.exact, bool):
            raise InvalidOption("exact", f'must be True, False or "auto", got {self.exact!r}')
        for name in ("cache", "expert_parallel", "paranoid", "quantize_head"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidOption(name, f"must be True or False, got {getattr(self, name)!r}")
        for name, what in (
            ("model", "folder or a hub id"),
            ("tokenizer", "folder or a hub id"),
            ("chat_template", "file"),
            ("disk", "path"),
            ("prefix_key", "file"),
            ("trusted_prefix_keys", "file"),
            ("remote", "URL such as s3://bucket/prefix"),
        ):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidOption(name, f"must be a {what}, got {getattr(self, name)!r}")
        if self.quantize_head and self.quantize == "off":
            raise InvalidOption("quantize_head", f"needs --quantize {' or '.join(QUANTISED[1:])}")
        for name in ("threads", "draft_vocabulary"):
            if getattr(self, name) < 0:
                raise InvalidOption(name, f"must not be negative, got {getattr(self, name)}")
        check_ranks(self)
        if verified_share(self.verify_import) and self.exact is False:
            raise InvalidOption("verify_import", "needs --exact: otherwise the same tokens may give other bits")
        refuse(features(self))
        memory_bytes(self.memory)
        if self.disk_size is not None:
            if self.disk is None:
                raise InvalidOption("disk_size", "needs --disk, the path of the file")
            memory_bytes(self.disk_size, "disk_size")
        if self.remote is not None and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]+(/[\w.-]+)*/?", self.remote):
            raise InvalidOption("remote", f"must be a URL such as s3://bucket/prefix, got {self.remote!r}")
        if self.host_memory != "off":
            memory_bytes(self.host_memory, "host_memory")
        length_limit(self.max_length)
        step_bound(self.max_step_ms)


def check_ranks(options: Options) -> None:
    """Raise if a model cannot be cut over ranks with these options."""
    ranks = options.tensor_parallel
    if not 1 <= ranks <= MOST_RANKS:
        raise InvalidOption("tensor_parallel", f"must be from 1 to {MOST_RANKS}, got {ranks}")
    if ranks == 1 and options.expert_parallel:
        raise InvalidOption("expert_parallel", "needs --tensor-parallel 2 or more, over whose ranks experts are spread")


def features(options: Options, device: str | None = None) -> set[str]:
    """Return what an engine with these options has of the features that may exclude each other.

    >>> sorted(features(Options(draft="mtp", exact=True), "cuda"))
    ['MTP head', 'exact', 'on a GPU']
    """
    drafter = draft_of(options)
    found = {
        "ranks": options.tensor_parallel > 1,
        "whole experts": options.expert_parallel,
        "exact": options.exact is True,
        "MTP head": drafter == "mtp",
        "draft model": drafter == "model",
        "FP8 activations": options.activations == "fp8",
        "host memory": options.host_memory != "off",
        "file": options.disk is not None,
        "remote store": options.remote is not None,
        "prompts in files": saves_prompts(options),
        "no cache": not options.cache,
        "small states": options.state_dtype != "float32",
        CPU: device == "cpu",
        GPU: device not in (None, "cpu"),
    }
    return {name for name, there in found.items() if there}


def saves_prompts(options: Options) -> bool:
    """Return whether prompts are saved to files, or loaded from them."""
    return options.prefix_key is not None or options.trusted_prefix_keys is not None


def verified_share(value: str | float) -> float:
    """Parse which share of a loaded prompt is computed again.

    >>> verified_share("off"), verified_share("all"), verified_share("0.25"), verified_share(1)
    (0.0, 1.0, 0.25, 1.0)
    """
    if value in ("off", "all"):
        return float(value == "all")
    number = isinstance(value, int | float) or re.fullmatch(r"[01]?\.?\d{1,9}", str(value))
    if isinstance(value, bool) or not number or not 0 < float(value) <= 1:
        raise InvalidOption("verify_import", f"must be all, off, or a share up to 1 such as 0.1, got {value!r}")
    return float(value)


def memory_bytes(value: str | int, name: str = "memory") -> int | None:
    """Parse a size in bytes; None stands for "auto".

    >>> memory_bytes("2GiB"), memory_bytes("1.5 GB"), memory_bytes(4096), memory_bytes("auto"), memory_bytes("auto/2")
    (2147483648, 1500000000, 4096, None, None)
    """
    if auto_share(value) is not None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B?)", str(value).strip().upper())
    unit = UNITS.get(found[2]) if found else None
    size = float(found[1]) * unit if found and unit else 0.0
    if isinstance(value, bool) or not 0 < size < MOST_BYTES:
        raise InvalidOption(name, f'must be a size such as 2GiB or 500MB, or "auto", got {value!r}')
    return int(size)


def auto_share(value: str | int) -> int | None:
    """Return by how much the size that "auto" stands for is divided; None if a size is given.

    >>> auto_share("auto"), auto_share("auto/4"), auto_share("2GiB")
    (1, 4, None)
    """
    found = re.fullmatch(r"auto(?:/([1-9]\d{0,3}))?", str(value))
    return None if found is None else int(found[1] or 1)


def count(name: str, value: int | str, device: str) -> int:
    """Parse a count, or return what "auto" means on a device.

    >>> count("max_sequences", "auto", "cuda"), count("depth", "1", "cpu"), count("max_sequences", 3, "cpu")
    (256, 1, 3)
    """
    if value == "auto":
        return AUTO_COUNTS[name][device]
    if isinstance(value, bool) or not str(value).removeprefix("-").isdigit():
        raise InvalidOption(name, f'must be an integer or "auto", got {value!r}')
    return int(value)


def length_limit(value: str | int) -> int | None:
    """Parse a maximum length in tokens; None stands for "auto"."""
    if value == "auto":
        return None
    if isinstance(value, bool) or not str(value).isdigit() or int(value) < 1:
        raise InvalidOption("max_length", f'must be a positive number of tokens or "auto", got {value!r}')
    return int(value)


def step_bound(value: str | float) -> tuple[float, float]:
    """Parse the bound on steps with prompts: milliseconds, and multiples of a decode step. Both 0: none.

    >>> step_bound("off"), step_bound("auto"), step_bound("60"), step_bound(2.5)
    ((0.0, 0.0), (50.0, 3.0), (60.0, 0.0), (2.5, 0.0))
    """
    if value in ("off", "auto"):
        return (0.0, 0.0) if value == "off" else (AUTO_STEP_MS, AUTO_STEP_DECODES)
    number = isinstance(value, int | float) or re.fullmatch(r"\d+(\.\d+)?", str(value))
    if isinstance(value, bool) or not number or not 0 < float(value) <= MOST_STEP_MS:
        raise InvalidOption(
            "max_step_ms",
            f'must be milliseconds greater than 0 and up to {MOST_STEP_MS:.0f}, "auto" or "off", got {value!r}',
        )
    return float(value), 0.0


@dataclass(frozen=True, slots=True)
class SizingFacts:
    """What `resolve` needs to know: the machine's free memory and the model's requirements."""

    free_bytes: int
    model_length: int | None  # the model's trained context, if its configuration has one
    longest: Callable[[int], int]  # length of the longest sequence that fits into this many bytes
    least_bytes: int  # the least memory in which a short sequence can run
    device: str = "cpu"
    room: str = ""  # on a GPU: how the free memory was measured
    free_host_bytes: int = 0  # on a GPU: free memory of the machine
    draft_bytes: Callable[[int], int] = lambda memory: 0  # what a draft model takes of this memory


def resolve(options: Options, facts: SizingFacts) -> tuple[EngineConfig, Mapping[str, str]]:
    """Return the engine's configuration, and the reason for each resolved "auto"."""
    refuse(features(options, facts.device))
    reasons: dict[str, str] = {}
    memory = _memory(options, facts, reasons)
    if memory < facts.least_bytes:
        found = f" ({reasons['memory']})" if "memory" in reasons else ""
        raise InvalidOption(
            "memory",
            f"is {options.memory}{found} but this model needs at least {facts.least_bytes} bytes; "
            f"pass --memory {facts.least_bytes} or more",
        )
    length = length_limit(options.max_length)
    if length is None:
        length, reasons["max_length"] = _auto_length(memory, facts)
    counts: dict[str, Any] = {name: count(name, getattr(options, name), facts.device) for name in AUTO_COUNTS}
    counts["max_tokens_per_step"] = max(counts["max_tokens_per_step"], counts["max_sequences"])
    step_ms, step_decodes = step_bound(options.max_step_ms)
    if options.max_step_ms == "auto":
        reasons["max_step_ms"] = f"{step_ms:.0f} ms, or {step_decodes:.0f} decode steps of the running rows if longer"
    drafting = facts.draft_bytes(memory)
    config = EngineConfig(
        memory_bytes=memory - drafting,
        draft_bytes=drafting,
        **counts,
        max_length=length,
        cache=options.cache,
        order=options.order,
        eviction=options.eviction,
        capture_every=options.capture_every,
        retain_share=options.retain_share,
        exact=options.exact is True,
        paranoid=options.paranoid,
        seed=options.seed,
        host_bytes=_host_bytes(options, facts, reasons),
        draft=draft_of(options),
        draft_tokens=draft_tokens(options, facts.device),
        disk_bytes=_disk_bytes(options),
        max_step_ms=step_ms,
        max_step_decodes=step_decodes,
        remote=options.remote is not None,
    )
    return config, reasons


def has_room(options: Options, facts: SizingFacts) -> bool:
    """Return whether a sequence of the length that was asked for, or else a short one, can run in the memory."""
    memory, length = _memory(options, facts, {}), length_limit(options.max_length)
    return memory >= facts.least_bytes and (length is None or facts.longest(memory) >= length)


def _memory(options: Options, facts: SizingFacts, reasons: dict[str, str]) -> int:
    memory = memory_bytes(options.memory)
    if memory is None:
        share = auto_share(options.memory) or 1
        if facts.device == "cuda":
            memory, reasons["memory"] = facts.free_bytes // share, facts.room
        else:
            memory = min(AUTO_MEMORY_BYTES, facts.free_bytes // 2) // share
            reasons["memory"] = f"{memory >> 20} MiB: half of the {facts.free_bytes >> 20} MiB free, up to 4096 MiB"
        reasons["memory"] += f", divided by {share}" if share > 1 else ""
    # Round down to whole pages of the machine, so that every item of the store is aligned.
    return memory - memory % PAGE_BYTES


def _disk_bytes(options: Options) -> int:
    if options.disk is None:
        return 0
    size = None if options.disk_size is None else memory_bytes(options.disk_size, "disk_size")
    if size is None:
        raise InvalidOption("disk", "needs --disk-size, the size of the file, such as 500GiB")
    return size


def _host_bytes(options: Options, facts: SizingFacts, reasons: dict[str, str]) -> int:
    if options.host_memory == "off":
        return 0
    size = memory_bytes(options.host_memory, "host_memory")
    if size is None:
        size = facts.free_host_bytes // 2 // (auto_share(options.host_memory) or 1)
        reasons["host_memory"] = f"{size >> 20} MiB: half of the {facts.free_host_bytes >> 20} MiB free"
    return size - size % PAGE_BYTES


def draft_of(options: Options) -> str:
    """Return the drafter of an engine with these options; "auto", which a checkpoint decides, counts as "suffix".

    >>> [draft_of(Options(draft=draft)) for draft in ("auto", "off", "owner/small")]
    ['suffix', 'off', 'model']
    """
    if options.draft == "auto":
        return "suffix"
    return options.draft if options.draft in DRAFT_OPTIONS else "model"


def draft_tokens(options: Options, device: str) -> int:
    """Return the most drafts of a row and step on a device ("cpu", "cuda" or "plain").

    >>> [draft_tokens(Options(draft=draft), "cpu") for draft in ("auto", "off")], draft_tokens(Options(), "cuda")
    ([15, 0], 7)
    """
    refuse(features(options, device))
    return 0 if draft_of(options) == "off" else DRAFT_TOKENS[device]


def _auto_length(memory: int, facts: SizingFacts) -> tuple[int, str]:
    bounds = {f"the default limit; pass --max-length for more than {AUTO_MAX_LENGTH}": AUTO_MAX_LENGTH}
    if facts.model_length is not None:
        bounds["the model's trained context"] = facts.model_length
    bounds["what fits into memory"] = facts.longest(memory)
    reason, length = min(bounds.items(), key=lambda bound: bound[1])
    return length, f"{length} tokens: {reason}"
