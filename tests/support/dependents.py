"""The test files that depend on a part of Weft, by imports: `python -m tests.support.dependents weft/memory`.

The nearest come first: those that import it themselves, then those that import what imports it. Imports nothing itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.support.fences import ROOT, imports, module_of, sources, within

# A module that a source starts in another process.
STARTED = re.compile(r'"-m", "([\w.]+)"')


def graph_of(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the modules that each module imports or starts, of those that there are."""
    return {name: {found for each in needed(text) if (found := known(each, modules))} for name, text in modules.items()}


def needed(text: str) -> set[str]:
    started = STARTED.findall(text)
    return imports(text) | {*started, *(f"{each}.__main__" for each in started)}


def known(name: str, modules: Mapping[str, str]) -> str | None:
    """Return the module that a name is, or is defined in."""
    return name if name in modules else next((m for m in [name.rpartition(".")[0]] if m in modules), None)


def dependents(graph: Mapping[str, Iterable[str]], package: str) -> list[str]:
    """Return the modules that need a package, itself included, the nearest first.

    >>> dependents({"a.x": [], "b": ["a.x"], "c": ["b"], "d": []}, "a")
    ['a.x', 'b', 'c']
    """
    found = {name: None for name in graph if within(name, package)}
    while True:
        nearest = [name for name, used in graph.items() if name not in found and not found.keys().isdisjoint(used)]
        if not nearest:
            return list(found)
        found |= dict.fromkeys(nearest)


def dependent_tests(place: Path, modules: Mapping[str, str]) -> list[str]:
    """Return the test files that depend on a folder or file."""
    found = dependents(graph_of(modules), module_of(place.resolve()))
    files = [name.replace(".", "/") + ".py" for name in found]
    return [file for file in files if Path(file).name.startswith("test_")]


if __name__ == "__main__":
    everything = sources("weft") | sources("tests")
    lists = [dependent_tests(ROOT / place, everything) for place in sys.argv[1:]]
    print(*dict.fromkeys(file for each in lists for file in each), sep="\n")
