"""Grammar rules under construction, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence

from weft.base.grammar import Grammar

ANYTHING = r"(.|\n)*"
# Returns the id of a special token, or None.
TokenOf = Callable[[str], int | None]


def no_specials(text: str) -> int | None:
    return None


class Rules:
    """Rules and terminals by generated names. Special tokens are references to tokens, never text."""

    def __init__(self, token_of: TokenOf = no_specials) -> None:
        self._rules: list[str] = []
        self._terminals: list[str] = []
        self._token_of = token_of
        self._counted = 0

    def next_name(self) -> str:
        """Return the name that the next rule will have."""
        return f"rule_{len(self._rules)}"

    def add(self, body: str, attributes: str = "") -> str:
        """Add a rule; return its name."""
        name = self.next_name()
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def add_terminal(self, body: str) -> str:
        name = f"TEXT_{len(self._terminals)}"
        self._terminals.append(f"{name}: {body}")
        return name

    def text(
        self,
        avoided: Sequence[str] = (),
        first: Sequence[str] = (),
        *,
        shapes: Sequence[str] = (ANYTHING,),
        other_than: str = "",
    ) -> str:
        """Add a terminal for text of all these shapes; return its name. All arguments are regular expressions.

        The text contains none of `avoided`, begins with none of `first`, and is not `other_than`.
        """
        limits = [f"~/{ANYTHING}({'|'.join(avoided)}){ANYTHING}/"] if avoided else []
        limits += [f"~/({'|'.join(first)}){ANYTHING}/"] if first else []
        limits += [f"~/{other_than}/"] if other_than else []
        return self.add_terminal(" & ".join([*(f"/{shape}/" for shape in shapes), *limits]))

    def affords(self, counted: int, most: int) -> bool:
        """Spend a number of counted characters, of `most` in all; return False, and spend none, if that is too many."""
        fits = self._counted + counted <= most
        self._counted += counted if fits else 0
        return fits

    def literal(self, *texts: str) -> str:
        """Return texts in sequence; special tokens become token references."""
        found = [(self._token_of(text), text) for text in texts if text]
        return " ".join(json.dumps(text) if token is None else f"<[{token}]>" for token, text in found)

    def until(self, end: str, text: str | None = None) -> str:
        """Return text up to and including the first `end`, a text or a special token. `text` is a terminal."""
        before = self.text() if text is None else text
        return f"{before} {self.literal(end)}" if self.knows(end) else self.add(f"{before} {json.dumps(end)}", "[lazy]")

    def tokens(self, texts: Collection[str]) -> str:
        """Return any one of the special tokens among these texts; an empty string if there are none."""
        found = sorted({token for text in texts if (token := self._token_of(text)) is not None})
        return f"<[{','.join(map(str, found))}]>" if found else ""

    def grammar(self, start: str) -> Grammar:
        """Return the grammar whose answers follow `start`."""
        # Terminals come last: what measures their depth takes everything up to the next one as part of one.
        return Grammar("lark", "\n".join([f"start: {start}", *self._rules, *self._terminals]))

    def knows(self, text: str) -> bool:
        """Return whether a text is a special token."""
        return self._token_of(text) is not None


def regex_of(text: str) -> str:
    """Return a regular expression that matches exactly this text.

    >>> print(regex_of("a.b[x]/"))
    a\\.b\\[x\\]\\/
    """
    escaped = "".join("\\" + character if character in r"\.+*?()|[]{}^$/-" else character for character in text)
    return escaped.replace("\n", "\\n")
