"""NIXL as the carrier of units: reads over UCX, by shared memory, TCP, or RDMA where there is any.

One thread makes all calls to NIXL and drives its progress, so an engine without transfers uses no time for it. What
NIXL 1.5 does not do decides how reads end here:

- Removing a remote agent, or releasing a read, does not stop a read that is under way: it may write later.
- Deregistering memory does not stop a peer that reads it over TCP or shared memory.

So a read is over when NIXL reports it done or its peer disconnected. To take memory away from a read that does not end,
or from a peer that may still read, the whole agent is closed and another one opened. Over shared memory a peer reads
without the help of this process, and that does not stop it.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from weft.transfer.connection import PATIENCE_SECONDS
from weft.transfer.messages import MAX_METADATA_BYTES, Introduction, TransferError
from weft.transfer.pulling import address_of

log = logging.getLogger("weft")

BACKEND = "UCX"
# The variable that names the transports that UCX may use.
TRANSPORTS = "UCX_TLS"
# More than there are transfers, so that a peer in use is never the oldest.
MOST_PEERS = 128
# Pauses between two looks at NIXL: while reads are under way here, and while peers may read here.
READING_SECONDS = 2e-4
ATTENDING_SECONDS = 1e-3
OPEN_SECONDS = 60.0
CLOSED = "the carrier is closed"


def load_nixl() -> Any:
    """Return NIXL's module. Raises `TransferError` with the reason if it cannot be used."""
    try:
        found = importlib.import_module("nixl")
    except (ImportError, OSError) as error:
        raise TransferError(f"the package nixl cannot be imported: {error}") from error
    # It writes every agent that it opens to the standard output.
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return found


@dataclass(eq=False, slots=True)
class Read:
    """A read under way."""

    peer: str
    handle: Any
    ended: Callable[[str | None], None]
    deadline: float


