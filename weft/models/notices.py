"""What a load says about the options and the operations of a model: log lines, each warning once in a process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from weft.base.errors import OptionError
from weft.kernels.choosing import Chosen
from weft.models.layers.rotary import Rotary
from weft.models.model import CausalModel

log = logging.getLogger("weft")

_logged: set[str] = set()


def check_length(model: CausalModel, length: int, trained: int | None) -> None:
    """Warn if sequences may be longer than those that a model was trained for, or raise if that changes its answers."""
    if trained is None or length <= trained:
        return
    asked = f"max_length is {length} but the model was trained for {trained} tokens"
    if any(isinstance(each, Rotary) and each.kind.variant == "dynamic" for each in model.modules()):
        # Then every new token would turn the keys of all tokens before it.
        raise OptionError(f"{asked}, and rope type dynamic is not supported beyond; pass at most {trained}")
    warn_once(f"{asked}; lower it, or quality may drop")


def report_parts(config: Mapping[str, Any]) -> None:
    """Warn if a checkpoint has parts for other inputs than text."""
    names = {"vision_config": "images", "audio_config": "sound"}
    found = [inputs for part, inputs in names.items() if config.get(part)]
    if found:
        warn_once(f"this checkpoint also reads {' and '.join(found)}; only its text part is served")


def warn_once(notice: str) -> None:
    """Log a warning, once in a process: several models may be loaded one after the other."""
    if notice not in _logged:
        _logged.add(notice)
        log.warning(notice)


def report_choices(device: str, chosen: Chosen, reasons: Mapping[str, str]) -> None:
    """Log the chosen packages and what each "auto" means, and warn if a GPU runs plain PyTorch."""
    for line in chosen.summary():
        log.debug("operations: %s", line)
    for name, reason in reasons.items():
        log.debug("%s: %s", name, reason)
    plain = [choice for choice in chosen.choices if choice.package == "plain"]
    if device == "cuda" and plain:
        warn_once(f"{plain[0].reason}; the GPU runs plain PyTorch operations, which are many times slower")
