"""`weft chat`: what is typed or pasted, what is a command, and that Ctrl-C ends an answer and nothing else."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import sys
import termios
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from tests.support.models import tiny_model
from tests.support.servers.http_server import serving
from weft.base.errors import EngineStopped, OptionError
from weft.cli.chat import command
from weft.cli.chat.command import banner, complain, converse, note, obey, take_turn
from weft.cli.chat.conversation import ALIASES, COMMANDS, Conversation, command_of, run_command
from weft.cli.chat.options import ChatOptions
from weft.cli.chat.partners import Local, Message, Remote, Show, Spent, interruptible
from weft.cli.chat.terminal import LEAVE, Colours, Editor, LineReader, Wrapper
from weft.cli.client import Client
from weft.cli.main import main
from weft.engine.loop import Engine

SMALL = [*tiny_model.ARGUMENTS, "--memory", "16MiB", "--threads", "1", "--max-tokens", "8", "--max-length", "512"]
PASTE = "\x1b[200~{}\x1b[201~"
CTRL_C, CTRL_D, ALT_ENTER = "\x03", "\x04", "\x1b\r"
# The editor switches bracketed paste off as it ends.
EDITOR_ENDED = r"\x1b\[\?2004l"
# The index in the list of `termios.tcgetattr`.
LOCAL_MODES = 3
# Far more than anything takes.
SECONDS = 120


class Echo:
    """A partner that answers with the last message, and keeps what it was asked."""

    def __init__(self, *models: str) -> None:
        self._models = models or ("echo",)
        self.model = self._models[0]
        self.asked: list[list[Message]] = []

    def settings(self) -> list[str]:
        return ["context 64 tokens"]

    def answer(self, messages: list[Message], show: Show, spent: Spent) -> None:
        self.asked.append(messages)
        show(messages[-1]["content"])
        spent.prompt_tokens, spent.cached_tokens, spent.tokens = 100, 64, 5

    def models(self) -> list[str]:
        return list(self._models)

    def switch(self, model: str) -> None:
        self.model = model

    def close(self) -> None: ...


class Script:
    """A reader of given lines."""

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)

    def read(self) -> str | None:
        return next(self._lines, None)


# the editor -----------------------------------------------------------------------------------------------------------


def typed(text: str, count: int = 1, history: str | None = None) -> list[str | None]:
    """What the editor returns for these keys."""
    with create_pipe_input() as pipe:
        pipe.send_text(text)
        editor = Editor(history, ["/help"], source=pipe, screen=DummyOutput())
        return [editor.read() for _ in range(count)]


def test_a_pasted_paragraph_is_one_question():
    assert typed(PASTE.format("one\ntwo\nthree") + "\r") == ["one\ntwo\nthree"]


@pytest.mark.parametrize("text", [f"one{ALT_ENTER}two\r", "one\\\rtwo\r"], ids=["alt-enter", "backslash"])
def test_a_question_may_have_several_lines(text):
    assert typed(text) == ["one\ntwo"]


def test_questions_are_remembered_and_written_to_a_file_only_if_asked_for(tmp_path):
    file = tmp_path / "history"
    with create_pipe_input() as pipe:
        pipe.send_text("first\rsecond\rthird\r")
        for history, expected in ((None, ["first"]), (str(file), ["second"]), (str(file), ["second", "third"])):
            editor = Editor(history, source=pipe, screen=DummyOutput())
            editor.read()
            assert editor.remembered() == expected
    assert "first" not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OptionError, match="--history: cannot write"):
        Editor(str(tmp_path / "no" / "history"))


def test_ctrl_c_discards_the_line_and_ctrl_d_ends_the_input(capsys):
    assert typed(f"nonsense{CTRL_C}sense\r{CTRL_D}", 2) == ["sense", None]
    assert capsys.readouterr().err == f"{LEAVE}\n"


def test_lines_of_a_pipe_are_questions_and_a_backslash_joins_two(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\\\ntwo\nthree\nfour\\"))
    source = LineReader()
    assert [source.read() for _ in range(4)] == ["one\ntwo", "three", "four", None]


@pytest.mark.parametrize(
    ("terminal", "environment", "coloured"),
    [(True, {}, True), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False), (False, {}, False)],
)
def test_colours_are_for_terminals_that_want_them(monkeypatch, terminal, environment, coloured):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    colours = Colours(stream)
    assert (colours.red("x") != "x") == coloured
    assert colours.harmless("a\x1b]0;title\x07b\n") == ("a]0;titleb\n" if terminal else "a\x1b]0;title\x07b\n")


# commands -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["exit", "quit", "/exit", "/quit", " EXIT "])
def test_words_that_end_the_program_are_not_sent(said):
    partner = Echo()
    converse(ChatOptions(), partner, Script("Hello", said, "never"))
    assert [messages[-1]["content"] for messages in partner.asked] == ["Hello"]


def test_a_file_that_cannot_be_written_is_reported_and_a_saved_one_is_private(tmp_path):
    chat = Conversation(Echo())
    for name in ("~nobody-of-this-name/x", "a\0b", str(tmp_path / "missing" / "x")):
        with pytest.raises(OptionError, match="cannot write"):
            run_command(chat, "save", name)
    run_command(chat, "save", str(tmp_path / "kept"))
    assert (tmp_path / "kept").stat().st_mode & 0o077 == 0


def test_a_server_cannot_control_the_terminal(monkeypatch, capsys):
    evil = Echo("\x1b]0;title\x07model\u202e")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    note(banner(evil))
    complain("bad \x1b[2J")
    obey(Conversation(evil), "model", "")
    shown = capsys.readouterr().err
    assert "title" in shown
    for part in ("\x1b]", "\x07", "\x1b[2J", "\u202e"):
        assert part not in shown


def test_unknown_commands_are_refused_with_a_hint_and_not_sent(capsys):
    partner = Echo()
    converse(ChatOptions(), partner, Script("/sytem Be brief.", "/foo", "/usr/bin/weft is missing", " /foo"))
    told = capsys.readouterr().err
    assert "unknown command /sytem; did you mean /system?" in told
    assert "unknown command /foo; /help lists all" in told
    assert [messages[-1]["content"] for messages in partner.asked] == ["/usr/bin/weft is missing", "/foo"]


def test_help_lists_every_command_and_every_alias_is_a_command():
    text = run_command(Conversation(Echo()), "help", "")
    assert all(f"/{name}" in text for name in COMMANDS)
    assert set(ALIASES.values()) <= set(COMMANDS)


def test_the_system_message_is_shown_set_and_removed_and_survives_clear(capsys):
    partner = Echo()
    lines = ("one", "/system Be brief.\nBe kind.", "two", "/clear", "three", "/system", "/system -", "four")
    converse(ChatOptions(system="Be loud."), partner, Script(*lines))
    systems = [messages[0]["content"] for messages in partner.asked]
    assert systems == ["Be loud.", "Be brief.\nBe kind.", "Be brief.\nBe kind.", "three"]
    assert [len(messages) for messages in partner.asked] == [2, 4, 2, 3]
    assert "system message: Be brief." in capsys.readouterr().err


def test_a_model_is_shown_and_switched_where_there_are_several():
    chat = Conversation(Echo("small", "large"))
    assert run_command(chat, "model", "") == "model: small; also there: large"
    assert run_command(chat, "model", "large") == "model: large"
    assert chat.partner.model == "large"


def test_saving_writes_a_request_body_and_never_overwrites(tmp_path):
    chat = Conversation(Echo(), "Be brief.")
    take_turn(chat, "Grüße", False)
    file = tmp_path / "talk.json"
    assert run_command(chat, "save", str(file)) == f"saved 3 messages to {file}"
    body = json.loads(file.read_text())
    assert body == {"model": "echo", "messages": chat.messages}
    before = file.read_bytes()
    chat.turns.clear()
    with pytest.raises(OptionError, match="exists and is not overwritten"):
        run_command(chat, "save", str(file))
    assert file.read_bytes() == before
    for name, message in (("", "needs the name"), (str(tmp_path / "no" / "file"), "cannot write")):
        with pytest.raises(OptionError, match=message):
            run_command(chat, "save", name)


def test_a_command_is_a_slash_and_a_word():
    assert command_of("/save  my file ") == ("save", "my file")
    assert command_of("/reset") == ("clear", "")
    assert command_of("1/2") is None


# answers --------------------------------------------------------------------------------------------------------------


def chat_with(monkeypatch: pytest.MonkeyPatch, said: str, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    return main(["chat", *SMALL, *arguments])


def test_chat_keeps_the_conversation_until_it_is_cleared(capsys, monkeypatch):
    said = f"{'Tell me about looms. ' * 5}\n\nAnd then?\n/reset\nAnd then?\n/help\n"
    code = chat_with(monkeypatch, said, "--stats", "--temperature", "0", "--system", "Be brief.")
    text, told = capsys.readouterr()
    assert (code, len(text.splitlines()) >= 3) == (0, True)
    stats = re.findall(r"tokens/s; (\d+) of (\d+) prompt tokens cached \((\d+)%\)", told)
    (cached, first, _), (hit, second, share), (_, third, _) = stats
    assert int(second) > int(first) > int(third)
    assert (cached, hit, share) == ("0", "128", f"{128 / int(second):.0%}"[:-1])
    assert "/clear" in told


def test_chat_says_why_there_is_no_answer_and_goes_on(capsys, monkeypatch):
    assert chat_with(monkeypatch, f"{'x' * 600}\nHello\n", "--stats") == 0
    told = capsys.readouterr().err
    assert "(no answer: prompt does not fit" in told
    assert told.count("prompt tokens cached") == 1


def test_a_stopped_engine_ends_the_program():
    partner = Echo()

    def fail(*_: object) -> None:
        raise EngineStopped("it is gone")

    partner.answer = fail
    with pytest.raises(EngineStopped):
        converse(ChatOptions(), partner, Script("one", "two"))


# interrupts -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def interruptible_process() -> Iterator[None]:
    """Ctrl-C means KeyboardInterrupt, also where tests are started with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press(times: int) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def test_only_the_first_interrupt_of_an_answer_counts(interruptible_process):
    stops: list[int] = []
    with interruptible(lambda: stops.append(1)):
        press(3)
    assert len(stops) == 1
    with pytest.raises(KeyboardInterrupt):
        press(1)


