"""Keys that sign prompts in files, and the signatures: HMAC-SHA256 over every byte of a file.

A state cannot be checked against its tokens without computing it: the writer of a file decides what a model reads.
The secret of a key is shared by those who write files and those who read them. Every reader can therefore sign too.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from weft.base.errors import OptionError, RequestError
from weft.base.guarded_files import read_guarded

SECRET_BYTES = 32
MOST_KEYS = 64
# The end of a file's first block: the name of the key, and the signature, which counts as zeros in what is signed.
FIRST_BLOCK = 4096
NAME_BYTES, SIGNATURE_BYTES = 16, 32
_SIGNATURE_AT = FIRST_BLOCK - SIGNATURE_BYTES
_NAME_AT = _SIGNATURE_AT - NAME_BYTES
_PURPOSE = b"weft prefix file 1\n"
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """A secret. Its name is a digest, from which the secret cannot be computed."""

    secret: bytes = field(repr=False)

    @property
    def name(self) -> bytes:
        return sha256(b"weft prefix key\n" + self.secret).digest()[:NAME_BYTES]


def make_key(path: Path) -> PrefixKey:
    """Write a new key to a new file that only this user can read."""
    key = PrefixKey(secrets.token_bytes(SECRET_BYTES))
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise OptionError(f"{path} cannot be created: {error.strerror}; pass a new path") from None
    with os.fdopen(handle, "w") as file:
        file.write(f"# A key for prompts in files: keep it secret.\n{key.secret.hex()}\n")
    return key


def read_prefix_keys(option: str, path: str) -> tuple[PrefixKey, ...]:
    """Return the keys of a file: one on each line, as `weft cache --make-key` writes them."""
    found = []
    for number, line in enumerate(read_guarded(option, path).splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        # The message quotes nothing: it may be a secret.
        if len(text) != 2 * SECRET_BYTES or not set(text) <= set("0123456789abcdef"):
            raise OptionError(f"{option} {path}, line {number}: a key has {2 * SECRET_BYTES} hexadecimal letters")
        found.append(PrefixKey(bytes.fromhex(text)))
    if not 0 < len(found) <= MOST_KEYS:
        raise OptionError(f"{option} {path} must have 1 to {MOST_KEYS} keys, got {len(found)}")
    return tuple(found)


def read_signing_key(option: str, path: str) -> PrefixKey:
    """Return the key of a file that has one."""
    keys = read_prefix_keys(option, path)
    if len(keys) != 1:
        raise OptionError(f"{option} {path} must have one key, got {len(keys)}")
    return keys[0]


def sign(file: BinaryIO, key: PrefixKey) -> None:
    """Sign a file that is open for reading and writing."""
    file.seek(_NAME_AT)
    file.write(key.name)
    signature = _signature(file, key)
    file.seek(_SIGNATURE_AT)
    file.write(signature)
    file.flush()


def check_signature(file: BinaryIO, keys: Sequence[PrefixKey]) -> PrefixKey:
    """Return the key that has signed a file. Raises unless it is one of these."""
    file.seek(0)
    block = file.read(FIRST_BLOCK)
    if len(block) < FIRST_BLOCK:
        raise RequestError("the file is no prompt in a file: it is too short")
    name, signature = block[_NAME_AT:_SIGNATURE_AT], block[_SIGNATURE_AT:]
    signer = None
    for key in keys:
        if hmac.compare_digest(key.name, name):
            signer = key
    if signer is None or not hmac.compare_digest(_signature(file, signer), signature):
        raise RequestError("the file is not signed by a trusted key, or was changed since", 403)
    return signer


def _signature(file: BinaryIO, key: PrefixKey) -> bytes:
    found = hmac.new(key.secret, _PURPOSE, sha256)
    file.seek(0)
    found.update(file.read(FIRST_BLOCK)[:_SIGNATURE_AT] + bytes(SIGNATURE_BYTES))
    while piece := file.read(PIECE_BYTES):
        found.update(piece)
    return found.digest()
