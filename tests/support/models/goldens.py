"""Logits of tiny models of every family, kept with the number of what each family and kernel package computes.

    python -m tests.support.models.goldens

computes them again and writes `tests/support/models/goldens.json`. It refuses if logits have changed and the
`revision` of their family has not: states that were stored before the change would be read after it.

Weights are integers hashed from their names, and all arithmetic is float64, so that neither PyTorch's random numbers
nor the processor matter. A difference of `TOLERANCE` is a change.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.kernels.operations import PLAIN
from tests.support.models.golden_cases import FAMILIES, cases_of, fields_of
from tests.support.models.oracle import DirectRunner
from weft.base.errors import ModelError
from weft.device import store
from weft.kernels.choosing import REVISIONS
from weft.kernels.interface import Operations
from weft.memory import spec as memory_spec
from weft.models.layers import attention
from weft.models.model import CausalModel, sources
from weft.models.registry import family_of
from weft.models.weights import build, copy, prepare

FILE = Path(__file__).with_suffix(".json")
# Of the largest kept logit of a configuration.
TOLERANCE = 1e-5
PROMPT = [3 + 7 * place % 250 for place in range(20)]
# Logits that are kept: those of some tokens after some positions.
POSITIONS = [1, 6, 13, 19]
TOKENS = [5, 60, 133, 250]
DIGITS = 8


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute in float64 what definitions compute in float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for table, sizes in ((store.DTYPES, {"float32": torch.float64}), (memory_spec.ITEM_BYTES, {"float32": 8})):
            for name, value in sizes.items():
                patch.setitem(table, name, value)
        patch.setitem(attention.DTYPE_NAMES, torch.float64, "float32")
        yield


def hashed(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return numbers from -1 to 1 that depend on a name alone, the same on every machine."""
    place = np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.uint64) + np.uint64(crc32(name.encode()) << 24)
    with np.errstate(over="ignore"):
        # A mix of 64 bits, as generators of random numbers use it for their seeds.
        place = (place ^ (place >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        place = (place ^ (place >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((place >> np.uint64(40)).astype(np.float64) / 2**23 - 1).reshape(shape))


def stored(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return what a checkpoint would hold under a name, of a size that lets signals and states through."""
    values = hashed(name, shape)
    if name.endswith("A_log"):
        return values
    if len(shape) < 2:
        return 0.3 * values + ("norm" in name)
    return values * (1.0 if "embed_tokens" in name or "conv" in name else (3 / shape[-1]) ** 0.5)


def fill(model: CausalModel) -> None:
    """Fill a model as from a checkpoint. A part may have several names; in their order, the last one counts."""
    for parameter in model.parameters():
        # A bias that a mixer does not have stays zero.
        parameter.fill_(torch.nan if parameter.ndim > 1 else 0.0)
    for source in sorted(sources(model), key=lambda source: source.name):
        # Packed or concatenated tensors have another name, under which they are stored whole.
        if not source.companions or not (source.concatenated or source.shape):
            copy(source, [stored(name, source.stored_shape) for name in (source.name, *source.companions)])


def logits_of(fields: dict[str, Any], operations: Operations, dtype: torch.dtype) -> list[float]:
    """Return the kept logits of a configuration, by these operations."""
    model = build(fields, dtype)
    fill(model)
    if dtype == torch.float64:
        model.double()
    prepare(model, operations, 0)
    runner = DirectRunner(model, 4 << 20, operations=operations)
    [found] = runner.step([(runner.open(PROMPT), len(PROMPT))])
    assert torch.isfinite(found).all(), "a weight was not filled"
    return found[POSITIONS][:, TOKENS].flatten().tolist()


def plain_logits(fields: dict[str, Any]) -> list[float]:
    with in_float64():
        return [float(f"{each:.{DIGITS}g}") for each in logits_of(fields, PLAIN, torch.float64)]


def revision_of(family: str) -> int:
    return family_of(fields_of(FAMILIES[family])).revision


def computed(family: str) -> dict[str, Any]:
    """Return a family's number and the logits of all configurations that it does not refuse."""
    found = {}
    for name, fields in cases_of(family).items():
        try:
            found[name] = plain_logits(fields)
        except ModelError:
            continue
    return {"revision": revision_of(family), "logits": found}


def kept() -> dict[str, Any]:
    goldens: dict[str, Any] = json.loads(FILE.read_text())
    return goldens


def differ(one: list[float], other: list[float]) -> bool:
    most = max(map(abs, one))
    return not all(abs(a - b) <= TOLERANCE * most for a, b in zip(one, other, strict=True))


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the configurations that a family computes as it did not before. New and refused ones are none."""
    both = [name for name in now["logits"] if name in before["logits"]]
    return [name for name in both if differ(before["logits"][name], now["logits"][name])]


def unraised(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line for each family whose logits have changed and whose number was not raised."""
    lines = []
    for family, found in now["families"].items():
        old = before["families"].get(family, found)
        names = changed(old, found)
        if names and found["revision"] <= old["revision"]:
            lines.append(f"{family}: raise the revision {old['revision']} of its class; changed are {', '.join(names)}")
    return lines


def main() -> int:
    now = {"packages": REVISIONS, "families": {family: computed(family) for family in FAMILIES}}
    if FILE.exists() and (lines := unraised(kept(), now)):
        print(*lines, sep="\n", file=sys.stderr)
        return 1
    FILE.write_text(written(now))
    return 0


def written(goldens: dict[str, Any]) -> str:
    """Return the file's text, with one line for each configuration."""
    families = []
    for family, found in goldens["families"].items():
        lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(row)}" for name, row in found["logits"].items())
        families.append(f' "{family}": {{"revision": {found["revision"]}, "logits": {{\n{lines}\n }}}}')
    body = ",\n".join(families)
    return f'{{"packages": {json.dumps(goldens["packages"])},\n"families": {{\n{body}\n}}}}\n'


if __name__ == "__main__":
    sys.exit(main())
