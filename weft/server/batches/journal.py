"""The journal of a batch: one line for each answer, appended at once, from which a restart continues.

A line is written by one call, so after a crash only the last one can be incomplete; it is cut off and answered again.
So every request has exactly one line in the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from weft.server.access.rates import Used


class BatchError(msgspec.Struct, frozen=True):
    code: str | None
    message: str


class BatchResponse(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchAnswer(msgspec.Struct, frozen=True):
    """A line of the output, in the shape of OpenAI's. `error` is for requests that could not be sent."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: BatchError | None = None

    @property
    def succeeded(self) -> bool:
        return self.response is not None and self.response.status_code < 400


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Usage under the names of chat and completions, and of responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


@dataclass(slots=True)
class BatchProgress:
    """LineCounts of a batch so far. `cached` are the tokens that sharing prefixes saved."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def add(self, answer: BatchAnswer) -> None:
        if not answer.succeeded or answer.response is None:
            self.failed += 1
            return
        self.completed += 1
        used = used_by(answer.response.body)
        self.prompt += used.prompt
        self.cached += used.cached
        self.generated += used.generated

    @property
    def done(self) -> int:
        return self.completed + self.failed

    def usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt + self.generated,
        }


def used_by(body: msgspec.Raw) -> Used:
    """Return the tokens that an answer reports."""
    try:
        usage = msgspec.json.decode(body, type=_Body).usage or _Usage()
    except msgspec.DecodeError:
        return Used()
    details = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    prompt, generated = usage.prompt_tokens or usage.input_tokens, usage.completion_tokens or usage.output_tokens
    return Used(prompt, details.cached_tokens or 0, generated)


class BatchJournal:
    """The answers of one batch, in the order in which they came."""

    def __init__(self, path: Path) -> None:
        """Open a journal, or create it. An incomplete last line is cut off."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.path = path
        self.size = end_of_lines(path)
        os.ftruncate(self._file, self.size)

    def append(self, answer: BatchAnswer) -> None:
        data = memoryview(msgspec.json.encode(answer) + b"\n")
        self.size += len(data)
        while data:
            data = data[os.write(self._file, data) :]

    def answers(self) -> Iterator[BatchAnswer]:
        yield from read_answers(self.path)

    def close(self) -> None:
        os.close(self._file)


def end_of_lines(path: Path) -> int:
    """Return the size of a file up to the end of its last complete line."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line) if line.endswith(b"\n") else 0
    return end


def read_answers(path: Path) -> Iterator[BatchAnswer]:
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield msgspec.json.decode(line, type=BatchAnswer)