def small_options(**more: object) -> ChatOptions:
    limits = {"memory": "16MiB", "threads": 1, "max_length": 512, "max_tokens": 200, "temperature": 0.0}
    return ChatOptions(**{**tiny_model.OPTIONS, **limits, **more})


def check_interrupts(partner: Local | Remote) -> None:
    """Interrupt an answer three times at its second piece: it ends, what was said is kept, and the next one works."""
    question: list[Message] = [{"role": "user", "content": "Hello"}]

    def answer(each: Callable[[int], None]) -> str:
        pieces: list[str] = []

        def show(piece: str) -> None:
            pieces.append(piece)
            each(len(pieces))

        partner.answer(question, show, Spent())
        return "".join(pieces)

    whole = answer(lambda _: None)
    seen: list[int] = []

    def interrupt(count: int) -> None:
        seen.append(count)
        if count == 2:
            press(3)

    with pytest.raises(KeyboardInterrupt):
        answer(interrupt)
    assert answer(lambda _: None) == whole


def test_interrupts_of_a_local_answer_leave_the_model_usable(interruptible_process):
    with closing(Local(small_options())) as partner:
        check_interrupts(partner)


def test_interrupts_in_every_step_from_the_third_on_end_one_answer_only(interruptible_process, monkeypatch):
    step, steps = Engine.step, []

    def interrupted(engine: Engine) -> object:
        steps.append(1)
        press(3 if len(steps) >= 3 else 0)
        return step(engine)

    with closing(Local(small_options())) as partner:
        chat = Conversation(partner)
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", interrupted)
            take_turn(chat, "one", False)
        assert len(steps) >= 3
        take_turn(chat, "two", False)
        assert chat.turns[-2]["content"] == "two"


