"""Configurations of public models, packaged: with random weights they run without a download.

Each file is what the model's own config.json says of its text part, without what no engine looks at. They say how large
a model is and what it computes, and hold nothing that was learnt.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
# Other names that people use, and what they stand for.
ALIASES = {"nemotron-nano-9b": "nemotron-nano-9b-v2"}


def names() -> list[str]:
    """
    >>> "nemotron-nano-9b-v2" in names()
    True
    """
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def find(name: str) -> Path | None:
    """The file of a packaged configuration, whatever the case of its name; None if there is none.

    >>> find("LFM2-1.2B").name, find("nemotron-nano-9b").name, find("no-such-model")
    ('lfm2-1.2b.json', 'nemotron-nano-9b-v2.json', None)
    """
    known = ALIASES.get(name.lower(), name.lower())
    return FOLDER / f"{known}.json" if known in names() else None
