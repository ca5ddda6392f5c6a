"""`weft pull`: downloads a model from the hub, checks it, and prints where it is."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from weft.base.errors import ModelError, OptionError
from weft.base.options import option
from weft.cli.options import argument

ABOUT = "download a model, or the rest of it, and check its files"


@dataclass(frozen=True, kw_only=True)
class PullOptions:
    """Options of `weft pull`."""

    model: str | None = argument("short name of `weft models`, hub id, or owner/name:Q4_K_M of GGUF files")
    progress: bool = option(True, "show progress bars on a terminal")


def run(options: PullOptions) -> None:
    from weft import builtin
    from weft.models.finding import find_checkpoint

    if options.model is None:
        raise OptionError("model is missing; pass a short name of `weft models` or a hub id")
    if not options.progress or not sys.stderr.isatty():
        quieten()
    place = builtin.place_of(options.model)
    found = find_checkpoint(place, with_weights=True)
    wrong = check(found, options.progress)
    if wrong:
        # The file may have been damaged on this disk, long after it was downloaded.
        for blob in wrong:
            blob.unlink()
        found = find_checkpoint(place, with_weights=True)
        wrong = check(found, options.progress)
    if wrong:
        names = ", ".join(blob.name[:12] for blob in wrong)
        raise ModelError(f"{options.model}: files differ from their checksums after a second download: {names}")
    print(found)


def check(found: Path, progress: bool) -> list[Path]:
    """Return the damaged files of a model."""
    from tqdm import tqdm

    from weft.base.hub.checksums import blobs_of, damaged

    folder = found if found.is_dir() else found.parent
    size = sum(blob.stat().st_size for blob in blobs_of(folder))
    shown = None if progress else True
    with tqdm(total=size, desc="checking", unit="B", unit_scale=True, leave=False, disable=shown) as bar:
        return list(damaged(folder, bar.update))


def quieten() -> None:
    """Hide the hub's progress bars, which it draws in files too. Read when its library is imported."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
