"""`weft cache`: shows, verifies, drops, exports and imports what a disk tier's file holds, while no server uses it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.base.errors import InvalidOption, OptionError
from weft.base.options import memory_bytes, option
from weft.cli.options import argument

if TYPE_CHECKING:
    from weft.memory.tiers.disk.file import DiskFile
    from weft.memory.tiers.disk.format import ModelPart

ABOUT = "show, verify, drop, export or import what the file of a disk tier holds; make a key for prompts in files"
LEAST_LETTERS = 16


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Options of `weft cache`."""

    file: str | None = argument("file that --disk named")
    list: int = option(
        0,
        "list up to this many resume points, the longest first: key, tokens, tenant, and why each was kept",
        metavar="COUNT",
    )
    verify: bool = option(False, "read every unit and compare its checksum; exit with code 1 if any is damaged")
    drop: str | None = option(
        None,
        "overwrite all units of this tenant, as listed, or of all tenants, also in the files of further ranks",
        metavar="TENANT",
    )
    prefix: str | None = option(
        None,
        "cell whose path --export-to writes: 16 or more letters of its key, as --list and GET /cache show it",
        metavar="KEY",
    )
    export_to: str | None = option(
        None, "write a prefix to this new file, to ship it with a deployment", metavar="PATH"
    )
    import_from: str | None = option(
        None,
        "add the prefix in this file, which is trusted like weights, and make the tier's file if there is none",
        metavar="PATH",
    )
    size: str | int | None = option(None, "size of a tier's file that --import-from makes, as --disk-size will say")
    make_key: str | None = option(
        None,
        "write a new key for --prefix-key and --trusted-prefix-keys to this new file; needs no tier",
        metavar="PATH",
    )
    json: bool = option(False, "print JSON for programs")


def run(options: CacheOptions) -> int:
    from weft.memory.tiers.disk.file import open_existing

    if options.make_key is not None:
        return make_prefix_key(options.make_key)
    if options.file is None:
        raise OptionError("the file of a disk tier must be given; pass the path that --disk named")
    if options.list < 0:
        raise InvalidOption("list", f"must not be negative, got {options.list}")
    if options.prefix is not None and options.export_to is None:
        raise InvalidOption("prefix", "needs --export-to, the file that it is written to")
    made = None if options.import_from is None else make_file(Path(options.file), options)
    file = made or open_existing(Path(options.file))
    try:
        report = {} if options.import_from is None else imported(file, Path(options.import_from))
        if options.export_to is not None:
            report["exported_units"] = export(file, options)
        if options.drop is not None:
            report["dropped_units"] = drop(file, Path(options.file), options.drop)
            file.reread()
        # What the file holds now.
        report |= summary(file)
        if options.list:
            report["prefixes"] = prefixes(file, options.list)
        if options.verify:
            report["damaged_units"] = sum(not file.is_whole(header) for header in file.found)
    finally:
        file.close()
    print(json.dumps(report, indent=1) if options.json else shown(report))
    return 1 if report.get("damaged_units") else 0


def make_prefix_key(path: str) -> int:
    from weft.base.prefix_keys import make_key

    print(f"key {make_key(Path(path)).name.hex()} is in {path}; copy it to those who save and load the same prompts")
    return 0


def make_file(path: Path, options: CacheOptions) -> DiskFile | None:
    """Make the file of a tier for the model of a prefix file, if there is none yet."""
    from weft.memory.tiers.disk.file import open_file
    from weft.memory.tiers.disk.format import DiskLayout
    from weft.memory.tiers.disk.prefix_file import read_head

    if path.exists() or options.import_from is None:
        return None
    size = None if options.size is None else memory_bytes(options.size, "size")
    if size is None:
        raise InvalidOption("size", f"must be given, because {path} does not exist yet; pass what --disk-size will say")
    with readable(Path(options.import_from)).open("rb") as opened:
        head = read_head(opened, options.import_from)
    return open_file(path, DiskLayout.of(head.identity, head.unit_bytes, size))


def readable(path: Path) -> Path:
    if not path.is_file():
        raise InvalidOption("import_from", f"{path} is no file; pass one that --export-to wrote")
    return path


def imported(file: DiskFile, source: Path) -> dict[str, Any]:
    from weft.memory.tiers.disk.prefix_file import import_prefix

    count = import_prefix(file, readable(source))
    file.reread()
    return {"imported_units": count}


