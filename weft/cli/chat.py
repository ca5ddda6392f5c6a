"""`weft chat`: a conversation in the terminal, with a local model or one behind a server."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from weft.base.errors import OptionError, RequestError, WeftError
from weft.base.options import Options, option
from weft.base.sampling import SamplingParams
from weft.cli.generate import params_of
from weft.cli.options import argument

if TYPE_CHECKING:
    from weft.offline.llm import LLM

ABOUT = "chat with a model in the terminal"
HELP = "/reset starts a new conversation, /exit ends the program; Ctrl-C interrupts an answer"
PROMPT = "> "
Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ChatOptions(Options):
    """Options of `weft chat`: its own, then the engine's."""

    model: str | None = argument("model folder or hub id, or the model's name at --url; default: weft-small")
    url: str | None = option(
        None, "chat with this OpenAI-compatible server, such as http://127.0.0.1:8000 or unix:/run/weft.sock"
    )
    api_key: str | None = option(None, "API key of that server; default: WEFT_API_KEY")
    system: str | None = option(None, "system message to start the conversation with")
    max_tokens: int = option(512, "maximum tokens of an answer")
    temperature: float | None = option(
        None, "0 is greedy, higher is more varied; default: the model's generation_config.json"
    )
    stats: bool = option(False, "print tokens per second and cached tokens after every answer")


@dataclass(slots=True)
class Spent:
    """Cost of an answer; filled in when the answer ends."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0


class Partner(Protocol):
    def answer(self, messages: list[Message], show: Callable[[str], None], spent: Spent) -> None: ...

    def close(self) -> None: ...


def run(options: ChatOptions) -> None:
    params_of(SamplingParams(), options.max_tokens, options.temperature)
    partner: Partner = Remote(options) if options.url else Local(options)
    try:
        converse(options, partner)
    finally:
        partner.close()


class Local:
    """A model that runs in this process."""

    def __init__(self, options: ChatOptions) -> None:
        from weft.offline.llm import LLM

        self._llm: LLM = LLM.from_options(options)
        self._params = params_of(self._llm.suggested, options.max_tokens, options.temperature)
        if self._llm.template is None:
            self.close()
            raise OptionError("the model has no chat template; use weft generate")

    def answer(self, messages: list[Message], show: Callable[[str], None], spent: Spent) -> None:
        with closing(self._llm.chat_stream(messages, self._params)) as chunks:
            for chunk in chunks:
                show(chunk.text)
                result = chunk.result
        assert result is not None, "the last chunk carries the result"
        spent.prompt_tokens, spent.cached_tokens = len(result.prompt_token_ids), result.cached_tokens
        spent.tokens = len(result.token_ids)
        if result.error is not None:
            raise RequestError(result.error)

    def close(self) -> None:
        self._llm.close()


class Remote:
    """A model behind an OpenAI-compatible server."""

    def __init__(self, options: ChatOptions) -> None:
        import asyncio

        from weft.cli.client import Client

        self._loop = asyncio.Runner()
        self._client = Client(str(options.url), options.api_key or os.environ.get("WEFT_API_KEY"))
        self._body: dict[str, Any] = {"max_tokens": options.max_tokens}
        if options.temperature is not None:
            self._body["temperature"] = options.temperature
        try:
            self._body["model"] = options.model or self._loop.run(first_model(self._client))
        except BaseException:
            self._loop.close()
            raise

    def answer(self, messages: list[Message], show: Callable[[str], None], spent: Spent) -> None:
        self._loop.run(self._answer(messages, show, spent))

    async def _answer(self, messages: list[Message], show: Callable[[str], None], spent: Spent) -> None:
        body = {**self._body, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        async with aclosing(self._client.stream("/v1/chat/completions", body)) as events:
            async for event in events:
                note_usage(event, spent)
                for choice in event.get("choices") or ():
                    show(str(choice["delta"].get("content") or ""))

    def close(self) -> None:
        self._loop.run(self._client.close())
        self._loop.close()


async def first_model(client: Any) -> str:
    listed = await client.get("/v1/models")
    return str(listed["data"][0]["id"])


def note_usage(event: dict[str, Any], spent: Spent) -> None:
    usage = event.get("usage") or {}
    if usage:
        spent.prompt_tokens, spent.tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        spent.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def converse(options: ChatOptions, partner: Partner) -> None:
    first: list[Message] = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = list(first)
    if sys.stdin.isatty():
        print(HELP, file=sys.stderr)
        with suppress(ImportError):
            import readline  # noqa: F401  line editing and history
    while (said := read_line()) not in (None, "/exit"):
        if said == "/reset":
            messages = list(first)
        elif said == "/help":
            print(HELP, file=sys.stderr)
        elif said:
            messages = take_turn(messages, said, options, partner)


def read_line() -> str | None:
    """Return the user's next line, or None at the end of input."""
    try:
        return input(PROMPT if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def take_turn(messages: list[Message], said: str, options: ChatOptions, partner: Partner) -> list[Message]:
    """Return the conversation after one more turn; unchanged if there is no answer."""
    asked = [*messages, {"role": "user", "content": said}]
    pieces: list[str] = []
    spent, started = Spent(), time.monotonic()

    def show(piece: str) -> None:
        pieces.append(piece)
        print(piece, end="", flush=True)

    try:
        partner.answer(asked, show, spent)
        print()
    except KeyboardInterrupt:
        print(" (interrupted)")
    except WeftError as error:
        print(f"(no answer: {error})", file=sys.stderr)
        return messages
    if options.stats:
        print(stats(spent, time.monotonic() - started), file=sys.stderr)
    return [*asked, {"role": "assistant", "content": "".join(pieces)}]


def stats(spent: Spent, seconds: float) -> str:
    """
    >>> stats(Spent(100, 64, 20), 2.0)
    '20 tokens in 2.00 s, 10.0 tokens/s; 64 of 100 prompt tokens cached'
    """
    pace = spent.tokens / seconds if seconds else 0.0
    cached = f"{spent.cached_tokens} of {spent.prompt_tokens} prompt tokens cached"
    return f"{spent.tokens} tokens in {seconds:.2f} s, {pace:.1f} tokens/s; {cached}"
