"""Where a model's files are: a folder, a file, a packaged configuration, or the hub. No torch.

A place that cannot hold a model of Weft is refused here, before anything large is imported or downloaded.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from weft.base.errors import ModelError
from weft.base.gguf.header import is_gguf
from weft.base.gguf.places import chosen, hub_place, local_file
from weft.base.hub.downloads import file_names, snapshot
from weft.base.hub.short_names import hub_id_of
from weft.kernels.formats import other_tools
from weft.models import configurations
from weft.models.bounds import CONFIG_BYTES
from weft.models.hints import similar_id, similar_name

PATTERNS = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt", "*.jinja"]
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


def find_checkpoint(path: str | Path, with_weights: bool) -> Path:
    """Return a folder, or without weights the file of a configuration; download a hub id."""
    found = local_checkpoint(path, with_weights)
    if found is not None:
        return found
    path = hub_id_of(str(path))
    place = hub_place(str(path))
    if place is not None:
        return download_file(*place)
    folder = snapshot(str(path), PATTERNS if with_weights else ["*.json"], similar_id(str(path)))
    refuse_others(folder)
    return folder


def local_checkpoint(path: str | Path, with_weights: bool) -> Path | None:
    """Return the place of a model on this machine; None for a hub id. Raise if it is neither."""
    local = Path(path).expanduser()
    path = path if local.exists() else hub_id_of(str(path))
    file = local_file(local)
    if file is not None:
        return file
    if is_gguf(local) and str(path).count("/") < 2:
        raise ModelError(f"there is no file {path}")
    if local.is_dir():
        refuse_others(local)
        if not (local / "config.json").exists():
            raise ModelError(f"{local} has no config.json, so it is not a checkpoint; pass the folder of one")
        return local
    if local.is_file() and local.suffix == ".json" and not with_weights:
        return local
    if str(path).startswith(("./", "../", "/", "~")) and not local.exists():
        raise ModelError(f"there is no folder {path}")
    if hub_place(str(path)) is not None:
        return None
    packaged = configurations.find(str(path))
    if packaged is not None and not with_weights:
        return packaged
    if local.is_file() or not HUB_ID.fullmatch(str(path)):
        raise ModelError(
            f"{path} is neither a folder with a checkpoint nor a hub id such as 'owner/name'" + similar_name(str(path))
        )
    return None


def download_file(repository: str, wanted: str) -> Path:
    """Return a GGUF file of a hub repository, chosen by its name or by a tag; download all of its parts."""
    names = chosen(file_names(repository), wanted, repository)
    return snapshot(repository, names) / names[0]


def refuse_others(folder: Path) -> None:
    """Raise if a folder holds something for other programs that is easily taken for a checkpoint."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file() and not (folder / "config.json").is_file():
        base = _read(adapter).get("base_model_name_or_path")
        of = f" of {base[:200]}" if isinstance(base, str) else ""
        raise ModelError(
            f"{folder} is a LoRA adapter{of}, not a model; merge it into its model (merge_and_unload and "
            "save_pretrained of peft), and pass the folder of the result"
        )
    config = _read(folder / "config.json")
    sizes = config.get("quantization")
    if isinstance(sizes, dict) and {"bits", "group_size"} <= sizes.keys() and "quant_method" not in sizes:
        raise ModelError(
            f"{folder} is quantised by MLX, whose format only MLX reads; pass the model's 16-bit weights, with "
            "--quantize fp8 if memory is short, or a GGUF file"
        )
    fields = config.get("quantization_config")
    if isinstance(fields, dict):
        other_tools.refuse(fields)


def _read(path: Path) -> dict[str, object]:
    """Return a JSON object; empty if it cannot be read, which the reader of the file reports. A pipe is left to it."""
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(CONFIG_BYTES + 1))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
