"""`weft route`: a front without an engine, before replicas on other machines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.base.errors import InvalidOption, ModelError
from weft.base.options import option
from weft.cli.options import argument
from weft.cli.serve import FrontOptions, ServeOptions, place_of, read_again, set_up_logs, settings_of

if TYPE_CHECKING:
    from weft.backends.backend import ModelInfo
    from weft.fleet.remote import RemoteBackend, ReplicaAddress
    from weft.start.launch import Companion, Running, Texts

__all__ = ("ABOUT", "RouteOptions", "run", "set_up_logs")
ABOUT = "serve the same API without an engine, and send requests to replicas (weft serve --fleet-listen)"


@dataclass(frozen=True, kw_only=True)
class RouteOptions(FrontOptions):
    """Options of `weft route`: the replicas, where texts come from, and the server's own."""

    replica: tuple[str, ...] = argument("address of a replica: tcp://HOST:PORT, or tls://HOST:PORT", many=True)
    replicas_file: str | None = option(None, "file with an address per line; reread when it changes", metavar="FILE")
    fleet_secret: str | None = option(
        None, "file with the secret that routers and replicas share, readable by its owner only", metavar="FILE"
    )
    replica_timeout: float = option(10.0, "seconds without a heartbeat from a replica until it gets no more requests")
    model: str | None = option(None, "model folder or hub id, for its tokenizer and chat template; default: weft-small")
    tokenizer: str | None = option(None, "folder or hub id of a tokenizer to use instead of the model's own")
    chat_template: str | None = option(
        None, "file with a Jinja chat template to use instead of the model's own", metavar="FILE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.replica_timeout <= 86400:
            raise InvalidOption(
                "replica_timeout", f"must be greater than 0 and at most 86400, got {self.replica_timeout}"
            )


def run(options: RouteOptions) -> int:
    from weft.fleet.backend import FleetBackend
    from weft.fleet.remote import ReplicaAddress
    from weft.fleet.replicas_file import parse_replicas, read_replicas
    from weft.fleet.routing import RoutedChoice
    from weft.start.launch import Served, launch

    check_given(options)
    settings, connect = settings_of(options), connector(options)
    file = options.replicas_file
    urls = parse_replicas(list(options.replica)) if file is None else read_replicas(file)

    def backend() -> FleetBackend:
        members = [(url, connect(ReplicaAddress.parse(url))) for url in urls]
        most = settings.limits.open_sequences
        return FleetBackend(members, chooser=RoutedChoice(), max_open=most, patient=True)

    companions = () if file is None else (file_watcher(file, connect, options.drain_seconds),)
    served = Served(backend, lambda info: texts_of(options, info), companions)
    return launch(served, settings, place_of(options), read_again(options))


def check_given(options: RouteOptions) -> None:
    """Raise unless replicas and the secret are given: these options have no default that works."""
    if bool(options.replica) == (options.replicas_file is not None):
        raise InvalidOption("replicas_file", "or addresses must be given, and not both")
    if options.fleet_secret is None:
        raise InvalidOption("fleet_secret", "is required: the file with the secret of the replicas")


def connector(options: RouteOptions) -> Callable[[ReplicaAddress], RemoteBackend]:
    """Return what makes the backend of an address."""
    from weft.fleet.remote import RemoteBackend
    from weft.wire.handshake import read_secret

    assert options.fleet_secret is not None
    secret, most = read_secret("fleet_secret", options.fleet_secret), options.max_open_requests
    return lambda address: RemoteBackend(address, secret, max_open=most, patience_seconds=options.replica_timeout)


def file_watcher(path: str, connect: Callable[[ReplicaAddress], RemoteBackend], drain_seconds: float) -> Companion:
    from weft.fleet.backend import FleetBackend
    from weft.fleet.replicas_file import ReplicasFile, watched

    def companion(running: Running) -> AbstractAsyncContextManager[None]:
        assert isinstance(running, FleetBackend)
        return watched(ReplicasFile(path, running, connect, drain_seconds))

    return companion


def texts_of(options: RouteOptions | ServeOptions, info: ModelInfo) -> Texts:
    """Load tokenizer and template from this machine. Raises if they are not those of the replicas' model."""
    from weft import builtin
    from weft.start.launch import load_texts
    from weft.text.identity import text_digest
    from weft.text.tokenizer import find_text_files

    folder = find_text_files(builtin.place_of(options.model))
    texts = folder if options.tokenizer is None else find_text_files(builtin.place_of(options.tokenizer))
    if text_digest(folder, texts) != info.settings.get("digest"):
        raise ModelError(
            f"the replicas serve {info.name}, and the config.json or tokenizer.json of {options.model or builtin.NAME} "
            "differ from theirs; pass the same --model and --tokenizer as the replicas"
        )
    return load_texts(options, {"folder": str(folder), "end_tokens": info.settings["end_tokens"]})
