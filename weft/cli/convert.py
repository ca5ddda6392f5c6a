"""`weft convert`: writes a checkpoint as a GGUF file or a quantised folder, or a GGUF file as a plain folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weft.base.errors import OptionError
from weft.base.options import option
from weft.cli.options import argument

ABOUT = "write a checkpoint as a GGUF file or a quantised folder, or a GGUF file as a folder of safetensors"
OF_FILES, OF_FOLDERS = ("q8_0", "q4_0", "q4_k", "q5_k", "q6_k"), ("int4", "int8", "fp8", "mxfp4")
KINDS = ("off", *OF_FILES, *OF_FOLDERS)


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of `weft convert`."""

    paths: tuple[str, ...] = argument("model, or GGUF file, and the file or folder to write", many=True)
    quantize: str = option(
        "off",
        "type of matrices in a GGUF file (q4_k and q5_k give some of them six bits, as other tools do), or format of "
        "those in a folder (int4, int8, fp8, mxfp4: compressed-tensors)",
        KINDS,
    )


def run(options: ConvertOptions) -> None:
    if len(options.paths) != 2:
        raise OptionError("weft convert needs two paths: a model, and the file or folder to write")
    from tqdm import tqdm

    from weft import builtin
    from weft.base.gguf.header import is_gguf
    from weft.models.finding import find_checkpoint

    target = Path(options.paths[1]).expanduser()
    if target.exists():
        raise OptionError(f"{target} exists already; pass another path")
    source = find_checkpoint(builtin.place_of(options.paths[0]), True)
    to_file = is_gguf(target)
    if not is_gguf(source) and not to_file and options.quantize in OF_FOLDERS:
        write_compressed(source, target, options.quantize)
        return
    if is_gguf(source) == to_file:
        raise OptionError(
            "one of the two paths must be a GGUF file, whose name ends in .gguf; "
            f"or pass --quantize {' or '.join(OF_FOLDERS)} to quantise a folder of safetensors"
        )
    if options.quantize in OF_FOLDERS:
        raise OptionError(f"--quantize {options.quantize} is for folders; a GGUF file has {', '.join(OF_FILES)}")
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


def write_compressed(source: Path, target: Path, kind: str) -> None:
    from weft.kernels.formats.quantising import Quantising
    from weft.models.compressing import compress

    written = compress(source, target, Quantising(kind))
    sizes = f"{written.bytes_before / 1e9:.3g} GB became {written.bytes_after / 1e9:.3g} GB"
    print(f"{target}: {written.quantised} matrices in {kind}, {sizes}")
    if written.fused:
        print(f"kept wide: {len(written.fused)} tensors of all experts of a layer ({written.fused[0]}...)")


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
