"""Grammars are compiled beside the engine: nobody's row waits for somebody else's grammar, and nothing gets lost."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.support.servers.backends import SMALL, ask, both, collect, in_loop, real, started, tokens_of
from tests.support.servers.held_steps import SECONDS
from tests.support.servers.http_server import serving
from weft.base.errors import RequestError
from weft.base.grammar import Grammar
from weft.server.texts.grammars import with_source
from weft.start.process_backend import ProcessBackend
from weft.start.thread_backend import ThreadBackend
from weft.text.grammar import Grammars, Guide

DIGITS = Grammar("regex", "[0-9]+")
LETTERS = Grammar("regex", "[a-z]+")


class SlowCompiler:
    """Grammars of this kind are compiled when they are allowed to, and not before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow: Grammar) -> None:
        self.begun, self.allowed = threading.Event(), threading.Event()
        compile_fast = Grammars.__call__

        def compile_slowly(grammars: Grammars, grammar: Grammar, stops: frozenset[int], salt: bytes) -> Guide:
            if grammar in (slow, with_source(slow)):
                self.begun.set()
                assert self.allowed.wait(SECONDS)
            return compile_fast(grammars, grammar, stops, salt)

        monkeypatch.setattr(Grammars, "__call__", compile_slowly)


def small() -> ThreadBackend:
    return ThreadBackend.from_options(SMALL, progress=False)


@in_loop
async def test_rows_run_and_other_grammars_are_served_while_one_is_compiled(monkeypatch):
    compiler = SlowCompiler(monkeypatch, DIGITS)
    async with started(small()) as backend:
        waiting = asyncio.ensure_future(backend.submit(ask([1], 4, grammar=DIGITS)))
        assert await asyncio.to_thread(compiler.begun.wait, SECONDS)
        assert len(await tokens_of(backend, ask([2, 3], 40))) == 40
        assert all(97 <= token <= 122 for token in await tokens_of(backend, ask([4], 6, grammar=LETTERS)))
        assert not waiting.done()
        assert (await backend.stats())["open"] == 1
        compiler.allowed.set()
        outputs, _ = await collect(await waiting)
        assert len(outputs) == 4
        assert all(48 <= output.token <= 57 for output in outputs)


@in_loop
async def test_an_idle_engine_wakes_up_when_a_grammar_is_there(monkeypatch):
    compiler = SlowCompiler(monkeypatch, DIGITS)
    async with started(small()) as backend:
        waiting = asyncio.ensure_future(backend.submit(ask([1], 1, grammar=DIGITS)))
        assert await asyncio.to_thread(compiler.begun.wait, SECONDS)
        await asyncio.sleep(0.1)
        compiler.allowed.set()
        assert len((await collect(await waiting))[0]) == 1


@in_loop
async def test_a_caller_that_leaves_before_its_grammar_is_compiled_leaves_nothing_behind(monkeypatch):
    compiler = SlowCompiler(monkeypatch, DIGITS)
    async with started(small()) as backend:
        waiting = asyncio.ensure_future(backend.submit(ask([1], 4, grammar=DIGITS)))
        assert await asyncio.to_thread(compiler.begun.wait, SECONDS)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert backend.open == 1
        compiler.allowed.set()
        while backend.open:
            await asyncio.sleep(0.01)
        stats = await backend.stats()
        assert (stats["open"], stats["requests"], stats["leases"], stats["waiting"]) == (0, 0, 0, 0)


def test_an_abort_by_name_reaches_a_request_whose_grammar_is_being_compiled(monkeypatch):
    compiler = SlowCompiler(monkeypatch, DIGITS)
    answers = []
    with serving(max_sequences=2) as server:
        sampling = {"regex": DIGITS.text, "max_new_tokens": 500}
        asking = threading.Thread(target=lambda: answers.append(server.generate("x", rid="slow", sampling=sampling)))
        asking.start()
        assert compiler.begun.wait(SECONDS)
        assert server.post("/abort_request", {"rid": "slow"}) == {"aborted": 1}
        compiler.allowed.set()
        asking.join()
        assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
        assert server.stats()["leases"] == 0


@in_loop
async def test_with_the_engine_its_threads_end():
    # Those of an engine that ended just now may still be on their way.
    others = set(threading.enumerate())
    async with started(small()) as backend:
        await tokens_of(backend, ask([1], 2, grammar=DIGITS))
        own = [each for each in set(threading.enumerate()) - others if each.name == "weft-preparation"]
        assert len(own) == 2
    for thread in own:
        await asyncio.to_thread(thread.join)


@both
@in_loop
async def test_grammars_come_through_and_bad_ones_are_refused(kind):
    async with started(real(kind)) as backend:
        found = await asyncio.gather(*(tokens_of(backend, ask([n], 3, grammar=DIGITS)) for n in range(8)))
        assert all(48 <= token <= 57 for tokens in found for token in tokens)
        with pytest.raises(RequestError, match="regex cannot be used") as error:
            await backend.submit(ask([1], 4, grammar=Grammar("regex", "(")))
        assert error.value.field == "regex"
        assert backend.open == 0
        assert isinstance(backend, ThreadBackend | ProcessBackend)


@in_loop
async def test_a_compiler_that_breaks_is_an_error_of_one_request(monkeypatch):
    def broken(*_: object) -> Guide:
        raise BaseException("something that no caller should read")

    monkeypatch.setattr(Grammars, "__call__", broken)
    async with started(small()) as backend:
        with pytest.raises(RequestError, match="compiling it failed") as error:
            await backend.submit(ask([1], 4, grammar=DIGITS))
        assert "something" not in str(error.value)
        assert error.value.field == "grammar"
        assert len(await tokens_of(backend, ask([2], 2))) == 2
