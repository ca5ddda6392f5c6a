"""The form that an answer must take, as plain text that travels between processes. Nothing is compiled here.

`text/grammar.py` has the compiler, its bounds and the error it raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text` is a JSON schema, a regular expression, a JSON list of strings or a Lark grammar, depending on the kind.

    `source` is the checked and translated form that the compiler takes; once set, it replaces the text.
    """

    kind: GrammarKind
    text: str = ""
    source: str | None = None

    def __post_init__(self) -> None:
        assert self.kind in get_args(GrammarKind), f"unknown grammar kind: {self.kind}"
