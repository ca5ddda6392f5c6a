"""Whether two machines have the same model's files: a digest of what a front needs of a model."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from weft.base.gguf.header import is_gguf, read_header

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"


def text_digest(model: Path, texts: Path) -> str:
    """Return the digest of a model's configuration and of the tokenizer in a folder; what is missing counts too.

    `model` is the folder of the model, its configuration file or its GGUF file.
    """
    parts = (model / CONFIG if model.is_dir() else model, texts if is_gguf(texts) else texts / TOKENIZER)
    return sha256(b"".join(map(digest_of, parts))).hexdigest()


def digest_of(part: Path) -> bytes:
    """Return the digest of a file, which may be missing; of a GGUF file, that of its header."""
    if not part.is_file():
        return bytes(32)
    if not is_gguf(part):
        return sha256(part.read_bytes()).digest()
    size = read_header(part).bytes
    with part.open("rb") as file:
        return sha256(file.read(size)).digest()
