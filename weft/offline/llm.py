"""Offline generation: a model in this process, for one prompt or thousands.

Checks requests, feeds the engine and collects its outputs. Several generations and streams may run at once, also from
several threads: every waiting thread steps the engine for all of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any, cast

from weft.answers.followed import FollowedAnswer
from weft.answers.requests import ModelBounds, build_request
from weft.base.errors import EngineStopped, InvalidField, OptionError, RequestError
from weft.base.grammar import Grammar
from weft.base.options import Options
from weft.base.sampling import SamplingParams
from weft.engine.events import Output
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.offline.interrupts import InterruptLater
from weft.offline.result import Chunk, Result, chunk_of, result_of
from weft.start.loading import load
from weft.text.bad_words import token_sequences
from weft.text.conversation import render
from weft.text.prompts import Prompt, Tokens, as_list, encode_prompts
from weft.text.template import Message, check_messages

Params = SamplingParams | Sequence[SamplingParams] | None
Conversation = Sequence[Message]


@dataclass(slots=True)
class OpenRequest:
    """A request in the engine under `number`. `chunks` are those not yet read, if it is streamed."""

    number: int
    followed: FollowedAnswer
    chunks: deque[Chunk] | None = None
    result: Result | None = None


class LLM:
    """A model, ready to answer. `LLM()` is weft-small, which ships with Weft; `weft generate --help` lists the options.

    `suggested` are the model's own sampling parameters, the defaults of every call.

    >>> with LLM(memory="16MiB") as llm:  # doctest: +SKIP
    ...     result = llm.generate("Once upon a time", SamplingParams(max_tokens=16))[0]
    """

    def __init__(self, model: str | None = None, *, progress: bool = True, **options: Any) -> None:
        self._start(_options(model, options), progress)

    @classmethod
    def from_options(cls, options: Options, progress: bool = True) -> LLM:
        """Create an LLM from parsed options."""
        llm = cls.__new__(cls)
        llm._start(options, progress)
        return llm

    def _start(self, options: Options, progress: bool) -> None:
        self.options = options
        loaded = load(options, progress)
        self.config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.template = loaded.template
        self.end_tokens = loaded.end_tokens
        self.suggested = loaded.suggested
        self.model = loaded.model
        self.vocab_size = loaded.model.vocab_size
        self.placement = loaded.placement
        self.measure_rate = loaded.measure_rate
        self.chosen = loaded.chosen
        has_text = self.tokenizer is not None
        self.bounds = ModelBounds(self.vocab_size, self.config.max_length, self.end_tokens, has_text)
        runner = loaded.runner(options.threads, progress)
        drafter = loaded.draft_model(runner, options.threads, progress)
        self.engine = Engine(loaded.spec, runner, self.config, loaded.grammars(warm=False), draft_model=drafter)
        self._stopped: str | None = None
        self._running: dict[int, OpenRequest] = {}
        self._lock = threading.RLock()

    # requests ---------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        progress: bool = True,
        cache_salt: str | None = None,
        priority: int = 0,
        snapshots: Sequence[int] | Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
    ) -> list[Result]:
        """Return the answers to all prompts, in order. Nothing runs if any prompt is invalid.

        `cache_salt` isolates the cached prefixes of a tenant; lower values of `priority` go first; `snapshots` are
        positions in the prompt (or a list of them per prompt) that later prompts will share; `grammar` is the form of
        every answer.
        """
        found = encode_prompts(as_list(prompts), self.tokenizer, self.vocab_size)
        requests = self._requests(found, params, cache_salt, priority, snapshots, grammar)
        return self._run(requests, progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        progress: bool = True,
        cache_salt: str | None = None,
        priority: int = 0,
        grammar: Grammar | None = None,
    ) -> list[Result]:
        """Return the next message of one or many conversations. A message with `cache_control` is kept for later.

        `continue_final_message` continues the text of the last message instead; without `add_generation_prompt`, the
        model also writes the opening of its message.
        """
        how = (tools, template_variables, add_generation_prompt, continue_final_message)
        rendered = [self._render(each, *how) for each in _conversations(messages)]
        found = encode_prompts([tokens for tokens, _ in rendered], self.tokenizer, self.vocab_size)
        kept = [positions for _, positions in rendered]
        requests = self._requests(found, params, cache_salt, priority, kept, grammar)
        return self._run(requests, progress)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        snapshots: Sequence[int] = (),
        grammar: Grammar | None = None,
    ) -> Generator[Chunk, None, None]:
        """Yield an answer as it grows; the last chunk has the whole result. Closing the iterator ends the request."""
        found = encode_prompts(_single(prompt), self.tokenizer, self.vocab_size)
        return self._follow(self._requests(found, params, cache_salt, priority, snapshots, grammar)[0])

    def chat_stream(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        cache_salt: str | None = None,
        priority: int = 0,
        grammar: Grammar | None = None,
    ) -> Generator[Chunk, None, None]:
        """Yield the next message of a conversation as it grows; see `chat`."""
        how = (tools, template_variables, add_generation_prompt, continue_final_message)
        tokens, positions = self._render(check_messages(messages), *how)
        found = encode_prompts([tokens], self.tokenizer, self.vocab_size)
        return self._follow(self._requests(found, params, cache_salt, priority, positions, grammar)[0])

    def close(self) -> None:
        """End running requests and free the memory. The object is unusable afterwards."""
        with self._lock:
            self._abort(list(self._running.values()))
            self._stopped = self._stopped or "it is closed"
            if self.engine is not None:
                self.engine.close()
            # Frees the memory; `_check_open` keeps calls away.
            self.engine = self.model = None  # type: ignore[assignment]

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # checking ---------------------------------------------------------------------------------------------------------

    def _requests(
        self,
        prompts: list[Tokens],
        params: Params,
        cache_salt: str | None,
        priority: int,
        snapshots: Sequence[int] | Sequence[Sequence[int]],
        grammar: Grammar | None,
    ) -> list[Request]:
        """Return every prompt as a valid request; raise before any of them runs."""
        self._check_open()
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise InvalidField("priority", f"must be an integer, got {priority!r}")
        if not isinstance(cache_salt, str | None):
            raise InvalidField("cache_salt", f"must be a string, got {cache_salt!r}")
        each_params = _per_prompt(self.suggested if params is None else params, len(prompts))
        each_snapshots = _snapshots_per_prompt(snapshots, len(prompts))
        salt = (cache_salt or "").encode()
        each_params = [self._with_tokens(own) for own in each_params]
        return [
            build_request(tokens, own, self.bounds, salt=salt, priority=priority, snapshots=positions, grammar=grammar)
            for tokens, own, positions in zip(prompts, each_params, each_snapshots, strict=True)
        ]

    def _with_tokens(self, params: SamplingParams) -> SamplingParams:
        """Return parameters with their bad words as token sequences."""
        if not params.bad_words:
            return params
        return replace(params, bad_words=token_sequences(params.bad_words, self.tokenizer))

    def _check_open(self) -> None:
        if self._stopped is not None:
            raise EngineStopped(f"this LLM no longer answers: {self._stopped}; create a new one")

    def _render(
        self,
        messages: Conversation,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        opens: bool,
        continues: bool,
    ) -> tuple[list[int], list[int]]:
        """Return a conversation's tokens, and the ends of its messages with `cache_control`."""
        return render(
            self.tokenizer,
            self.template,
            messages,
            tools=tools,
            variables=variables,
            add_generation_prompt=opens,
            continue_final_message=continues,
        )

    # running ----------------------------------------------------------------------------------------------------------

    def _run(self, requests: list[Request], progress: bool) -> list[Result]:
        from weft.offline.progress import Progress

        opened: list[OpenRequest] = []
        with Progress(len(requests), shown=progress) as bar:
            try:
                for request in requests:
                    self._add(request, opened)
                for each in opened:
                    while each.result is None:
                        self._move_on()
                        bar.show(opened)
            except BaseException:
                self._abort(opened)
                raise
        return [each.result for each in opened if each.result is not None]

    def _follow(self, request: Request) -> Generator[Chunk, None, None]:
        chunks: deque[Chunk] = deque()
        opened: list[OpenRequest] = []
        try:
            self._add(request, opened, chunks)
            while True:
                while not chunks:
                    self._move_on()
                chunk = chunks.popleft()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self._abort(opened)

    def _add(self, request: Request, opened: list[OpenRequest], chunks: deque[Chunk] | None = None) -> None:
        """Give the request to the engine. `chunks`, if given, receives its output from the first token on.

        It joins `opened` before an interrupt can be raised, so that the caller can abort it.
        """
        with self._lock:
            self._check_open()
            detokenizer = None if self.tokenizer is None else self.tokenizer.detokenizer()
            with InterruptLater():
                added = OpenRequest(self.engine.add(request), FollowedAnswer(request, detokenizer), chunks)
                self._running[added.number] = added
                opened.append(added)

    def _move_on(self) -> None:
        """Run one step of the engine and dispatch its outputs."""
        with self._lock:
            self._check_open()
            with InterruptLater():
                for output in self._step():
                    opened = self._running.get(output.sequence)
                    if opened is not None:
                        self._take(opened, output)
                self._land_rest()

    def _land_rest(self) -> None:
        """Settle flights that went one step too far once no caller waits, so that their memory is free."""
        while not self._running and not self.engine.idle:
            self._step()
        if not self._running:
            self.engine.write_behind()

    def _step(self) -> list[Output]:
        try:
            return self.engine.step()
        except BaseException as error:
            # A step is half done: no further result could be trusted, so nothing may follow.
            self._stopped = f"a step failed: {error!r}"
            raise

    def _take(self, opened: OpenRequest, output: Output) -> None:
        number, followed = opened.number, opened.followed
        piece = followed.take([output])
        if piece.stops_engine:
            self.engine.finish(number)
        if piece.finish is not None:
            followed.report = self.engine.report(number)
            opened.result = result_of(followed)
            del self._running[number]
            self.engine.forget(number)
        if opened.chunks is not None:
            opened.chunks.append(chunk_of(piece, followed.request.params.logprobs is not None, opened.result))

    def _abort(self, requests: list[OpenRequest]) -> None:
        """Abort those that still run, and free their memory at once."""
        with self._lock, InterruptLater():
            left = [each for each in requests if self._running.pop(each.number, None) is not None]
            if self._stopped is not None:
                return
            for each in left:
                self.engine.abort(each.number)
                self.engine.forget(each.number)
            if left:
                self._land_rest()


