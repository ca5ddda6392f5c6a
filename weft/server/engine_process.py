"""The engine's side: what loads a model and makes an engine of it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from weft.base.options import Options
from weft.server.backend import ModelInfo

if TYPE_CHECKING:
    from weft.engine.loop import Engine
    from weft.memory.ledger import Ledger

BUILTIN_NAME = "builtin"
# A model whose memory does not grow with the text has room for any length; somewhere the count must end.
MOST_CELLS = 1 << 18


def load_engine(options: Options, progress: bool) -> tuple[Engine, ModelInfo]:
    """A model, an engine around it, and what its callers should know. Everything with tensors is imported here."""
    from weft.engine.loop import Engine
    from weft.loading import load
    from weft.runner.runner import Runner

    loaded = load(options, progress)
    config, model = loaded.config, loaded.model
    runner = Runner(model, loaded.spec, config.memory_bytes, config.max_sequences, threads=options.threads or None)
    engine = Engine(loaded.spec, runner, config)
    folder = _folder(options)
    info = ModelInfo(
        name=_name(options.model),
        architecture=_architecture(folder),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        vocab_size=model.vocab_size,
        max_length=config.max_length,
        memory_bytes=config.memory_bytes,
        memory_tokens=_longest(engine.ledger),
        max_sequences=config.max_sequences,
        settings=asdict(config) | {"folder": str(folder), "end_tokens": sorted(loaded.end_tokens)},
    )
    return engine, info


def _folder(options: Options) -> Path:
    from weft import builtin
    from weft.models.weights import find_checkpoint

    return builtin.FOLDER if options.model is None else find_checkpoint(options.model, options.weights != "dummy")


def _name(model: str | None) -> str:
    """A hub id as it is; of a folder only its name, for its path is nobody's business."""
    if model is None:
        return BUILTIN_NAME
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def _architecture(folder: Path) -> str:
    from weft.models.config import read_config

    config = read_config(folder if folder.is_file() else folder / "config.json")
    return str((config.get("architectures") or [config.get("model_type", "unknown")])[0])


def _longest(ledger: Ledger) -> int:
    """Tokens of the longest sequence that memory could hold if it were alone."""
    cell = ledger.spec.cell
    return (bisect_left(range(1, MOST_CELLS), True, key=lambda n: not ledger.fits_alone(n * cell))) * cell
