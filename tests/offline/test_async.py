"""`AsyncLLM`: the same answers as `LLM`, as they grow; cancelled requests leave the engine; readers set the pace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.support.models import tiny_model
from weft import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    EngineStopped,
    RequestError,
    RequestOutputKind,
    SamplingParams,
)

LONG = "The river ran past the mill and under the bridge, and nobody asked where it went. " * 3
OPTIONS: dict[str, Any] = tiny_model.OPTIONS | {
    "memory": "32MiB",
    "threads": 1,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "max_model_len": 1024,
}


def with_engine(work: Callable[[AsyncLLM], Awaitable[Any]], **more: Any) -> Any:
    async def run() -> Any:
        async with AsyncLLM(**OPTIONS, **more) as engine:
            return await asyncio.wait_for(work(engine), 120)

    return asyncio.run(run())


def seeded(**params) -> SamplingParams:
    return SamplingParams(**{"seed": 3, "max_tokens": 12, "ignore_eos": True, **params})


async def collected(engine: AsyncLLM, prompt: Any, params: SamplingParams, **named: Any) -> list[Any]:
    return [output async for output in engine.generate(prompt, params, **named)]


@pytest.fixture(scope="module")
def expected():
    """The answers of `LLM`."""
    with LLM(**OPTIONS) as llm:
        yield {
            "long": llm.generate(LONG, seeded(n=3, logprobs=1))[0],
            "chat": llm.chat([{"role": "user", "content": "hi"}], seeded())[0],
        }


def shape(result: Any) -> list[tuple[Any, ...]]:
    return [(each.index, each.text, each.token_ids, each.finish_reason) for each in result.outputs]


def test_answers_grow_to_those_of_llm(expected):
    async def work(engine: AsyncLLM) -> None:
        outputs = await collected(engine, LONG, seeded(n=3, logprobs=1))
        assert [each.finished for each in outputs] == [False] * (len(outputs) - 1) + [True]
        assert shape(outputs[-1]) == shape(expected["long"])
        assert outputs[-1].prompt_token_ids == list(LONG.encode())
        for before, after in pairwise(outputs):
            for one, other in zip(before.outputs, after.outputs, strict=True):
                assert other.text.startswith(one.text)
                assert other.token_ids[: len(one.token_ids)] == one.token_ids
        found = [each async for each in engine.chat([{"role": "user", "content": "hi"}], seeded())]
        assert shape(found[-1]) == shape(expected["chat"])

    with_engine(work)


def test_new_parts_add_up_and_a_last_output_stands_alone(expected):
    async def work(engine: AsyncLLM) -> None:
        parts = await collected(engine, LONG, seeded(n=3, logprobs=1, output_kind=RequestOutputKind.DELTA))
        for place, whole in enumerate(expected["long"].outputs):
            assert "".join(each.outputs[place].text for each in parts) == whole.text
            assert [token for each in parts for token in each.outputs[place].token_ids] == whole.token_ids
            scores = [score for each in parts for score in each.outputs[place].logprobs]
            assert [score.token for score in scores] == whole.token_ids
        (last,) = await collected(engine, LONG, seeded(n=3, output_kind=RequestOutputKind.FINAL_ONLY))
        assert shape(last) == shape(expected["long"])

    with_engine(work)


def test_stop_strings_end_the_engines_sequence():
    async def work(engine: AsyncLLM) -> None:
        text = (await collected(engine, "Hello", seeded(max_tokens=40)))[-1].text
        found = (await collected(engine, "Hello", seeded(max_tokens=40, stop=text[8:11])))[-1]
        assert found.text == text[: text.index(text[8:11])]
        assert (found.finish_reason, found.outputs[0].stop_reason) == ("stop", text[8:11])
        assert engine.open_answers == 0

    with_engine(work)


def test_leaving_or_cancelling_an_iterator_ends_its_request():
    async def work(engine: AsyncLLM) -> None:
        answers = engine.generate(LONG, seeded(max_tokens=700))
        await anext(answers)
        assert engine.open_answers == 1
        await answers.aclose()
        assert engine.open_answers == 0
        # A full engine must have room again: this one needs nearly all of it.
        task = asyncio.ensure_future(collected(engine, LONG, seeded(n=5, max_tokens=700)))
        while not engine.open_answers:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.open_answers == 0
        assert len((await collected(engine, "after", seeded()))[-1].token_ids) == 12

    with_engine(work)


def test_requests_are_aborted_by_name():
    async def work(engine: AsyncLLM) -> None:
        answers = engine.generate(LONG, seeded(max_tokens=700), "mine")
        await anext(answers)
        with pytest.raises(RequestError, match="request_id 'mine' is already in use"):
            await collected(engine, "x", seeded(), request_id="mine")
        await engine.abort(["other", "mine"])
        rest = [each async for each in answers]
        assert rest[-1].finish_reason == "abort"
        assert rest[-1].request_id == "mine"
        # The name is free again.
        assert (await collected(engine, "x", seeded(), request_id="mine"))[-1].finished

    with_engine(work)


def test_more_requests_than_may_be_open_wait_their_turn():
    async def work(engine: AsyncLLM) -> None:
        most, ends = 0, []

        async def ask(number: int) -> None:
            nonlocal most
            async for output in engine.generate([number + 1] * 5, seeded(n=2)):
                most = max(most, engine.open_answers)
                if output.finished:
                    ends.append(number)

        await asyncio.gather(*map(ask, range(12)))
        assert most == 4
        assert sorted(ends) == list(range(12))
        assert engine.open_answers == 0
        # A request with more answers than may be open runs alone.
        assert len((await collected(engine, "x", seeded(n=6)))[-1].outputs) == 6

    with_engine(work, max_open=4)


def test_a_reader_that_does_not_read_gets_everything_at_once():
    async def work(engine: AsyncLLM) -> None:
        slow = engine.generate("Hello", seeded(max_tokens=200))
        await anext(slow)
        # Others go on, and end long after the slow one has in the engine.
        for _ in range(3):
            await collected(engine, LONG, seeded(max_tokens=200))
        rest = [each async for each in slow]
        assert len(rest) <= 2
        assert len(rest[-1].token_ids) == 200

    with_engine(work)


def test_a_wrong_request_raises_when_it_is_made():
    async def work(engine: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="one prompt, got 2"):
            engine.generate(["a", "b"], seeded())
        with pytest.raises(RequestError, match="max_tokens does not fit"):
            engine.generate("a", seeded(max_tokens=5000))
        with pytest.raises(RequestError, match="does not fit into the engine's memory"):
            await collected(engine, LONG * 3, seeded(max_tokens=200))
        assert engine.open_answers == 0

    async def small() -> None:
        async with AsyncLLM(**{**OPTIONS, "memory": "1400KiB"}) as engine:
            await work(engine)

    asyncio.run(small())


def test_a_shut_down_engine_fails_open_requests_and_refuses_more():
    async def work() -> None:
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**OPTIONS, disable_log_stats=True))
        await engine.check_health()
        answers = engine.generate(LONG, seeded(max_tokens=700))
        await anext(answers)
        engine.shutdown()
        with pytest.raises(EngineStopped):
            _ = [each async for each in answers]
        with pytest.raises(EngineStopped, match="shut down"):
            await collected(engine, "x", seeded())
        engine.shutdown()

    asyncio.run(work())


def test_the_tokenizer_and_the_cache_are_those_of_llm():
    async def work(engine: AsyncLLM) -> None:
        assert (await engine.get_tokenizer()).encode("ab") == [97, 98]
        cached = [(await collected(engine, LONG, seeded()))[-1].num_cached_tokens for _ in range(2)]
        assert await engine.reset_prefix_cache()
        cached.append((await collected(engine, LONG, seeded()))[-1].num_cached_tokens)
        assert cached == [0, (len(LONG) - 1) // 64 * 64, 0]

    with_engine(work)
