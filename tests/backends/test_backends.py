"""An engine behind a thread or a process answers as it does alone, whatever becomes of its callers or of itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.fences import ROOT
from tests.support.models import tiny_model
from tests.support.servers.backends import (
    LONG,
    SMALL,
    alone,
    ask,
    both,
    collect,
    in_loop,
    instant,
    real,
    started,
    tokens_of,
    varied_requests,
)
from tests.support.servers.fake_engines import POISON, answer
from tests.support.servers.held_steps import SECONDS, HeldSteps, wait_until
from weft.backends.dispatcher import Dispatcher
from weft.base.errors import EngineStopped, OptionError, RequestError
from weft.base.sampling import SamplingParams
from weft.engine.events import FinishReason, Output
from weft.engine.request import Request
from weft.start.thread_backend import ThreadBackend

# answers --------------------------------------------------------------------------------------------------------------


@both
@in_loop
async def test_answers_are_those_of_the_engine_alone(kind):
    expected = alone(varied_requests())
    async with started(real(kind)) as backend:
        for request, (outputs, report) in zip(varied_requests(), expected, strict=True):
            found, told = await collect(await backend.submit(request))
            report.queued_seconds = told.queued_seconds
            assert (found, told) == (outputs, report)
            assert told.queued_seconds > 0
        assert expected[1][0][0].logprob is not None
        assert len(expected[1][0][0].top) == 2
        assert len(expected[2][1].prompt_scores) == 149
        assert expected[1][1].cached_tokens == 128
        assert backend.info.name == tiny_model.NAME
        assert backend.info.vocab_size == 259
        assert backend.info.settings["end_tokens"] == [257]
        assert backend.info.memory_tokens >= 512
        assert (await backend.cache_report(5))["cached_tokens"] > 0
        assert await backend.flush() == 0
        assert (await backend.stats())["units"]["page"] == {"live": 0, "cached": 0}


@both
@in_loop
async def test_many_callers_at_once_each_get_their_own(kind):
    # While the engine dawdles, others come.
    async with started(instant(kind, 0.001)) as backend:
        prompts = [[index % 200 + 20] for index in range(100)]
        found = await asyncio.gather(*(tokens_of(backend, ask(prompt, 30)) for prompt in prompts))
        assert found == [answer(prompt, 30) for prompt in prompts]
        stats = await backend.stats()
        assert stats["open"] == stats["running"] == backend.open == 0
        assert (stats["requests"], stats["tokens_in"], stats["tokens_out"]) == (100, 100, 3000)
        assert stats["finished"] == {"stop": 0, "length": 100, "abort": 0, "error": 0}
        assert stats["steps"] < 3000, "callers share steps"


@both
@in_loop
async def test_a_request_that_cannot_be_served_harms_no_other(kind):
    async with started(instant(kind)) as backend:
        going = await backend.submit(ask([20], 200))
        biased = SamplingParams(logit_bias={256: 1.0})
        banned, allowed = SamplingParams(bad_words=[[1, 256]]), SamplingParams(allowed_token_ids=[2**31 - 1])
        for wrong, field, complaint in [
            (ask([20, 256], 2), "prompt", "prompt must have token ids from 0 to"),
            (ask([-1], 2), "prompt", "prompt must have token ids from 0 to"),
            (ask([20], 2, snapshots=(7,)), "snapshots", "snapshots"),
            (ask([20], 1 << 21), "prompt", "exceed"),
            (ask([], 2), "prompt", "at least one token"),
            (Request(np.array([1], np.int32), biased), "logit_bias", "logit_bias has token id 256"),
            (Request(np.array([1], np.int32), banned), "bad_words", "bad_words has token id 256"),
            (
                Request(np.array([1], np.int32), allowed),
                "allowed_token_ids",
                "allowed_token_ids has token id 2147483647",
            ),
        ]:
            with pytest.raises(RequestError, match=complaint) as caught:
                await backend.submit(wrong)
            assert (caught.value.status, caught.value.field) == (400, field)
        assert [output.token for output in (await collect(going))[0]] == answer([20], 200)
        assert (await backend.stats())["refused"] == 8
        assert backend.open == 0


@both
@in_loop
async def test_too_many_requests_are_turned_away_until_one_ends(kind):
    async with started(instant(kind, 0.002, max_open=2)) as backend:
        first, second = await backend.submit(ask([1], LONG)), await backend.submit(ask([2], LONG))
        with pytest.raises(RequestError, match="limit of 2 open requests") as caught:
            await backend.submit(ask([3], 5))
        assert caught.value.status == 429
        backend.abort(first)
        await collect(first)
        assert await tokens_of(backend, ask([3], 5)) == answer([3], 5)
        backend.abort(second)


@both
@in_loop
async def test_ends_that_callers_ask_for(kind):
    async with started(instant(kind, 0.002)) as backend:
        for end, reason in ((backend.abort, FinishReason.ABORT), (backend.finish, FinishReason.STOP)):
            stream = await backend.submit(ask([1], LONG))
            await anext(stream)
            end(stream)
            outputs, report = await collect(stream)
            assert outputs[-1] == Output(0, None, finish=reason)
            assert report is not None
            end(stream)
        assert (await backend.stats())["aborts"] == 1
        assert await tokens_of(backend, ask([3], 5)) == answer([3], 5)


@both
@in_loop
async def test_a_caller_that_gives_up_while_submitting_leaves_nothing_behind(kind):
    async with started(instant(kind, 0.05)) as backend:
        running = await backend.submit(ask([1], LONG))
        for _ in range(3):
            submitting = asyncio.ensure_future(backend.submit(ask([2], LONG)))
            # One turn: the request is on its way, and no answer can have been heard.
            await asyncio.sleep(0)
            submitting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await submitting
        backend.abort(running)
        await collect(running)
        await backend.stats()
        assert (await backend.stats())["open"] == backend.open == 0


@pytest.mark.parametrize("depth", [0, 1])
@in_loop
async def test_an_abort_frees_memory_within_a_step(depth, monkeypatch):
    steps = HeldSteps(monkeypatch)
    options = replace(SMALL, depth=depth, max_tokens_per_step=64)
    async with started(real("thread", options)) as backend:
        prompt = np.arange(200).tolist()
        streams = [await backend.submit(ask([*prompt, index], 300)) for index in range(3)]
        await asyncio.to_thread(wait_until, lambda: len(steps.engine.ledger.leases) == 3)
        steps.hold()
        await asyncio.to_thread(steps.wait_held)
        before = steps.engine.stats()
        assert before["leases"] == before["running"] == 3
        assert before["units"]["page"]["live"] > 0
        for stream in streams:
            backend.abort(stream)
        steps.release()
        await asyncio.gather(*map(collect, streams))
        after = await backend.stats()
        # The step that was about to begin was the last one that knew of them.
        assert after["steps"] - before["steps"] <= 1
        assert after["leases"] == after["running"] == 0
        assert {kind: used["live"] for kind, used in after["units"].items()} == {"page": 0, "state": 0, "tail": 0}
        assert after["units"]["page"]["cached"] > 0
        assert await backend.flush() == 0


@both
@in_loop
async def test_an_engine_without_work_sleeps(kind):
    async with started(instant(kind)) as backend:
        await tokens_of(backend, ask([1], 3))
        before, used = await backend.stats(), cpu_seconds(backend)
        await asyncio.sleep(0.5)
        assert (await backend.stats())["steps"] == before["steps"]
        assert cpu_seconds(backend) - used < 0.1


def cpu_seconds(backend: Dispatcher) -> float:
    """Of the thread that steps, or of the process."""
    place = f"self/task/{backend._thread.native_id}" if isinstance(backend, ThreadBackend) else backend.process_id
    words = Path(f"/proc/{place}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


# ends -----------------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_killed_engine_answers_everybody_with_an_error():
    async with started(instant("process", 0.002)) as backend:
        streams = [await backend.submit(ask([index], LONG)) for index in range(5)]
        await anext(streams[0])
        assert backend.healthy
        os.kill(backend.process_id, signal.SIGKILL)
        waiting = [asyncio.create_task(collect(stream)) for stream in streams]
        submitting = asyncio.create_task(backend.submit(ask([7], 3)))
        asking = asyncio.create_task(backend.stats())
        for task in (*waiting, submitting, asking):
            with pytest.raises(EngineStopped, match="ended unexpectedly"):
                await task
        assert not backend.healthy
        assert backend.open == 0
        with pytest.raises(EngineStopped):
            await backend.submit(ask([1], 1))
        assert await backend.wait_failed() == "the engine process has ended unexpectedly"


@in_loop
async def test_health_is_red_before_anybody_has_noticed_the_death():
    async with started(instant("process")) as backend:
        process = backend._process
        process.kill()
        # Without a turn of the event loop; its last thread has to go as well.
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            time.sleep(0.001)
        assert not backend.healthy


@in_loop
async def test_a_dead_engine_is_started_again_if_wished():
    async with started(instant("process", 0.002, restart=True)) as backend:
        for _ in range(2):
            stream = await backend.submit(ask([1], LONG))
            await anext(stream)
            os.kill(backend.process_id, signal.SIGKILL)
            with pytest.raises(EngineStopped, match="is restarting"):
                await collect(stream)
            with pytest.raises(EngineStopped, match="is restarting"):
                await backend.submit(ask([1], 1))
            async with asyncio.timeout(SECONDS):
                while not backend.healthy:
                    await asyncio.sleep(0.01)
            assert await tokens_of(backend, ask([3], 5)) == answer([3], 5)


@both
@in_loop
async def test_a_failed_step_ends_all_requests_and_tells_no_secrets(kind, caplog, capfd):
    async with started(instant(kind, 0.002)) as backend:
        going = await backend.submit(ask([1], LONG))
        await anext(going)
        poisoned = await backend.submit(ask([POISON], 5))
        for stream in (going, poisoned):
            with pytest.raises(EngineStopped) as caught:
                await collect(stream)
            assert "secret" not in str(caught.value)
        assert not backend.healthy
        reason = await backend.wait_failed()
        assert "secret" not in reason
        with pytest.raises(EngineStopped):
            await backend.stats()
    logged = caplog.text if kind == "thread" else capfd.readouterr().err
    assert "a secret of the engine's inside" in logged


@in_loop
async def test_a_failing_engine_process_is_not_started_again_for_ever(monkeypatch):
    monkeypatch.setattr("weft.start.process_backend.MAX_RESTARTS", 2)
    async with started(instant("process", restart=True)) as backend:
        for _ in range(3):
            with pytest.raises(EngineStopped):
                await collect(await backend.submit(ask([POISON], 5)))
            async with asyncio.timeout(SECONDS):
                while not backend.healthy and not backend._failed.is_set():
                    await asyncio.sleep(0.01)
        assert "2 times" in await backend.wait_failed()


@both
@in_loop
async def test_stopping_lets_requests_finish_and_takes_no_more(kind):
    backend = instant(kind, 0.002)
    await backend.start()
    going = await backend.submit(ask([1], LONG))
    stopping = asyncio.create_task(backend.stop(SECONDS))
    await asyncio.sleep(0)
    with pytest.raises(EngineStopped, match="shutting down"):
        await backend.submit(ask([2], 3))
    assert not backend.healthy
    assert (await backend.stats())["open"] == 1, "metrics are told to the end"
    assert not stopping.done()
    backend.finish(going)
    outputs, _ = await collect(going)
    assert outputs.pop().finish is FinishReason.STOP
    assert [output.token for output in outputs] == answer([1], len(outputs))
    await stopping
    await backend.stop(0)


@both
@in_loop
async def test_what_does_not_finish_in_time_gets_an_error(kind):
    backend = instant(kind, 0.002)
    await backend.start()
    stream = await backend.submit(ask([1], LONG))
    await anext(stream)
    began = time.monotonic()
    await backend.stop(0.1)
    assert time.monotonic() - began >= 0.1
    with pytest.raises(EngineStopped, match="shutting down"):
        await collect(stream)
    with pytest.raises(EngineStopped):
        await backend.flush()


@in_loop
async def test_signals_that_reach_the_whole_service_end_no_request():
    async with started(instant("process", 0.002)) as backend:
        stream = await backend.submit(ask([1], 100))
        await anext(stream)
        os.kill(backend.process_id, signal.SIGTERM)
        os.kill(backend.process_id, signal.SIGINT)
        outputs, _ = await collect(stream)
        assert outputs[-1].finish is FinishReason.LENGTH


@in_loop
async def test_an_engine_that_dies_while_others_wait_for_its_last_words_is_waited_for_no_longer():
    backend = instant("process", 0.002)
    await backend.start()
    stream = await backend.submit(ask([1], LONG))
    stopping = asyncio.create_task(backend.stop(10 * SECONDS))
    await anext(stream)
    os.kill(backend.process_id, signal.SIGKILL)
    with pytest.raises(EngineStopped, match="ended unexpectedly"):
        await collect(stream)
    await stopping


@in_loop
async def test_an_engine_that_does_not_end_by_itself_is_killed(monkeypatch):
    monkeypatch.setattr("weft.start.process_backend.GOODBYE_SECONDS", 0.2)
    backend = instant("process", step_seconds=100)
    await backend.start()
    await backend.submit(ask([1], LONG))
    process = backend._process
    await backend.stop(0)
    assert process.returncode == -signal.SIGKILL


@both
@in_loop
async def test_loading_that_fails_says_why(kind):
    with pytest.raises(OptionError, match="no such thing"):
        await instant(kind, "unloadable").start()


@in_loop
async def test_an_engine_that_dies_while_loading_is_an_error():
    backend = instant("process", "broken")
    with pytest.raises(EngineStopped, match="before the model was loaded"):
        await backend.start()
    await backend.stop(0)


FRONT = """
import asyncio
from tests.support.models import tiny_model
from tests.support.servers.fake_engines import *
from weft.start.process_backend import ProcessBackend

async def main():
    backend = ProcessBackend(Options(model="{seconds}"), program=PROGRAM)
    await backend.start()
    print(backend.process_id, flush=True)
    await asyncio.sleep(100)

asyncio.run(main())
"""


@pytest.mark.parametrize("seconds", [0, 100])
def test_the_fronts_death_ends_the_engine_process(seconds):
    code = FRONT.replace("{seconds}", str(seconds))
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as front:
        engine = int(front.stdout.readline())
        assert alive(engine)
        front.kill()
    wait_until(lambda: not alive(engine))


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
