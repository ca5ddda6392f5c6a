"""Builds and runs a whole server from options: engine, texts, application, socket, first lines, signals, exit code.

The socket is bound before the model is loaded, so that an address in use is reported at once, and listens only when
requests can be answered (a Unix socket listens from the start). SIGTERM and SIGINT drain: new requests are refused,
running ones may finish for a while, the rest fail with an error. A second signal skips the wait. SIGHUP reloads the
certificate and the key files.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import signal
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from weft import builtin
from weft.backends.backend import Backend, ModelInfo, PromptFiles
from weft.base.errors import ModelError, OptionError
from weft.base.garbage_collection import freeze_heap
from weft.base.logs import LogFormat
from weft.base.options import Options
from weft.base.sampling import SamplingParams
from weft.base.transfers import TransferSettings
from weft.fleet.backend import FleetBackend
from weft.fleet.local import divide
from weft.fleet.routing import RoutedChoice
from weft.server.access.auth import Keys, reread
from weft.server.access.usage import UsageBook
from weft.server.access_log import AccessLog
from weft.server.app import Background, create_app
from weft.server.batches.store import BatchStore
from weft.server.front import pool_for
from weft.server.http.addresses import TrustedProxies
from weft.server.http.connections import Connections, bounded_connections, raise_descriptor_limit
from weft.server.http.listener import Listener, bind, unix_listener
from weft.server.http.protocol import ServerContext
from weft.server.settings import ServerSettings
from weft.server.stored.answers import FILE_SHARE, StoredAnswers
from weft.server.stored.file import RecordFile
from weft.start.first_lines import first_lines
from weft.start.process_backend import ProcessBackend
from weft.start.thread_backend import ThreadBackend
from weft.start.watchdog import Watchdog, notify
from weft.text.suggestions import suggested_params
from weft.text.template import ChatTemplate, load_template
from weft.text.tokenizer import Tokenizer, find_text_files, load_tokenizer, text_place
from weft.wire.tls import TlsFiles

log = logging.getLogger("weft")

ENGINE_DIED = 1
# Time after the drain for the last bytes to leave.
GOODBYE_SECONDS = 5
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Life(Protocol):
    """What is started before a server listens, and drained at its end."""

    async def start(self) -> None: ...

    async def stop(self, drain_seconds: float) -> None: ...

    async def wait_failed(self) -> str: ...

    @property
    def open(self) -> int:
        """Number of open requests."""
        ...


class Running(Backend, Life, Protocol):
    """A backend that also counts its open requests."""

    @property
    def files(self) -> PromptFiles | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """Where and how the server runs. `uds` is a path to bind instead of host and port."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    uds_mode: int = 0o600
    tls: TlsFiles | None = None
    in_process: bool = False
    replicas: int = 1  # engine processes on this machine
    restart_engine: bool = False
    engine_timeout: float = 120.0  # seconds without a heartbeat from the engine; 0: no limit
    front_timeout: float = 30.0  # seconds that the front's own loop may block; 0: no limit
    log_format: LogFormat = "text"
    prefill_replicas: int = 0  # of the replicas, those that compute prompts for the others
    transfer: TransferSettings | None = None


@dataclass(frozen=True, slots=True)
class Texts:
    """What the front needs to convert messages to tokens and back."""

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    end_tokens: frozenset[int]
    suggested: SamplingParams


