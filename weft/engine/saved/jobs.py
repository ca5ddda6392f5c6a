"""Prompts on their way to or from files: what each holds, and how far it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weft.base.copies import UnitCopy
from weft.engine.saved.verification import Stretch
from weft.memory.keys import Key
from weft.memory.saved.carriages import KeptPath, LoosePath, OutgoingFile, PromptCarriage
from weft.memory.saved.file import PrefixReader, PrefixWriter, Tokens


@dataclass(slots=True)
class SaveJob:
    """A computed prompt on its way to a file. `number` is that of its request."""

    number: int
    kept: KeptPath
    carriage: OutgoingFile
    writer: PrefixWriter
    tokens: Tokens
    prompt: int
    keys: Sequence[Key]
    tenant: bytes


@dataclass(slots=True)
class LoadJob:
    """A file on its way in, for the question `number`. `stretches` are still to be computed again."""

    number: int
    reader: PrefixReader
    loose: LoosePath
    carriage: PromptCarriage | None
    share: float
    keys: Sequence[Key]
    tenant: bytes
    incoming: bool = True
    stretches: list[Stretch] = field(default_factory=list)
    # The request that computes a stretch, and what it computed.
    computing: int | None = None
    computed: KeptPath | None = None
    verified_tokens: int = 0


Job = SaveJob | LoadJob


class CarriedBatch(NamedTuple):
    job: Job
    carriage: PromptCarriage
    copies: Sequence[UnitCopy]
    ticket: Any
