"""Choice of a package for each group of operations, made once, when a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch

from weft.base.errors import OptionError
from weft.device.devices import device_name
from weft.kernels.formats.rounded import kinds_of
from weft.kernels.interface import Batch, Operations
from weft.kernels.native import library
from weft.kernels.native.limits import declines as declines_decodes
from weft.kernels.native.limits import groups_of
from weft.memory.spec import Memory, MemorySpec

# The operations of each group. A package has one module per group, with the group's name.
GROUPS: dict[str, tuple[str, ...]] = {
    "embedding": ("prepare_table", "look_up"),
    "linear": ("prepare", "linear", "linear_into_stream", "activated_linear"),
    "norm": ("residual", "rows_of", "rms_norm", "gated_rms_norm"),
    "activation": ("gated_product", "add"),
    "rotary": ("make_rotation",),
    "attention": ("attend", "warm_attention", "prefix_members"),
    "latent_attention": ("attend_latents",),
    "causal_conv": ("causal_conv", "short_conv"),
    "ssd": ("ssd_memory", "ssd"),
    "gated_delta": ("gated_delta_memory", "gated_delta"),
    "channel_delta": ("channel_delta_memory", "channel_delta"),
    "moe": ("prepare_experts", "score_experts", "route_softmax", "route_top", "route_sigmoid", "experts"),
    "together": ("run_together", "side_by_side", "record_decodes"),
    "ranks": ("add_ranks", "gather_ranks"),
    "following": ("verify_drafts", "move_rows"),
    "sampling": ("for_sampling", "likeliest", "take_likeliest", "read_board", "restrict", "draw", "score", "digest"),
}
# Operations with a C++ kernel for decode-only steps (one new token per row), by group.
DECODES = {
    "attention": ("attend",),
    "latent_attention": (),
    "causal_conv": ("causal_conv", "short_conv"),
    "ssd": ("ssd",),
    "gated_delta": ("gated_delta",),
    "channel_delta": ("channel_delta",),
    "together": (),
}
# Operations with a C++ kernel in any step: norms for all rows, others for few of them.
FEW_ROWS = ("embedding", "linear", "norm", "activation", "rotary", "moe")
# Groups with operations of their own where bits must not depend on a step's other rows, by modules `GROUP/exact.py`.
# The kernels of all other groups have no choice by the number of rows that changes a bit.
EXACT = ("linear", "norm", "attention", "latent_attention", "causal_conv", "gated_delta", "ssd", "moe")
EXACT_DTYPES = (torch.bfloat16, torch.float16)
# Packages that read all of a step's numbers from its batch on the device, so that steps can be recorded.
RECORDED = ("cuda", "exact")
# Descriptions of the packages for `weft doctor` and the log.
TITLES = {
    "plain": "plain PyTorch",
    "cpu": "PyTorch, tuned for processors",
    "native": "C++ for decodes, tuned PyTorch for prompts",
    "cuda": "Triton and FlashInfer",
    "exact": "Triton, with sums in a fixed order",
}
# The same in a word or two.
KERNELS = {"exact": "exact Triton kernels", "cuda": "Triton kernels", "native": "C++ kernels", "plain": "plain PyTorch"}
NO_NATIVE = "no C++: "
# What each package computes. A change of results beyond rounding, such as a fix, raises the number: then no engine
# reads states that were stored before (`weft/models/identity.py`).
REVISIONS = {"plain": 1, "cpu": 1, "native": 1, "cuda": 1, "exact": 1}
LEAST_CAPABILITY = (8, 0)
# The reason of a group that no layer of the model needs.
UNUSED = "this model has none"


@dataclass(frozen=True, slots=True)
class PackageChoice:
    """The package that computes a group of operations, and the reason."""

    group: str
    package: str
    reason: str

    def __str__(self) -> str:
        return f"{TITLES[self.package]} ({self.reason})"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The operations of a model, and what else a backend decides.

    `are_recorded`: steps are recorded and replayed, and have been tried before. `numerics` names the passes in which
    plans are computed: "usual", or in exact mode "cells" or "turns".
    """

    operations: Operations
    choices: tuple[PackageChoice, ...]
    numerics: str = "usual"

    def summary(self) -> list[str]:
        """Return a line for each chosen package, with its groups and the reason."""
        groups: dict[tuple[str, str], list[str]] = {}
        for choice in self.choices:
            groups.setdefault((choice.package, choice.reason), []).append(choice.group)
        return [f"{TITLES[name]} ({why}): {', '.join(found)}" for (name, why), found in groups.items()]

    def all_by(self, package: str) -> bool:
        """Return whether one package computes everything."""
        return all(choice.package == package for choice in self.choices)

    def kernels(self) -> str:
        """Return the kinds of kernels in a few words; of C++ kernels that are missing, the reason."""
        packages = {each.package for each in self.choices}
        if packages == {"cpu"}:
            missing = next(each.reason for each in self.choices if each.reason.startswith(NO_NATIVE))
            return f"PyTorch kernels, {missing}"
        return " and ".join(name for package, name in KERNELS.items() if package in packages)

    @property
    def are_recorded(self) -> bool:
        return all(choice.package in RECORDED for choice in self.choices)


