"""Ends a front whose event loop no longer responds, and reports the front's state to a service manager.

A restarted server is better than one that does not answer at all. Two watchdogs cover each other: a thread that logs
why it ends the process, and `faulthandler`'s, which is written in C and works while a call holds the interpreter lock
and no Python thread can run.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import socket
import threading
from contextlib import suppress

# The descriptor, because `sys.stderr` may be replaced or closed.
STDERR = 2
log = logging.getLogger("weft")

BLOCKED = 1
# The timeout is divided into this many beats, and the watchdog in C waits one beat longer.
BEATS = 4


class Watchdog:
    """`start` and `stop` run in the event loop's thread. `seconds` is how long the loop may block; 0: no limit."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._beat = threading.Event()
        self._stopped = False
        self._beating: asyncio.Task[None] | None = None

    def start(self) -> None:
        intervals = [each / BEATS for each in (self._seconds, service_seconds()) if each]
        if intervals:
            self._beating = asyncio.get_running_loop().create_task(self._answer(min(intervals)))
        if self._seconds:
            threading.Thread(target=self._watch, name="weft-watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped = True
        self._beat.set()
        if self._beating is not None:
            self._beating.cancel()
        faulthandler.cancel_dump_traceback_later()

    async def _answer(self, interval: float) -> None:
        while True:
            self._beat.set()
            if self._seconds:
                patience = self._seconds * (1 + 1 / BEATS)
                faulthandler.dump_traceback_later(patience, exit=True, file=STDERR)
            notify("WATCHDOG=1")
            await asyncio.sleep(interval)

    def _watch(self) -> None:
        while self._beat.wait(self._seconds) and not self._stopped:
            self._beat.clear()
        if not self._stopped:
            log.critical("the event loop has been blocked for %g s: exiting; stacks of all threads:", self._seconds)
            faulthandler.dump_traceback(STDERR)
            os._exit(BLOCKED)


def service_seconds() -> float:
    """Return how long systemd waits for a heartbeat (`WatchdogSec`); 0: it expects none."""
    stated, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not stated.isdigit() or (process.isdigit() and int(process) != os.getpid()):
        return 0.0
    return int(stated) / 1e6


def notify(state: str) -> None:
    """Send a state to the service manager, if there is one: `READY=1`, `WATCHDOG=1`, `STOPPING=1`."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    # A name that begins with @ is not in the file system.
    place = "\0" + address[1:] if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
        manager.setblocking(False)
        manager.sendto(state.encode(), place)
