"""Offline generation: a model in this process, for one prompt or thousands.

Checks requests, feeds the engine and collects its outputs. Several generations and streams may run at once, also from
several threads: every waiting thread steps the engine for all of them.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

from weft.answers.pair_scores import ANSWERS, INSTRUCTION, PairScorer, pairs_of
from weft.answers.requests import ModelBounds
from weft.base.errors import EngineStopped, InvalidField, RequestError
from weft.base.options import Options
from weft.base.sampling import SamplingParams
from weft.engine.events import Output, Report
from weft.engine.loop import Engine
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
from weft.offline.beams import search
from weft.offline.embedding import AskedVector, ClassificationOutput, EmbeddingOutput, VectorCalls, scored
from weft.offline.interrupts import InterruptLater
from weft.offline.keywords import options_of
from weft.offline.result import BeamSearchOutput, Chunk, Result, chunk_of
from weft.offline.sampling import BeamSearchParams, GenerationParams
from weft.offline.saved import AnyPath, LoadedPrompt, PromptKeys
from weft.offline.scoring import ScoringOutput
from weft.offline.text import TextTokenizer
from weft.start.loading import load
from weft.text.prompts import NO_TOKENIZER, Prompt


@dataclass(slots=True)
class OpenRequest:
    """A request in the engine under `number`, for an answer of `asked`. `chunks` are those not yet read of a stream."""

    number: int
    answering: Answering
    asked: OpenPrompt
    chunks: deque[Chunk] | None = None
    ended: bool = False


class LLM:
    """A model, ready to answer. `LLM()` is weft-small, which ships with Weft; `weft generate --help` lists the options.

    Keywords are the engine's options with underscores, or vLLM's and SGLang's names of them (`max_model_len`,
    `tensor_parallel_size`). `suggested` are the model's own sampling parameters, the defaults of every call.

    >>> with LLM(memory="16MiB") as llm:  # doctest: +SKIP
    ...     result = llm.generate("Once upon a time", SamplingParams(max_tokens=16))[0]
    """

    def __init__(self, model: str | None = None, *, progress: bool = True, **options: Any) -> None:
        self._start(options_of({"model": model, **options}), progress)

    @classmethod
    def from_options(cls, options: Options, progress: bool = True, now: Callable[[], float] = perf_counter) -> LLM:
        """Create an LLM from parsed options. `now` is the clock, in seconds, by which the engine measures its steps."""
        llm = cls.__new__(cls)
        llm._start(options, progress, now)
        return llm

    def _start(self, options: Options, progress: bool, now: Callable[[], float] = perf_counter) -> None:
        self.options = options
        # First: a wrong file is reported before the weights are loaded.
        self._keys = PromptKeys.of(options)
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
        self.reasons = loaded.reasons
        has_text = self.tokenizer is not None
        only_vectors = not loaded.vectors.generates
        self.bounds = ModelBounds(self.vocab_size, self.config.max_length, self.end_tokens, has_text, only_vectors)
        self._vectors = VectorCalls(loaded.vectors, self.tokenizer, self.vocab_size)
        self._asking = Asking(self.tokenizer, self.template, self.bounds, self.suggested)
        runner = loaded.runner(options.threads, progress)
        drafter = loaded.draft_model(runner, options.threads, progress)
        grammars = loaded.grammars(warm=False)
        self.engine = Engine(
            loaded.spec, runner, self.config, grammars, draft_model=drafter, now=now, saves=loaded.saves
        )
        self._stopped: str | None = None
        self._running: dict[int, OpenRequest] = {}
        self._loads = itertools.count()
        self._answers: dict[int, dict[str, Any]] = {}
        self._lock = threading.RLock()

    # requests ---------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        lora_request: None = None,
        cache_salt: str | None = None,
        priority: int | Sequence[int] = 0,
        snapshots: Sequence[int] | Sequence[Sequence[int]] = (),
        retain: float | None = None,
    ) -> list[Result]:
        """Return the answers to all prompts, in order. Nothing runs if any prompt is invalid.

        A prompt is a text, a list of token ids, or a dictionary with `prompt` or `prompt_token_ids`. `sampling_params`
        are for all prompts, or a list with one for each. `use_tqdm` shows a progress bar. `cache_salt` isolates the
        cached prefixes of a tenant; lower values of `priority` go first; `snapshots` are positions in the prompt (or a
        list of them per prompt) that later prompts will share. `retain` protects prompts and answers against eviction
        for a number of seconds. LoRA adapters are not supported.
        """
        self._check_open()
        refuse_adapters(lora_request)
        how: dict[str, Any] = {"cache_salt": cache_salt, "priority": priority, "snapshots": snapshots}
        how["retain"] = retain
        return self._run(self._asking.prompts(prompts, sampling_params, **how), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        cache_salt: str | None = None,
        priority: int | Sequence[int] = 0,
        retain: float | None = None,
    ) -> list[Result]:
        """Return the next message of one or many conversations. A message with `cache_control` is kept for later.

        `chat_template` replaces the model's own, as text; `chat_template_kwargs` are variables for it. Its content
        format is always found out. `continue_final_message` continues the text of the last message instead; without
        `add_generation_prompt`, the model also writes the opening of its message.
        """
        self._check_open()
        refuse_adapters(lora_request)
        asked = self._asking.conversations(
            messages,
            sampling_params,
            tools=tools,
            chat_template=chat_template,
            variables=chat_template_kwargs,
            opens=add_generation_prompt,
            continues=continue_final_message,
            cache_salt=cache_salt,
            priority=priority,
            retain=retain,
        )
        return self._run(asked, use_tqdm)

    def stream(
        self,
        prompt: AnyPrompt,
        sampling_params: AnyParams | None = None,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        snapshots: Sequence[int] = (),
    ) -> Generator[Chunk, None, None]:
        """Yield an answer as it grows; the last chunk has the whole result. Closing the iterator ends the request."""
        self._check_open()
        how: dict[str, Any] = {"cache_salt": cache_salt, "priority": priority, "snapshots": snapshots}
        return self._follow(single(self._asking.prompts(prompt, sampling_params, **how)))

    def chat_stream(
        self,
        messages: Conversation,
        sampling_params: AnyParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Generator[Chunk, None, None]:
        """Yield the next message of a conversation as it grows; see `chat`."""
        self._check_open()
        asked = self._asking.conversations(
            messages,
            sampling_params,
            tools=tools,
            variables=chat_template_kwargs,
            opens=add_generation_prompt,
            continues=continue_final_message,
            cache_salt=cache_salt,
            priority=priority,
        )
        return self._follow(single(asked))

    def retain(
        self, prompts: AnyPrompt | Sequence[AnyPrompt], seconds: float, *, cache_salt: str | None = None
    ) -> list[Result]:
        """Compute prompts, as far as they are not cached, and protect them against eviction for a number of seconds.

        Zero seconds release them.
        """
        params = SamplingParams(max_tokens=0)
        return self.generate(prompts, params, use_tqdm=False, cache_salt=cache_salt, retain=seconds)

    def fork(
        self,
        result: Result,
        at: int | None = None,
        n: int | None = None,
        sampling_params: Params = None,
        use_tqdm: bool = False,
        *,
        choice: int = 0,
        retain: float | None = None,
    ) -> list[Result]:
        """Go on with an answer after its first `at` tokens, or all: `n` times, or once for each of the parameters.

        Nothing is computed again that is still cached. `choice` is the answer to go on with, if there are several.
        """
        self._check_open()
        return self._run(self._asking.forks(result, at, n, sampling_params, choice, retain), use_tqdm)

    def save(self, path: AnyPath, prompt: AnyPrompt | Result, *, cache_salt: str | None = None) -> Result:
        """Write a prompt, or a result's prompt and answer, to a new signed file: tokens, and what was computed of them.

        What is not cached is computed first. Another LLM of the same model can `load` it.
        """
        self._check_open()
        self._keys.check_can_save()
        [result] = self._run(self._asking.saved(prompt, cache_salt), False, Path(path))
        if result.error is not None:
            raise RequestError(result.error)
        self._keys.sign(Path(path))
        return result

    def load(self, path: AnyPath, *, cache_salt: str | None = None) -> LoadedPrompt:
        """Read a prompt from a file into the cache, if a trusted key has signed it; return its tokens.

        It is only hit by prompts with the same salt as the one that was saved.
        """
        self._check_open()
        self._keys.check(Path(path))
        with self._lock:
            number = next(self._loads)
            self.engine.begin_load(number, Path(path), (cache_salt or "").encode(), self._keys.share)
        while (found := self._loaded(number)) is None:
            self._move_on()
        if "error" in found:
            raise RequestError(found["error"], found["status"])
        return self._keys.loaded(Path(path), found)

    def _loaded(self, number: int) -> dict[str, Any] | None:
        with self._lock:
            self._check_open()
            self._answers |= self.engine.take_loaded()
            return self._answers.pop(number, None)

    def beam_search(
        self, prompts: Sequence[AnyPrompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """Return the likeliest answers to each prompt that beam search finds, best first."""
        return search(self, prompts, params, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        cache_salt: str | None = None,
    ) -> list[EmbeddingOutput]:
        """Return the embeddings of texts or lists of token ids, as the checkpoint's `sentence_transformers` files say.

        Without these files, an embedding is the last token's hidden state, with length one. `prompt_name` is one of the
        model's prompts, which then goes before each text; `dimensions` keeps the first numbers only.
        """
        asked = self._vectors.texts(prompts, dimensions, prompt_name)
        return self._vectors.embedded(asked, self._reports(asked, use_tqdm, cache_salt), dimensions)

    def classify(
        self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True, *, cache_salt: str | None = None
    ) -> list[ClassificationOutput]:
        """Return the classes of texts or lists of token ids, by a model with a class head."""
        asked = self._vectors.classes(prompts)
        return self._vectors.classified(asked, self._reports(asked, use_tqdm, cache_salt))

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        instruction: str = INSTRUCTION,
        answers: tuple[str, str] = ANSWERS,
        cache_salt: str | None = None,
    ) -> list[ScoringOutput]:
        """Return how well documents answer a query. Several queries are paired with as many documents.

        A model with a class head says so itself. Of an embedding model, it is the cosine of the two embeddings. Any
        other model says it in a word (Qwen3-Reranker): the score is the probability of the first of the `answers`
        against the second, with this `instruction`.
        """
        pairs = pairs_of(queries, documents)
        scorer = PairScorer(self._vectors.facts, self._vectors.known_tokenizer, instruction, answers)
        prompts, asked = self._vectors.pairs(scorer, pairs)
        return scored(scorer, len(pairs), prompts, self._reports(asked, use_tqdm, cache_salt))

    def get_tokenizer(self) -> TextTokenizer:
        """Return the tokenizer, with the methods of transformers' tokenizers that scripts use."""
        if self.tokenizer is None:
            raise RequestError(NO_TOKENIZER)
        return TextTokenizer(self.tokenizer, self.template)

    def get_default_sampling_params(self) -> GenerationParams:
        """Return a copy of the model's own sampling parameters, which may be changed and passed."""
        return self._asking.defaults()

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes that nothing uses; return whether none is left."""
        with self._lock:
            self._check_open()
            return self.engine.flush() == 0

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

    def _check_open(self) -> None:
        if self._stopped is not None:
            raise EngineStopped(f"this LLM no longer answers: {self._stopped}; create a new one")

    # running ----------------------------------------------------------------------------------------------------------

    def _run(self, asked: list[OpenPrompt], progress: bool, save_to: Path | None = None) -> list[Result]:
        from weft.offline.progress import Progress

        opened: list[OpenRequest] = []
        with Progress(len(asked), shown=progress) as bar:
            try:
                for each in asked:
                    self._add(each, opened, save_to=save_to)
                for request in opened:
                    while not request.ended:
                        self._move_on()
                        bar.show(asked)
            except BaseException:
                self._abort(opened)
                raise
        results = [each.result() for each in asked]
        report_cut(results)
        return results

    def _reports(self, asked: Sequence[AskedVector], progress: bool, salt: str | None) -> list[Report]:
        """Return what the engine reports of requests that have no answer."""
        self._check_open()
        opened = self._asking.vectors(asked, salt)
        self._run(opened, progress)
        return [each.answers[0].followed.report for each in opened]

    def _follow(self, asked: OpenPrompt) -> Generator[Chunk, None, None]:
        chunks: deque[Chunk] = deque()
        opened: list[OpenRequest] = []
        try:
            self._add(asked, opened, chunks)
            while True:
                while not chunks:
                    self._move_on()
                chunk = chunks.popleft()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self._abort(opened)

    def _add(
        self,
        asked: OpenPrompt,
        opened: list[OpenRequest],
        chunks: deque[Chunk] | None = None,
        save_to: Path | None = None,
    ) -> None:
        """Give the requests to the engine. `chunks`, if given, receives their output from the first token on.

        They join `opened` before an interrupt can be raised, so that the caller can abort them.
        """
        with self._lock:
            self._check_open()
            with InterruptLater():
                for each in asked.answers:
                    number = self.engine.add(each.followed.request, save_to=save_to)
                    self._running[number] = OpenRequest(number, each, asked, chunks)
                    opened.append(self._running[number])

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
        number, followed = opened.number, opened.answering.followed
        piece = opened.answering.take([output])
        if piece.stops_engine:
            self.engine.finish(number)
        if piece.finish is not None:
            followed.report = self.engine.report(number)
            opened.ended = True
            del self._running[number]
            self.engine.forget(number)
        if opened.chunks is not None:
            scored, result = opened.asked.params.logprobs is not None, opened.asked.result() if opened.ended else None
            opened.chunks.append(chunk_of(piece, scored, result, opened.asked.decode))

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


def single(asked: list[OpenPrompt]) -> OpenPrompt:
    """Return the only prompt with its only answer."""
    if len(asked) != 1:
        raise RequestError(f"stream takes one prompt, got {len(asked)}; use generate for several")
    if len(asked[0].answers) != 1:
        raise InvalidField("n", "must be 1 in a stream; use generate for several answers")
    return asked[0]