Reread = Callable[[], ServerSettings]
Companion = Callable[[Running], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Parts:
    """What every server has, whatever it serves."""

    settings: ServerSettings
    place: LaunchSettings
    keys: Keys
    connections: Connections
    batch_store: BatchStore | None
    stored: StoredAnswers | None


@dataclass(frozen=True, slots=True)
class Assembled:
    """An application. `beside` runs from now on until the server has drained; the last one ends first.

    `lines` are printed when the server listens at an address; `hint` is logged for those who look closely.
    """

    app: AccessLog
    beside: Sequence[Background]
    lines: Callable[[str], list[str]]
    hint: Callable[[Address], str]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Something to start, and what makes the application once it has."""

    life: Life
    assemble: Callable[[], Assembled]


class Serving(Protocol):
    """What a server serves."""

    def prepared(self, parts: Parts) -> Prepared: ...


@dataclass(frozen=True, slots=True)
class Served:
    """One model: makes the backend, and loads the texts for a backend that has started.

    `companions` run beside the server, from the backend's start until it has drained.
    """

    backend: Callable[[], Running]
    texts: Callable[[ModelInfo], Texts]
    companions: Sequence[Companion] = ()

    def prepared(self, parts: Parts) -> Prepared:
        backend = self.backend()
        return Prepared(backend, lambda: self._assembled(parts, backend))

    def _assembled(self, parts: Parts, backend: Running) -> Assembled:
        texts, settings = self.texts(backend.info), parts.settings
        pool = pool_for(texts.tokenizer, texts.template, settings, parts.place.log_format)
        background: list[Background] = []
        more: dict[str, Any] = {"keys": parts.keys, "batch_store": parts.batch_store, "stored": parts.stored}
        more |= {"pool": pool, "connections": parts.connections, "background": background}
        app = app_for(backend, texts, settings, **more)
        name = settings.model_name or backend.info.name
        return Assembled(
            app,
            [pool.running, *background, *(partial(each, backend) for each in self.companions)],
            lambda address: first_lines(backend.info, name, address),
            lambda address: f"try: {curl(address, name, bool(settings.api_keys), texts)}",
        )


def launch(served: Serving, settings: ServerSettings, place: LaunchSettings, read_again: Reread | None = None) -> int:
    """Serve until a signal; return the exit code. `read_again` returns the settings whose keys apply after SIGHUP."""
    if place.uds is None:
        warn_of_strangers(place.host, bool(settings.api_keys))
    raise_descriptor_limit()
    tls = None if place.tls is None else place.tls.context()
    bound = bind(place.host, place.port) if place.uds is None else unix_listener(place.uds, place.uds_mode)
    # uvicorn's choice: uvloop if it is installed.
    with bound as listener, asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        return runner.run(serve(served, settings, place, listener, tls, read_again))


async def serve(
    served: Serving,
    settings: ServerSettings,
    place: LaunchSettings,
    listener: socket.socket,
    tls: ssl.SSLContext | None = None,
    read_again: Reread | None = None,
) -> int:
    keys, batch_store = keys_and_batches(settings)
    orders = Orders()
    if read_again is not None:
        orders.on_hangup(partial(reread, keys, read_again))
    if place.tls is not None and tls is not None:
        orders.on_hangup(partial(reread_certificate, place.tls, tls))
    async with AsyncExitStack() as files:
        stored = open_stored(settings)
        if stored is not None:
            files.callback(stored.close)
        connections = bounded_connections(settings.limits)
        log.debug("accepting up to %d connections", connections.bound)
        parts = Parts(settings, place, keys, connections, batch_store, stored)
        prepared = served.prepared(parts)
        if not await started(prepared.life, orders):
            return 0
        return await serve_prepared(prepared, parts, listener, tls, orders)


async def serve_prepared(
    prepared: Prepared, parts: Parts, listener: socket.socket, tls: ssl.SSLContext | None, orders: Orders
) -> int:
    """Serve what has started until a signal; return the exit code."""
    life, settings, companions = prepared.life, parts.settings, AsyncExitStack()
    try:
        assembled = prepared.assemble()
        for run in (parts.keys.usage.kept, *assembled.beside):
            await companions.enter_async_context(run())
    except BaseException:
        await companions.aclose()
        await life.stop(0)
        raise
    freeze_heap()

    def ready(address: Address) -> None:
        log.debug("%s", assembled.hint(address))
        # One write, so that a program that waits for the address reads all lines.
        print("\n".join(assembled.lines(str(address))), flush=True)
        watchdog.start()
        notify("READY=1")

    draining = partial(drain, life, orders, settings.drain_seconds)
    server = Server(assembled.app, settings, draining, ready, tls, parts.connections)
    watchdog = Watchdog(parts.place.front_timeout)
    try:
        return await run_until_signalled(server, life, orders, listener)
    finally:
        watchdog.stop()
        await companions.aclose()


def app_for(backend: Running, texts: Texts, settings: ServerSettings, **more: Any) -> AccessLog:
    """Return the application. `more` are further arguments of `create_app`."""
    found = (texts.tokenizer, texts.template, texts.end_tokens)
    return create_app(backend, *found, settings, texts.suggested, files=backend.files, **more)


def keys_and_batches(settings: ServerSettings) -> tuple[Keys, BatchStore | None]:
    """Return the keys with their usage so far, and the folder of batches if there is one."""
    keys = Keys(settings, usage=UsageBook(settings.usage_file, time.time))
    folder = settings.batch_folder
    return keys, None if folder is None else BatchStore(folder, settings.limits, time.time)


def open_stored(settings: ServerSettings) -> StoredAnswers | None:
    """Return what keeps responses, if the settings ask for it."""
    most, path = settings.responses_bytes, settings.responses_file
    if not most:
        return None
    return StoredAnswers(most, None if path is None else RecordFile(Path(path), FILE_SHARE * most))


async def started(backend: Life, orders: Orders) -> bool:
    """Start a backend; return False if a signal came first."""
    starting = asyncio.create_task(backend.start())
    await orders.or_done(starting)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return False
    await starting
    return True


def serving_engines(options: Options, settings: ServerSettings, place: LaunchSettings) -> Served:
    """Return what `weft serve` serves: engines of this machine, and the texts of their model."""
    return Served(lambda: make_backend(options, settings, place), lambda info: load_texts(options, info.settings))


def make_backend(options: Options, settings: ServerSettings, place: LaunchSettings) -> Running:
    most = settings.limits.open_sequences
    patience = place.engine_timeout or None
    # A progress bar is not a log line: it is for people at a terminal.
    progress = place.log_format == "text" and sys.stderr is not None and sys.stderr.isatty()
    if place.in_process:
        return ThreadBackend.from_options(options, progress, max_open=most, patience_seconds=patience)
    alone = place.replicas == 1
    process = partial(
        ProcessBackend,
        progress=progress and alone,
        max_open=most,
        restart=place.restart_engine,
        patience_seconds=patience,
        log_format=place.log_format,
    )
    if alone:
        return process(options, transfer=place.transfer)
    replicas = divide(options, place.replicas)
    members = [
        process(each.options, cores=each.cores, variables=dict(each.variables), transfer=role)
        for each, role in zip(replicas, roles_of(place), strict=True)
    ]
    named = [(str(number), member) for number, member in enumerate(members)]
    return FleetBackend(named, chooser=RoutedChoice(), max_open=most)


def roles_of(place: LaunchSettings) -> Sequence[TransferSettings | None]:
    """Return the role of each replica of this machine: the first ones compute prompts for the others."""
    shared, count = place.transfer, place.prefill_replicas
    if shared is None or not count:
        return [None] * place.replicas
    others = place.replicas - count
    size = f"auto/{others}" if shared.arrivals == "auto" else shared.arrivals
    return [replace(shared, role="prefill")] * count + [replace(shared, role="decode", arrivals=size)] * others


def reread_certificate(files: TlsFiles, context: ssl.SSLContext) -> None:
    try:
        files.reload(context)
    except OptionError as error:
        log.error("certificate not reloaded, keeping the old one: %s", error)
    else:
        log.info("reloaded the certificate %s", files.certfile)


class Orders:
    """The operator's signals: the first stops the server, the second at once; SIGHUP reloads files.

    Without files to reload, SIGHUP ends the process as it does by default, so that none outlives its terminal.
    """

    def __init__(self) -> None:
        self._hangup: list[Callable[[], None]] = []
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._tell)

    def on_hangup(self, call: Callable[[], None]) -> None:
        """Register a callback for SIGHUP. Without one, the signal ends the server as it does by default."""
        self._hangup.append(call)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: [each() for each in self._hangup])

    def _tell(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()

    async def or_done(self, *tasks: asyncio.Task[Any]) -> None:
        """Wait for a signal to stop, or until one of these tasks is done."""
        await first_of(self.stop, *tasks)


async def first_of(event: asyncio.Event, *tasks: asyncio.Task[Any]) -> None:
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def run_until_signalled(server: Server, backend: Life, orders: Orders, listener: socket.socket) -> int:
    """Serve until a signal or the engine's death; return the exit code."""
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    dying = asyncio.create_task(backend.wait_failed())
    await orders.or_done(serving, dying)
    died = dying.done()
    if died:
        log.error("exiting because the engine has ended: %s", dying.result())
    dying.cancel()
    notify("STOPPING=1")
    server.should_exit = True
    await serving
    return ENGINE_DIED if died or not server.started else 0


async def drain(backend: Life, orders: Orders, seconds: float) -> None:
    """Let running requests finish, for this long or until a second signal; then end the rest."""
    if backend.open:
        log.warning("draining %d requests for up to %g s; another signal ends them now", backend.open, seconds)
    stopping = asyncio.create_task(backend.stop(seconds))
    await first_of(orders.hurry, stopping)
    if not stopping.done():
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        stopping = asyncio.create_task(backend.stop(0))
    await stopping


@dataclass(frozen=True, slots=True)
class Address:
    """Where clients find the server. `path` is that of its Unix socket, if it has one."""

    url: str
    path: str | None = None

    @classmethod
    def of(cls, listener: socket.socket, secure: bool) -> Address:
        scheme, name = "https" if secure else "http", listener.getsockname()
        if listener.family == socket.AF_UNIX:
            return cls(f"{scheme}://localhost", name)
        host = f"[{name[0]}]" if ":" in name[0] else name[0]
        return cls(f"{scheme}://{host}:{name[1]}")

    def __str__(self) -> str:
        return self.url if self.path is None else f"unix:{self.path}"


class Server(uvicorn.Server):
    """Reports its address when it listens; before it closes, `drain` ends running requests, so that all are answered.

    uvicorn provides the clock, the tasks and the order of shutdown. Weft has its own connections (`http.py`) and its
    own request log (`access_log.py`).
    """

    def __init__(
        self,
        app: AccessLog,
        settings: ServerSettings,
        drain: Callable[[], Awaitable[None]],
        ready: Callable[[Address], None],
        tls: ssl.SSLContext | None = None,
        connections: Connections | None = None,
    ) -> None:
        config = uvicorn.Config(
            app, lifespan="off", ws="none", log_config=None, log_level=logging.ERROR, server_header=False
        )
        config.timeout_graceful_shutdown = GOODBYE_SECONDS
        super().__init__(config)
        self._app, self._settings = app, settings
        self._drain, self._ready, self._tls = drain, ready, tls
        self._connections = connections or bounded_connections(settings.limits)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # Handled here: uvicorn would raise them again at its end, as if the process were killed.
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        proxies = TrustedProxies(self._settings.trusted_proxies)
        shared = ServerContext(self._app, self._settings.limits, self._connections, proxies, self.server_state)
        # uvicorn only closes them, and waits for that.
        self.servers = [Listener(listener, shared, self._tls) for listener in sockets]  # type: ignore[misc]
        self.started = True
        self._ready(Address.of(sockets[0], self._tls is not None))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Clients that connect meanwhile get a 503 instead of no answer.
        await self._drain()
        await super().shutdown(sockets)


def warn_of_strangers(host: str, has_keys: bool) -> None:
    """Log a warning, because every client that reaches the port can use the model and flush its cache."""
    if host in LOOPBACK:
        return
    log.warning("bound to %s: other machines may reach this server", host)
    if not has_keys:
        log.warning("NO API KEY IS SET: EVERY CLIENT THAT REACHES IT MAY USE IT. Set --api-key, or --host 127.0.0.1")


class TextOptions(Protocol):
    """The options that say where texts come from."""

    @property
    def tokenizer(self) -> str | None: ...

    @property
    def chat_template(self) -> str | None: ...


def load_texts(options: TextOptions, settings: dict[str, Any]) -> Texts:
    """Return tokenizer and template, from the folder in which the engine found the model, or from another one."""
    ends = frozenset(settings["end_tokens"])
    folder = Path(settings["folder"])
    folder = text_place(folder)
    suggested = suggested_params(folder)
    if options.tokenizer is not None:
        folder = find_text_files(builtin.place_of(options.tokenizer))
    found = load_tokenizer(folder)
    if found is None and options.tokenizer is not None:
        raise ModelError(f"tokenizer: {folder} has no tokenizer.json")
    if found is None:
        log.warning("the model has no tokenizer.json: serving token ids only, no text")
        return Texts(None, None, ends, suggested)
    template = load_template(folder, found.specials, options.chat_template)
    return Texts(found, template, ends | found.end_tokens, suggested)


def curl(address: Address, name: str, has_keys: bool, texts: Texts) -> str:
    """Return a request to paste."""
    body: dict[str, Any] = {"model": name, "max_tokens": 32}
    path = "/v1/completions"
    if texts.template is not None:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "Hello"}]
    else:
        body["prompt"] = "Hello" if texts.tokenizer is not None else [1, 2, 3]
    where = "" if address.path is None else f"--unix-socket {shlex.quote(address.path)} "
    key = ' -H "Authorization: Bearer $WEFT_API_KEY"' if has_keys else ""
    quoted = shlex.quote(json.dumps(body))
    return f"curl -s {where}{address.url}{path}{key} -H 'Content-Type: application/json' -d {quoted}"
