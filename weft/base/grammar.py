"""What a request's answer must look like, as plain text that travels between processes. Nothing is compiled here.

The compiler, the bounds on what it takes and the error it raises live in `text/grammar.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text` is a JSON schema, a regular expression, a JSON list of strings or a Lark grammar, by the kind.

    `source` is what the compiler takes, once the text is checked and translated; it then stands for the text.
    """

    kind: GrammarKind
    text: str = ""
    source: str | None = None

    def __post_init__(self) -> None:
        assert self.kind in get_args(GrammarKind), f"no such kind of grammar: {self.kind}"
