"""`weft doctor`: reports the machine and every decision, and compares a cache hit with a cold run."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft import __version__, builtin
from weft.base.cores import usable_cores
from weft.base.errors import InvalidOption, WeftError
from weft.base.options import Options, features, option
from weft.base.refused import refused_with
from weft.cli.options import argument
from weft.cli.several import MODELS, models_of

if TYPE_CHECKING:
    from weft.offline.llm import LLM

ABOUT = "report what Weft would use here and why, and test the cache on the given model"
LIBRARIES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "jinja2",
    "uvicorn",
    "starlette",
    "msgspec",
)


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Options):
    """Options of `weft doctor`: the engine's, as for the server."""

    model: str | None = argument("model folder or hub id; default: weft-small, which ships with Weft")
    models: tuple[str, ...] = field(default=(), metadata=MODELS)
    models_memory: str | int = option("auto", "memory of all --model together, as of weft serve", metavar="SIZE")
    self_test: bool = option(True, "compare answers after a cache hit with cold runs")
    check: bool = option(
        False,
        "compare answers to a page of texts with transformers if it is installed, and hits, drafts, a disk tier and "
        "long prompts with cold runs; takes minutes",
    )
    against: str | None = option(
        None, "with --check: a wide checkpoint of the same model; prints KL and perplexity", metavar="FOLDER"
    )


def run(options: DoctorOptions) -> int:
    if options.against is not None and not options.check:
        raise InvalidOption("against", "needs --check")
    show("weft", {"version": __version__, "python": platform.python_version(), **dict(libraries())})
    show("machine", machine())
    try:
        wrong = [complaint for each in each_model(options) for complaint in examine(each)]
    except WeftError as error:
        wrong = [str(error)]
    for complaint in wrong:
        print(f"problem: {complaint}")
    if not wrong:
        print("no problems found")
    return 1 if wrong else 0


def each_model(options: DoctorOptions) -> Iterator[DoctorOptions]:
    """Yield the options of each model, with its share of the memory if there are several."""
    if not options.models:
        yield options
        return
    from weft.fleet.local import visible_gpus
    from weft.start.shares import gib, shares_of

    models = {each.name: each.options for each in models_of(options)}
    shares = shares_of(models, str(options.models_memory), lambda: bool(visible_gpus()))
    show("models", {"memory": shares.about})
    for name, share in shares.models.items():
        show("served as", {"name": name, "weights": gib(share.weights_bytes)})
        own = {each.name: getattr(share.options, each.name) for each in fields(Options)}
        yield replace(options, models=(), models_memory="auto", **own)


def show(title: str, facts: dict[str, Any]) -> None:
    print(title)
    for name, fact in facts.items():
        print(f"  {name + ':':<22}{fact}")


def libraries() -> Iterator[tuple[str, str]]:
    from importlib.metadata import PackageNotFoundError, version

    for name in LIBRARIES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def machine() -> dict[str, str]:
    from weft.base import processor
    from weft.device.devices import free_bytes

    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor.name(),
        "cores": f"{usable_cores()} of {os.cpu_count()} usable",
        "instructions": " ".join(processor.features()) or "none that speed up matmuls",
        "free memory": f"{free_bytes() / 2**30:.1f} GiB",
        "device": device(),
    }


def device() -> str:
    cards = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return f"{cards} CUDA devices (Weft uses one if torch supports it; see --device)" if cards else "CPU"


def examine(options: DoctorOptions) -> list[str]:
    """Load the model as the server would, print its facts, and return the problems."""
    from weft.cli.early import prepare

    prepare(options)
    from weft.offline.llm import LLM

    describe_file(options)
    with LLM.from_options(options) as llm:
        dtype = llm.reasons.get("dtype", options.dtype).partition(",")[0]
        show("model", about_model(llm, options, dtype))
        show("operations", {choice.group: choice for choice in llm.chosen.choices})
        show("decisions", decisions(options, llm.reasons))
        asked = replace(options, exact=llm.config.exact, draft=llm.config.draft)
        if refused := dict(refused_with(features(asked))):
            show("not supported with these", refused)
        wrong = [] if not options.self_test else exact_test(llm) if llm.config.exact else self_test(llm, dtype)
        return wrong + (check(llm, options, dtype) if options.check else [])


def describe_file(options: DoctorOptions) -> None:
    """Print what a GGUF file holds, before its weights are read. One of the hub is downloaded first."""
    from weft.base.gguf.header import read_header
    from weft.base.gguf.places import hub_place, local_file
    from weft.base.gguf.report import about
    from weft.base.hub.short_names import hub_id_of
    from weft.device.devices import free_bytes
    from weft.models.finding import find_checkpoint

    if options.model is None:
        return
    file = local_file(Path(options.model).expanduser())
    if file is None and hub_place(hub_id_of(options.model)) is not None:
        file = local_file(find_checkpoint(options.model, with_weights=True))
    if file is not None:
        show("file", about(read_header(file), free_bytes()))


