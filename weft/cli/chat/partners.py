"""The two sides that can answer in `weft chat`: a model in this process, or one behind an OpenAI-compatible server.

Ctrl-C during an answer ends that answer only. The first press aborts the request; further presses, which may arrive
while the abort runs, have no effect.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote

from weft import builtin
from weft.base.errors import OptionError, RequestError
from weft.base.sampling import SamplingParams
from weft.base.suggest import did_you_mean
from weft.cli.chat.options import ChatOptions
from weft.cli.generate import params_of, start

if TYPE_CHECKING:
    from weft.offline.llm import LLM

T = TypeVar("T")
Message = dict[str, str]
Show = Callable[[str], None]


@dataclass(slots=True)
class Spent:
    """Cost of an answer; filled in when the answer ends."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0


class Partner(Protocol):
    """`answer` raises KeyboardInterrupt when Ctrl-C ended the answer; the partner stays usable."""

    @property
    def model(self) -> str: ...

    def settings(self) -> list[str]:
        """Return the facts that the banner shows."""

    def answer(self, messages: list[Message], show: Show, spent: Spent) -> None: ...

    def models(self) -> list[str]: ...

    def switch(self, model: str) -> None: ...

    def close(self) -> None: ...


@contextmanager
def interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first Ctrl-C of the block, and ignore all others. Only the main thread receives any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = False

    def press(*_: object) -> None:
        nonlocal pressed
        if not pressed:
            pressed = True
            stop()

    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, press)
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C in the block, except where an inner block handles it.

    Of several presses, the last may arrive when its answer has ended already, and must not end the program.
    """
    with interruptible(lambda: None):
        yield


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def sampling_facts(params: SamplingParams) -> str:
    """
    >>> sampling_facts(SamplingParams(temperature=0.7, top_p=0.9, max_tokens=512))
    'temperature 0.7, top_p 0.9, up to 512 tokens an answer'
    """
    default = SamplingParams()
    told = [f"temperature {params.temperature:g}"]
    told += [
        f"{name} {getattr(params, name):g}"
        for name in ("top_p", "top_k", "min_p", "repetition_penalty")
        if getattr(params, name) != getattr(default, name)
    ]
    return ", ".join([*told, f"up to {params.max_tokens} tokens an answer"])


class Local:
    """A model that runs in this process."""

    def __init__(self, options: ChatOptions) -> None:
        self._llm: LLM = start(options)
        self.model = options.model or builtin.NAME
        self._params = params_of(self._llm.suggested, options.max_tokens, options.temperature)
        if self._llm.template is None:
            self.close()
            raise OptionError("the model has no chat template; use weft generate --raw")

    def settings(self) -> list[str]:
        config = self._llm.config
        return [
            f"context {config.max_length} tokens",
            self._llm.placement,
            f"{config.memory_bytes / 2**30:.2f} GiB for context",
            sampling_facts(self._params),
        ]

    def answer(self, messages: list[Message], show: Show, spent: Spent) -> None:
        # The engine defers the interrupt to the end of its step, and the stream aborts its request as it closes.
        with interruptible(raise_interrupt), closing(self._llm.chat_stream(messages, self._params)) as chunks:
            for chunk in chunks:
                show(chunk.text)
                result = chunk.result
        assert result is not None, "the last chunk carries the result"
        spent.prompt_tokens, spent.cached_tokens = len(result.prompt_token_ids), result.cached_tokens
        spent.tokens = len(result.token_ids)
        if result.error is not None:
            raise RequestError(result.error)

    def models(self) -> list[str]:
        return [self.model]

    def switch(self, model: str) -> None:
        raise OptionError(f"this process runs {self.model} only; start weft chat {model}")

    def close(self) -> None:
        self._llm.close()


class Remote:
    """A model behind an OpenAI-compatible server."""

    def __init__(self, options: ChatOptions) -> None:
        import asyncio

        from weft.cli.client import Client

        self._loop = asyncio.Runner()
        self._client = Client(str(options.url), options.api_key)
        self._body: dict[str, Any] = {"max_tokens": options.max_tokens}
        if options.temperature is not None:
            self._body["temperature"] = options.temperature
        try:
            self.model = options.model or self._first_model()
        except BaseException:
            self.close()
            raise

    def _first_model(self) -> str:
        found = self.models()
        if not found:
            raise OptionError(f"{self._client.url} lists no models; pass the name of one")
        return found[0]

    def models(self) -> list[str]:
        return [str(card["id"]) for card in self._cards()]

    def _cards(self) -> list[dict[str, Any]]:
        listed = self._run(self._client.get("/v1/models"))
        return list(listed["data"])

    def switch(self, model: str) -> None:
        known = self.models()
        if model not in known:
            raise OptionError(f"{self._client.url} has no model {model}{did_you_mean(model, known)}")
        self.model = model

    def settings(self) -> list[str]:
        from weft.cli.client import ServerError

        sampling = f"temperature {self._body['temperature']:g}" if "temperature" in self._body else "its own sampling"
        facts = [f"at {self._client.url}", f"{sampling}, up to {self._body['max_tokens']} tokens an answer"]
        card: dict[str, Any] = {}
        # Not every server lists its models.
        with suppress(ServerError):
            card = next((card for card in self._cards() if card["id"] == self.model), card)
        if "max_model_len" in card:
            facts.insert(1, f"context {card['max_model_len']} tokens")
        if card.get("owned_by") == "weft":
            facts[2:2] = self._run(self._own_facts())
        return facts

    async def _own_facts(self) -> list[str]:
        """Return what Weft's own servers tell; the memory only with an admin key."""
        from weft.cli.client import ServerError

        facts, named = [], f"?model={quote(self.model, safe='')}"
        with suppress(ServerError, KeyError):
            facts.append(str((await self._client.get(f"/model_info{named}"))["dtype"]))
            size = (await self._client.get(f"/server_info{named}"))["memory_bytes"]
            facts.append(f"{size / 2**30:.2f} GiB for context")
        return facts

    def answer(self, messages: list[Message], show: Show, spent: Spent) -> None:
        self._run(self._answer(messages, show, spent))

    async def _answer(self, messages: list[Message], show: Show, spent: Spent) -> None:
        import asyncio

        body = {**self._body, "model": self.model, "messages": messages, "stream": True}
        body["stream_options"] = {"include_usage": True}
        async with aclosing(self._client.stream("/v1/chat/completions", body)) as events:
            async for event in events:
                note_usage(event, spent)
                for choice in event.get("choices") or ():
                    show(str(choice["delta"].get("content") or ""))
                # A cancellation takes effect here, even if the rest of the answer has arrived already.
                await asyncio.sleep(0)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run this to its end, or until Ctrl-C cancels it. Its connection is closed then, and the server stops."""
        import asyncio

        async def cancellable() -> T:
            task, loop = asyncio.current_task(), asyncio.get_running_loop()
            assert task is not None, "runs as a task"

            def stop() -> None:
                loop.call_soon_threadsafe(task.cancel)

            with interruptible(stop):
                return await work

        try:
            return self._loop.run(cancellable())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    def close(self) -> None:
        self._loop.run(self._client.close())
        self._loop.close()


def note_usage(event: dict[str, Any], spent: Spent) -> None:
    usage = event.get("usage") or {}
    if usage:
        spent.prompt_tokens, spent.tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        spent.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
