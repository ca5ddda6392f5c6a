"""From options to what runs: the model, its tokenizer and chat template, the engine's configuration."""

from __future__ import annotations

import logging
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft import builtin
from weft.base.config import EngineConfig
from weft.base.errors import ModelError
from weft.base.grid import cells_covering
from weft.base.options import Facts, Options, resolve
from weft.memory.spec import MemorySpec
from weft.models.config import read_config, text_part
from weft.models.model import CausalModel
from weft.models.weights import find_checkpoint, load_model
from weft.text.grammar import Grammars
from weft.text.template import ChatTemplate, load_template
from weft.text.tokenizer import Tokenizer, end_tokens, find_text_files, load_tokenizer

log = logging.getLogger("weft")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_told: set[str] = set()


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything that a serving process holds of a model."""

    model: CausalModel
    spec: MemorySpec
    config: EngineConfig
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    end_tokens: frozenset[int]

    def grammars(self, warm: bool = True) -> Grammars | None:
        """What an engine needs for answers that follow a grammar. `warm`: ready before the first one comes."""
        if self.tokenizer is None:
            return None
        grammars = Grammars(self.tokenizer, self.model.vocab_size)
        if warm:
            # A large vocabulary takes a second, which no running answer should have to wait.
            threading.Thread(target=grammars.warm, name="weft-grammars", daemon=True).start()
        return grammars


def load(options: Options, progress: bool = True) -> Loaded:
    if options.model is None:
        tell_once(builtin.NOTICE)
        folder, weights, seed = builtin.FOLDER, "dummy", builtin.SEED
    else:
        folder, weights, seed = (
            find_checkpoint(options.model, options.weights != "dummy"),
            options.weights,
            options.seed,
        )
    dtype = choose_dtype(options.dtype, folder)
    model, config = load_model(folder, dtype, progress=progress, weights=weights, seed=seed)
    spec = MemorySpec(model.memories())
    engine_config, reasons = resolve(options, facts_of(spec, config))
    for name, reason in reasons.items():
        log.info("%s: %s", name, reason)
    tokenizer, template = load_text(options, folder)
    ends = end_tokens(folder if folder.is_dir() else folder.parent)
    return Loaded(model, spec, engine_config, tokenizer, template, ends | (tokenizer.end_tokens if tokenizer else ends))


def tell_once(notice: str) -> None:
    if notice not in _told:
        _told.add(notice)
        print(notice, file=sys.stderr)


def choose_dtype(asked: str, folder: Path) -> torch.dtype:
    """As asked, or as the checkpoint says, or float32."""
    if asked != "auto":
        return DTYPES[asked]
    config = read_config(folder if folder.is_file() else folder / "config.json")
    stated = text_part(config).get("dtype") or text_part(config).get("torch_dtype")
    stated = stated or config.get("dtype") or config.get("torch_dtype") or "float32"
    if stated not in DTYPES:
        raise ModelError(f"config.json states dtype {stated!r}; choose one of {', '.join(DTYPES)} with dtype")
    log.info("dtype: %s, as the checkpoint states", stated)
    return DTYPES[stated]


def load_text(options: Options, folder: Path) -> tuple[Tokenizer | None, ChatTemplate | None]:
    if options.model is None and options.tokenizer is None:
        tokenizer = builtin.tokenizer()
        return tokenizer, ChatTemplate(builtin.TEMPLATE, tokenizer.specials)
    if options.tokenizer is not None:
        folder = find_text_files(options.tokenizer)
    folder = folder if folder.is_dir() else folder.parent
    found = load_tokenizer(folder)
    if found is None and options.tokenizer is not None:
        raise ModelError(f"tokenizer: {folder} holds no tokenizer.json")
    return found, None if found is None else load_template(folder, found.specials)


def facts_of(spec: MemorySpec, config: dict[str, Any]) -> Facts:
    per_cell = spec.page_bytes
    window = spec.window_page_bytes * (spec.window_cells + 2)
    return Facts(
        free_bytes=free_bytes(),
        model_length=config.get("max_position_embeddings"),
        bytes_per_token=cells_covering(per_cell, spec.cell),
        fixed_bytes=spec.tail_bytes + 4 * spec.state_bytes + window + 8 * per_cell,
    )


def free_bytes() -> int:
    """Memory that could be had now: the kernel's estimate, cut by the container's limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return max(0, min(free, limit))
