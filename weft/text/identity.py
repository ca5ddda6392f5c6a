"""Whether two machines have the same model's files: a digest of what a front needs of a model."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"


def text_digest(model: Path, texts: Path) -> str:
    """Return the digest of a model's configuration and of the tokenizer in a folder; what is missing counts too.

    `model` is the folder of the model, or its configuration file.
    """
    parts = (model / CONFIG if model.is_dir() else model, texts / TOKENIZER)
    found = b"".join(sha256(part.read_bytes()).digest() if part.is_file() else bytes(32) for part in parts)
    return sha256(found).hexdigest()