def about_model(llm: LLM, options: DoctorOptions, dtype: str) -> dict[str, Any]:
    spec, config = llm.engine.ledger.spec, llm.config
    drafter = llm.engine.planner.drafts.model
    own = "" if drafter is None else f", with {config.draft_bytes / 2**30:.2f} GiB of its own"
    return {
        "name": options.model or builtin.NAME,
        "vocabulary": llm.vocab_size,
        "dtype": dtype,
        "tokenizer": "none: token ids only" if llm.tokenizer is None else "found",
        "chat template": "none" if llm.template is None else "found",
        "end tokens": sorted(llm.end_tokens) or "none",
        "weights": str(llm.model.held),
        "decode floor": decode_floor(llm),
        "memory": f"{config.memory_bytes / 2**30:.2f} GiB",
        "drafts": f"{config.draft}, up to {config.draft_tokens} a row{own}" if config.draft_tokens else "none",
        "cell of 64 tokens": f"{spec.page_bytes} bytes of pages, {spec.window_page_bytes} of window pages",
        "state": f"{spec.state_bytes} bytes; tail {spec.tail_bytes}",
    }


def decode_floor(llm: LLM) -> str:
    """Return the least time in which a token of one sequence can be decoded, by what it reads."""
    read, rate = llm.model.held.decode_bytes, llm.measure_rate()
    return f"{read / 1e9:.3g} GB read per token: {1e3 * read / rate:.3g} ms at the {rate / 1e9:.3g} GB/s measured here"


def decisions(options: Options, reasons: Mapping[str, str]) -> dict[str, str]:
    """Return every option's value, and whether it was given, is the default, or was decided and why."""
    found = {}
    for each in fields(Options):
        value = getattr(options, each.name)
        if each.name in reasons:
            found[each.name] = reasons[each.name]
        elif each.name not in ("model", "tokenizer"):
            found[each.name] = f"{value}, {'default' if value == each.default else 'as given'}"
    if not options.threads:
        found["threads"] = f"{usable_cores()}: one for each core that this process may use"
    return found


def self_test(llm: LLM, dtype: str) -> list[str]:
    from weft.cli.selftest import SelfTest, can_tell, complaints

    test = SelfTest(llm)
    if not llm.config.cache or not test.fits():
        why = "the cache is off" if not llm.config.cache else "max_length is too short"
        print(f"self-test\n  skipped: {why}")
        return []
    found = test.run()
    print("self-test, compared with scores of a cold run")
    for name, each in found.items():
        size = f"KL {each.kl:8.1e}, largest difference {each.difference:8.1e}"
        print(f"  {name + ':':<22}{size}, {each.cached_tokens} tokens cached")
    if not can_tell(found):
        print("  inconclusive: this model answers the same after another prefix, so a wrong state would not show")
    return complaints(found, dtype)


def exact_test(llm: LLM) -> list[str]:
    from weft.cli.exact_test import ExactTest, exact_complaints

    test = ExactTest(llm)
    if not llm.config.cache or not test.fits():
        why = "the cache is off" if not llm.config.cache else "max_length is too short"
        print(f"self-test\n  skipped: {why}")
        return []
    found = test.run()
    print("self-test, digests of logits compared with those of cold runs")
    for name, each in found.items():
        result = "equal" if each.differs is None else f"differ from token {each.differs} on"
        print(f"  {name + ':':<22}{result}, {each.cached_tokens} tokens cached")
    return exact_complaints(found)


def check(llm: LLM, options: DoctorOptions, dtype: str) -> list[str]:
    """Print a table of checks, and return what is wrong."""
    from weft.cli.check.measures import LeftOut
    from weft.cli.check.others import against_lines, transformers_lines
    from weft.cli.check.ways import ways
    from weft.models.finding import find_checkpoint

    folder = builtin.FOLDER if options.model is None else find_checkpoint(options.model, with_weights=True)
    print("check, KL unless another number is named")
    wrong = []
    lines = [transformers_lines(llm, folder, dtype), ways(llm, options, dtype)]
    if options.against is not None:
        lines.append(against_lines(llm, options, options.against))
    for line in chain(*lines):
        if isinstance(line, LeftOut):
            print(f"  {line.name + ':':<36}left out: {line.why}")
            continue
        limit = "" if line.limit is None else f", at most {line.limit:.1e}"
        more = f"; {line.detail}" if line.detail else ""
        print(f"  {line.name + ':':<36}{line.found:.3g}{limit}{more}{'  WRONG' if line.is_wrong else ''}", flush=True)
        if line.is_wrong:
            wrong.append(f"{line.name}: {line.found:.3g} exceeds {line.limit:.1e}{more}")
    return wrong
