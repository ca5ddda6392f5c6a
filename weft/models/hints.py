"""What a model that cannot be loaded may have meant: misspelt names. No torch."""

from __future__ import annotations

from weft.base.suggest import did_you_mean
from weft.models import configurations
from weft.models.catalogue import BUILT_IN, hub_ids, published


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
