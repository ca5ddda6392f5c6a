"""`weft config`: prints the options that `weft serve` would run with, and where each was given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from weft.base.options import option
from weft.cli.serve import ServeOptions

ABOUT = "check the options of weft serve, and print where each was given"
HIDDEN = ("api_key", "admin_key")


@dataclass(frozen=True, kw_only=True)
class ConfigOptions(ServeOptions):
    """Options of `weft config`: all of `weft serve`, which they describe."""

    show: bool = option(False, "print all options, not only those that were given")


def run(options: ConfigOptions, names: Mapping[str, str]) -> None:
    """`names` says how each option was given."""
    rows = [
        (each.name.replace("_", "-"), shown(each.name, getattr(options, each.name)), names.get(each.name, "default"))
        for each in fields(ServeOptions)
        if options.show or each.name in names
    ]
    if not rows:
        print("every option has its default; --show prints them")
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    for name, value, source in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}")


def shown(name: str, value: Any) -> str:
    """
    >>> shown("api_key", ("secret",)), shown("limit", ("n=4", "tools=5")), shown("disk", None), shown("cache", True)
    ('(hidden)', 'n=4,tools=5', '-', 'on')
    """
    if name in HIDDEN and value:
        return "(hidden)"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(value) or "-"
    return "-" if value is None else str(value)
