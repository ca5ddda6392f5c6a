"""`weft convert`: writes a checkpoint in another form. Each form has a module of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from weft.base.errors import InvalidOption, OptionError
from weft.base.options import QUANTISED, option
from weft.cli.options import argument

ABOUT = "write a quantised copy of a checkpoint, which other tools read too"


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of `weft convert`."""

    model: str | None = argument("model folder or hub id, in 16 bits")
    out: str | None = argument("new folder for the copy, in compressed-tensors' layouts")
    quantize: str = option("off", "format of the copy's matrices, as of `weft serve`", QUANTISED)


def run(options: ConvertOptions) -> None:
    if options.model is None or options.out is None:
        raise OptionError("a model and a new folder must be given: weft convert MODEL OUT --quantize int4")
    if options.quantize == "off":
        raise InvalidOption("quantize", f"must be one of {', '.join(QUANTISED[1:])}")
    from weft.kernels.formats.quantising import Quantising
    from weft.models.compressing import compress

    written = compress(options.model, Path(options.out).expanduser(), Quantising(options.quantize))
    sizes = f"{written.bytes_before / 2**20:.1f} MiB became {written.bytes_after / 2**20:.1f} MiB"
    print(f"{written.folder}: {written.quantised} matrices in {options.quantize}; {sizes}")
    if written.fused:
        shown = ", ".join(written.fused[:2])
        print(f"kept wide: {len(written.fused)} tensors that hold all experts of a layer ({shown}...)", file=sys.stderr)