def test_interrupts_of_a_remote_answer_leave_the_client_usable(interruptible_process, monkeypatch):
    with serving() as server, closing(Remote(small_options(url=server.url, model=None))) as partner:
        server.pace(monkeypatch)
        check_interrupts(partner)
        assert partner.models() == ["tiny"]
        assert any("context 2048 tokens" in fact for fact in partner.settings())
        with pytest.raises(OptionError, match="has no model tini; did you mean tiny"):
            partner.switch("tini")


def test_an_interrupt_ends_a_remote_answer_that_has_arrived_already(interruptible_process, monkeypatch):
    async def stream(client: Client, path: str, body: dict[str, object]) -> AsyncIterator[dict[str, object]]:
        for _ in range(50):
            yield {"choices": [{"delta": {"content": "word "}}]}

    monkeypatch.setattr(Client, "stream", stream)
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        press(3 if len(pieces) == 2 else 0)

    with closing(Remote(small_options(url="http://127.0.0.1:1"))) as partner, pytest.raises(KeyboardInterrupt):
        partner.answer([{"role": "user", "content": "Hello"}], show, Spent())
    assert len(pieces) == 2


def test_on_a_terminal_interrupts_between_answers_do_not_end_the_program(interruptible_process, monkeypatch, capsys):
    """The second of two presses may arrive when the first has ended the answer already."""
    partner, lines = Echo(), iter(["one", "two", None])

    class Pressed:
        def read(self) -> str | None:
            press(2)
            return next(lines)

    monkeypatch.setattr(command, "is_terminal", lambda: True)
    monkeypatch.setattr(command, "reader", lambda *_: Pressed())
    monkeypatch.setattr(command, "Local", lambda _: partner)
    command.run(ChatOptions())
    assert len(partner.asked) == 2
    with pytest.raises(KeyboardInterrupt):
        press(1)


def test_an_interrupted_command_is_told_and_the_conversation_goes_on(capsys):
    partner = Echo()

    def interrupted() -> list[str]:
        raise KeyboardInterrupt

    partner.models = interrupted
    converse(ChatOptions(), partner, Script("/model", "Hello"))
    assert "(interrupted)" in capsys.readouterr().err
    assert len(partner.asked) == 1


