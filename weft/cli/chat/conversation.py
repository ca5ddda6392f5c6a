"""The state of a chat and its commands: `/system`, `/model`, `/save` and so on. Knows no terminal.

A command is a slash and a word of letters at the start of the input, so a question may begin with a path.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from weft.base.errors import OptionError
from weft.base.suggest import did_you_mean
from weft.cli.chat.partners import Message, Partner

_COMMAND = re.compile(r"/([A-Za-z]+)(?:\s+(.*))?", re.DOTALL)
BARE = {"exit": "exit", "quit": "exit"}


@dataclass(slots=True)
class Conversation:
    """What was said so far. `turns` are the messages after the system message."""

    partner: Partner
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    ended: bool = False

    @property
    def messages(self) -> list[Message]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.turns]


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """`run` returns what to print."""

    usage: str
    about: str
    run: Callable[[Conversation, str], str]


def _help(_: Conversation, __: str) -> str:
    width = max(len(each.usage) for each in COMMANDS.values())
    lines = [f"{each.usage:<{width}}  {each.about}" for each in COMMANDS.values()]
    return "\n".join([*lines, KEYS])


def _system(chat: Conversation, text: str) -> str:
    if not text:
        return "no system message" if chat.system is None else f"system message: {chat.system}"
    chat.system = None if text == "-" else text
    return "system message removed" if chat.system is None else "system message set"


def _model(chat: Conversation, name: str) -> str:
    if name:
        chat.partner.switch(name)
        return f"model: {chat.partner.model}"
    others = [each for each in chat.partner.models() if each != chat.partner.model]
    more = f"; also there: {', '.join(others)}" if others else ""
    return f"model: {chat.partner.model}{more}"


def private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _save(chat: Conversation, name: str) -> str:
    if not name:
        raise OptionError("/save needs the name of a file")
    body = {"model": chat.partner.model, "messages": chat.messages}
    try:
        # Mode x: an existing file is never overwritten.
        with open(Path(name).expanduser(), "x", encoding="utf-8", opener=private) as file:
            json.dump(body, file, indent=2, ensure_ascii=False)
            file.write("\n")
    except FileExistsError:
        raise OptionError(f"{name} exists and is not overwritten; choose another name") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise OptionError(f"cannot write {name}: {getattr(error, 'strerror', None) or error}") from None
    return f"saved {len(chat.messages)} messages to {name}"


def _clear(chat: Conversation, _: str) -> str:
    chat.turns.clear()
    return "new conversation" if chat.system is None else "new conversation with the same system message"


def _exit(chat: Conversation, _: str) -> str:
    chat.ended = True
    return ""


KEYS = """\
Enter sends; Alt-Enter, Esc Enter or a trailing backslash starts a new line. A pasted text is one question.
Ctrl-C interrupts an answer, Ctrl-D or exit ends the program. A space before a slash sends the line to the model."""
COMMANDS = {
    "system": ChatCommand("/system [TEXT]", "show or set the system message; - removes it", _system),
    "model": ChatCommand("/model [NAME]", "show the model, or switch to another model of the server", _model),
    "save": ChatCommand("/save FILE", "write the conversation to a new file, as a JSON request body", _save),
    "clear": ChatCommand("/clear", "start a new conversation", _clear),
    "help": ChatCommand("/help", "show this help", _help),
    "exit": ChatCommand("/exit", "end the program", _exit),
}
ALIASES = {"reset": "clear", "quit": "exit"}


def command_of(said: str) -> tuple[str, str] | None:
    """Return the name and argument of a command, None for a message to the model.

    >>> command_of("/save a.json"), command_of("quit"), command_of("/usr/bin is missing"), command_of("exit the loop")
    (('save', 'a.json'), ('exit', ''), None, None)
    """
    if said.strip().lower() in BARE:
        return BARE[said.strip().lower()], ""
    found = _COMMAND.fullmatch(said)
    if found is None:
        return None
    name = found[1].lower()
    return ALIASES.get(name, name), (found[2] or "").strip()


def run_command(chat: Conversation, name: str, argument: str) -> str:
    """Run a command and return what to print. Raises `OptionError` for one that is unknown or cannot run."""
    if name not in COMMANDS:
        known = [f"/{each}" for each in (*COMMANDS, *ALIASES)]
        raise OptionError(f"unknown command /{name}{did_you_mean(f'/{name}', known) or '; /help lists all'}")
    return COMMANDS[name].run(chat, argument)
