"""Writes the tables of fields into a page: `python -m weft.server.apis.field_reference docs/api.md`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from weft.server.apis import anthropic_route, native, openai_chat, openai_completions, openai_responses
from weft.server.apis.llama_cpp.completion import INFILL, LLAMA_COMPLETION
from weft.server.apis.ollama.routes import OLLAMA_CHAT, OLLAMA_GENERATE
from weft.server.texts.body_reader import BodyReader
from weft.server.texts.fields import EVERY, PATHS, RULES, Rule, understood

READERS: dict[str, BodyReader[Any]] = {
    reader.name: reader
    for reader in (
        openai_chat.CHAT,
        openai_completions.COMPLETION,
        openai_responses.RESPONSE,
        anthropic_route.MESSAGE,
        native.GENERATE,
        OLLAMA_CHAT,
        OLLAMA_GENERATE,
        LLAMA_COMPLETION,
        INFILL,
    )
}


def reference() -> str:
    return "\n".join([*understood_fields(), "", *rules("refused"), "", *rules("ignored")])


def understood_fields() -> list[str]:
    parts = {name: kind for reader in READERS.values() for name, kind in reader.parts.items()}
    kinds: dict[str, type[msgspec.Struct]] = {name: reader.kind for name, reader in READERS.items()} | parts
    names = sorted({name for kind in kinds.values() for name in understood(kind)})
    lines = [
        "| understood | " + " | ".join(f"`{PATHS[route]}`" for route in kinds) + " |",
        "|---" * (1 + len(kinds)) + "|",
    ]
    for name in names:
        marks = ["yes" if name in understood(kind) else "" for kind in kinds.values()]
        lines.append(f"| `{name}` | " + " | ".join(marks) + " |")
    return lines


def rules(treatment: str) -> list[str]:
    lines = [f"| {treatment} | where | why, or what to use |", "|---|---|---|"]
    groups: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
    for rule in RULES:
        if rule.treatment == treatment:
            groups.setdefault((rule.about, rule.routes, off(rule)), []).append(f"`{rule.name}`")
    for (about, routes, neutral), names in groups.items():
        where = "everywhere" if routes == EVERY else ", ".join(f"`{PATHS[route]}`" for route in routes)
        lines.append(f"| {', '.join(names)} | {where} | {about}{neutral} |")
    return lines


def off(rule: Rule) -> str:
    """Return the values that are accepted because they change nothing."""
    names = [f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in rule.neutral]
    return f" ({' and '.join(names)}: accepted)" if names else ""


def rewritten(page: str) -> str:
    """Return a page with the current tables. They end where the next section begins."""
    start = page.index("| understood |")
    return page[:start] + reference() + page[page.index("\n\n## ", start) :]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(rewritten(path.read_text()))
