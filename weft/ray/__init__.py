"""Weft on Ray Serve: `serve run weft.ray:app config=fleet.yaml`.

Ray Serve places, restarts and scales; requests go from an ingress straight to an engine, over the fleet's own
connections. Settings: `weft.ray.settings`. See docs/fleet.md.
"""

from __future__ import annotations

from typing import Any

from weft.ray.deployments import application
from weft.ray.settings import read

__all__ = ["app", "build"]


def build(args: dict[str, Any]) -> Any:
    """Return the application (`ray.serve.Application`) for settings, or for `{"config": path}` of a YAML file.

    Without arguments, the environment variable WEFT_FLEET names the file.
    """
    return application(read(args))


# Ray Serve calls it as well: the settings are read when the application is deployed, not when it is imported.
app = build