def export(file: DiskFile, options: CacheOptions) -> int:
    from weft.memory.tiers.disk.prefix_file import export_prefix

    letters = options.prefix or ""
    if len(letters) < LEAST_LETTERS or len(letters) % 2 or not set(letters) <= set("0123456789abcdef"):
        raise InvalidOption("prefix", f"must be {LEAST_LETTERS} to 64 hexadecimal letters of a cell's key")
    assert options.export_to is not None
    if file.layout.part.ranks > 1:
        raise InvalidOption("export_to", f"needs the file of a whole model; this one holds {file.layout.part}")
    return export_prefix(file, bytes.fromhex(letters), Path(options.export_to))


def summary(file: DiskFile) -> dict[str, Any]:
    """Return what a file holds, in numbers. Prompts cannot be read from it."""
    kinds, tenants, sizes = Counter[str](), Counter[str](), Counter[str]()
    for header in file.found:
        kinds[header.kind.value] += 1
        tenants[header.tenant.hex()] += 1
        sizes[header.tenant.hex()] += header.size
    return {
        "fingerprint": file.layout.identity.fingerprint.hex(),
        "computed_by": file.layout.identity.revisions,
        "exact": file.layout.identity.exact,
        "part": str(file.layout.part),
        "file_bytes": file.layout.size_bytes,
        "used_bytes": sum(sizes.values()),
        "units": dict(kinds),
        "damaged_headers": file.damaged,
        "tenants": {name: {"units": count, "bytes": sizes[name]} for name, count in tenants.most_common()},
    }


def prefixes(file: DiskFile, most: int) -> list[dict[str, Any]]:
    """Return the longest prefixes that a request can resume from. Each is named by the beginning of its key."""
    from weft.memory.kinds import Kind

    kind = next((each for each in (Kind.STATE, Kind.WINDOW) if each in file.layout.unit_bytes), Kind.PAGE)
    # Without states, a request can resume at any cell: the ends of paths stand for all of them.
    inner = {each.parent for each in file.found} if kind is Kind.PAGE else set()
    found = {each.key: each for each in sorted(file.found, key=lambda each: each.position) if each.kind is kind}
    ends = [each for key, each in found.items() if key not in inner]
    return [
        {
            "key": each.key.hex()[:LEAST_LETTERS],
            "tokens": each.position,
            "tenant": each.tenant.hex(),
            "origin": each.origin.value,
        }
        for each in nlargest(most, ends, key=lambda each: each.position)
    ]


def drop(file: DiskFile, path: Path, tenant: str) -> int:
    """Overwrite the units of a tenant with zeros, also in the files of other ranks; return their number."""
    part = file.layout.part
    if part.rank:
        raise InvalidOption("drop", f"needs the first rank's file, beside which it finds all others; this is {part}'s")
    with ExitStack() as opened:
        files = [file, *(opened.enter_context(closing(each)) for each in files_of_ranks(path, part))]
        gone = [[each for each in one.found if tenant in ("all", each.tenant.hex())] for one in files]
        if not any(gone) and tenant != "all":
            raise InvalidOption("drop", f"must be a tenant of this file, or all; it has none called {tenant[:64]!r}")
        for one, headers in zip(files, gone, strict=True):
            units = [(each.kind, each.unit) for each in headers]
            one.doom(units)
            # With what an interrupted drop has left.
            one.erase([*one.doomed, *units])
    return sum(map(len, gone))


def files_of_ranks(path: Path, part: ModelPart) -> Iterator[DiskFile]:
    """Yield the files that lie beside the first rank's and hold the other ranks' parts of the same units."""
    from weft.memory.tiers.disk.file import open_existing

    for rank in range(1, part.ranks):
        other = replace(part, rank=rank).path(path)
        if other.is_file():
            yield open_existing(other)


def shown(report: dict[str, Any]) -> str:
    units = ", ".join(f"{count} {kind}s" for kind, count in report["units"].items()) or "no units"
    lines = [
        f"model    {report['fingerprint'][:16]}, {report['part']}, exact answers {'on' if report['exact'] else 'off'}",
        f"computed {report['computed_by']}",
        f"file     {report['file_bytes'] / 2**20:.0f} MiB, {report['used_bytes'] / 2**20:.1f} MiB in use",
        f"units    {units}",
        f"damaged  {report['damaged_headers']} headers",
    ]
    if "damaged_units" in report:
        lines[-1] += f", {report['damaged_units']} units"
    for name, each in report["tenants"].items():
        lines.append(f"tenant   {name}  {each['units']} units, {each['bytes'] / 2**20:.1f} MiB")
    for each in report.get("prefixes", ()):
        lines.append(f"prefix   {each['key']}  {each['tokens']} tokens, {each['origin']}, of {each['tenant'][:8]}")
    for done in ("dropped", "imported", "exported"):
        if f"{done}_units" in report:
            lines.append(f"{done:<8} {report[f'{done}_units']} units")
    return "\n".join(lines)