class NixlCarrier:
    """Implements `Carrier` for one area of host memory. `local`: all peers are on this machine.

    Then UCX uses shared memory only, and opens no ports, unless `UCX_TLS` says otherwise.
    """

    def __init__(self, area: memoryview, local: bool = False) -> None:
        self._nixl = load_nixl()
        self._area = area
        self._address = address_of(area)
        self._shared_memory = local and TRANSPORTS not in os.environ
        self._introduction: Introduction | None = None
        self._agent: Any = None
        # What each peer's name stands for; the most recent ones last.
        self._peers: dict[str, Introduction] = {}
        self._reads: list[Read] = []
        self._attending = 0
        self._orders: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="weft-nixl", daemon=True)
        self._thread.start()
        try:
            self._ask(self._open)
        except BaseException:
            self.close()
            raise

    # any thread -----------------------------------------------------------------------------------------------------

    def introduce(self) -> Introduction:
        found = self._introduction
        if found is None:
            raise TransferError("NIXL's agent could not be opened again")
        return found

    def meet(self, introduction: Introduction) -> None:
        self._ask(lambda: self._meet(introduction))

    def read(self, peer: str, address: int, target: memoryview, ended: Callable[[str | None], None]) -> None:
        if not self._order(lambda: self._start(peer, address, target, ended)):
            ended(CLOSED)

    def attend(self) -> None:
        with self._changed:
            self._attending += 1
            self._changed.notify()

    def leave(self) -> None:
        with self._changed:
            self._attending -= 1

    def retire(self, name: str) -> bool:
        if self._shared_memory:
            return False
        try:
            self._ask(lambda: self._retire(name), None)
        except TransferError:
            # It is being closed, which is as good when it is done.
            self._thread.join()
        return True

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _order(self, order: Callable[[], None]) -> bool:
        with self._changed:
            if not self._closed:
                self._orders.append(order)
                self._changed.notify()
            return not self._closed

    def _ask(self, function: Callable[[], None], seconds: float | None = OPEN_SECONDS) -> None:
        """Let the thread call a function, and return when it has. Raises what it raises."""
        answer: Future[None] = Future()

        def order() -> None:
            try:
                function()
                answer.set_result(None)
            except BaseException as error:
                answer.set_exception(error)

        if not self._order(order):
            raise TransferError(CLOSED)
        try:
            answer.result(seconds)
        except TimeoutError:
            raise TransferError("NIXL does not answer") from None

    # the carrier's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed or self._orders:
            try:
                self._turn()
            except Exception as error:
                log.exception("NIXL has failed")
                self._restart(self._described(error))
        self._shut(CLOSED)

    def _turn(self) -> None:
        with self._changed:
            if not (self._orders or self._closed):
                self._changed.wait(self._pause())
            orders = list(self._orders)
            self._orders.clear()
        for order in orders:
            order()
        if self._agent is not None and (self._reads or self._attending):
            self._progress()

    def _pause(self) -> float | None:
        if self._reads:
            return READING_SECONDS
        return ATTENDING_SECONDS if self._attending else None

    def _open(self) -> None:
        """Open an agent under a new name, and register the area with it."""
        nixl, name = self._nixl, f"weft-{secrets.token_hex(12)}"
        try:
            agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
            self._create_backend(agent)
            agent.register_memory([(self._address, len(self._area), 0, "")], "DRAM", [BACKEND])
            metadata = agent.get_agent_metadata()
        except Exception as error:
            raise TransferError(f"NIXL cannot open an agent over {BACKEND}: {error}") from error
        if len(metadata) > MAX_METADATA_BYTES:
            raise TransferError(f"NIXL's metadata have {len(metadata)} bytes; the limit is {MAX_METADATA_BYTES}")
        self._agent, self._introduction = agent, Introduction(name, metadata)

    def _create_backend(self, agent: Any) -> None:
        if not self._shared_memory:
            agent.create_backend(BACKEND)
            return
        os.environ[TRANSPORTS] = "sm"
        try:
            # Otherwise UCX insists on a transport that notices the death of peers. Reads of a dead process fail anyway.
            agent.create_backend(BACKEND, {"ucx_error_handling_mode": "none"})
        finally:
            del os.environ[TRANSPORTS]

    def _shut(self, reason: str) -> None:
        """Close the agent, after which nothing is read here or written here; end all reads."""
        reads, self._reads = self._reads, []
        for read in reads:
            with suppress(Exception):
                read.handle.release()
            # The handle would keep the agent open.
            read.handle = None
        self._agent = self._introduction = None
        self._peers.clear()
        for read in reads:
            read.ended(reason)

    def _restart(self, reason: str) -> None:
        log.warning("NIXL's agent is opened again, and the transfers that use it end: %s", reason)
        self._shut(reason)
        try:
            self._open()
        except TransferError as error:
            log.warning("payloads of prefixes are no longer pulled: %s", error)

    def _retire(self, name: str) -> None:
        if self._introduction is not None and self._introduction.name == name:
            self._restart("a peer may still read memory that is to be used again")

    def _meet(self, introduction: Introduction) -> None:
        if self._agent is None:
            raise TransferError("NIXL's agent could not be opened again")
        known = self._peers.pop(introduction.name, None)
        if known is not None:
            self._peers[introduction.name] = known
            if known != introduction:
                raise TransferError("a peer introduces itself by a name that stands for another one")
            return
        try:
            found = self._agent.add_remote_agent(introduction.metadata)
        except Exception as error:
            raise TransferError(f"NIXL does not accept the peer's metadata: {error}") from error
        name = found.decode(errors="replace") if isinstance(found, bytes) else str(found)
        if name != introduction.name:
            # It may have replaced a peer that is being read from.
            self._restart("a peer's metadata are those of another name")
            raise TransferError("the peer's metadata are those of another name")
        self._peers[name] = introduction
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        read = {read.peer for read in self._reads}
        while len(self._peers) > MOST_PEERS:
            oldest = next((name for name in self._peers if name not in read), None)
            if oldest is None:
                return
            del self._peers[oldest]
            with suppress(Exception):
                self._agent.remove_remote_agent(oldest)

    def _start(self, peer: str, address: int, target: memoryview, ended: Callable[[str | None], None]) -> None:
        if self._agent is None or peer not in self._peers:
            ended("the peer was forgotten")
            return
        try:
            handle = self._prepare(peer, address, target)
        except Exception as error:
            ended(self._described(error))
            return
        read = Read(peer, handle, ended, monotonic() + PATIENCE_SECONDS)
        # A second reference would keep the agent open.
        del handle
        self._reads.append(read)
        self._advance(read, begin=True)

    def _prepare(self, peer: str, address: int, target: memoryview) -> Any:
        local = self._agent.get_xfer_descs([(address_of(target), len(target), 0)], "DRAM")
        remote = self._agent.get_xfer_descs([(address, len(target), 0)], "DRAM")
        return self._agent.initialize_xfer("READ", local, remote, peer)

    def _progress(self) -> None:
        failed = None
        try:
            # The only call that drives the progress of reads by peers. Notifications are not used.
            self._agent.get_new_notifs()
        except Exception as error:
            failed = self._described(error)
        if failed is not None:
            self._restart(failed)
        for read in list(self._reads):
            if read.handle is not None:
                self._advance(read)

    def _advance(self, read: Read, begin: bool = False) -> None:
        """Begin a read or look at it, and end it if it is over."""
        error = None
        try:
            state = self._agent.transfer(read.handle) if begin else self._agent.check_xfer_state(read.handle)
        except Exception as failure:
            state, error = type(failure).__name__, self._described(failure)
        # Here and not in the handler: its traceback would keep the agent open.
        if state == "DONE":
            self._end(read, None)
        elif state == "nixlRemoteDisconnectError":
            # UCX has failed the connection, and with it every operation on it.
            self._end(read, error)
        elif state != "PROC":
            self._restart(error or f"a read is in the state {state}")
        elif monotonic() > read.deadline:
            self._restart(f"a read has not ended in {PATIENCE_SECONDS:g} s")

    def _end(self, read: Read, error: str | None) -> None:
        self._reads.remove(read)
        with suppress(Exception):
            read.handle.release()
        read.handle = None
        if error is not None:
            self._forget(read.peer)
        read.ended(error)

    def _forget(self, peer: str) -> None:
        """Remove a peer that has disconnected, after its last read."""
        if peer in self._peers and not any(read.peer == peer for read in self._reads):
            del self._peers[peer]
            with suppress(Exception):
                self._agent.remove_remote_agent(peer)

    def _described(self, error: Exception) -> str:
        return f"{type(error).__name__}: {error}"
