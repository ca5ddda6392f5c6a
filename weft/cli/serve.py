"""`weft serve`: from options to a server."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from weft.base.errors import OptionError
from weft.base.options import Options, memory_bytes, option
from weft.cli.options import argument

if TYPE_CHECKING:
    from weft.server.keys import Key
    from weft.server.settings import Limits, ServerSettings

ABOUT = "serve a model over HTTP: OpenAI's API, and the native one that SGLang's clients speak"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Named here too, so that `--help` need not load the parsers; a test compares.
TOOL_PARSERS: tuple[str, ...] = ("auto", "none", "hermes", "qwen3_coder", "lfm2", "llama3_json", "mistral")
TOOL_PARSERS += ("granite", "nemotron", "gemma", "harmony")
REASONING_PARSERS = ("auto", "none", "think", "mistral", "granite", "harmony")
LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


def repeated(about: str, name: str) -> Any:
    """A field that may be given several times."""
    return field(default=(), metadata={"help": f"{about}; may be repeated", "choices": (), "metavar": name})


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Options):
    """Options of `weft serve`: where and for whom, then those of the engine."""

    model: str | None = argument("folder or hub id of a model; without one, weft-small, which comes along")
    host: str = option("127.0.0.1", "address to listen at; anything but this machine alone is warned of")
    port: int = option(8000, "port to listen at; 0: any that is free")
    uds: str | None = option(None, "path of a Unix socket to listen at, instead of host and port")
    uds_mode: str = option("600", "file mode of the Unix socket; 660 lets its group connect")
    ssl_certfile: str | None = option(None, "certificate chain in PEM format: serve HTTPS; reread on SIGHUP")
    ssl_keyfile: str | None = option(None, "the certificate's private key, if it is not in the same file")
    ssl_keyfile_password_file: str | None = option(None, "file with the password of that key")
    allowed_host: tuple[str, ...] = repeated(
        "name that clients may have in the Host header beside localhost; *.example.com: all below it, *: any", "NAME"
    )
    trusted_proxy: tuple[str, ...] = repeated(
        "address or network of a proxy whose X-Forwarded-For names the client; unix: whatever connects to --uds", "CIDR"
    )
    api_key: tuple[str, ...] = field(
        default=(),
        metadata={"help": "key that clients must send, may be repeated; also from WEFT_API_KEY", "choices": ()},
    )
    api_key_file: str | None = option(
        None, "file of keys, which no process list shows: a KEY, or NAME KEY LIMITS on each line; reread on SIGHUP"
    )
    admin_key: str | None = option(
        None, "key for what concerns all clients, where there are several keys; also from WEFT_ADMIN_KEY"
    )
    admin_key_file: str | None = option(None, "file with the admin key, in the same form; reread on SIGHUP")
    requests_per_minute: int = option(
        0, "requests a minute of each key that sets no limit of its own; 0: any number", metavar="NUMBER"
    )
    tokens_per_minute: int = option(
        0, "tokens a minute of each key that sets no limit of its own; 0: any number", metavar="NUMBER"
    )
    served_model_name: str | None = option(None, "what clients call the model")
    open_health: bool = option(True, "/health answers without a key: up or down, nothing else")
    max_open_requests: int = option(1024, "requests running and waiting at most; others are told to come back later")
    max_body: str | int = option("8MiB", "size of a request at most")
    max_answers: int = option(32, "answers to one prompt (n) at most")
    limit: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "another bound on what one request may ask for, such as tools=64, may be repeated; a wrong name "
            "tells all of them",
            "choices": (),
            "metavar": "NAME=NUMBER",
        },
    )
    drain_seconds: float = option(30.0, "how long requests may finish after SIGTERM")
    restart_engine: bool = option(False, "start the engine anew if it dies, instead of ending with exit code 1")
    engine_timeout: float = option(
        120.0,
        "seconds without a sign of life from the engine until /health is red (and it is killed, with "
        "--restart-engine); more than the longest step takes; 0: never",
    )
    front_timeout: float = option(
        30.0,
        "seconds that the server's own event loop may be blocked until the process ends with exit code 1; 0: for ever",
    )
    in_process: bool = option(False, "run the engine in a thread of the server's process")
    tool_parser: str = option("auto", "how the model writes calls of tools; auto: by its chat template", TOOL_PARSERS)
    reasoning_parser: str = option("auto", "how the model marks thoughts; auto: by its template", REASONING_PARSERS)
    cors_origin: tuple[str, ...] = field(
        default=(), metadata={"help": "web pages of this origin may call, may be repeated", "choices": ()}
    )
    sse_keep_alive: float = option(
        15.0, "seconds of silence after which a stream sends a comment; 0: never", metavar="SECONDS"
    )
    log_level: str = option("info", "how much is told on standard error", LEVELS)
    log_format: str = option("text", "form of the log's lines", LOG_FORMATS)
    log_requests: bool = option(True, "log a line for each request: who, what, status, tokens, times; never text")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.port <= 65535:
            raise OptionError(f"port must be from 0 to 65535, got {self.port}")
        for name in ("drain_seconds", "engine_timeout", "front_timeout", "sse_keep_alive"):
            if not 0 <= getattr(self, name) <= 86400:
                raise OptionError(f"{name} must be from 0 to 86400, got {getattr(self, name)}")
        for name in ("max_open_requests", "max_answers"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.admin_key is not None and self.admin_key_file is not None:
            raise OptionError("admin_key and admin_key_file exclude each other: give one of them")
        size_of("max_body", self.max_body)
        if not re.fullmatch("0?[0-7]{3}", self.uds_mode):
            raise OptionError(f"uds_mode must be three octal digits, such as 660, got {self.uds_mode!r}")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_keyfile_password_file):
            raise OptionError("ssl_keyfile needs a certificate: give --ssl-certfile too")


def run(options: ServeOptions) -> int:
    from weft.server.launch import Place, launch
    from weft.server.logs import set_up_logging
    from weft.server.tls import TlsFiles

    set_up_logging(options.log_level.upper(), options.log_format)
    place = Place(
        host=options.host,
        port=options.port,
        uds=options.uds,
        uds_mode=int(options.uds_mode, 8),
        tls=TlsFiles(options.ssl_certfile, options.ssl_keyfile, options.ssl_keyfile_password_file)
        if options.ssl_certfile is not None
        else None,
        in_process=options.in_process,
        restart_engine=options.restart_engine,
        engine_timeout=options.engine_timeout,
        front_timeout=options.front_timeout,
        log_format="json" if options.log_format == "json" else "text",
    )
    has_files = options.api_key_file is not None or options.admin_key_file is not None
    return launch(options, settings_of(options), place, (lambda: settings_of(options)) if has_files else None)


def settings_of(options: ServeOptions) -> ServerSettings:
    from weft.server.keys import Rates
    from weft.server.settings import ServerSettings

    keys = read_keys(options)
    return ServerSettings(
        api_keys=keys,
        admin_key=read_admin_key(options),
        key_rates=Rates(options.requests_per_minute, options.tokens_per_minute),
        model_name=options.served_model_name,
        open_health=options.open_health,
        cors_origins=options.cors_origin,
        trusted_hosts=trusted_hosts(options, bool(keys)),
        trusted_proxies=options.trusted_proxy,
        tool_parser=options.tool_parser,
        reasoning_parser=options.reasoning_parser,
        drain_seconds=options.drain_seconds,
        log_requests=options.log_requests,
        keep_alive_seconds=options.sse_keep_alive,
        limits=limits_of(options),
    )


def trusted_hosts(options: ServeOptions, has_keys: bool) -> tuple[str, ...]:
    """Return the names that requests may call this server by; empty: any."""
    if options.allowed_host:
        return () if "*" in options.allowed_host else (*LOOPBACK, *options.allowed_host)
    # Without a key, a page in the user's browser could reach the server under a name of its own.
    reached_by_browsers = options.uds is None and options.host in LOOPBACK
    return LOOPBACK if reached_by_browsers and not has_keys else ()


def limits_of(options: ServeOptions) -> Limits:
    """The bounds by their own options, then those that `--limit` names."""
    from weft.server.settings import Limits

    known = {each.name: float if each.name.endswith("_seconds") else int for each in fields(Limits)}
    values: dict[str, Any] = {
        "body_bytes": size_of("max_body", options.max_body),
        "n": options.max_answers,
        "open_sequences": options.max_open_requests,
    }
    for given in options.limit:
        name, _, text = given.partition("=")
        if name not in known:
            raise OptionError(f"--limit {given}: known are {', '.join(known)}")
        try:
            values[name] = size_of(name, text) if name.endswith("_bytes") else known[name](text)
        except ValueError:
            raise OptionError(f"--limit {given}: {text!r} is no number for {name}") from None
    return Limits(**values)


def size_of(name: str, value: str | int) -> int:
    """A number of bytes as users write it."""
    try:
        size = memory_bytes(value)
    except OptionError:
        size = None
    if size is None:
        raise OptionError(f"{name} must be a size, such as 8MiB, got {value!r}")
    return size


def read_keys(options: ServeOptions) -> tuple[str | Key, ...]:
    """Keys from the command line and from the file; from the environment if there are none."""
    from weft.server.keys import read_key_file

    keys: list[str | Key] = list(options.api_key)
    if options.api_key_file is not None:
        keys += read_key_file("api_key_file", options.api_key_file)
    if not keys and os.environ.get("WEFT_API_KEY"):
        keys += os.environ["WEFT_API_KEY"].split(",")
    return tuple(keys)


def read_admin_key(options: ServeOptions) -> str | Key | None:
    """The admin's key from the command line or from the file; from the environment if neither has one."""
    from weft.server.keys import read_key_file

    if options.admin_key_file is not None:
        keys = read_key_file("admin_key_file", options.admin_key_file)
        if len(keys) > 1:
            raise OptionError(f"admin_key_file {options.admin_key_file} must hold one key, got {len(keys)}")
        return keys[0]
    return options.admin_key or os.environ.get("WEFT_ADMIN_KEY") or None
