"""Prints a software bill of materials of this environment in CycloneDX's JSON: Weft and everything that it requires.

    python release/sbom.py [--extra cuda] > weft.cdx.json

It reads the metadata of what is installed, so it describes just this environment; run it where Weft runs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

ROOT = "weft-serve"
REQUIREMENT = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?[^;]*(?:;(.*))?$")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python release/sbom.py", description=__doc__.splitlines()[0])
    parser.add_argument("--extra", action="append", default=[], help="with what an extra of Weft requires")
    print(json.dumps(bill(parser.parse_args().extra), indent=2))
    return 0


def bill(extras: Iterable[str] = ()) -> dict[str, Any]:
    """Return the bill: a component for each installed package, and what each of them requires."""
    found = collected(extras)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(found[ROOT][0])},
        "components": [component(each) for name, (each, _) in sorted(found.items()) if name != ROOT],
        "dependencies": [
            {"ref": reference(each), "dependsOn": sorted(reference(found[name][0]) for name in names if name in found)}
            for each, names in found.values()
        ],
    }


def collected(extras: Iterable[str]) -> dict[str, tuple[Distribution, list[str]]]:
    """Return all packages that Weft requires here, and the names of what each requires."""
    found: dict[str, tuple[Distribution, list[str]]] = {}
    waiting = [(ROOT, frozenset(extras))]
    while waiting:
        name, wanted = waiting.pop()
        if name in found:
            continue
        try:
            each = distribution(name)
        except PackageNotFoundError:
            # Required elsewhere, such as on another system.
            continue
        names = requirements(each.requires or [], wanted)
        found[name] = (each, names)
        waiting += [(other, frozenset()) for other in names]
    if ROOT not in found:
        raise SystemExit(f"{ROOT} is not installed here")
    return found


def requirements(lines: Iterable[str], extras: frozenset[str]) -> list[str]:
    """Return the names that metadata requires, those of other extras left out.

    >>> requirements(["A.b>=1", 'c; extra == "cuda"', 'd[x]>2; extra == "test"'], frozenset({"cuda"}))
    ['a-b', 'c']
    """
    names = []
    for line in lines:
        found = REQUIREMENT.match(line)
        if found is None:
            continue
        extra = re.search(r"""extra\s*==\s*['"]([\w.-]+)""", found[2] or "")
        if extra is None or extra[1] in extras:
            names.append(re.sub(r"[-_.]+", "-", found[1]).lower())
    return names


def component(each: Distribution) -> dict[str, Any]:
    licence = each.metadata.get("License-Expression") or each.metadata.get("License") or ""
    found: dict[str, Any] = {"type": "library", "bom-ref": reference(each), "name": each.name, "version": each.version}
    found["purl"] = reference(each)
    # Some packages put the whole text there.
    if licence and len(licence) < 100:
        found["licenses"] = [{"license": {"name": licence}}]
    return found


def reference(each: Distribution) -> str:
    return f"pkg:pypi/{re.sub(r'[-_.]+', '-', each.name).lower()}@{each.version}"


if __name__ == "__main__":
    sys.exit(main())
