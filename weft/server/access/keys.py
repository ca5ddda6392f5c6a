"""Keys as operators write them: plain strings, or lines of a file that only the operator can change.

A line is `KEY`, or `NAME KEY` and the key's limits. `auth.py` decides what a key may do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from weft.base.errors import OptionError
from weft.base.guarded_files import read_guarded

# Every request is compared with all keys, at about 0.2 µs each.
MAX_KEYS = 1024
MAX_KEY_CHARACTERS = 512
MAX_RATE = 10**9
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NAME_FORM = "a key's name must have 1 to 64 letters, digits, dots, underscores and dashes"
ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Limits of one key. 0 is unlimited; None takes the server's default."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not 0 <= value <= MAX_RATE:
                raise OptionError(f"{each.name} must be from 0 (unlimited) to {MAX_RATE}, got {value}")

    def filled(self, default: RateLimits) -> RateLimits:
        """
        >>> RateLimits(requests_per_minute=0).filled(RateLimits(60, 1000))
        RateLimits(requests_per_minute=0, tokens_per_minute=1000)
        """
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(default, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Key:
    """`name` stands for the key in logs and metrics. A key without one is named by its place: key-1, key-2."""

    secret: str = field(repr=False)
    name: str = ""
    rates: RateLimits = RateLimits()
    admin: bool = False

    def __post_init__(self) -> None:
        secret = self.secret
        if not secret.isascii() or not secret.isprintable() or not secret or " " in secret:
            raise OptionError("api_keys must be non-empty ASCII without spaces")
        if len(secret) > MAX_KEY_CHARACTERS:
            raise OptionError(f"api_keys must have at most {MAX_KEY_CHARACTERS} characters, got {len(secret)}")
        # The message omits the name: it may be a secret in the wrong place.
        if self.name and not NAME.fullmatch(self.name):
            raise OptionError(NAME_FORM)


def resolve_keys(api_keys: Sequence[str | Key], admin_key: str | Key | None, default: RateLimits) -> tuple[Key, ...]:
    """Return all keys with names, limits and rights. Without an admin key, a single key is its own admin.

    `default` applies to API keys; the admin key has only the limits of its own line.
    """
    admin = None if admin_key is None else as_key(admin_key)
    found = []
    for place, key in enumerate(map(as_key, api_keys), 1):
        may_all = len(api_keys) == 1 if admin is None else key.secret == admin.secret
        name = key.name or f"key-{place}"
        found.append(replace(key, name=name, rates=key.rates.filled(default), admin=may_all))
    if admin is not None and not any(key.admin for key in found):
        found.append(replace(admin, name=admin.name or ADMIN, admin=True))
    _check_together(found)
    return tuple(found)


def as_key(given: str | Key) -> Key:
    return Key(given) if isinstance(given, str) else given


def _check_together(keys: Sequence[Key]) -> None:
    if len(keys) > MAX_KEYS:
        raise OptionError(f"api_keys must have at most {MAX_KEYS} entries, got {len(keys)}")
    if len({key.secret for key in keys}) != len(keys):
        raise OptionError("api_keys has the same key twice")
    names = [key.name for key in keys]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise OptionError(f"api_keys has two keys named {twice}; names must be unique")


# files ----------------------------------------------------------------------------------------------------------------


def read_key_file(option: str, path: str) -> tuple[Key, ...]:
    """Return the keys of a file. Raises if another user could change them; logs a warning if another can read them."""
    text = read_guarded(option, path)
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            key = parse_line(line)
        except OptionError as error:
            raise OptionError(f"{option} {path}, line {number}: {error}") from None
        if key is not None:
            found.append(key)
    if not found:
        raise OptionError(f"{option} {path} has no key")
    return tuple(found)


def parse_line(line: str) -> Key | None:
    """Return the key of a line; None for an empty line and a comment.

    >>> parse_line("alice sesame tokens_per_minute=1000")
    Key(name='alice', rates=RateLimits(requests_per_minute=None, tokens_per_minute=1000), admin=False)
    >>> parse_line("# keys of the team"), parse_line("sesame").name
    (None, '')
    """
    words = line.split()
    if not words or words[0].startswith("#"):
        return None
    if len(words) == 1:
        return Key(words[0])
    name, secret, *limits = words
    if secret.partition("=")[0] in RATES:
        raise OptionError("a key with limits needs a name: NAME KEY LIMIT=NUMBER")
    return Key(secret, name, _parse_rates(limits))


RATES = tuple(each.name for each in fields(RateLimits))


def _parse_rates(words: Sequence[str]) -> RateLimits:
    # The message quotes no word: it may be part of a key with a space in it.
    found: dict[str, int] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in RATES or name in found or not (value.isascii() and value.isdigit()) or len(value) > 10:
            raise OptionError(f"only limits may follow NAME KEY: {', '.join(f'{each}=NUMBER' for each in RATES)}")
        found[name] = int(value)
    return RateLimits(**found)
