"""What all routes share: the model's texts on this side, the engine on the other, and who runs what."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, TypeVar

from starlette.responses import Response

from weft.base.errors import RequestError
from weft.base.sampling import SamplingParams
from weft.engine.request import Request
from weft.server.auth import Tenant
from weft.server.backend import Backend
from weft.server.errors import FieldError, json_response
from weft.server.grammars import Form
from weft.server.limits import check_count
from weft.server.metrics import Metrics
from weft.server.runs import Run
from weft.server.settings import ServerSettings
from weft.text import conversation
from weft.text.answer import Answer
from weft.text.output import output_parser
from weft.text.prompts import (
    NO_TOKENIZER,
    Tokens,
    check_request,
    check_snapshots,
    checked_tokens,
    ends_of_messages,
)
from weft.text.reasoning import detect_reasoning
from weft.text.template import ChatTemplate, Message
from weft.text.tokenizer import Tokenizer
from weft.text.tools import detect_tools

T = TypeVar("T")
# Texts of more characters are tokenized beside the event loop.
LONG_TEXT = 1 << 14


@dataclass(frozen=True, slots=True)
class Wish:
    """One prompt and how to go on from it; `n` answers are wanted. `field` is where the body has the prompt."""

    tokens: Tokens
    params: SamplingParams
    n: int = 1
    snapshots: tuple[int, ...] = ()
    field: str = "prompt"


class Front:
    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        end_tokens: frozenset[int],
        settings: ServerSettings,
        suggested: SamplingParams | None = None,
    ) -> None:
        self.backend = backend
        self.suggested = suggested or SamplingParams()
        self.tokenizer = tokenizer
        self.template = template
        self.end_tokens = end_tokens
        self.settings = settings
        self.limits = settings.limits
        self.metrics = Metrics()
        source = None if template is None else template.source
        self.tool_parser = chosen(settings.tool_parser, lambda: detect_tools(backend.info.architecture, source))
        self.reasoning_parser = chosen(settings.reasoning_parser, lambda: detect_reasoning(source or ""))
        # A name that is none fails now, not with the first request.
        output_parser(self.reasoning_parser, self.tool_parser)
        self.runs: set[Run] = set()
        self.open_sequences = 0

    @property
    def model_name(self) -> str:
        return self.settings.model_name or self.backend.info.name

    @property
    def room(self) -> int:
        """The most tokens that a sequence can have here."""
        return min(self.backend.info.max_length, self.backend.info.memory_tokens or self.backend.info.max_length)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise FieldError(
                "model", f"{name!r:.80} is not served here, but {self.model_name!r}", 404, "model_not_found"
            )

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(NO_TOKENIZER)
        return self.tokenizer

    def count(self, text: str) -> int:
        """How many tokens a text has."""
        return len(self.tokenizer.encode(text, special=False)) if self.tokenizer is not None and text else 0

    # prompts --------------------------------------------------------------------------------------------------------

    async def beside(self, size: int, work: Callable[[], T]) -> T:
        """Long work must not hold up the streams of others."""
        return await asyncio.to_thread(work) if size > LONG_TEXT else work()

    async def shaped(self, run: Run, make: Callable[[], Any]) -> Response:
        """An answer as JSON. Scores of a long text are many, and shaping them is long work."""
        return await self.beside(run.scores, lambda: json_response(make()))

    def check_size(self, characters: int, field: str) -> None:
        """Refuse a text that could not fit whatever its tokens are: tokenizing it would take long, for nothing."""
        most = self.room * self.need_tokenizer().characters_per_token
        if characters > most:
            raise FieldError(
                field,
                f"is too much: a text of {characters} characters has more than {self.room} tokens",
                code="context_length_exceeded",
            )

    async def encode(self, prompts: Sequence[str | list[int]], field: str) -> list[Tokens]:
        """Token ids of prompts, which are texts or token ids already."""
        if not 0 < len(prompts) <= self.limits.prompts:
            raise FieldError(field, f"must hold 1 to {self.limits.prompts} prompts, got {len(prompts)}")
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            self.check_size(len(text), field)
        encoded: list[list[int]] = []
        if texts:
            tokenizer = self.need_tokenizer()
            encoded = await self.beside(sum(map(len, texts)), lambda: tokenizer.encode_all(texts))
        found = iter(encoded)
        vocab_size = self.backend.info.vocab_size
        named = [field] if len(prompts) == 1 else [f"{field}[{place}]" for place in range(len(prompts))]
        return [
            checked_tokens(next(found) if isinstance(prompt, str) else prompt, vocab_size, name)
            for prompt, name in zip(prompts, named)
        ]

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        add_generation_prompt: bool = True,
        field: str = "messages",
    ) -> tuple[Tokens, tuple[int, ...]]:
        """A conversation as tokens, and the positions that it declares worth keeping."""
        characters = sum(len(str(message.get("content"))) for message in messages)
        self.check_size(characters, field)
        size = characters + 256 * len(messages)
        tokens, positions = await self.beside(
            size,
            lambda: conversation.render(
                self.tokenizer,
                self.template,
                messages,
                tools=tools,
                variables=variables,
                add_generation_prompt=add_generation_prompt,
            ),
        )
        checked = checked_tokens(tokens, self.backend.info.vocab_size, field)
        return checked, check_snapshots(positions, len(checked))

    def template_variables(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """What a request may tell the template: names from a list, plain values."""
        for name, value in (given or {}).items():
            if name not in self.settings.template_kwargs:
                known = ", ".join(self.settings.template_kwargs)
                raise FieldError(f"chat_template_kwargs.{name:.64}", f"is not allowed; known are {known}")
            if not isinstance(value, str | int | float | None) or len(str(value)) > 256:
                raise FieldError(f"chat_template_kwargs.{name}", "must be a short text, a number, true, false or null")
        return dict(given or {})

    def max_tokens(self, asked: int | None, prompt: int, field: str = "max_tokens", default: int | None = None) -> int:
        """As asked; else so many as this API's default says, or all that fits behind the prompt."""
        if asked is not None:
            check_count(field, asked, self.limits.max_tokens)
            return asked
        fits = min(self.room - prompt, self.limits.max_tokens)
        return max(1, fits if default is None else min(fits, default))

    # running --------------------------------------------------------------------------------------------------------

    async def run(
        self,
        wishes: Sequence[Wish],
        tenant: Tenant,
        *,
        name: str,
        aliases: tuple[str, ...] = (),
        cache_salt: str | None = None,
        priority: int | None = None,
        form: Form | None = None,
        skip_special: bool = True,
        shown: frozenset[str] = frozenset(),
    ) -> Run:
        """Start everything that one HTTP request asks for: n sequences per prompt, in their order."""
        if form is not None:
            self.need_tokenizer()
        requests, answers = [], []
        for wish in wishes:
            check_count("n", wish.n, self.limits.n, 1)
            self._check(wish)
            for place in range(wish.n):
                request = self._request(wish, place, tenant.salted(cache_salt), priority or 0, form)
                detokenizer = None if self.tokenizer is None else self.tokenizer.detokenizer(skip_special, shown)
                requests.append(request)
                answers.append(Answer(request.params, detokenizer, request.stop_tokens))
        if len(requests) > self.limits.sequences:
            raise FieldError("n", f"asks for {len(requests)} answers in all, more than {self.limits.sequences}")
        run = self._open(name, aliases, tenant, len(requests), form, wishes)
        try:
            await run.submit(requests, answers)
        except RequestError as error:
            raise error if form is None else form.named(error) from None
        return run

    def _check(self, wish: Wish) -> None:
        info, length = self.backend.info, len(wish.tokens)
        if length + wish.params.max_tokens > info.max_length:
            field = wish.field if length >= info.max_length else "max_tokens"
            what = (
                f"is too much: {length} tokens of prompt and {wish.params.max_tokens} to come exceed {info.max_length}"
            )
            raise FieldError(field, what, code="context_length_exceeded")
        check_request(wish.tokens, wish.params, self.tokenizer is not None, info.vocab_size, info.max_length)

    def _request(self, wish: Wish, place: int, salt: bytes, priority: int, form: Form | None) -> Request:
        params = wish.params
        if params.seed is not None and place:
            params = replace(params, seed=derived_seed(params.seed, place))
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_tokens)
        grammar = None if form is None else form.grammar
        ends = ends_of_messages(wish.tokens, self.end_tokens)
        return Request(wish.tokens, params, stops, salt, priority, wish.snapshots, grammar, ends)

    def _open(
        self,
        name: str,
        aliases: tuple[str, ...],
        tenant: Tenant,
        sequences: int,
        form: Form | None,
        wishes: Sequence[Wish],
    ) -> Run:
        if self.open_sequences + sequences > self.limits.open_sequences:
            raise RequestError("the server is busy: too many requests are running or waiting", 429)
        prompt = sum(len(wish.tokens) for wish in wishes)
        reserved = tenant.account.reserve(prompt, sum(wish.n * wish.params.max_tokens for wish in wishes))
        self.open_sequences += sequences

        def closed(run: Run) -> None:
            if run in self.runs:
                self.runs.remove(run)
                self.open_sequences -= sequences
                tenant.account.settle(reserved, run.used())

        run = Run((name, *aliases), tenant, self.backend, self.metrics, closed, form)
        self.runs.add(run)
        return run

    def abort(self, names: Sequence[str] | None, tenant: Tenant) -> int:
        """End runs by name, or all of a tenant (of everybody, for an admin); how many."""
        found = [
            run
            for run in self.runs
            if (tenant.admin or run.tenant == tenant) and (names is None or not run.names.isdisjoint(names))
        ]
        for run in found:
            run.abort()
        return len(found)


def chosen(name: str, detect: Callable[[], str | None]) -> str | None:
    """A parser's name: as told, or as found out; none if told so."""
    return detect() if name == "auto" else None if name == "none" else name


def new_name(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


def derived_seed(seed: int, place: int) -> int:
    """The seed of the n-th answer: the first keeps the request's own.

    >>> derived_seed(7, 1) == derived_seed(7, 1) != derived_seed(7, 2)
    True
    """
    return int.from_bytes(sha256(f"{seed}/{place}".encode()).digest()[:8], "big", signed=True)
