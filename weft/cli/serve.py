"""`weft serve`: turns options into a running server."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.base.errors import InvalidOption, OptionError
from weft.base.options import Options, memory_bytes, option, saves_prompts, verified_share
from weft.base.transfers import ROLES, WAYS, TransferSettings
from weft.cli.options import argument
from weft.cli.several import MODELS, aliases_of, check_together, keep_alive_seconds, models_of

if TYPE_CHECKING:
    from weft.server.access.keys import Key
    from weft.server.settings import Limits, PromptFileSettings, ServerSettings
    from weft.start.launch import Companion, LaunchSettings
    from weft.wire.tls import TlsFiles

log = logging.getLogger("weft")

ABOUT = "serve a model over HTTP, with OpenAI's API and SGLang's native API"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Listed here as well, so that `--help` need not import the parsers; a test compares.
TOOL_PARSERS: tuple[str, ...] = ("auto", "none", "hermes", "qwen3_coder", "lfm2", "llama3_json", "mistral")
TOOL_PARSERS += ("granite", "phi4", "olmo3", "nemotron", "gemma", "harmony")
REASONING_PARSERS = ("auto", "none", "think", "mistral", "granite", "harmony")
LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


def repeated(about: str, name: str) -> Any:
    """Return a field that may be given several times."""
    return field(default=(), metadata={"help": f"{about}; may be repeated", "choices": (), "metavar": name})


@dataclass(frozen=True, kw_only=True)
class FrontOptions:
    """Options of everything that serves the API: `weft serve` and `weft route`."""

    host: str = option("127.0.0.1", "address to bind; any other than loopback logs a warning")
    port: int = option(8000, "port to bind; 0: any free port")
    uds: str | None = option(None, "path of a Unix socket to bind instead of host and port")
    uds_mode: str = option("600", "file mode of the Unix socket; 660 lets its group connect")
    ssl_certfile: str | None = option(None, "certificate chain in PEM format: serve HTTPS; reread on SIGHUP")
    ssl_keyfile: str | None = option(None, "private key of the certificate, if it is not in the same file")
    ssl_keyfile_password_file: str | None = option(None, "file with the password of the private key")
    allowed_host: tuple[str, ...] = repeated(
        "name accepted in the Host header besides localhost; *.example.com: all names below it, *: any", "NAME"
    )
    trusted_proxy: tuple[str, ...] = repeated(
        "address or network of a proxy whose X-Forwarded-For is trusted; unix: every client of --uds", "CIDR"
    )
    api_key: tuple[str, ...] = field(
        default=(),
        metadata={"help": "key that clients must send; may be repeated; better: WEFT_API_KEY", "choices": ()},
    )
    api_key_file: str | None = option(
        None, "key file, hidden from the process list; each line is KEY or NAME KEY LIMITS; reread on SIGHUP"
    )
    admin_key: str | None = option(
        None, "key for metrics and administration when there are several keys; better: WEFT_ADMIN_KEY"
    )
    admin_key_file: str | None = option(None, "file with the admin key, in the same format; reread on SIGHUP")
    requests_per_minute: int = option(
        0, "requests per minute for each key that sets no limit of its own; 0: unlimited", metavar="NUMBER"
    )
    tokens_per_minute: int = option(
        0, "tokens per minute for each key that sets no limit of its own; 0: unlimited", metavar="NUMBER"
    )
    alias: tuple[str, ...] = repeated(
        "further name of a model, such as gpt-4o=NAME, which requests may use instead of NAME", "ALIAS=NAME"
    )
    served_model_name: str | None = option(None, "model name that clients use; default: derived from the model")
    open_health: bool = option(True, "answer /health and /ping without a key; they show only up or down")
    usage_file: str | None = option(
        None, "file that keeps the usage of each key by day, for GET /v1/usage", metavar="FILE"
    )
    batch_folder: str | None = option(
        None, "folder for /v1/files and /v1/batches, which continue after a restart", metavar="FOLDER"
    )
    page: bool = option(True, "serve a page at /, to talk to the model and look at the cache (docs/page.md)")
    max_open_requests: int = option(1024, "maximum requests running and waiting; others get a 429")
    max_body: str | int = option("8MiB", "maximum size of a request body")
    max_answers: int = option(32, "maximum answers to one prompt (n)")
    limit: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "set another bound on requests, such as tools=64; may be repeated; an unknown name lists all "
            "bounds",
            "choices": (),
            "metavar": "NAME=NUMBER",
        },
    )
    drain_seconds: float = option(30.0, "seconds that running requests have to finish after SIGTERM")
    front_timeout: float = option(
        30.0,
        "seconds that the server's event loop may block before the process exits with code 1; 0: no limit",
    )
    tool_parser: str = option("auto", "format of the model's tool calls; auto: by its chat template", TOOL_PARSERS)
    reasoning_parser: str = option("auto", "format of the model's reasoning; auto: by its template", REASONING_PARSERS)
    strict_fields: bool = option(
        False, "refuse requests with unknown fields, such as typos, instead of logging the names"
    )
    cors_origin: tuple[str, ...] = field(
        default=(), metadata={"help": "allow web pages of this origin (CORS); may be repeated", "choices": ()}
    )
    sse_keep_alive: float = option(
        15.0, "seconds without output after which a stream sends a comment; 0: never", metavar="SECONDS"
    )
    vllm_metrics: bool = option(False, "also export metrics under vLLM's names, for dashboards that exist")
    otlp_traces_endpoint: str | None = option(
        None, "collector of OpenTelemetry (OTLP over HTTP) that gets a span for each request", metavar="URL"
    )
    responses_memory: str | int = option(
        "off", "memory for responses that the server stores, such as 256MiB; with --disk also in a file beside it"
    )
    log_level: str = option("info", "lowest level to log to standard error", LEVELS)
    log_format: str = option("text", "format of log lines", LOG_FORMATS)
    log_requests: bool = option(True, "log one line per request: key, route, status, tokens, times; never text")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidOption("port", f"must be from 0 to 65535, got {self.port}")
        for name in ("drain_seconds", "front_timeout", "sse_keep_alive"):
            if not 0 <= getattr(self, name) <= 86400:
                raise InvalidOption(name, f"must be from 0 to 86400, got {getattr(self, name)}")
        for name in ("max_open_requests", "max_answers"):
            if getattr(self, name) < 1:
                raise InvalidOption(name, f"must be at least 1, got {getattr(self, name)}")
        if self.admin_key is not None and self.admin_key_file is not None:
            raise InvalidOption("admin_key", "and admin_key_file exclude each other; pass only one of them")
        size_of("max_body", self.max_body)
        if not re.fullmatch("0?[0-7]{3}", self.uds_mode):
            raise InvalidOption("uds_mode", f"must be three octal digits, such as 660, got {self.uds_mode!r}")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_keyfile_password_file):
            raise InvalidOption("ssl_keyfile", "needs a certificate; pass --ssl-certfile too")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(FrontOptions, Options):
    """Options of `weft serve`: the server's own, then the engine's."""

    model: str | None = argument("model folder or hub id; default: weft-small, which ships with Weft")
    models: tuple[str, ...] = field(default=(), metadata=MODELS)
    models_memory: str | int = option(
        "auto",
        "memory of all --model together; auto: 0.8 of what is free at the start; on a GPU: one model at a time",
        metavar="SIZE",
    )
    keep_alive: str | None = option(
        None,
        "time without requests after which one of several models is unloaded; default: 5m; -1: when its memory is "
        "needed; one model is never unloaded",
        metavar="TIME",
    )
    restart_engine: bool = option(False, "restart the engine if it dies, instead of exiting with code 1")
    engine_timeout: float = option(
        120.0,
        "seconds without a heartbeat from the engine until /health fails (with --restart-engine the engine is killed "
        "and restarted); must exceed the longest step; 0: never",
    )
    in_process: bool = option(False, "run the engine in a thread of the server process")
    replicas: int = option(
        1, "engines on this machine, each with its own GPU, or its share of the cores and of memory (docs/fleet.md)"
    )
    fleet_listen: str | None = option(
        None, "address to bind for routers (weft route), such as 10.0.0.1:8100; needs --fleet-secret", metavar="ADDRESS"
    )
    fleet_secret: str | None = option(
        None, "file with the secret that routers and replicas share, readable by its owner only", metavar="FILE"
    )
    role: str = option(
        "both",
        "what the engine does in a fleet (docs/disaggregation.md); prefill: computes prompts for decode engines; "
        "decode: receives them and answers; needs --fleet-listen",
        ROLES,
    )
    prefill_replicas: int = option(
        0, "how many of the --replicas compute prompts for the others, which answer them", metavar="NUMBER"
    )
    arrivals: str | int = option(
        "auto",
        "host memory of a decode engine for prompts that arrive, such as 4GiB; auto: a quarter of free memory up to "
        "4GiB",
        metavar="SIZE",
    )
    transfer_listen: str | None = option(
        None,
        "address to bind for prompts that arrive at a decode engine, on an interface that prefill engines reach; "
        "default: any free port of the host of --fleet-listen",
        metavar="ADDRESS",
    )
    transfer: str = option(
        "tcp",
        "how prompts travel between engines with roles; nixl: read over UCX, whose ports authenticate no peer, so for "
        "private networks only (docs/security.md); auto: nixl if both engines have it and TLS is off",
        WAYS,
    )
    kv_events: str | None = option(
        None,
        "publish changes of the cache over ZeroMQ, in the shape of vLLM's KV events, such as tcp://127.0.0.1:5557; "
        "needs pyzmq",
        metavar="ENDPOINT",
    )

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        FrontOptions.__post_init__(self)
        if not 0 <= self.engine_timeout <= 86400:
            raise InvalidOption("engine_timeout", f"must be from 0 to 86400, got {self.engine_timeout}")
        if self.replicas < 1:
            raise InvalidOption("replicas", f"must be at least 1, got {self.replicas}")
        if self.replicas > 1 and saves_prompts(self):
            raise InvalidOption(
                "replicas", "must be 1 with --prefix-key and --trusted-prefix-keys: files are of one engine"
            )
        if self.in_process and self.replicas > 1:
            raise InvalidOption("replicas", f"is {self.replicas}, but --in-process allows one engine; omit one of them")
        self._check_fleet()
        self._check_role()
        check_together(self)

    def _check_role(self) -> None:
        memory_bytes(self.arrivals, "arrivals")
        if self.arrivals != "auto" and self.role != "decode" and not self.prefill_replicas:
            needed = "--role decode, or --replicas with --prefill-replicas"
            raise InvalidOption(
                "arrivals", f"is memory of decode engines; it needs {needed}, but --role is {self.role}"
            )
        if self.transfer_listen is not None:
            read_address(self.transfer_listen, "transfer_listen")
            if self.role != "decode":
                raise InvalidOption("transfer_listen", f"needs --role decode, got {self.role}")
        if self.role != "both" and self.fleet_listen is None:
            raise InvalidOption("role", f"is {self.role}, which needs --fleet-listen and a router (weft route)")
        if self.prefill_replicas < 0 or (self.prefill_replicas and self.prefill_replicas >= self.replicas):
            least = f"must be less than --replicas, which is {self.replicas}"
            raise InvalidOption("prefill_replicas", f"{least}, got {self.prefill_replicas}")
        asked = "prefill_replicas" if self.prefill_replicas else "role" if self.role != "both" else None
        if asked is None:
            if self.transfer != "tcp":
                raise InvalidOption("transfer", f"is {self.transfer}, which needs --role or --prefill-replicas")
            return
        if not self.cache:
            raise InvalidOption(asked, "cannot be combined with --no-cache: its engines do not exchange prefixes")
        if self.in_process:
            raise InvalidOption(asked, "needs engine processes; do not pass --in-process with it")

    def _check_fleet(self) -> None:
        if (self.fleet_listen is None) != (self.fleet_secret is None):
            raise InvalidOption("fleet_listen", "and --fleet-secret need each other; pass both")
        if self.fleet_listen is not None:
            read_address(self.fleet_listen)
            if self.replicas > 1:
                raise InvalidOption(
                    "fleet_listen",
                    f"serves one engine, but --replicas is {self.replicas}; start a server for each, and a router",
                )


# Addresses that bind all interfaces.
ANY_HOST = ("0.0.0.0", "::")


def read_address(text: str, name: str = "fleet_listen") -> tuple[str, int]:
    """Parse the address of --fleet-listen or --transfer-listen.

    >>> read_address("[::1]:8100"), read_address("0.0.0.0:0")
    (('::1', 8100), ('0.0.0.0', 0))
    """
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+)):(\d{1,5})", text)
    if found is None or int(found[3]) > 65535:
        raise InvalidOption(name, f"must be HOST:PORT, such as 127.0.0.1:8100, got {text!r}")
    return found[1] or found[2], int(found[3])


def set_up_logs(options: FrontOptions) -> None:
    from weft.base.logs import set_up_logging

    set_up_logging(options.log_level.upper(), options.log_format)


def run(options: ServeOptions) -> int:
    from weft.cli.early import prepare

    if len(options.models) > 1:
        return run_several(options)
    options = alone(options)
    prepare(options)
    from weft.start.launch import launch, serving_engines

    place = replace(
        place_of(options),
        in_process=options.in_process,
        replicas=options.replicas,
        restart_engine=options.restart_engine,
        engine_timeout=options.engine_timeout,
        prefill_replicas=options.prefill_replicas,
        transfer=transfer_of(options),
    )
    settings = settings_of(options)
    served = serving_engines(options, settings, place)
    with ExitStack() as sockets:
        companions: list[Companion] = []
        if options.fleet_listen is not None:
            companions.append(fleet_door(options, place.tls, sockets))
        if options.kv_events is not None:
            from weft.fleet.kv_events import publishing

            companions.append(partial(publishing, options.kv_events))
        served = replace(served, companions=companions)
        return launch(served, settings, place, read_again(options))


def alone(options: ServeOptions) -> ServeOptions:
    """Return the options of one model, which may have been given as --model NAME=PATH."""
    if not options.models:
        return options
    [model] = models_of(options)
    own = {each.name: getattr(model.options, each.name) for each in fields(Options)}
    return replace(options, **own, **model.settings, models=(), served_model_name=model.name)


def run_several(options: ServeOptions) -> int:
    """Serve several models, each in a process of its own."""
    from weft.start.launch import launch
    from weft.start.several import SeveralServed

    place = replace(place_of(options), engine_timeout=options.engine_timeout)
    models, memory = models_of(options), str(options.models_memory)
    served = SeveralServed.of(models, memory, keep_alive_seconds(options.keep_alive))
    return launch(served, settings_of(options), place, read_again(options))


def transfer_of(options: ServeOptions) -> TransferSettings | None:
    """Return how engines exchange prefixes, if they have roles."""
    from weft.wire.handshake import read_secret

    if options.prefill_replicas:
        return TransferSettings("decode", secrets.token_bytes(32), options.arrivals, way=options.transfer)
    if options.role == "both":
        return None
    assert options.fleet_listen is not None
    assert options.fleet_secret is not None
    host, port, reached_at = read_address(options.fleet_listen)[0], 0, None
    if options.transfer_listen is not None:
        fleet_host = host
        host, port = read_address(options.transfer_listen)
        reached_at = None if host in (fleet_host, *ANY_HOST) else host
    files = (options.ssl_certfile, options.ssl_keyfile, options.ssl_keyfile_password_file)
    secret = read_secret("fleet_secret", options.fleet_secret)
    place = (host, port, *files, reached_at)
    return TransferSettings(options.role, secret, options.arrivals, *place, way=options.transfer)


def place_of(options: FrontOptions) -> LaunchSettings:
    """Return where and how a front runs."""
    from weft.start.launch import LaunchSettings
    from weft.wire.tls import TlsFiles

    return LaunchSettings(
        host=options.host,
        port=options.port,
        uds=options.uds,
        uds_mode=int(options.uds_mode, 8),
        tls=TlsFiles(options.ssl_certfile, options.ssl_keyfile, options.ssl_keyfile_password_file)
        if options.ssl_certfile is not None
        else None,
        front_timeout=options.front_timeout,
        log_format="json" if options.log_format == "json" else "text",
    )


def read_again(options: FrontOptions) -> Callable[[], ServerSettings] | None:
    """Return what reads the keys again on SIGHUP, if they come from files."""
    has_files = options.api_key_file is not None or options.admin_key_file is not None
    return (lambda: settings_of(options)) if has_files else None


def fleet_door(options: ServeOptions, tls: TlsFiles | None, sockets: ExitStack) -> Companion:
    """Bind the socket for routers, and return what serves them."""
    from weft.fleet.listener import FleetDoor, listening
    from weft.server.http.listener import bind
    from weft.wire.handshake import read_secret

    assert options.fleet_listen is not None
    assert options.fleet_secret is not None
    host, port = read_address(options.fleet_listen)
    door = FleetDoor(host, port, read_secret("fleet_secret", options.fleet_secret), tls)
    listener = sockets.enter_context(bind(host, port))
    if host not in LOOPBACK and tls is None:
        log.warning("routers reach %s without TLS, so prompts can be read on the way; pass --ssl-certfile", host)
    return lambda backend: listening(listener, door, backend)


def settings_of(options: FrontOptions) -> ServerSettings:
    from weft.server.access.keys import RateLimits
    from weft.server.settings import ServerSettings

    keys = read_keys(options)
    return ServerSettings(
        api_keys=keys,
        admin_key=read_admin_key(options),
        key_rates=RateLimits(options.requests_per_minute, options.tokens_per_minute),
        model_name=options.served_model_name,
        aliases=aliases_of(options.alias),
        batch_folder=options.batch_folder,
        usage_file=options.usage_file,
        open_health=options.open_health,
        page=options.page,
        cors_origins=options.cors_origin,
        trusted_hosts=trusted_hosts(options, bool(keys)),
        trusted_proxies=options.trusted_proxy,
        tool_parser=options.tool_parser,
        reasoning_parser=options.reasoning_parser,
        strict_fields=options.strict_fields,
        drain_seconds=options.drain_seconds,
        log_requests=options.log_requests,
        vllm_metrics=options.vllm_metrics,
        otlp_traces_endpoint=options.otlp_traces_endpoint,
        keep_alive_seconds=options.sse_keep_alive,
        limits=limits_of(options),
        responses_bytes=responses_bytes(options),
        responses_file=responses_file(options),
        prompt_files=prompt_files(options),
    )


def prompt_files(options: FrontOptions) -> PromptFileSettings:
    """Return the keys of prompts in files. A router has none: its engines are elsewhere."""
    from weft.base.prefix_keys import read_prefix_keys, read_signing_key
    from weft.server.settings import PromptFileSettings

    if not isinstance(options, ServeOptions) or not saves_prompts(options):
        return PromptFileSettings()
    key, trusted = options.prefix_key, options.trusted_prefix_keys
    return PromptFileSettings(
        None if key is None else read_signing_key("prefix_key", key),
        () if trusted is None else read_prefix_keys("trusted_prefix_keys", trusted),
        verified_share(options.verify_import),
    )


def responses_bytes(options: FrontOptions) -> int:
    if options.responses_memory == "off":
        return 0
    size = memory_bytes(options.responses_memory, "responses_memory")
    if not size:
        raise InvalidOption("responses_memory", f"must be a size such as 256MiB, got {options.responses_memory!r}")
    return size


def responses_file(options: FrontOptions) -> str | None:
    """Return the file of responses: beside the one of prefixes."""
    disk = getattr(options, "disk", None)
    return None if disk is None or options.responses_memory == "off" else f"{disk}.responses"


def trusted_hosts(options: FrontOptions, has_keys: bool) -> tuple[str, ...]:
    """Return the names accepted in the Host header; empty: any."""
    if options.allowed_host:
        return () if "*" in options.allowed_host else (*LOOPBACK, *options.allowed_host)
    # Without a key, a web page in the user's browser could reach the server under a host name of its own (rebinding).
    reached_by_browsers = options.uds is None and options.host in LOOPBACK
    return LOOPBACK if reached_by_browsers and not has_keys else ()


def limits_of(options: FrontOptions) -> Limits:
    """Return the bounds from their own options, then those set by `--limit`."""
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
            raise OptionError(f"--limit {given}: unknown bound; must be one of {', '.join(known)}")
        try:
            values[name] = size_of(name, text) if name.endswith("_bytes") else known[name](text)
        except ValueError:
            raise OptionError(f"--limit {given}: {text!r} is not a valid number for {name}") from None
    return Limits(**values)


def size_of(name: str, value: str | int) -> int:
    """Parse a size in bytes."""
    try:
        size = memory_bytes(value)
    except OptionError:
        size = None
    if size is None:
        raise InvalidOption(name, f"must be a size, such as 8MiB, got {value!r}")
    return size


def read_keys(options: FrontOptions) -> tuple[str | Key, ...]:
    """Return the keys that were given, and those of the key file."""
    from weft.server.access.keys import read_key_file

    keys: list[str | Key] = list(options.api_key)
    if options.api_key_file is not None:
        keys += read_key_file("api_key_file", options.api_key_file)
    return tuple(keys)


def read_admin_key(options: FrontOptions) -> str | Key | None:
    """Return the admin key, or that of its file."""
    from weft.server.access.keys import read_key_file

    if options.admin_key_file is not None:
        keys = read_key_file("admin_key_file", options.admin_key_file)
        if len(keys) > 1:
            raise OptionError(f"admin_key_file {options.admin_key_file} must hold one key, got {len(keys)}")
        return keys[0]
    return options.admin_key or None
