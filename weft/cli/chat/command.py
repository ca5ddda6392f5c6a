"""`weft chat`: a conversation in the terminal, with a local model or one behind a server."""

from __future__ import annotations

import sys
import time

from weft import __version__
from weft.base.errors import EngineStopped, WeftError
from weft.base.sampling import SamplingParams
from weft.cli.chat.conversation import COMMANDS, Conversation, command_of, run_command
from weft.cli.chat.options import ChatOptions
from weft.cli.chat.partners import Local, Partner, Remote, Spent, ignoring_interrupts
from weft.cli.chat.terminal import Colours, Reader, is_terminal, reader, wrapper
from weft.cli.generate import pace, params_of

ABOUT = "chat with a model in the terminal"
HINT = "/help lists commands and keys; Ctrl-C interrupts an answer, Ctrl-D ends the program"


def run(options: ChatOptions) -> None:
    # Reject bad values before a model is loaded.
    params_of(SamplingParams(), options.max_tokens, options.temperature)
    source = reader(options.history, [f"/{name}" for name in COMMANDS])
    partner: Partner = Remote(options) if options.url else Local(options)
    try:
        if is_terminal():
            note(banner(partner))
            # The editor and the partner handle Ctrl-C themselves.
            with ignoring_interrupts():
                converse(options, partner, source)
        else:
            converse(options, partner, source)
    finally:
        partner.close()


def banner(partner: Partner) -> str:
    """Return the model and its settings, and where to find help."""
    colours = Colours(sys.stderr)
    name, settings = colours.bold(colours.harmless(partner.model)), map(colours.harmless, partner.settings())
    return "\n".join([f"weft {__version__}: {name}", "; ".join(settings), HINT])


def converse(options: ChatOptions, partner: Partner, source: Reader) -> None:
    """Answer questions and run commands until the end of input."""
    chat = Conversation(partner, options.system)
    while not chat.ended and (said := source.read()) is not None:
        found = command_of(said)
        if found is not None:
            obey(chat, *found)
        elif said.strip():
            take_turn(chat, said.strip(), options.stats)


def obey(chat: Conversation, name: str, argument: str) -> None:
    try:
        note(Colours(sys.stderr).harmless(run_command(chat, name, argument)))
    except KeyboardInterrupt:
        complain("(interrupted)")
    except WeftError as error:
        complain(str(error))


def take_turn(chat: Conversation, said: str, with_stats: bool) -> None:
    """Add a question and its answer to the conversation; neither if there is no answer."""
    asked = {"role": "user", "content": said}
    pieces: list[str] = []
    spent, started = Spent(), time.monotonic()
    colours = Colours(sys.stdout)

    wrapped = wrapper(sys.stdout)

    def show(piece: str) -> None:
        pieces.append(piece)
        print(wrapped.feed(colours.harmless(piece)), end="", flush=True)

    try:
        chat.partner.answer([*chat.messages, asked], show, spent)
        print(wrapped.rest())
    except KeyboardInterrupt:
        print(f"{wrapped.rest()} (interrupted)")
    except EngineStopped:
        raise
    except WeftError as error:
        complain(f"(no answer: {error})")
        return
    if with_stats and spent.tokens:
        note(pace(spent.tokens, time.monotonic() - started, spent.cached_tokens, spent.prompt_tokens))
    if pieces:
        chat.turns += [asked, {"role": "assistant", "content": "".join(pieces)}]


def note(text: str) -> None:
    if text:
        print(Colours(sys.stderr).dim(text), file=sys.stderr)


def complain(text: str) -> None:
    colours = Colours(sys.stderr)
    print(colours.red(colours.harmless(text)), file=sys.stderr)
