"""What all routes share: the tokenizer and templates, the engine's backend, and the generations in progress."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from weft import __version__
from weft.answers.followed import FollowedAnswer
from weft.answers.requests import ModelBounds, build_request, numbered
from weft.backends.backend import Backend
from weft.base.errors import InvalidField, OptionError, RequestError
from weft.base.grammar import Grammar
from weft.base.logs import LogFormat
from weft.base.sampling import SamplingParams
from weft.base.vectors import VectorFacts
from weft.engine.request import MOST_NAME, Request
from weft.server.access.auth import Tenant
from weft.server.generation import Generation
from weft.server.http.errors import json_response
from weft.server.http.receiving import Receiving
from weft.server.http.sse import while_connected
from weft.server.metrics.registry import Metrics
from weft.server.settings import ServerSettings
from weft.server.stored.answers import StoredAnswers
from weft.server.stored.retained import RETAINED_BYTES, note_retained
from weft.server.texts.bodies import check_count
from weft.server.texts.body_reader import BodyReader, is_quick
from weft.server.texts.fields import UnknownFields
from weft.server.texts.grammars import Form, with_source
from weft.server.texts.messages import setup_of
from weft.server.texts.pool import TextPool
from weft.server.texts.prompt_builder import NO_VECTORS, Prompt, PromptBuilder, PromptFacts
from weft.server.tracing.hub import TraceHub
from weft.server.tracing.records import RequestRecords
from weft.text.output import output_parser
from weft.text.prompts import Tokens
from weft.text.reasoning import detect_reasoning
from weft.text.template import ChatTemplate
from weft.text.tokenizer import Tokenizer
from weft.text.tools import detect_tools

T = TypeVar("T")
B = TypeVar("B", bound=msgspec.Struct)
# Answers with more characters or scores are encoded in a thread.
LONG_TEXT = 1 << 14
# Grammars with more characters are checked and translated in a worker process.
SMALL_GRAMMAR = 1 << 11


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """One prompt, its parameters and the number of answers `n`. `field` is the prompt's place in the body.

    `scores_once`: only the first answer computes the prompt's log-probabilities, and the others show the same. They are
    complete when all answers are.
    """

    prompt: Prompt
    params: SamplingParams
    n: int = 1
    field: str = "prompt"
    scores_once: bool = False
    answered: Tokens | None = None  # of an answer to the prompt, with which its own go on

    @property
    def known_length(self) -> int:
        return len(self.prompt.tokens) + (0 if self.answered is None else len(self.answered))

    def params_of(self, place: int) -> SamplingParams:
        """Return the parameters of the answer at this place."""
        found = numbered(self.params, place)
        return replace(found, prompt_logprobs=None) if self.scores_once and place else found


class ServerSide(Protocol):
    """What routes need that no model answers."""

    @property
    def model_name(self) -> str: ...

    @property
    def receiving(self) -> Receiving: ...

    @property
    def stored(self) -> StoredAnswers | None: ...


class Front:
    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        end_tokens: frozenset[int],
        settings: ServerSettings,
        suggested: SamplingParams | None = None,
        pool: TextPool | None = None,
        stored: StoredAnswers | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.backend = backend
        self.stored = stored
        # What is retained, by name, so that it can be forked, or sent as a file.
        self.retained = StoredAnswers(RETAINED_BYTES)
        self.suggested = suggested or SamplingParams()
        self.tokenizer = tokenizer
        self.template = template
        self.end_tokens = end_tokens
        self.settings = settings
        self.limits = settings.limits
        self.metrics = metrics or Metrics()
        source = None if template is None else template.source
        self.tool_parser = chosen(settings.tool_parser, lambda: detect_tools(backend.info.architecture, source))
        self.reasoning_parser = chosen(settings.reasoning_parser, lambda: detect_reasoning(source or ""))
        # An unknown parser name fails now, not with the first request.
        output_parser(self.reasoning_parser, self.tool_parser)
        for alias, name in settings.aliases:
            if name != self.model_name:
                raise OptionError(f"alias {alias} must stand for {self.model_name}, the only model, got {name}")
        self._builder = PromptBuilder(tokenizer, template, self.limits, settings.strict_fields, self.facts)
        self.receiving = Receiving(self.limits)
        self.pool = pool or pool_for(tokenizer, template, settings)
        self.generations: set[Generation] = set()
        self.traces = TraceHub(backend)
        self.requests = RequestRecords(backend, self.generations)
        self._unknown_fields = UnknownFields()
        self.open_sequences = 0

    @property
    def model_name(self) -> str:
        return self.settings.model_name or self.backend.info.name

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further names of the model."""
        return tuple(alias for alias, _ in self.settings.aliases)

    @property
    def fingerprint(self) -> str:
        """The `system_fingerprint` of answers: version and data type, and whether answers are exact."""
        info = self.backend.info
        return f"weft-{__version__}-{info.dtype}" + ("-exact" if info.settings.get("exact") else "")

    @property
    def room(self) -> int:
        """The maximum number of tokens of a sequence."""
        return min(self.backend.info.max_length, self.backend.info.memory_tokens or self.backend.info.max_length)

    @property
    def bounds(self) -> ModelBounds:
        info = self.backend.info
        has_text, only_vectors = self.tokenizer is not None, not self.vectors.generates
        return ModelBounds(info.vocab_size, info.max_length, self.end_tokens, has_text, only_vectors)

    @property
    def vectors(self) -> VectorFacts:
        """What embeddings and classes the model has."""
        stated = self.backend.info.settings.get("vectors")
        return NO_VECTORS if stated is None else msgspec.convert(stated, VectorFacts)

    @property
    def facts(self) -> PromptFacts:
        info = self.backend.info
        return PromptFacts(self.model_name, info.vocab_size, info.max_length, self.room, self.aliases, self.vectors)

    @property
    def builder(self) -> PromptBuilder:
        self._builder.facts = self.facts
        return self._builder

    def check_model(self, name: str | None) -> None:
        self.builder.check_model(name)

    def need_tokenizer(self) -> Tokenizer:
        return self.builder.need_tokenizer()

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self.tokenizer.encode(text, special=False)) if self.tokenizer is not None and text else 0

    # prompts --------------------------------------------------------------------------------------------------------

    async def read_prompts(self, request: HttpRequest, reader: BodyReader[B]) -> tuple[B, list[Prompt]]:
        """Return a request's body without its texts, and its prompts. A worker process reads what may take long."""
        return await self.read_texts(request, reader, await self.receiving.read_body(request))

    async def read_texts(self, request: HttpRequest, reader: BodyReader[B], data: bytes) -> tuple[B, list[Prompt]]:
        """Return a body, given as bytes, without its texts, and its prompts."""
        if is_quick(data, self.builder):
            body, prompts, unknown = reader.read(self.builder, data)
        else:
            with self.counted(1):
                body, prompts, unknown = reader.unpacked(await self.read_in_worker(request, reader.name, data))
        self._unknown_fields.note(unknown, reader.name, reader.kind, reader.parts)
        return body, prompts

    async def read_in_worker(self, request: HttpRequest, name: str, data: bytes) -> bytes:
        """Return the result of a worker process for a body; the work ends when the client disconnects."""
        return await while_connected(request, self.pool.run(name, self.facts, data))

    @contextmanager
    def counted(self, sequences: int) -> Iterator[None]:
        """Count work as open requests while it runs."""
        self._reserve(sequences)
        try:
            yield
        finally:
            self.open_sequences -= sequences

    def _reserve(self, sequences: int) -> None:
        if self.open_sequences + sequences > self.limits.open_sequences:
            raise RequestError("the server is busy: too many requests are running or waiting; try again later", 429)
        self.open_sequences += sequences

    async def prepared(self, form: Form) -> Form:
        """Return a form whose grammar is checked and translated, so that the engine only compiles it."""
        grammar = form.grammar
        self.need_tokenizer()
        try:
            if len(grammar.text) <= SMALL_GRAMMAR:
                return form.within(with_source(grammar))
            found = await self.pool.run("grammar", self.facts, msgspec.msgpack.encode(grammar))
        except RequestError as error:
            raise form.named(error) from None
        return form.within(msgspec.msgpack.decode(found, type=Grammar))

    async def run_off_loop(self, size: int, work: Callable[[], T]) -> T:
        """Run work that may tokenize an answer; long work goes to a thread, so that it does not delay other streams."""
        quick = self.tokenizer is None or self.tokenizer.is_linear
        return work() if quick and size <= LONG_TEXT else await asyncio.to_thread(work)

    async def shaped(self, generation: Generation, make: Callable[[], Any]) -> Response:
        """Return an answer as JSON. Encoding a long one, or the scores of a long text, is long work."""
        return await self.run_off_loop(generation.size, lambda: json_response(make()))

    def max_tokens(self, asked: int | None, prompt: int, field: str = "max_tokens", default: int | None = None) -> int:
        """Return the number asked for, or this API's default, or all that fits behind the prompt."""
        if asked is not None:
            check_count(field, asked, self.limits.max_tokens)
            return asked
        fits = min(self.room - prompt, self.limits.max_tokens)
        return max(1, fits if default is None else min(fits, default))

    # running --------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Sequence[AskedPrompt],
        tenant: Tenant,
        *,
        name: str,
        aliases: tuple[str, ...] = (),
        cache_salt: str | None = None,
        salt: bytes | None = None,
        priority: int | None = None,
        retain: float | None = None,
        form: Form | None = None,
        skip_special: bool = True,
        shown: frozenset[str] = frozenset(),
        keeps_answer: bool = False,
        save_to: str | None = None,
    ) -> Generation:
        """Start everything that one HTTP request asks for: n sequences per prompt, in order.

        `salt` is that of an answer that the tenant forks; otherwise it follows from the tenant and `cache_salt`.
        `save_to` is a new file, to which the prompt of a request without an answer is written.
        """
        form = None if form is None else await self.prepared(form)
        answers: list[FollowedAnswer] = []
        several = sum(asked.n for asked in prompts) > 1
        for asked in prompts:
            check_count("n", asked.n, self.limits.n, 1)
            first = build_request(
                asked.prompt.tokens,
                asked.params,
                self.bounds,
                salt=tenant.salted(cache_salt) if salt is None else salt,
                priority=priority or 0,
                snapshots=asked.prompt.snapshots,
                grammar=None if form is None else form.grammar,
                field=asked.field,
                prediction=asked.prompt.prediction,
                retain=asked.prompt.retained(retain),
                answered=asked.answered,
                keeps_answer=keeps_answer,
            )
            params = [asked.params_of(place) for place in range(asked.n)]
            named = [name_of(name, each, several) for each in range(len(answers), len(answers) + asked.n)]
            requests = [msgspec.structs.replace(first, params=p, name=n) for p, n in zip(params, named, strict=True)]
            found = [self._followed(*each, skip_special, shown) for each in enumerate(requests, start=len(answers))]
            for other in found[1:] if asked.scores_once else ():
                other.scored_by = found[0]
            answers += found
        if len(answers) > self.limits.sequences:
            raise InvalidField("n", f"asks for {len(answers)} answers in all; the limit is {self.limits.sequences}")
        generation = self._open(name, aliases, tenant, len(answers), form, prompts)
        try:
            await generation.submit(answers, save_to)
        except RequestError as error:
            raise error if form is None else form.named(error) from None
        return generation

    def _followed(self, index: int, request: Request, skip_special: bool, shown: frozenset[str]) -> FollowedAnswer:
        silent = self.tokenizer is None or request.params.vector_from is not None
        detokenizer = None if silent or self.tokenizer is None else self.tokenizer.detokenizer(skip_special, shown)
        return FollowedAnswer(request, detokenizer, index)

    def _open(
        self,
        name: str,
        aliases: tuple[str, ...],
        tenant: Tenant,
        sequences: int,
        form: Form | None,
        prompts: Sequence[AskedPrompt],
    ) -> Generation:
        self._reserve(sequences)
        prompt = sum(asked.known_length for asked in prompts)
        try:
            reserved = tenant.account.reserve(prompt, sum(asked.n * asked.params.max_tokens for asked in prompts))
        except BaseException:
            self.open_sequences -= sequences
            raise

        def closed(generation: Generation) -> None:
            if generation in self.generations:
                self.generations.remove(generation)
                self.open_sequences -= sequences
                tenant.account.settle(reserved, generation.used())
                note_retained(self.retained, generation)
                self.requests.note(generation)

        names, model = (name, *aliases), self.model_name
        generation = Generation(names, tenant, self.backend, self.metrics, closed, form, model)
        self.generations.add(generation)
        return generation

    def abort(self, names: Sequence[str] | None, tenant: Tenant) -> int:
        """Abort generations by name, or all of a tenant (of all tenants, for an admin); return how many."""
        found = [
            generation
            for generation in self.generations
            if (tenant.admin or generation.tenant == tenant)
            and (names is None or not set(generation.names).isdisjoint(names))
        ]
        for generation in found:
            generation.abort()
        return len(found)


def pool_for(
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    settings: ServerSettings,
    log_format: LogFormat = "text",
    **more: Any,
) -> TextPool:
    """Return text workers for these texts. `more` are further arguments of `TextPool`."""
    level, limits = logging.getLogger("weft").getEffectiveLevel(), settings.limits
    return TextPool(
        lambda: setup_of(tokenizer, template, limits, settings.strict_fields, level, log_format), limits, **more
    )


def chosen(name: str, detect: Callable[[], str | None]) -> str | None:
    """Return a parser's name: as configured, or as detected; None if it is turned off."""
    return detect() if name == "auto" else None if name == "none" else name


def name_of(request: str, place: int, several: bool) -> str:
    """Return the name of one answer in what is reported of requests.

    >>> name_of("chatcmpl-1", 0, False), name_of("chatcmpl-1", 2, True)
    ('chatcmpl-1', 'chatcmpl-1#2')
    """
    return f"{request[: MOST_NAME - 8]}#{place}" if several else request[:MOST_NAME]


def new_name(prefix: str) -> str:
    return prefix + secrets.token_hex(16)
