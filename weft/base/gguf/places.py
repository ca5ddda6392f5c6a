"""Where GGUF files are: a path, a folder with one, or a hub repository with many, of which a name or tag chooses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from weft.base.errors import ModelError
from weft.base.gguf.header import is_gguf

# What a repository's files are called, without a tag to choose by.
DEFAULT_TAG = "Q4_K_M"
HUB = re.compile(r"([\w.-]+/[\w.-]+?)(?::([\w.-]+)|/([\w./-]+\.gguf))?", re.IGNORECASE)
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
MOST_SHOWN = 12


def local_file(path: Path) -> Path | None:
    """Return the file of a path, or of a folder whose only weights are in one; None if the path is neither."""
    if path.is_file():
        return path if is_gguf(path) else None
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    names = candidates([each.name for each in path.iterdir()])
    if len(names) > 1:
        raise ModelError(f"{path} has several models; pass one of its files: {some(names)}")
    return path / names[0] if names else None


def hub_place(name: str) -> tuple[str, str] | None:
    """Return repository and tag or file name, if a name is one of a hub repository with GGUF files.

    >>> hub_place("owner/name:Q8_0"), hub_place("owner/name-GGUF/a.gguf"), hub_place("owner/name-GGUF")
    (('owner/name', 'Q8_0'), ('owner/name-GGUF', 'a.gguf'), ('owner/name-GGUF', ''))
    >>> hub_place("owner/name"), hub_place("name.gguf")
    (None, None)
    """
    found = HUB.fullmatch(name)
    if found is None:
        return None
    wanted = found[2] or found[3] or ""
    return (found[1], wanted) if wanted or found[1].lower().endswith("-gguf") else None


def chosen(names: Sequence[str], wanted: str, place: str) -> list[str]:
    """Return the files of the model that a file name or a tag chooses, the first of several first."""
    models = candidates(names)
    if is_gguf(Path(wanted)):
        found = [name for name in models if name == wanted]
    else:
        # A tag is a whole word: Q4_K is no Q4_K_M.
        tag = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(wanted or DEFAULT_TAG)}(?![A-Za-z0-9_])", re.IGNORECASE)
        found = [name for name in models if tag.search(name)]
        if not wanted and not found and len(models) == 1:
            found = models
    if len(found) != 1:
        what = "no file" if not found else "several files"
        raise ModelError(
            f"{place} has {what} for {wanted or DEFAULT_TAG}; pass {place}:TAG or {place}/FILE of {some(models)}"
        )
    parts = PART.search(found[0])
    if parts is None:
        return found
    stem = found[0][: parts.start()]
    return [name for name in sorted(names) if name.startswith(stem) and PART.search(name)]


def candidates(names: Sequence[str]) -> list[str]:
    """Return the files of models: of several parts the first one, and none of projectors for images.

    >>> candidates(["b-00002-of-00002.gguf", "b-00001-of-00002.gguf", "mmproj-a.gguf", "README.md", "a.gguf"])
    ['a.gguf', 'b-00001-of-00002.gguf']
    """
    found = [name for name in names if is_gguf(Path(name)) and not Path(name).name.lower().startswith("mmproj")]
    return sorted(name for name in found if (part := PART.search(name)) is None or int(part[1]) == 1)


def some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return (", ".join(names[:MOST_SHOWN]) or "no GGUF file") + more
