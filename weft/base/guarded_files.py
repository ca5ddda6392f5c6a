"""Small files with secrets, which only the operator may be able to change."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from weft.base.errors import OptionError

log = logging.getLogger("weft.server")

MAX_FILE_BYTES = 1 << 20
MAX_LINKS = 40


def read_guarded(option: str, path: str) -> str:
    """Return the text of a small file. Raises if another user could change it, or the way to it."""
    place = Path(path).expanduser()
    try:
        _check_path(place)
        return _read(place)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"cannot read {option} {path}: {reason}") from None
    except OptionError as error:
        raise OptionError(f"{option} {path} is refused: {error}") from None


def _read(path: Path) -> str:
    # Opening a pipe would wait for its writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise OptionError("a key file must be a regular file")
        if others_can_write(state):
            raise OptionError("users other than its owner and root can write to it; run chmod 600, chown")
        if others_can_read(state):
            log.warning("other users can read the key file %s; run chmod 600", path)
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise OptionError(f"a key file must have at most {MAX_FILE_BYTES} bytes")
    return data.decode()


def _check_path(path: Path) -> None:
    """Refuse a path that another user could redirect to another file, as sshd does."""
    for place in lookups(path):
        state = place.lstat()
        sticky = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX
        # Links have no permissions of their own.
        writable = not stat.S_ISLNK(state.st_mode) and state.st_mode & 0o022 and not sticky
        if foreign(state) or writable:
            raise OptionError(f"users other than its owner and root can change {place}")


def lookups(path: Path) -> Iterator[Path]:
    """Yield every directory that is searched on the way to a file, and every symbolic link that is followed."""
    path = path.absolute()
    at, left, links = Path(path.anchor), list(path.parts[:0:-1]), 0
    while left:
        yield at
        name = left.pop()
        if name == "..":
            at = at.parent
        elif not (at / name).is_symlink():
            at /= name
        else:
            yield at / name
            links += 1
            if links > MAX_LINKS:
                raise OptionError("too many symbolic links lead to it")
            target = Path(os.readlink(at / name))
            left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            at = Path(target.anchor) if target.is_absolute() else at


def foreign(state: os.stat_result) -> bool:
    """Return whether the owner is neither root nor the user of this process."""
    return state.st_uid not in (0, os.geteuid())


def others_can_write(state: os.stat_result) -> bool:
    return foreign(state) or bool(state.st_mode & 0o022)


def others_can_read(state: os.stat_result) -> bool:
    """Return whether other users can read the file; a root-owned file that we read by group is meant to be shared."""
    shared = state.st_uid == os.geteuid() and state.st_mode & 0o040
    return bool(state.st_mode & 0o004 or shared)
