"""The five lines that a server prints when it is ready, the address alone in the last one.

Reasons, and everything else that is known at the start, are in `weft doctor`, `/server_info` and `--log-level debug`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from weft import __version__
from weft.backends.backend import ModelInfo

# It has a line of its own.
MEMORY = "memory"


def first_lines(info: ModelInfo, name: str, address: str) -> list[str]:
    r"""Return model, device, memory, what "auto" means here, and the address.

    >>> settings = {"device": "cpu", "auto": {"exact": "off: unknown", "max_length": "4096 tokens: trained"}}
    >>> info = ModelInfo("m", "M", "float32", 9, 8, 1 << 30, 7, 4, settings)
    >>> print("\n".join(first_lines(info, "m", "http://[::1]:80")[1:4]))
    device   cpu
    memory   1.00 GiB, for 7 tokens of context
    auto     exact off, max-length 4096 tokens; weft doctor says why
    """
    weights = info.settings.get("weights", {}).get("bytes", {})
    size = f", {sum(weights.values()) / 1e9:.2f} GB of weights" if weights else ""
    return [
        f"model    {name}: {info.architecture} in {info.dtype}{size} (weft {__version__})",
        f"device   {info.settings.get('device', 'not reported: an engine of an earlier version')}",
        f"memory   {info.memory_bytes / 2**30:.2f} GiB, for {info.memory_tokens} tokens of context",
        f"auto     {chosen(info.settings.get('auto', {}))}",
        address,
    ]


def chosen(reasons: Mapping[str, Any]) -> str:
    """Return what each "auto" means, without the reasons.

    >>> chosen({}), chosen({"dtype": "bfloat16, from the checkpoint", "memory": "4 MiB: half"})
    ('nothing: every option was given', 'dtype bfloat16; weft doctor says why')
    """
    values = [
        f"{option.replace('_', '-')} {re.split('[:,]', str(reason))[0]}"
        for option, reason in reasons.items()
        if option != MEMORY
    ]
    return f"{', '.join(values)}; weft doctor says why" if values else "nothing: every option was given"
