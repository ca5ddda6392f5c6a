"""Columns of a benchmark: what a user gets without any option first, and then what an option changes."""

from __future__ import annotations

# The column of a user who sets no option.
DEFAULT = "default"
# What users get, and the same without drafts.
COLUMNS = (DEFAULT, "draft=off")


def options_of(column: str) -> dict[str, str | bool]:
    """Return the options of a column by name.

    >>> options_of("draft=off,exact=false"), options_of("default")
    ({'draft': 'off', 'exact': False}, {})
    """
    given = {} if column == DEFAULT else dict(each.split("=", 1) for each in column.split(","))
    return {name: {"true": True, "false": False}.get(value, value) for name, value in given.items()}