class Table:
    """Operations by name, as fast to call as module functions."""

    for_cpu = is_exact = False

    def __init__(self, members: Mapping[str, Any]) -> None:
        vars(self).update(members)

    def __repr__(self) -> str:
        return f"<{len(vars(self))} operations>"


def assemble(packages: Mapping[str, str]) -> Operations:
    """Return the operations of each group from the package named for it."""
    functions: dict[str, Callable[..., Any]] = {}
    for group, names in GROUPS.items():
        package = packages[group]
        module = import_module(module_of(group, package))
        functions |= {name: getattr(module, name) for name in names}
        if package == "native":
            decodes = import_module("weft.kernels.cpu.decodes")
            functions |= {name: by_step(getattr(decodes, name), functions[name]) for name in DECODES[group]}
    if all(packages[group] == "native" for group in DECODES):
        functions["record_decodes"] = import_module("weft.kernels.cpu.decodes").record_decodes
    for_cpu = any(package in ("cpu", "native") for package in packages.values())
    is_exact = "exact" in packages.values()
    return cast(Operations, Table({**functions, "for_cpu": for_cpu, "is_exact": is_exact}))


def module_of(group: str, package: str) -> str:
    """Return the name of a group's module in a package.

    >>> module_of("norm", "exact"), module_of("norm", "cuda"), module_of("ssd", "native")
    ('weft.kernels.cuda.norm.exact', 'weft.kernels.cuda.norm', 'weft.kernels.cpu.ssd')
    """
    if package == "exact":
        return f"weft.kernels.cuda.{group}.exact"
    home = "cpu" if package == "native" else package
    return f"weft.kernels.{home}.{group}"


