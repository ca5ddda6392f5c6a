"""Reads the multipart form of POST /v1/files: small fields, and one file. Linear, within bounds."""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.base.errors import InvalidField, RequestError

MAX_PARTS = 8
MAX_HEAD_BYTES = 1024
MAX_VALUE_BYTES = 256
BOUNDARY = re.compile(r"""boundary=(?:"([^"\r\n]{1,70})"|([^\s";,]{1,70}))""")
NAME = re.compile(rb'name="([^"\r\n]{1,64})"')
FILENAME = re.compile(rb'filename="([^"\r\n]{0,255})"')


@dataclass(frozen=True, slots=True)
class Upload:
    filename: str
    purpose: str
    data: bytes


def read_upload(content_type: str, body: bytes) -> Upload:
    """Return the file and the purpose of a form."""
    fields: dict[str, bytes] = {}
    filename = b""
    for head, value in parts_of(content_type, body):
        name = NAME.search(head)
        if name is None:
            raise RequestError("each part of the form must have a name")
        key = name[1].decode("latin-1")
        if key in fields:
            raise InvalidField(key, "is given twice")
        if key == "file":
            found = FILENAME.search(head)
            filename = b"" if found is None else found[1]
        elif len(value) > MAX_VALUE_BYTES:
            raise InvalidField(key, f"must have at most {MAX_VALUE_BYTES} bytes")
        fields[key] = value
    if "file" not in fields:
        raise InvalidField("file", "must be given, as a part of a multipart form")
    purpose = fields.get("purpose", b"").decode(errors="replace")
    if purpose != "batch":
        raise InvalidField("purpose", f"must be batch, got {purpose!r:.40}")
    shown = filename.decode(errors="replace").rpartition("/")[2]
    return Upload("".join(each for each in shown if each.isprintable()) or "file.jsonl", purpose, fields["file"])


def parts_of(content_type: str, body: bytes) -> list[tuple[bytes, bytes]]:
    """Return the head and the value of each part."""
    found = BOUNDARY.search(content_type)
    if not content_type.startswith("multipart/form-data") or found is None:
        raise RequestError("the body must be a form: multipart/form-data with a boundary", 415)
    mark = b"\r\n--" + (found[1] or found[2]).encode()
    # The first mark has no line before it.
    first, *pieces = (b"\r\n" + body).split(mark, MAX_PARTS + 1)
    if first.strip() or not pieces or not pieces[-1].startswith(b"--"):
        raise RequestError(f"the form must have 1 to {MAX_PARTS} parts and end with its boundary")
    parts = []
    for piece in pieces[:-1]:
        head, between, value = piece.partition(b"\r\n\r\n")
        if not between or len(head) > MAX_HEAD_BYTES:
            raise RequestError(f"each part must have a head of up to {MAX_HEAD_BYTES} bytes, and a value")
        parts.append((head, value))
    return parts
