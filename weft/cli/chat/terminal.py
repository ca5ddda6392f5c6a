"""Input and colours of `weft chat`: an editor on a terminal, plain lines otherwise. Knows no model.

On a terminal, prompt_toolkit provides line editing, history, several lines per question and bracketed paste.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO
from unicodedata import east_asian_width

from weft.base.errors import OptionError

if TYPE_CHECKING:
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import Output

PROMPT = "> "
MORE = ". "
LEAVE = "(Ctrl-D or /exit ends the program)"
# A model's answer must not control the terminal, nor change the direction of other text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Reader(Protocol):
    def read(self) -> str | None:
        """Return the next question or command, None at the end of input."""


def is_terminal() -> bool:
    """Return whether a person is at both ends and the terminal can position its cursor."""
    streams = (sys.stdin, sys.stdout)
    return all(each is not None and each.isatty() for each in streams) and os.environ.get("TERM") != "dumb"


def reader(history: str | None, words: Sequence[str]) -> Reader:
    """Return the editor on a terminal, otherwise a reader of lines. `words` are completed by Tab."""
    return Editor(history, words) if is_terminal() else LineReader()


class LineReader:
    """Reads one question per line; a trailing backslash joins the next line."""

    def read(self) -> str | None:
        lines: list[str] = []
        while True:
            # Read here and not by `input`, which prompts on standard output.
            line = sys.stdin.readline()
            if not line:
                return "\n".join(lines) if lines else None
            line = line.rstrip("\n")
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])


class Editor:
    """A line editor with history. `source` and `screen` replace the terminal in tests."""

    def __init__(
        self,
        history: str | None = None,
        words: Sequence[str] = (),
        source: Input | None = None,
        screen: Output | None = None,
    ) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        self._history = InMemoryHistory() if history is None else FileHistory(_history_file(history))
        self._session: PromptSession[str] = PromptSession(
            [("ansigreen bold", PROMPT)],
            multiline=True,
            prompt_continuation=MORE,
            key_bindings=_keys(),
            history=self._history,
            completer=WordCompleter(list(words), sentence=True),
            complete_while_typing=False,
            enable_history_search=True,
            input=source,
            output=screen,
        )

    def remembered(self) -> list[str]:
        """Return the questions that the up arrow brings back, oldest first."""
        return list(self._history.load_history_strings())[::-1]

    def read(self) -> str | None:
        while True:
            try:
                return self._session.prompt()
            except KeyboardInterrupt:
                # The line is discarded. A program that ended here would take the conversation with it.
                print(LEAVE, file=sys.stderr)
            except EOFError:
                return None


def _history_file(name: str) -> str:
    """Return the path of a history that can be written, readable by its owner only."""
    path = Path(name).expanduser()
    try:
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
    except OSError as error:
        raise OptionError(f"--history: cannot write {path}: {error.strerror}") from None
    return str(path)


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\" and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: Any) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


def wrapper(stream: TextIO) -> Wrapper:
    """Return what wraps text for a stream: at the width of a terminal, and nothing elsewhere."""
    is_shown = stream is not None and stream.isatty()
    return Wrapper(shutil.get_terminal_size().columns if is_shown else None)


class Wrapper:
    r"""Wraps a text that comes in pieces between words. A word is held back until it ends.

    >>> wrapped = Wrapper(10)
    >>> wrapped.feed("one two "), wrapped.feed("thr"), wrapped.feed("ee four"), wrapped.rest()
    ('one two', '', '\nthree', ' four')
    >>> Wrapper(None).feed("as it is ")
    'as it is '
    """

    def __init__(self, width: int | None) -> None:
        self._width = width
        self._column = 0
        self._blank = self._word = ""

    def feed(self, text: str) -> str:
        """Return what can be printed now."""
        if self._width is None:
            return text
        shown = []
        for part in re.split(r"(\s)", text):
            if not part.isspace():
                self._word += part
                continue
            shown.append(self.rest())
            self._blank += part
            if part == "\n":
                shown.append(self._blank)
                self._blank, self._column = "", 0
        return "".join(shown)

    def rest(self) -> str:
        """Return the word that was held back, on this line or the next."""
        if not self._word:
            return ""
        width = columns(self._word)
        if self._width is not None and self._column and self._column + len(self._blank) + width > self._width:
            shown, self._column = f"\n{self._word}", width
        else:
            shown, self._column = self._blank + self._word, self._column + len(self._blank) + width
        self._blank = self._word = ""
        return shown


def columns(word: str) -> int:
    """Return the columns that a word takes on a terminal, where some characters take two.

    >>> columns("loom"), columns("織機")
    (4, 4)
    """
    return sum(1 + (east_asian_width(each) in "WF") for each in word)


class Colours:
    """Colours text for a stream if it is a terminal that has colours, unless NO_COLOR is set (no-color.org)."""

    def __init__(self, stream: TextIO) -> None:
        self.terminal = stream is not None and stream.isatty()
        self._on = self.terminal and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")

    def dim(self, text: str) -> str:
        return self._coloured(text, "2")

    def red(self, text: str) -> str:
        return self._coloured(text, "31")

    def bold(self, text: str) -> str:
        return self._coloured(text, "1")

    def _coloured(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._on and text else text

    def harmless(self, text: str) -> str:
        r"""Return external text without the control characters by which it could drive a terminal."""
        return _CONTROL.sub("", text) if self.terminal else text