def by_step(for_decodes: Callable[..., Any], for_others: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation that calls one function in decode-only steps (one new token per row), another in others."""

    def operation(*inputs: Any, **more: Any) -> Any:
        batch = next(value for value in inputs if isinstance(value, Batch))
        return (for_decodes if batch.only_decodes else for_others)(*inputs, **more)

    return operation


def check_device(operations: Operations, device: str) -> None:
    """Raise if CPU operations would run on a GPU: C++ kernels would dereference GPU addresses."""
    if operations.for_cpu and torch.device(device).type != "cpu":
        raise ValueError(f"these operations are for a CPU and cannot run on {device}")


def everywhere(package: str) -> Operations:
    """Return all operations of one package."""
    return assemble(dict.fromkeys(GROUPS, package))


def choose(
    device: str,
    dtype: torch.dtype,
    memories: Callable[[Operations], tuple[Memory, ...]],
    refused: str | None = None,
    exact: bool = False,
    activations: str = "wide",
) -> Chosen:
    """Choose operations for a model in `dtype` on a device; `memories` returns its mixers' memory for given operations.

    `refused` is the reason why the GPU kernels cannot be used, if trying them has failed. `exact`: choose operations
    whose bits do not depend on a step's other rows, or raise. `activations`: to what rows are rounded before they are
    multiplied with stored formats, as the option says.
    """
    kind = torch.device(device).type
    found = choose_packages(kind, dtype, memories, refused, exact)
    rounds = kinds_of(activations, kind)
    return replace(found, operations=rounding(found.operations, rounds)) if rounds else found


def choose_packages(
    kind: str,
    dtype: torch.dtype,
    memories: Callable[[Operations], tuple[Memory, ...]],
    refused: str | None,
    exact: bool,
) -> Chosen:
    if kind == "cpu":
        return choose_for_cpu(dtype, memories, exact)
    if exact:
        return choose_exact(kind, dtype, refused)
    reason = refused or declines(kind)
    if reason is not None:
        return chosen_everywhere("plain", reason)
    try:
        return chosen_everywhere("cuda", device_name(kind))
    except Exception as error:  # whatever a broken or unknown version of a library may raise
        return chosen_everywhere("plain", f"the kernels for GPUs cannot be imported: {first_line(error)}")


def choose_exact(kind: str, dtype: torch.dtype, refused: str | None = None) -> Chosen:
    """Choose operations for exact answers on a GPU."""
    reason = refused or why_not_exact(kind, dtype)
    if reason is not None:
        raise OptionError(f"exact answers are not available: {reason}")
    packages = exact_packages()
    whys = {"exact": "sums do not depend on other rows", "cuda": f"exact on {device_name(kind)} as they are"}
    choices = tuple(PackageChoice(group, package, whys[package]) for group, package in packages.items())
    return Chosen(assemble(packages), choices, "turns")


def exact_packages() -> dict[str, str]:
    return {group: "exact" if group in EXACT else "cuda" for group in GROUPS}


def why_not_exact(device: str, dtype: torch.dtype) -> str | None:
    """Return why answers in this dtype cannot be exact on a device, before any kernel is tried."""
    kind = torch.device(device).type
    reason = None if kind == "cpu" else declines(kind)
    if kind == "cpu" or reason is not None:
        return reason
    if dtype not in EXACT_DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"on a GPU they need dtype bfloat16 or float16, whose sums tensor cores add in order, this is {name}"
    try:
        assemble(exact_packages())
    except Exception as error:  # as in `choose`
        return f"the kernels for GPUs cannot be imported: {first_line(error)}"
    return None


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}" if str(error).strip() else repr(error)


def choose_for_cpu(
    dtype: torch.dtype,
    memories: Callable[[Operations], tuple[Memory, ...]],
    exact: bool = False,
) -> Chosen:
    spec = MemorySpec(memories(everywhere("cpu")))
    used = groups_of(spec) | {"together"}
    library.use(used)
    missing = library.why_not(dtype)
    choices = []
    for group in GROUPS:
        if group not in DECODES:
            choices.append(PackageChoice(group, "cpu", reason_on_cpu(group, missing)))
            continue
        reason = missing or declines_decodes(group, spec)
        choices.append(
            PackageChoice(group, "native", library.origin() if group in used else UNUSED)
            if reason is None
            else PackageChoice(group, "cpu", f"{NO_NATIVE}{reason}")
        )
    operations = assemble({choice.group: choice.package for choice in choices})
    if exact:
        operations = in_any_company(operations, all(c.package == "native" for c in choices if c.group in DECODES))
    return Chosen(operations, tuple(choices), "cells" if exact else "usual")


def rounding(operations: Operations, rounds: Set[str]) -> Operations:
    """Return operations that multiply stored formats with rows rounded to these kinds of numbers."""
    names = {name: partial(getattr(operations, name), rounds=rounds) for name in ("prepare", "prepare_experts")}
    return cast(Operations, Table({**vars(operations), **names}))


def in_any_company(operations: Operations, are_native: bool) -> Operations:
    """Return CPU operations for exact mode: matmuls by C++ for any number of rows.

    `decodes_at_once` is the number of decodes that a step may have; rows of C++ kernels do not see each other.
    """
    exact = import_module("weft.kernels.cpu.exact")
    names = {name: getattr(exact, name) for name in ("prepare", "prepare_experts")}
    at_once = library.FEW_ROWS if are_native else 1
    return cast(Operations, Table({**vars(operations), **names, "decodes_at_once": at_once}))


def begin_compiling(memories: Callable[[Operations], tuple[Memory, ...]], others: Set[str]) -> None:
    """Compile in the background the C++ kernels of a model on a CPU, while its weights are loaded.

    `others`: groups of kernels that its mixers do not tell: "moe" and "stored".
    """
    library.begin(groups_of(MemorySpec(memories(everywhere("cpu")))) | others)


def reason_on_cpu(group: str, missing: str | None) -> str:
    """Return the reason of a group that uses one package for all steps. `missing`: why there are no C++ kernels."""
    if group not in FEW_ROWS:
        return "the device is a CPU"
    if missing is not None:
        return f"{NO_NATIVE}{missing}"
    if group == "linear":
        return str(import_module("weft.kernels.cpu.linear").described())
    return "C++" if group == "norm" else "C++ for few rows"


def chosen_everywhere(package: str, reason: str) -> Chosen:
    return Chosen(everywhere(package), tuple(PackageChoice(group, package, reason) for group in GROUPS))


def declines(device: str) -> str | None:
    """Return why the GPU kernels cannot run on this device, before any is tried."""
    if device != "cuda":
        return f"the kernels for GPUs need CUDA, this is {device}"
    if find_spec("triton") is None:
        return "Triton is not installed; pip install 'weft-serve[cuda]'"
    if torch.version.hip is not None:
        return "the Triton kernels use instructions of NVIDIA GPUs, this is ROCm"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        return f"the Triton kernels need compute capability {LEAST_CAPABILITY}, {device_name(device)} has {capability}"
    return None
