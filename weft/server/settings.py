"""The operator's settings of the HTTP side: keys, names, bounds. All resolved; nothing is looked up here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from weft.base.errors import OptionError
from weft.base.prefix_keys import PrefixKey
from weft.base.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
)
from weft.server.access.keys import Key, RateLimits, resolve_keys
from weft.server.http.addresses import TrustedProxies
from weft.server.http.hosts import host_of
from weft.text.grammar_source import MAX_REGEX_CHARACTERS, MAX_SCHEMA_CHARACTERS, MAX_SCHEMA_DEPTH
from weft.text.tool_grammar import MAX_TOOLS

# Bounds of the lower layers, which no setting here can exceed.
MOST = {
    "body_bytes": 100 << 20,
    "batch_file_bytes": 200 << 20,
    "max_tokens": 1 << 24,
    "logprobs": MAX_LOGPROBS,
    "stops": MAX_STOPS,
    "stop_characters": MAX_STOP_CHARACTERS,
    "biases": MAX_BIASES,
    "tools": MAX_TOOLS,
    "schema_bytes": MAX_SCHEMA_CHARACTERS,
    "schema_depth": MAX_SCHEMA_DEPTH,
    "regex_characters": MAX_REGEX_CHARACTERS,
    "bad_words": MAX_BAD_WORDS // 2,
    "allowed_tokens": MAX_ALLOWED_TOKENS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one request. A request beyond them gets a 4xx that names the field."""

    body_bytes: int = 8 << 20
    header_bytes: int = 32 << 10
    # Total times: a client that sends a byte now and then gains nothing.
    handshake_seconds: float = 10.0  # for a TLS handshake
    header_seconds: float = 30.0  # for a request's headers to arrive
    body_seconds: float = 300.0  # for a request's body to arrive
    body_rate: int = 1024  # least bytes per second of a body, on average over ten seconds
    receiving_bytes: int = 256 << 20  # of all unfinished bodies, without their first 16 KiB; more get a 503
    linger_seconds: float = 10.0  # for the rest of a body that was answered before it was read
    linger_bytes: int = 16 << 20  # maximum of such a rest that is read
    idle_seconds: float = 75.0  # between two requests; proxies reuse connections for a minute
    stall_seconds: float = 300.0  # without reading, before a client is disconnected
    connections: int = 16384  # open at once; fewer if the process may not open that many files
    connections_per_address: int = 256
    json_depth: int = 64
    beside_bytes: int = 256 << 10  # of a large body besides its prompts: tools, schemas, everything else
    text_seconds: float = 30.0  # for a worker process to read one large body
    text_memory_bytes: int = 4 << 30  # of a worker process
    waiting_bytes: int = 128 << 20  # of large bodies that are read or wait for a worker; more get a 503
    prompts: int = 128  # prompts in one body
    inputs: int = 2048  # texts to embed or to rank in one body
    n: int = 32  # answers to one prompt
    sequences: int = 256  # prompts times n
    max_tokens: int = 1 << 20  # the model's own limit applies too
    logprobs: int = 20
    stops: int = 16
    stop_characters: int = 1024
    biases: int = 1024
    messages: int = 4096
    cache_points: int = 16  # cache_control points of one conversation; each costs another rendering
    tools: int = 128
    schema_bytes: int = 64 << 10
    schema_depth: int = 32
    regex_characters: int = 4096
    template_kwargs_bytes: int = 16 << 10  # variables for the chat template, as JSON
    template_kwargs_depth: int = 16
    bad_words: int = 128
    allowed_tokens: int = 16384
    batch_file_bytes: int = 100 << 20  # of one file for batches
    batch_folder_bytes: int = 2 << 30  # of all files and answers of one key
    batch_files: int = 1000  # of one key
    batch_lines: int = 50_000  # requests in one batch
    batches: int = 100  # of one key; the oldest complete one makes room
    open_sequences: int = 1024  # running and waiting, of all clients; more get a 429

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise OptionError(f"{name} must be greater than zero, got {value!r}")
            if value > MOST.get(name, math.inf):
                raise OptionError(f"{name} must be at most {MOST[name]}, the limit of the engine, got {value}")


@dataclass(frozen=True, slots=True)
class PromptFileSettings:
    """The key that signs prompts which leave as files, those whose files are taken, and the share to verify."""

    key: PrefixKey | None = None
    trusted: tuple[PrefixKey, ...] = ()
    share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How the front behaves.

    With `api_keys`, every route requires one of them. Several keys are several tenants: none sees or hits the prefixes
    of another, and routes that affect all clients (metrics, cache, flush, server_info) require the `admin_key`; a
    single key is its own admin. A plain string is a key without a name; `key_rates` are the limits of API keys that
    have none of their own. `open_health` lets /health answer without a key. With `trusted_hosts`, other names in the
    Host header are refused, which protects a server without keys on a loopback address from web pages; `*.example.com`
    is every name below that. `trusted_proxies` are addresses and networks of proxies that may name the client.
    """

    api_keys: tuple[str | Key, ...] = field(default=(), repr=False)
    admin_key: str | Key | None = field(default=None, repr=False)
    key_rates: RateLimits = field(default_factory=RateLimits)
    model_name: str | None = None  # the name that clients use; None: the model's own
    usage_file: str | None = None  # where usage by key and day is kept; None: only in memory
    batch_folder: str | None = None  # where files and batches are kept; None: there are none
    aliases: tuple[tuple[str, str], ...] = ()  # further names, each with that of its model
    open_health: bool = True
    page: bool = True  # serve the page at /
    log_requests: bool = True
    vllm_metrics: bool = False  # also export metrics under vLLM's names
    otlp_traces_endpoint: str | None = None  # URL of a collector that gets a span for each request
    keep_alive_seconds: float = 15.0  # without output before a stream sends a comment; 0: never
    cors_origins: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    strict_fields: bool = False  # refuse unknown fields of a body instead of logging them
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    drain_seconds: float = 30.0
    responses_bytes: int = 0  # of stored responses; 0: none are stored
    responses_file: str | None = None  # keeps them through a restart
    prompt_files: PromptFileSettings = PromptFileSettings()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        # Raises if they contradict each other.
        resolve_keys(self.api_keys, self.admin_key, self.key_rates)
        if self.admin_key is not None and not self.api_keys:
            raise OptionError("admin_key needs api_keys, or all other routes would be open; set api_keys too")
        for host in self.trusted_hosts:
            name = host.removeprefix("*.")
            if not name or host_of(f"[{name}]" if ":" in name else name) != name:
                raise OptionError(f"allowed_host must be a lower-case name without a port, got {host!r}")
        TrustedProxies(self.trusted_proxies)

    @property
    def keys(self) -> tuple[Key, ...]:
        """All keys, each with its name, limits and rights."""
        return resolve_keys(self.api_keys, self.admin_key, self.key_rates)
