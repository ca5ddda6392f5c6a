"""Lines of a batch: checked within bounds, and ordered so that prompts which begin alike follow each other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from weft.base.errors import RequestError
from weft.server.settings import Limits
from weft.server.texts.bodies import check_depth

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
# Higher numbers are scheduled later: every interactive request comes first.
PRIORITY = (1 << 31) - 1
# Where a body has its prompt.
PROMPTS = ("messages", "prompt", "input")
# What a line may have besides its body.
FRAME_BYTES = 4096
# Characters of a prompt that decide on its place. Longer common beginnings are rare, and found anyway.
KEY_CHARACTERS = 1 << 14
MAX_PROBLEMS = 20


class BatchLine(msgspec.Struct, kw_only=True):
    """One line of the input: a request, and the client's id of it."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: str = "POST"
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LinePlace:
    """Where a line is in its file, and the client's id of it."""

    custom_id: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A line as it is sent: its body as JSON, and how many sequences it opens at once."""

    custom_id: str
    url: str
    body: bytes
    sequences: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a line cannot be part of a batch. `line` counts from 1."""

    line: int
    message: str


class InvalidBatch(Exception):
    """A file that is not a batch, with its first problems."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"line {each.line}: {each.message}" for each in problems[:3]))
        self.problems = problems


def places_of(path: Path, endpoint: str | None, limits: Limits) -> list[LinePlace]:
    """Return a file's lines in the order in which to answer them. `endpoint`: the only one allowed."""
    found: list[tuple[str, str, LinePlace]] = []
    problems: list[Problem] = []
    names: set[str] = set()
    with path.open("rb") as file:
        start = 0
        for number, data in enumerate(file, 1):
            if data.strip():
                try:
                    line = checked(data, endpoint, limits)
                    if line.custom_id in names:
                        raise RequestError(f"custom_id {line.custom_id!r:.80} is given twice")
                    names.add(line.custom_id)
                    found.append((*key_of(line), LinePlace(line.custom_id, start, len(data))))
                except RequestError as error:
                    problems.append(Problem(number, str(error)))
            start += len(data)
            if len(names) > limits.batch_lines:
                problems = [Problem(number, f"a batch may have {limits.batch_lines} lines")]
            if len(problems) >= MAX_PROBLEMS or len(names) > limits.batch_lines:
                break
    if not found and not problems:
        problems.append(Problem(1, "the file has no requests"))
    if problems:
        raise InvalidBatch(problems)
    return [place for _, _, place in sorted(found, key=lambda each: each[:2])]


def checked(data: bytes, endpoint: str | None, limits: Limits) -> BatchLine:
    """Return a line, after checking all that can be known without its endpoint."""
    if len(data) > limits.body_bytes + FRAME_BYTES:
        raise RequestError(f"has {len(data)} bytes; the limit is {limits.body_bytes}")
    check_depth(data, limits.json_depth)
    try:
        line = msgspec.json.decode(data, type=BatchLine)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"is not a request: {error}") from None
    if line.method != "POST":
        raise RequestError(f"method must be POST, got {line.method!r:.20}")
    if line.url not in ENDPOINTS or (endpoint is not None and line.url != endpoint):
        allowed = endpoint or " or ".join(ENDPOINTS)
        raise RequestError(f"url must be {allowed}, got {line.url!r:.80}")
    if line.body.get("stream"):
        raise RequestError("body.stream must not be true in a batch")
    return line


def key_of(line: BatchLine) -> tuple[str, str]:
    """Return what orders lines: bodies whose prompts begin alike have keys that begin alike."""
    system = [line.body.get(name) for name in ("model", "instructions", "tools", "cache_salt")]
    prompt = next((line.body[name] for name in PROMPTS if name in line.body), None)
    return json.dumps([line.url, *system])[:KEY_CHARACTERS], json.dumps(prompt)[:KEY_CHARACTERS]


def request_at(source: Path, place: LinePlace, limits: Limits) -> LineRequest:
    """Return the line at a place of a file, as it was checked before. Call it in a thread: a line may be large."""
    with source.open("rb") as file:
        file.seek(place.start)
        line = msgspec.json.decode(file.read(place.size), type=BatchLine)
    # The route refuses, or computes in parts, what is beyond its limit.
    sequences = min(sequences_of(line.body), limits.sequences)
    body = msgspec.json.encode({**line.body, "priority": PRIORITY})
    return LineRequest(line.custom_id, line.url, body, sequences)


def sequences_of(body: dict[str, Any]) -> int:
    """Return how many sequences a body asks for: one for each prompt and answer.

    >>> sequences_of({"messages": [{}, {}], "n": 3}), sequences_of({"prompt": ["a", [1, 2]], "n": 2})
    (3, 4)
    >>> sequences_of({"prompt": [1, 2]}), sequences_of({"input": ["a", "b"]})
    (1, 2)
    """
    n = body.get("n")
    answers = n if isinstance(n, int) and n > 0 else 1
    prompts = next((body[name] for name in ("prompt", "input") if name in body), None)
    if isinstance(prompts, list) and any(isinstance(each, str | list) for each in prompts):
        return answers * len(prompts)
    return answers
