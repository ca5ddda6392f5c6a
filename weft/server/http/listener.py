"""The listening socket: binds, accepts within the bounds, and recovers when descriptors run out. Knows no HTTP.

It accepts connections itself instead of using `loop.create_server`, because event loops differ when no descriptor is
free: asyncio logs a traceback and waits, uvloop accepts and silently drops every client.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.base.errors import OptionError
from weft.server.http.connections import Connections
from weft.server.http.protocol import HttpConnection, ServerContext

log = logging.getLogger("weft")

BACKLOG = 2048
# Maximum accepted per iteration of the loop, so that running streams are not delayed.
MAX_ACCEPTED = 64
RETRY_SECONDS = 0.1
# Time for a client to confirm the end of a TLS connection.
TLS_GOODBYE_SECONDS = 5.0


class Listener:
    """Accepts clients on a listening socket. Stands in for asyncio's server object in `uvicorn.Server.servers`."""

    def __init__(self, listener: socket.socket, shared: ServerContext, tls: ssl.SSLContext | None) -> None:
        self.sockets = (listener,)
        self._listener = listener
        self._shared = shared
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._connections: Connections = shared.connections
        self._connections.left = self._resume
        listen(listener)
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED):
            try:
                client, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            client.setblocking(False)
            self._admit(client, (address[0], address[1]) if isinstance(address, tuple) else None)

    def _admit(self, client: socket.socket, address: tuple[str, int] | None) -> None:
        connection = HttpConnection(self._shared, address, self._tls is not None)
        refusal = self._connections.enter(connection)
        if refusal is not None:
            if self._tls is not None:
                # The client expects TLS, so a plain-text refusal is useless, and a handshake costs time.
                self._connections.leave(connection)
                client.close()
                return
            connection.refuse(*refusal)
        else:
            connection.settle()
        connection.opening = self._loop.create_task(self._open(client, connection))
        self._opening.add(connection.opening)
        connection.opening.add_done_callback(lambda task: self._opened(task, client, connection))

    async def _open(self, client: socket.socket, connection: HttpConnection) -> None:
        timeouts = {}
        if self._tls is not None:
            timeouts["ssl_handshake_timeout"] = self._shared.limits.handshake_seconds
            timeouts["ssl_shutdown_timeout"] = TLS_GOODBYE_SECONDS
        await self._loop.connect_accepted_socket(lambda: connection, client, ssl=self._tls, **timeouts)

    def _opened(self, task: asyncio.Task[None], client: socket.socket, connection: HttpConnection) -> None:
        """Forget a connection that was never established: its client left, its handshake failed, or it was cut."""
        self._opening.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OSError):
            log.error("cannot open a connection", exc_info=error)
        if error is not None or task.cancelled():
            self._connections.leave(connection)
            client.close()

    # without descriptors ----------------------------------------------------------------------------------------------

    def _pause(self, error: OSError) -> None:
        """Stop accepting for a while, and close a waiting connection to make room."""
        if self._retry is not None:
            return
        short = error.errno in (errno.EMFILE, errno.ENFILE)
        hint = "; raise the limit of open files, or lower --limit connections" if short else ""
        self._connections.warnings.warn("cannot accept connections: %s%s", error.strerror, hint)
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(RETRY_SECONDS, self._resume)
        self._connections.crowded["descriptors"] += 1
        if short:
            self._connections.cut_longest_waiting()

    def _resume(self) -> None:
        """Accept again: a connection has ended, or enough time has passed."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
            self._loop.add_reader(self._listener, self._accept)


# binding --------------------------------------------------------------------------------------------------------------


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; for port 0 the system chooses one.

    It listens later, and until then no other server may bind the address, which `SO_REUSEADDR` would allow.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.bind(address)
        except OSError:
            # Closed connections of an earlier server may be left.
            reuse_address(listener, True)
            listener.bind(address)
            reuse_address(listener, False)
    except OSError as error:
        raise OptionError(f"cannot bind {host}:{port}: {error.strerror or error}") from None
    return listener


def reuse_address(listener: socket.socket, may: bool) -> None:
    """Let a socket share its address with closed connections, or not. Connections that it accepts inherit it."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(may))


def listen(listener: socket.socket) -> None:
    """Let clients connect. The next server may bind the address while connections of this one are closed."""
    reuse_address(listener, True)
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise OptionError(f"cannot listen on {listener.getsockname()}: {error.strerror or error}") from None


@contextmanager
def unix_listener(path: str, mode: int) -> Iterator[socket.socket]:
    """Provide a socket bound to a path with this file mode, and remove the file at the end.

    The socket listens from the start, so that another start can tell a server that is loading its model from a dead
    one.
    """
    place = Path(path)
    remove_stale(place)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        # The file must never be more accessible than requested, not even between two calls.
        umask = os.umask(0o777)
        try:
            listener.bind(path)
            listener.listen(BACKLOG)
        except OSError as error:
            raise OptionError(f"cannot bind uds {path}: {error.strerror or error}") from None
        finally:
            os.umask(umask)
        place.chmod(mode)
        ours = place.lstat().st_ino
        try:
            yield listener
        finally:
            with suppress(OSError):
                if place.lstat().st_ino == ours:
                    place.unlink()


def remove_stale(place: Path) -> None:
    """Remove the file of a socket that no server uses any more."""
    try:
        found = place.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise OptionError(f"cannot use uds {place}: {error.strerror or error}") from None
    if not stat.S_ISSOCK(found.st_mode):
        raise OptionError(f"uds {place} must be a free path or a stale socket, but is a file; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(place))
        except ConnectionRefusedError:
            place.unlink(missing_ok=True)
        except OSError as error:
            raise OptionError(f"uds {place} is in use or belongs to another user: {error.strerror or error}") from None
        else:
            raise OptionError(f"uds {place} is in use by another server; choose another path")
