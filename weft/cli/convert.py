"""`weft convert`: writes a checkpoint as a GGUF file, or a GGUF file as a folder of safetensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weft.base.errors import OptionError
from weft.base.options import option
from weft.cli.options import argument

ABOUT = "write a checkpoint as a GGUF file, or a GGUF file as a folder of safetensors"
KINDS = ("off", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k")


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of `weft convert`."""

    paths: tuple[str, ...] = argument("model and file to write, or GGUF file and folder to write", many=True)
    quantize: str = option(
        "off", "type of matrices in a GGUF file; q4_k and q5_k give some of them six bits, as other tools do", KINDS
    )


def run(options: ConvertOptions) -> None:
    if len(options.paths) != 2:
        raise OptionError("weft convert needs two paths: a model, and the file or folder to write")
    from tqdm import tqdm

    from weft import builtin
    from weft.base.gguf.header import is_gguf
    from weft.models.weights import find_checkpoint

    target = Path(options.paths[1]).expanduser()
    if target.exists():
        raise OptionError(f"{target} exists already; pass another path")
    source = find_checkpoint(builtin.place_of(options.paths[0]), True)
    to_file = is_gguf(target)
    if is_gguf(source) == to_file:
        raise OptionError("one of the two paths must be a GGUF file, whose name ends in .gguf")
    unfinished = target.with_name(f"{target.name}.unfinished")
    remove(unfinished)
    try:
        with tqdm(unit="B", unit_scale=True, desc=f"writing {target.name}", disable=None) as bar:
            if to_file:
                write_file(source, unfinished, options.quantize, bar.update)
            else:
                write_folder(source, unfinished, bar.update)
        unfinished.rename(target)
    finally:
        remove(unfinished)
    print(f"{target}: {size_of(target) / 1e9:.3g} GB")


def write_file(source: Path, target: Path, kind: str, written: Callable[[int], object]) -> None:
    from weft.models.config import checkpoint_config, text_part
    from weft.models.gguf.exported_keys import architecture_of
    from weft.models.gguf.exporting import export
    from weft.text.gguf_export import tokenizer_metadata
    from weft.text.tokenizer import end_tokens

    config = text_part(checkpoint_config(source))
    arch = architecture_of(config)
    more = tokenizer_metadata(source, arch, config.get("vocab_size") or 0, tuple(sorted(end_tokens(source))))
    export(source, target, kind, more, written)


def write_folder(source: Path, target: Path, written: Callable[[int], object]) -> None:
    from weft.base.gguf.header import read_header
    from weft.models.gguf.importing import import_file
    from weft.text.gguf_export import save_tokenizer

    import_file(source, target, written)
    save_tokenizer(target, source, read_header(source).metadata)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(each.stat().st_size for each in path.iterdir())
