"""Readers of deployment files: instructions of a Dockerfile, and commands of Weft in any of them."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.fences import ROOT
from weft.cli.main import parse
from weft.cli.options import read_options
from weft.cli.serve import ServeOptions

DEPLOY = ROOT / "deploy"


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """Return the arguments, of the JSON form too, without flags such as `--from=`."""
        if self.text.lstrip().startswith("["):
            return list(json.loads(self.text))
        return [word for word in shlex.split(self.text) if not re.match(r"--(from|mount|interval|timeout)", word)]


def instructions(dockerfile: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile, with continued lines joined and comments left out.

    >>> instructions("# a comment\\nFROM x:1 AS y\\nRUN a \\\\\\n    && b")
    [Instruction(name='FROM', text='x:1 AS y'), Instruction(name='RUN', text='a     && b')]
    """
    lines = [line for line in dockerfile.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    return [Instruction(*re.split(r"\s+", line, maxsplit=1)) for line in joined.splitlines()]


def complaints(dockerfile: str) -> list[str]:
    """Return what a linter of Dockerfiles would say of one."""
    found, steps = [], instructions(dockerfile)
    for step in steps:
        if step.name == "FROM" and not re.search(r":\d+\.\d+\.\d+\S*", step.text):
            found.append(f"a base image without a pinned version: {step.text}")
        if step.name == "ADD":
            found.append("ADD unpacks and downloads; use COPY")
        if step.name == "RUN":
            found += run_complaints(step.text)
    users = [step.text for step in steps if step.name == "USER"]
    if not users or users[-1].split(":")[0] in ("root", "0"):
        found.append("the image runs as root")
    if not any(step.name == "HEALTHCHECK" for step in steps):
        found.append("no health check")
    return found


def run_complaints(text: str) -> list[str]:
    found = []
    if "apt-get install" in text:
        if "--no-install-recommends" not in text:
            found.append("apt-get installs what is only recommended")
        if "rm -rf /var/lib/apt/lists" not in text or "apt-get update" not in text:
            found.append("apt's lists stay in the image, or are of another layer")
    if re.search(r"\bpip (install|wheel)\b", text) and "--no-cache-dir" not in text:
        found.append("pip's cache stays in the image")
    if re.search(r"\bsudo\b|curl [^|]*\|\s*(ba)?sh", text):
        found.append("sudo, or a script from the network")
    return found


def is_sent(path: str, ignore_file: str) -> bool:
    """Return whether a file of the repository reaches the builder, by the rules of a .dockerignore file."""
    sent = True
    for line in ignore_file.splitlines():
        rule = line.strip()
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.removeprefix("!")
        parts = [path, *map(str, Path(path).parents)]
        inner = pattern.removeprefix("**/")
        if any(fnmatch.fnmatch(part, pattern) or fnmatch.fnmatch(Path(part).name, inner) for part in parts):
            sent = rule.startswith("!")
    return sent


def served(arguments: list[str]) -> ServeOptions:
    """Return the options of a `weft serve` command; an unknown option ends the test."""
    found = parse(arguments)
    assert found.command == "serve"
    return read_options(ServeOptions, vars(found))


def documents(name: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((DEPLOY / name).read_text()) if each is not None]