def test_an_interrupted_answer_is_kept_and_one_without_text_is_not(capsys):
    partner = Echo()

    def begin(messages: list[Message], show: Show, spent: Spent) -> None:
        if messages[-1]["content"] == "one":
            show("Well")
        raise KeyboardInterrupt

    partner.answer = begin
    chat = Conversation(partner)
    take_turn(chat, "one", True)
    take_turn(chat, "two", True)
    assert [message["content"] for message in chat.messages] == ["one", "Well"]
    assert capsys.readouterr().out.count("(interrupted)") == 2


# the program on a terminal --------------------------------------------------------------------------------------------


class OnTerminal:
    """The program on a pseudo-terminal of its own, where Ctrl-C is a signal as for a user."""

    def __init__(self, process: int, terminal: int) -> None:
        self._process, self._terminal = process, terminal
        self.seen = ""

    def send(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def until(self, pattern: str) -> str:
        """Read until the output since the last match has the pattern; return it up to there, without escapes."""
        while (found := re.search(pattern, self.seen)) is None:
            assert select.select([self._terminal], [], [], SECONDS)[0], f"no {pattern!r} in {self.seen[-300:]!r}"
            self.seen += os.read(self._terminal, 1024).decode(errors="replace")
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)

    def ended(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])


@contextmanager
def on_terminal(*arguments: str) -> Iterator[OnTerminal]:
    process, terminal = pty.fork()
    if not process:
        # By default, Ctrl-C also discards what the program has written and the test has not read.
        modes = termios.tcgetattr(0)
        modes[LOCAL_MODES] |= termios.NOFLSH
        termios.tcsetattr(0, termios.TCSANOW, modes)
        environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "weft", *arguments], environment)
    try:
        yield OnTerminal(process, terminal)
    finally:
        os.close(terminal)
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


@pytest.fixture
def endless(tmp_path: Path) -> str:
    """The tiny model without end tokens: its answers end at their limit."""
    folder = tmp_path / "endless"
    shutil.copytree(tiny_model.FOLDER, folder)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).exists():
            fields = json.loads((folder / name).read_text())
            kept = {key: value for key, value in fields.items() if "eos_token" not in key}
            (folder / name).write_text(json.dumps(kept))
    return str(folder)


@pytest.mark.thorough
def test_on_a_terminal_an_answer_is_interrupted_and_the_next_question_is_answered(endless):
    limits = ["--memory", "64MiB", "--threads", "1", "--max-length", "30000", "--max-tokens", "25000", "--stats"]
    with on_terminal("chat", endless, "--weights", "dummy", *limits) as program:
        banner = program.until("Ctrl-D ends the program")
        assert "endless" in banner
        assert "context 30000 tokens; float32 on cpu; 0.06 GiB for context; temperature 1" in banner
        program.until("> ")
        for number in range(2):
            program.send(PASTE.format(f"question {number}\nline two\nline three"))
            program.until("line three")
            program.send("\r")
            # Visible text after the end of the editor is the answer. A terminal holds a fraction of it unread, so it
            # cannot end before it is interrupted.
            program.until(EDITOR_ENDED + r"(?:\x1b\[[0-9;?]*[A-Za-z]|[\r\n])*[^\x1b\r\n]")
            program.send(CTRL_C * 3)
            program.until(r"\(interrupted\)")
            program.until("> ")
        program.send("/foo\r")
        program.until(r"unknown command /foo")
        program.send("exit\r")
        assert program.ended() == 0


# wrapping -------------------------------------------------------------------------------------------------------------


def wrapped(width: int | None, *pieces: str) -> str:
    lines = Wrapper(width)
    return "".join([*map(lines.feed, pieces), lines.rest()])


def test_words_are_wrapped_wherever_the_pieces_of_a_text_end():
    text = "The loom stands by the window, and  nobody\nweaves.\n    indented words stay indented\n\nend"
    whole = wrapped(16, text)
    assert wrapped(16, *text) == wrapped(16, text[:7], text[7:]) == whole
    lines = ["The loom stands", "by the window,", "and  nobody", "weaves.", "    indented", "words stay", "indented"]
    assert whole.split("\n") == [*lines, "", "end"]
    assert wrapped(None, *text) == text


def test_long_words_and_wide_characters_keep_to_the_terminal():
    assert wrapped(5, "a verylongword b") == "a\nverylongword\nb"
    assert wrapped(6, "織機 織機") == "織機\n織機"


def test_a_chat_says_its_pace_unless_it_is_told_not_to(capsys):
    for options, shown in ((ChatOptions(), 1), (ChatOptions(stats=False), 0)):
        converse(options, Echo(), Script("hello", None))
        assert capsys.readouterr().err.count("tokens/s") == shown
