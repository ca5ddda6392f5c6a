"""What is loaded when a process is ready is not looked at by its garbage collector again."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref

import pytest

from tests.support.servers.fake_engines import PROGRAM
from tests.support.servers.held_steps import SECONDS
from weft.base.garbage_collection import freeze_heap
from weft.base.options import Options
from weft.start.process_backend import ProcessBackend


class Loop:
    def __init__(self) -> None:
        self.self = self


def test_what_is_there_is_kept_and_garbage_is_not():
    kept, garbage = Loop(), Loop()
    seen = weakref.ref(garbage)
    del garbage
    # The suite has frozen what it imported.
    gc.unfreeze()
    try:
        freeze_heap()
        assert seen() is None
        assert gc.get_freeze_count() > 0
        assert not any(each is kept for each in gc.get_objects())
    finally:
        gc.unfreeze()


def test_an_engine_process_keeps_what_it_has_loaded():
    async def frozen() -> int:
        backend = ProcessBackend(Options(model="0"), program=PROGRAM)
        await backend.start()
        try:
            return (await backend.stats())["frozen"]
        finally:
            await backend.stop(0)

    assert asyncio.run(asyncio.wait_for(frozen(), SECONDS)) > 1000


@pytest.mark.thorough
def test_a_servers_front_keeps_what_it_has_loaded_before_it_listens():
    """Of the two processes the front is told apart by what it has not imported."""
    code = """
import gc, sys
from weft.start import launch

def listen(self, *args, **settings):
    print(gc.get_freeze_count() > 1000, "torch" in sys.modules)
    raise SystemExit(0)

launch.Server.__init__ = listen
from weft.cli.main import main
main(["serve", "--port", "0"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout.split() == ["True", "False"], done.stderr
