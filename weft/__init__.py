"""Weft serves hybrid language models. `LLM` runs one in this process; `SamplingParams` controls its answers.

Names are loaded on first use, so that `import weft` costs nothing.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from weft.base.openmp import shorten_waits

if TYPE_CHECKING:
    from weft.base.errors import EngineStopped, ModelError, OptionError, RequestError, WeftError
    from weft.base.sampling import SamplingParams
    from weft.offline.llm import LLM
    from weft.offline.result import Chunk, Result

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Chunk",
    "EngineStopped",
    "ModelError",
    "OptionError",
    "RequestError",
    "Result",
    "SamplingParams",
    "WeftError",
]

_HOMES = {
    "LLM": "weft.offline.llm",
    "Chunk": "weft.offline.result",
    "Result": "weft.offline.result",
    "SamplingParams": "weft.base.sampling",
}

# Before PyTorch is loaded, which reads these then. On ARM, oneDNN would leave a list of its kernels in /tmp.
os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")
if hasattr(os, "uname"):
    shorten_waits(os.environ, os.uname().machine)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "weft.base.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