def _options(model: str | None, given: Mapping[str, Any]) -> Options:
    known = [each.name for each in fields(Options)]
    for name in given:
        if name not in known:
            raise OptionError(f"LLM has no option {name!r}; known options are {', '.join(known)}")
    return Options(model=None if model is None else str(model), **given)


def _per_prompt(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, str | Mapping) or not isinstance(params, Sequence):
        raise InvalidField("params", f"must be SamplingParams or a list of them, got {params!r:.80}")
    if len(params) != count:
        raise InvalidField("params", f"must have one entry per prompt, got {len(params)} for {count} prompts")
    for place, each in enumerate(params):
        if not isinstance(each, SamplingParams):
            raise InvalidField(f"params[{place}]", f"must be SamplingParams, got {each!r:.80}")
    return list(params)


def _snapshots_per_prompt(snapshots: Sequence[int] | Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    if all(isinstance(each, int) for each in snapshots):
        return [cast(Sequence[int], snapshots)] * count
    if len(snapshots) != count:
        raise InvalidField("snapshots", f"must have one entry per prompt, got {len(snapshots)} for {count} prompts")
    return list(cast(Sequence[Sequence[int]], snapshots))


def _conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    if isinstance(messages, Sequence) and messages and all(isinstance(each, list | tuple) for each in messages):
        return [check_messages(each) for each in cast(Sequence[Conversation], messages)]
    return [check_messages(cast(Conversation, messages))]


def _single(prompt: Prompt) -> list[Prompt]:
    prompts = as_list(prompt)
    if len(prompts) != 1:
        raise RequestError(f"stream takes one prompt, got {len(prompts)}; use generate for several")
    return prompts
