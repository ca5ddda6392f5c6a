"""SGLang's `Engine`: its calls and dictionaries, over `AsyncLLM` in an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from weft.base.errors import InvalidField
from weft.base.suggest import did_you_mean
from weft.offline.async_llm import AsyncLLM
from weft.offline.keywords import EngineArgs
from weft.offline.result import CompletionOutput, Result, TokenScore
from weft.offline.sampling import GenerationParams, StructuredOutputsParams

# Names of sampling parameters that differ; those with a form are `FORMS`. The others are ours.
RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "no_stop_trim": "include_stop_str_in_output"}
FORMS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
OWN = tuple(GenerationParams.__dataclass_fields__)
# A stream's answer, or the answers of a call.
Answer = dict[str, Any]


class SglangEngine:
    """A model in this process with SGLang's interface. Keywords are those of `LLM` and of SGLang's `Engine`."""

    def __init__(self, model_path: str | None = None, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weft-asyncio", daemon=True)
        args = EngineArgs(**({"model_path": model_path} if model_path is not None else {}), **options)
        self._llm = AsyncLLM.from_engine_args(args)
        self._thread.start()

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        stream: bool = False,
    ) -> Any:
        """Return a dictionary for a prompt, a list of them for several, or with `stream` an iterator of them.

        A dictionary has `text`, `output_ids` and `meta_info`. A stream yields whole answers so far.
        """
        asked = self._asked(prompt, sampling_params, input_ids, return_logprob, top_logprobs_num)
        if stream:
            return self._stream(*_one(asked))
        found = self._run(self._answers(asked)).result()
        return found if _is_many(prompt, input_ids) or len(found) != 1 else found[0]

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        stream: bool = False,
    ) -> Any:
        """Return the same as `generate`, for asyncio; with `stream` an asynchronous iterator."""
        asked = self._asked(prompt, sampling_params, input_ids, return_logprob, top_logprobs_num)
        if stream:
            return self._async_stream(*_one(asked))
        found = await asyncio.wrap_future(self._run(self._answers(asked)))
        return found if _is_many(prompt, input_ids) or len(found) != 1 else found[0]

    def flush_cache(self) -> bool:
        """Drop all cached prefixes that nothing uses; return whether none is left."""
        return bool(self._run(self._llm.reset_prefix_cache()).result())

    def shutdown(self) -> None:
        """End the engine and its threads."""
        if self._thread.is_alive():
            self._run(self._end()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> SglangEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # running ----------------------------------------------------------------------------------------------------------

    def _asked(
        self,
        prompt: str | Sequence[str] | None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        return_logprob: bool,
        top_logprobs_num: int,
    ) -> list[tuple[Any, GenerationParams]]:
        if (prompt is None) == (input_ids is None):
            raise InvalidField("prompt", "or input_ids must be given, and not both")
        given: Any = prompt if prompt is not None else input_ids
        prompts = list(given) if _is_many(prompt, input_ids) else [given]
        each = sampling_params if isinstance(sampling_params, list | tuple) else [sampling_params] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidField("sampling_params", f"has {len(each)} entries for {len(prompts)} prompts")
        scores = top_logprobs_num if return_logprob else None
        return [(one, self._params(own or {}, scores)) for one, own in zip(prompts, each, strict=True)]

    def _params(self, given: Mapping[str, Any], scores: int | None) -> GenerationParams:
        params = self._llm.get_default_sampling_params()
        forms = {FORMS[name]: value for name, value in given.items() if name in FORMS and value is not None}
        for name, value in given.items():
            ours = RENAMED.get(name, name)
            if ours not in OWN and name not in FORMS:
                known = [*OWN, *RENAMED, *FORMS]
                raise InvalidField(f"sampling_params.{name}", f"is unknown{did_you_mean(name, known)}")
            if ours in OWN:
                setattr(params, ours, value)
        if forms:
            params.structured_outputs = StructuredOutputsParams(**forms)
        params.logprobs = scores
        return params

    def _run(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _end(self) -> None:
        self._llm.shutdown()

    async def _answers(self, asked: list[tuple[Any, GenerationParams]]) -> list[Answer]:
        found = await asyncio.gather(*(self._last(*each) for each in asked))
        return [answer_of(result, output) for result in found for output in result.outputs]

    async def _last(self, prompt: Any, params: GenerationParams) -> Result:
        async for result in self._llm.generate(prompt, params):
            last = result
        return last

    def _stream(self, prompt: Any, params: GenerationParams) -> Iterator[Answer]:
        results = self._llm.generate(prompt, params)
        try:
            while (result := self._run(_next(results)).result()) is not None:
                yield answer_of(result, result.outputs[0])
        finally:
            self._run(_leave(results)).result()

    async def _async_stream(self, prompt: Any, params: GenerationParams) -> AsyncIterator[Answer]:
        results = self._llm.generate(prompt, params)
        try:
            while (result := await asyncio.wrap_future(self._run(_next(results)))) is not None:
                yield answer_of(result, result.outputs[0])
        finally:
            await asyncio.wrap_future(self._run(_leave(results)))


def answer_of(result: Result, output: CompletionOutput) -> Answer:
    """Return an answer as SGLang's dictionary."""
    finish: Answer | None = None if output.finish_reason is None else {"type": output.finish_reason}
    if finish is not None and output.stop_reason is not None:
        finish["matched"] = output.stop_reason
    meta: Answer = {
        "id": result.request_id,
        "finish_reason": finish,
        "prompt_tokens": len(result.prompt_token_ids),
        "completion_tokens": len(output.token_ids),
        "cached_tokens": output.cached_tokens,
    }
    if output.logprobs is not None:
        meta["output_token_logprobs"] = [(each.logprob, each.token, None) for each in output.logprobs]
        meta["output_top_logprobs"] = [_tops(each) for each in output.logprobs]
    return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}


def _tops(score: TokenScore) -> list[tuple[float, int, None]]:
    return [(logprob, token, None) for token, logprob in score.top]


def _is_many(prompt: Any, input_ids: Any) -> bool:
    """Return whether a call has a list of prompts, which gets a list of answers."""
    if prompt is not None:
        return not isinstance(prompt, str)
    return bool(input_ids) and not isinstance(input_ids[0], int)


def _one(asked: list[tuple[Any, GenerationParams]]) -> tuple[Any, GenerationParams]:
    if len(asked) != 1:
        raise InvalidField("stream", f"takes one prompt, got {len(asked)}")
    return asked[0]


async def _next(results: AsyncIterator[Result]) -> Result | None:
    return await anext(results, None)


async def _leave(results: Any) -> None:
    await results.aclose()
