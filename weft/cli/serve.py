"""`weft serve`: from options to a server."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from weft.base.errors import OptionError
from weft.base.options import Options, option
from weft.cli.options import argument

if TYPE_CHECKING:
    from weft.server.settings import ServerSettings

ABOUT = "serve a model over HTTP: OpenAI's API, and the native one that SGLang's clients speak"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Named here too, so that `--help` need not load the parsers; a test compares.
TOOL_PARSERS = ("auto", "none", "hermes", "qwen3_coder", "lfm2", "llama3_json", "mistral", "granite", "nemotron")
TOOL_PARSERS += ("gemma", "harmony")
REASONING_PARSERS = ("auto", "none", "think", "mistral", "granite", "harmony")
LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Options):
    """Options of `weft serve`: where and for whom, then those of the engine."""

    model: str | None = argument("folder or hub id of a model; without one, a small built-in one of random weights")
    host: str = option("127.0.0.1", "address to listen at; anything but this machine alone is warned of")
    port: int = option(8000, "port to listen at; 0: any that is free")
    api_key: tuple[str, ...] = field(
        default=(),
        metadata={"help": "key that clients must send, may be repeated; also from WEFT_API_KEY", "choices": ()},
    )
    api_key_file: str | None = option(None, "file with a key on each line, which no process list shows")
    admin_key: str | None = option(None, "key for what concerns all clients, where there are several keys")
    served_model_name: str | None = option(None, "what clients call the model")
    open_health: bool = option(False, "/health answers without a key")
    max_open_requests: int = option(1024, "requests running and waiting at most; others are told to come back later")
    max_body: str | int = option("8MiB", "size of a request at most")
    max_answers: int = option(32, "answers to one prompt (n) at most")
    drain_seconds: float = option(30.0, "how long requests may finish after SIGTERM")
    restart_engine: bool = option(False, "start the engine anew if it dies, instead of ending with exit code 1")
    in_process: bool = option(False, "run the engine in a thread of the server's process")
    tool_parser: str = option("auto", "how the model writes calls of tools; auto: by its chat template", TOOL_PARSERS)
    reasoning_parser: str = option("auto", "how the model marks thoughts; auto: by its template", REASONING_PARSERS)
    cors_origin: tuple[str, ...] = field(
        default=(), metadata={"help": "web pages of this origin may call, may be repeated", "choices": ()}
    )
    log_level: str = option("info", "how much is told on standard error", LEVELS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.port <= 65535:
            raise OptionError(f"port must be from 0 to 65535, got {self.port}")
        if not 0 <= self.drain_seconds <= 86400:
            raise OptionError(f"drain_seconds must be from 0 to 86400, got {self.drain_seconds}")


def run(options: ServeOptions) -> int:
    from weft.server.launch import Place, launch

    logging.basicConfig(level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    place = Place(
        host=options.host,
        port=options.port,
        in_process=options.in_process,
        restart_engine=options.restart_engine,
    )
    return launch(options, settings_of(options), place)


def settings_of(options: ServeOptions) -> ServerSettings:
    from weft.base.options import memory_bytes
    from weft.server.settings import Limits, ServerSettings

    body = memory_bytes(options.max_body)
    if body is None:
        raise OptionError("max_body must be a size, such as 8MiB")
    limits = Limits(body_bytes=body, n=options.max_answers, open_sequences=options.max_open_requests)
    keys = read_keys(options)
    return ServerSettings(
        api_keys=keys,
        admin_key=options.admin_key,
        model_name=options.served_model_name,
        open_health=options.open_health,
        cors_origins=options.cors_origin,
        # Without a key, a page in the user's browser could reach us under a name of its own.
        trusted_hosts=LOOPBACK if options.host in LOOPBACK and not keys else (),
        tool_parser=options.tool_parser,
        reasoning_parser=options.reasoning_parser,
        drain_seconds=options.drain_seconds,
        limits=limits,
    )


def read_keys(options: ServeOptions) -> tuple[str, ...]:
    """Keys from the command line and from the file; from the environment if there are none."""
    keys = list(options.api_key)
    if options.api_key_file is not None:
        try:
            lines = Path(options.api_key_file).expanduser().read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"api_key_file {options.api_key_file} cannot be read: {error}") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise OptionError(f"api_key_file {options.api_key_file} holds no key")
        keys += found
    if not keys and os.environ.get("WEFT_API_KEY"):
        keys = os.environ["WEFT_API_KEY"].split(",")
    return tuple(keys)
