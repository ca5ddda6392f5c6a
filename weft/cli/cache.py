"""`weft cache`: shows, verifies and drops what a disk tier's file holds, while no server uses it. No torch."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.base.errors import InvalidOption, OptionError
from weft.base.options import option
from weft.cli.options import argument

if TYPE_CHECKING:
    from weft.memory.tiers.disk_file import DiskFile

ABOUT = "show, verify or drop what the file of a disk tier holds"


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Options of `weft cache`."""

    file: str | None = argument("file that --disk named")
    verify: bool = option(False, "read every unit and compare its checksum; exit with code 1 if any is damaged")
    drop: str | None = option(
        None, "overwrite all units of this tenant, as listed, or of all tenants", metavar="TENANT"
    )
    json: bool = option(False, "print JSON for programs")


def run(options: CacheOptions) -> int:
    from weft.memory.tiers.disk_file import open_existing

    if options.file is None:
        raise OptionError("the file of a disk tier must be given; pass the path that --disk named")
    file = open_existing(Path(options.file))
    try:
        report = summary(file)
        if options.verify:
            report["damaged_units"] = sum(not file.is_whole(header) for header in file.found)
        if options.drop is not None:
            report["dropped_units"] = drop(file, options.drop)
    finally:
        file.close()
    print(json.dumps(report, indent=1) if options.json else shown(report))
    return 1 if report.get("damaged_units") else 0


def summary(file: DiskFile) -> dict[str, Any]:
    """Return what a file holds, in numbers. Prompts cannot be read from it."""
    kinds, tenants, sizes = Counter[str](), Counter[str](), Counter[str]()
    for header in file.found:
        kinds[header.kind.value] += 1
        tenants[header.tenant.hex()] += 1
        sizes[header.tenant.hex()] += header.size
    return {
        "fingerprint": file.layout.fingerprint.hex(),
        "file_bytes": file.layout.size_bytes,
        "used_bytes": sum(sizes.values()),
        "units": dict(kinds),
        "damaged_headers": file.damaged,
        "tenants": {name: {"units": count, "bytes": sizes[name]} for name, count in tenants.most_common()},
    }


def drop(file: DiskFile, tenant: str) -> int:
    """Overwrite the units of a tenant with zeros; return their number."""
    gone = [each for each in file.found if tenant in ("all", each.tenant.hex())]
    if not gone and tenant != "all":
        raise InvalidOption("drop", f"must be a tenant of this file, or all; it has none called {tenant[:64]!r}")
    file.erase((each.kind, each.unit) for each in gone)
    return len(gone)


def shown(report: dict[str, Any]) -> str:
    units = ", ".join(f"{count} {kind}s" for kind, count in report["units"].items()) or "no units"
    lines = [
        f"model    {report['fingerprint'][:16]}",
        f"file     {report['file_bytes'] / 2**20:.0f} MiB, {report['used_bytes'] / 2**20:.1f} MiB in use",
        f"units    {units}",
        f"damaged  {report['damaged_headers']} headers",
    ]
    if "damaged_units" in report:
        lines[-1] += f", {report['damaged_units']} units"
    lines += [f"tenant   {name}  {each['units']} units" for name, each in report["tenants"].items()]
    if "dropped_units" in report:
        lines.append(f"dropped  {report['dropped_units']} units")
    return "\n".join(lines)
