"""What a model that cannot be loaded may have meant: formats of other programs, and misspelt names. No torch."""

from __future__ import annotations

from pathlib import Path

from weft.base.errors import ModelError
from weft.base.suggest import did_you_mean
from weft.models import configurations
from weft.models.catalogue import BUILT_IN, hub_ids, published


def refuse_gguf(path: Path) -> None:
    """Raise if the path is a GGUF file, a folder with weights in that format only, or a hub id that ends in GGUF."""
    inside = path.is_dir() and any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    named = not path.is_dir() and path.name.lower().endswith((".gguf", "-gguf"))
    if inside or named:
        what = "has only GGUF weights" if inside else "is in the GGUF format"
        raise ModelError(
            f"{path} {what}, which is not supported; pass the folder or hub id of the original checkpoint with "
            "config.json and *.safetensors, such as LiquidAI/LFM2-1.2B (weft models lists more)"
        )


def similar_id(hub_id: str) -> str:
    """Return a hint for a hub id that cannot be downloaded."""
    return did_you_mean(hub_id, hub_ids()) if hub_id not in hub_ids() else ""


def similar_name(name: str) -> str:
    """Return a hint for a name that is neither a folder nor a hub id."""
    packaged = configurations.find(name)
    if packaged is not None:
        hub_id = published(packaged.stem)
        real = "" if hub_id is None else f"pass {hub_id} for the published weights, or "
        return f"; it is a packaged configuration without weights: {real}add --weights dummy for random ones"
    if "/" in name:
        return ""
    meant, names = did_you_mean(name, [*configurations.names(), BUILT_IN]), ", ".join(configurations.names())
    return f"{f'{meant} Packaged' if meant else '; packaged'} configurations for --weights dummy are {names}"
