"""Packaged configurations of public models: with random weights they run without a download.

Each file has the text part of the model's own config.json, without fields that no engine reads. It defines a model's
size and computation, and contains nothing learnt.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
# Common aliases.
ALIASES = {"nemotron-nano-9b": "nemotron-nano-9b-v2"}


def names() -> list[str]:
    """Return the names of all packaged configurations.

    >>> "nemotron-nano-9b-v2" in names()
    True
    """
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def find(name: str) -> Path | None:
    """Return the file of a packaged configuration, ignoring the case of its name; None if there is none.

    >>> find("LFM2-1.2B").name, find("nemotron-nano-9b").name, find("no-such-model")
    ('lfm2-1.2b.json', 'nemotron-nano-9b-v2.json', None)
    """
    known = ALIASES.get(name.lower(), name.lower())
    return FOLDER / f"{known}.json" if known in names() else None
