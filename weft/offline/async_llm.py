"""Offline generation for asyncio: the engine runs in a thread, and answers are asynchronous iterators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from weft.answers.pair_scores import ANSWERS, INSTRUCTION, PairScorer, pairs_of
from weft.answers.requests import ModelBounds
from weft.backends.output_stream import OutputStream
from weft.base.errors import EngineStopped, RequestError
from weft.base.options import Options
from weft.base.sampling import SamplingParams as EngineParams
from weft.base.vectors import VectorFacts
from weft.engine.events import Report
from weft.offline.asking import (
    Answering,
    AnyParams,
    AnyPrompt,
    Asking,
    Conversation,
    OpenPrompt,
    Params,
    refuse_adapters,
    report_cut,
)
from weft.offline.embedding import AskedVector, ClassificationOutput, EmbeddingOutput, VectorCalls, scored
from weft.offline.keywords import EngineArgs, options_of
from weft.offline.result import Result
from weft.offline.sampling import GenerationParams, RequestOutputKind
from weft.offline.saved import AnyPath, LoadedPrompt, PromptKeys
from weft.offline.scoring import ScoringOutput
from weft.offline.text import TextTokenizer
from weft.start.engine_process import load_engine
from weft.start.launch import load_texts
from weft.start.thread_backend import ThreadBackend
from weft.text.prompts import NO_TOKENIZER, Prompt

MOST_OPEN = 256


class AsyncLLM:
    """A model in this process for asyncio programs: vLLM's `AsyncLLM` and `AsyncLLMEngine`.

    Keywords are those of `LLM`. At most `max_open` answers are computed or queued in the engine at once; further calls
    wait their turn, in order. All calls belong to one event loop. `shutdown` ends it.

    >>> async def ask(llm: AsyncLLM) -> None:
    ...     async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=16)):
    ...         print(output.text)
    """

    def __init__(self, model: str | None = None, *, max_open: int = MOST_OPEN, progress: bool = True, **options: Any):
        self._start(options_of({"model": model, **options}), max_open, progress)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **ignored: Any) -> AsyncLLM:
        """Return the engine with these arguments. Others, such as `usage_context`, have no meaning here."""
        llm = cls.__new__(cls)
        llm._start(engine_args.options, MOST_OPEN, progress=True)
        return llm

    def _start(self, options: Options, max_open: int, progress: bool) -> None:
        self._keys = PromptKeys.of(options)
        engine, info = load_engine(options, progress)
        texts = load_texts(options, info.settings)
        facts = msgspec.convert(info.settings["vectors"], VectorFacts)
        has_text = texts.tokenizer is not None
        bounds = ModelBounds(info.vocab_size, info.max_length, texts.end_tokens, has_text, not facts.generates)
        self._vectors = VectorCalls(facts, texts.tokenizer, info.vocab_size)
        self._asking = Asking(texts.tokenizer, texts.template, bounds, texts.suggested)
        # Requests wait here, not in the backend, which would refuse them.
        self._backend = ThreadBackend(lambda: (engine, info), max_open=1 << 30)
        self._starting: asyncio.Task[None] | None = None
        self._max_open = max_open
        self._open = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._named: dict[str, list[OutputStream]] = {}
        self._stopped = False

    # requests ---------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: AnyPrompt,
        sampling_params: AnyParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        retain: float | None = None,
    ) -> AsyncIterator[Result]:
        """Yield the answers to a prompt as they grow; the last output is `finished`.

        An output has everything that arrived since the last one was read, so a slow reader gets fewer and larger ones.
        `sampling_params.output_kind` chooses whole answers, new parts or the last output only. Leaving the iterator, or
        cancelling its task, ends the request in the engine.
        """
        refuse_adapters(lora_request)
        how: dict[str, Any] = {"cache_salt": cache_salt, "priority": priority, "request_id": request_id}
        how["retain"] = retain
        return self._follow(_only(self._asking.prompts(prompt, sampling_params, **how)))

    def chat(
        self,
        messages: Conversation,
        sampling_params: AnyParams | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        retain: float | None = None,
    ) -> AsyncIterator[Result]:
        """Yield the next message of a conversation as it grows; see `generate`."""
        asked = self._asking.conversations(
            messages,
            sampling_params,
            tools=tools,
            chat_template=chat_template,
            variables=chat_template_kwargs,
            cache_salt=cache_salt,
            priority=priority,
            retain=retain,
            request_id=request_id,
        )
        return self._follow(_only(asked))

    async def retain(self, prompt: AnyPrompt, seconds: float, *, cache_salt: str | None = None) -> Result:
        """Compute a prompt, as far as it is not cached, and protect it against eviction; zero seconds release it."""
        params = EngineParams(max_tokens=0)
        return await self._last(_only(self._asking.prompts(prompt, params, cache_salt=cache_salt, retain=seconds)))

    async def fork(
        self,
        result: Result,
        at: int | None = None,
        n: int | None = None,
        sampling_params: Params = None,
        *,
        choice: int = 0,
        retain: float | None = None,
    ) -> list[Result]:
        """Go on with an answer after its first `at` tokens, or all; see `LLM.fork`."""
        asked = self._asking.forks(result, at, n, sampling_params, choice, retain)
        return list(await asyncio.gather(*map(self._last, asked)))

    async def save(self, path: AnyPath, prompt: AnyPrompt | Result, *, cache_salt: str | None = None) -> Result:
        """Write a prompt, or a result's prompt and answer, to a new signed file; see `LLM.save`."""
        self._keys.check_can_save()
        result = await self._last(_only(self._asking.saved(prompt, cache_salt)), str(path))
        if result.error is not None:
            raise RequestError(result.error)
        await asyncio.to_thread(self._keys.sign, Path(path))
        return result

    async def load(self, path: AnyPath, *, cache_salt: str | None = None) -> LoadedPrompt:
        """Read a prompt from a file into the cache, if a trusted key has signed it; see `LLM.load`."""
        await asyncio.to_thread(self._keys.check, Path(path))
        await self._ready()
        found = await self._backend.load_prompt(str(path), (cache_salt or "").encode(), self._keys.share)
        return await asyncio.to_thread(self._keys.loaded, Path(path), found)

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        cache_salt: str | None = None,
    ) -> list[EmbeddingOutput]:
        """Return the embeddings of texts or lists of token ids; see `LLM.embed`."""
        asked = self._vectors.texts(prompts, dimensions, prompt_name)
        return self._vectors.embedded(asked, await self._reports(asked, cache_salt), dimensions)

    async def classify(
        self, prompts: Prompt | Sequence[Prompt], *, cache_salt: str | None = None
    ) -> list[ClassificationOutput]:
        """Return the classes of texts or lists of token ids; see `LLM.classify`."""
        asked = self._vectors.classes(prompts)
        return self._vectors.classified(asked, await self._reports(asked, cache_salt))

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str = INSTRUCTION,
        answers: tuple[str, str] = ANSWERS,
        cache_salt: str | None = None,
    ) -> list[ScoringOutput]:
        """Return how well documents answer a query; see `LLM.score`."""
        pairs = pairs_of(queries, documents)
        scorer = PairScorer(self._vectors.facts, self._vectors.known_tokenizer, instruction, answers)
        prompts, asked = self._vectors.pairs(scorer, pairs)
        return scored(scorer, len(pairs), prompts, await self._reports(asked, cache_salt))

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests by name; their iterators yield what there is, with the finish reason "abort"."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            for stream in self._named.get(name, ()):
                self._backend.abort(stream)

    async def get_tokenizer(self) -> TextTokenizer:
        """Return the tokenizer, with the methods of transformers' tokenizers that scripts use."""
        if self._asking.tokenizer is None:
            raise RequestError(NO_TOKENIZER)
        return TextTokenizer(self._asking.tokenizer, self._asking.template)

    def get_default_sampling_params(self) -> GenerationParams:
        """Return a copy of the model's own sampling parameters, which may be changed and passed."""
        return self._asking.defaults()

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes that nothing uses; return whether none is left."""
        await self._ready()
        return await self._backend.flush() == 0

    async def check_health(self) -> None:
        """Raise if the engine has stopped."""
        await self._ready()
        if not self._backend.healthy:
            raise EngineStopped("the engine has stopped")

    @property
    def open_answers(self) -> int:
        """The number of answers that the engine computes or queues; at most `max_open`, or one request with more."""
        return self._open

    def shutdown(self) -> None:
        """End the engine and all requests. Call it from the event loop's thread, or after the loop has ended."""
        if not self._stopped:
            self._stopped = True
            self._backend.end_now()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # running ----------------------------------------------------------------------------------------------------------

    async def _ready(self) -> None:
        """Start the engine's thread with the first call."""
        if self._stopped:
            raise EngineStopped("this AsyncLLM is shut down; create a new one")
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._backend.start())
        await asyncio.shield(self._starting)

    async def _last(self, asked: OpenPrompt, save_to: str | None = None) -> Result:
        """Return the result of a prompt when it has ended."""
        async for _ in self._follow(asked, save_to):
            pass
        return asked.result()

    async def _follow(self, asked: OpenPrompt, save_to: str | None = None) -> AsyncIterator[Result]:
        if asked.id in self._named:
            raise RequestError(f"request_id {asked.id!r} is already in use")
        streams = self._named[asked.id] = []
        count = len(asked.answers)
        try:
            await self._ready()
            await self._take_room(count)
            try:
                for request in asked.requests:
                    streams.append(await self._backend.submit(request, save_to))
                async for result in self._results(asked, streams):
                    yield result
            finally:
                # Ended ones are ignored.
                for stream in streams:
                    self._backend.abort(stream)
                self._open -= count
                self._freed.set()
        finally:
            del self._named[asked.id]

    async def _reports(self, asked: Sequence[AskedVector], salt: str | None) -> list[Report]:
        """Return what the engine reports of requests that have no answer."""
        opened = self._asking.vectors(asked, salt)
        tasks = [asyncio.ensure_future(self._end_of(each)) for each in opened]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _end_of(self, asked: OpenPrompt) -> Report:
        async for _ in self._follow(asked):
            pass
        return asked.answers[0].followed.report

    async def _take_room(self, count: int) -> None:
        """Wait until the engine has room for this many more answers; callers are served in order."""
        async with self._turn:
            while self._open and self._open + count > self._max_open:
                self._freed.clear()
                await self._freed.wait()
            self._open += count

    async def _results(self, asked: OpenPrompt, streams: list[OutputStream]) -> AsyncIterator[Result]:
        kind, shown = asked.params.output_kind, [0] * len(streams)
        tokens = [0] * len(streams)
        changed = asyncio.Event()
        tasks = [asyncio.ensure_future(self._feed(*each, changed)) for each in zip(asked.answers, streams, strict=True)]
        try:
            left = True
            while left:
                await changed.wait()
                changed.clear()
                for task in tasks:
                    if task.done():
                        task.result()
                left = not all(task.done() for task in tasks)
                if left and kind is RequestOutputKind.FINAL_ONLY:
                    continue
                result = asked.result()
                yield result.after(shown, tokens) if kind is RequestOutputKind.DELTA else result
            report_cut([asked.result()])
        finally:
            for task in tasks:
                task.cancel()

    async def _feed(self, answering: Answering, stream: OutputStream, changed: asyncio.Event) -> None:
        """Process an answer's outputs as they arrive. A stop string ends the engine's sequence too."""
        try:
            async for outputs in stream:
                answering.followed.report = stream.report or answering.followed.report
                piece = answering.take(outputs)
                if piece.stops_engine:
                    self._backend.finish(stream)
                elif piece.outputs and piece.finish is None:
                    changed.set()
            answering.followed.report = stream.report or answering.followed.report
        finally:
            changed.set()


def _only(asked: list[OpenPrompt]) -> OpenPrompt:
    if len(asked) != 1:
        raise RequestError(f"an iterator has the answers to one prompt, got {len(asked)}")
    return asked[0]
