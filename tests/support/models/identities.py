"""One engine's states, stored in every way that outlives it, and other engines that must not read them.

Engines are loaded from checkpoints as a server does it, so that what names a state comes from where it really does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.hashed.remote import FakeStore
from tests.support.models.engines import tokens
from tests.support.models.hybrid_models import LFM2
from tests.support.models.oracle import Oracle
from tests.support.tiers.remote_tier import save_all
from weft import LLM
from weft.base.errors import InvalidOption
from weft.base.options import Options
from weft.base.sampling import SamplingParams
from weft.base.transfers import Offer
from weft.kernels.choosing import REVISIONS
from weft.memory.tiers.disk.file import open_existing
from weft.memory.tiers.disk.prefix_file import export_prefix, import_prefix
from weft.memory.tiers.remote import store as remote_store
from weft.models.lfm2 import Lfm2
from weft.start.disaggregated import contract_of
from weft.start.loading import load
from weft.transfer.messages import Contract, TransferError

OPTIONS: dict[str, Any] = {
    "threads": 1,
    "device": "cpu",
    "dtype": "float32",
    "max_length": 600,
    "max_sequences": 4,
    "memory": "16MiB",
    "draft": "off",
    "exact": False,
}
ON_DISK = {"disk_size": "8MiB"}
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
PROMPT = tokens(200, 1)
CACHED = 192  # tokens of whole cells
Patch = pytest.MonkeyPatch


@cache
def checkpoint() -> Path:
    return Oracle(LFM2).save(Path(mkdtemp()))


def with_fields(change: Callable[[dict[str, Any]], None]) -> Path:
    """Return a copy of the checkpoint with a changed configuration."""
    folder = Path(shutil.copytree(checkpoint(), mkdtemp(), dirs_exist_ok=True))
    fields = json.loads((folder / "config.json").read_text())
    change(fields)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def with_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    folder = Path(shutil.copytree(checkpoint(), mkdtemp(), dirs_exist_ok=True))
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def one_number(weights: dict[str, torch.Tensor]) -> None:
    name = next(name for name in sorted(weights) if "q_proj" in name)
    weights[name][0, 0] += 2**-10


def all_numbers(weights: dict[str, torch.Tensor]) -> None:
    for tensor in weights.values():
        tensor.mul_(-1)


def same(patch: Patch) -> Path:
    return checkpoint()


def newer_family(patch: Patch) -> Path:
    patch.setattr(Lfm2, "revision", Lfm2.revision + 1)
    return checkpoint()


def newer_package(patch: Patch) -> Path:
    patch.setitem(REVISIONS, "cuda", REVISIONS["cuda"] + 1)
    return checkpoint()


# Another engine, and what a refusal says of it.
OTHER_MODELS: dict[str, tuple[Callable[[Patch], Path], str]] = {
    "other weights": (lambda patch: with_weights(all_numbers), "the weights or their dtype differ"),
    "one number": (lambda patch: with_weights(one_number), "the weights or their dtype differ"),
    "epsilon": (lambda patch: with_fields(lambda f: f.update(norm_eps=2e-5)), "the configuration differs"),
    "rotary": (lambda patch: with_fields(lambda f: f["rope_parameters"].update(rope_theta=9e5)), "the configuration"),
}
OTHER_CODE: dict[str, tuple[Callable[[Patch], Path], str]] = {
    "newer family": (newer_family, "computed by Lfm2 1, .* this is Lfm2 2"),
    "newer package": (newer_package, "computed by .*cuda 1.* this is .*cuda 2"),
}
OTHERS = OTHER_MODELS | OTHER_CODE


@dataclass
class Reading:
    """How an engine fared with the states of another: tokens that it read, and why it read none."""

    tokens: int
    answer: list[int] = field(default_factory=list)
    refusal: str = ""


def answered(folder: Path, store: FakeStore | None = None, **options: Any) -> Reading:
    """Answer the prompt by an engine of its own, and leave its states behind."""
    with pytest.MonkeyPatch.context() as patch:
        if store is not None:
            patch.setattr(remote_store, "S3Objects", lambda url: store)
            options["remote"] = "s3://bucket"
        try:
            with LLM(str(folder), **OPTIONS | options, progress=False) as llm:
                result = llm.generate([PROMPT], GREEDY)[0]
                save_all(llm.engine)
        except InvalidOption as error:
            return Reading(0, refusal=str(error))
    return Reading(result.loaded_tokens, result.token_ids)


@cache
def filled_file() -> Path:
    path = Path(mkdtemp()) / "tier"
    assert answered(checkpoint(), disk=str(path), **ON_DISK).tokens == 0
    return path


@cache
def filled_store() -> FakeStore:
    store = FakeStore()
    assert answered(checkpoint(), store).tokens == 0
    return store


@cache
def exported() -> Path:
    path, file = Path(mkdtemp()) / "prefix", open_existing(filled_file())
    deepest = max(file.found, key=lambda each: each.position)
    assert export_prefix(file, deepest.key, path)
    file.close()
    return path


def contract(folder: Path, **options: Any) -> Contract:
    return contract_of(load(Options(model=str(folder), **OPTIONS | options), progress=False, disaggregated=True))


@cache
def own_contract() -> Contract:
    return contract(checkpoint())


def copy_of(path: Path) -> Path:
    """Return a file of its own with the same bytes, as only its owner may read it."""
    copied = Path(shutil.copy(path, mkdtemp()))
    copied.chmod(0o600)
    return copied


def from_disk(folder: Path) -> Reading:
    return answered(folder, disk=str(copy_of(filled_file())), **ON_DISK)


def from_store(folder: Path) -> Reading:
    store = FakeStore()
    store.objects = dict(filled_store().objects)
    return answered(folder, store)


def from_prefix_file(folder: Path) -> Reading:
    prefix, path = exported(), Path(mkdtemp()) / "tier"
    # A file of the other engine, from which everything is dropped again.
    assert answered(folder, disk=str(path), **ON_DISK).tokens == 0
    file = open_existing(path)
    file.erase([(each.kind, each.unit) for each in file.found])
    file.reread()
    try:
        import_prefix(file, prefix)
    except InvalidOption as error:
        return Reading(0, refusal=str(error))
    finally:
        file.close()
    return answered(folder, disk=str(path), **ON_DISK)


def from_transfer(folder: Path) -> Reading:
    own, other = own_contract(), contract(folder)
    try:
        offer = other.accept(own.offer(Offer((b"k" * 32,), b"t" * 16)))
    except TransferError as error:
        return Reading(0, refusal=str(error))
    assert offer.keys == (b"k" * 32,)
    return Reading(CACHED)


WAYS: dict[str, Callable[[Path], Reading]] = {
    "disk": from_disk,
    "store": from_store,
    "prefix file": from_prefix_file,
    "transfer": from_transfer,
}


# States of the first engine, stored once. A test that patches what names them clears these.
STORED = (filled_file, filled_store, exported, own_contract)


def prepare_all() -> None:
    """Store the states of the first engine, before anything of the other one is patched."""
    for stored in STORED:
        stored()


def check_reads_nothing(way: str, other: str) -> Reading:
    """Check that another engine reads none of the states; return what became of it."""
    prepare_all()
    with pytest.MonkeyPatch.context() as patch:
        found = WAYS[way](OTHERS[other][0](patch))
    assert found.tokens == 0, f"{found.tokens} tokens of another engine were read: {way}, {other}"
    return found


@contextmanager
def other_engine(other: str) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield OTHERS[other][0](patch)
