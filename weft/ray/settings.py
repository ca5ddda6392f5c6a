"""The settings of a fleet on Ray: a small YAML file or mapping, checked before anything is deployed. Imports no Ray."""

from __future__ import annotations

import os
import types
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from weft import __version__
from weft.base.errors import InvalidOption, OptionError
from weft.base.logs import LogFormat
from weft.base.options import Options, memory_bytes
from weft.base.suggest import did_you_mean
from weft.base.transfers import TransferSettings
from weft.cli.serve import ServeOptions
from weft.wire.handshake import read_secret

VARIABLE = "WEFT_FLEET"
MAX_BYTES = 1 << 16
MAX_REPLICAS = 1024
# Options of `weft serve` that have another place here, or none.
ELSEWHERE = dict.fromkeys(
    ("host", "port", "uds", "uds_mode", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password_file"),
    "belongs to Ray Serve's proxies; set http_options of the Serve cluster",
) | {
    "trusted_proxy": "has no effect: Ray Serve's proxies say who the client is",
    "replicas": "must be at the top level of the settings",
    "restart_engine": "is not needed: Ray Serve restarts a replica whose engine has ended",
    "front_timeout": "is not needed: Ray Serve restarts an ingress that does not respond",
    "disk": "is not supported on Ray, where a new replica has no place of its own; use host_memory",
    "disk_size": "is not supported on Ray, where a new replica has no place of its own; use host_memory",
    "kv_events": "is not supported on Ray, where a new replica has no address of its own",
    "prefix_key": "is not supported on Ray, whose ingress reads no prompts as files",
    "trusted_prefix_keys": "is not supported on Ray, whose ingress reads no prompts as files",
    "models": "is not supported on Ray; deploy one application for each model",
    "models_memory": "is not supported on Ray; deploy one application for each model",
    "keep_alive": "is not supported on Ray; deploy one application for each model",
    "fleet_listen": "is not needed: replicas and ingress find each other through Ray",
    "fleet_secret": "is not needed: every replica makes its own secret",
    "role": "is not set by replica: with the section prefill at the top level, replicas get their roles",
    "prefill_replicas": "must be at the top level of the settings, as prefill.replicas",
    "transfer": "is not supported on Ray, where prefixes travel over TCP",
    "transfer_listen": "is not needed: replicas receive prefixes on any free port of their machine's address",
}
BY_ROLE = ("arrivals",)
_ENGINE = tuple(each.name for each in fields(Options))


def number(name: str, value: Any, least: float, most: float, whole: bool = False) -> None:
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        what = "an integer" if whole else "a number"
        raise InvalidOption(name, f"must be {what} from {least:g} to {most:g}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling:
    """Bounds and targets of the number of replicas.

    A replica has its share of work with `target_open` requests, or with prompts of `target_waiting_tokens` tokens that
    it has not begun to answer, whichever comes first.
    """

    min: int = 1
    max: int = 8
    target_open: float = 32.0
    target_waiting_tokens: float = 32768.0
    window_seconds: float = 30.0  # loads are averaged over this time
    upscale_seconds: float = 30.0  # for this long the load must ask for more replicas
    downscale_seconds: float = 600.0  # for this long the load must ask for fewer

    def __post_init__(self) -> None:
        number("autoscaling.min", self.min, 1, MAX_REPLICAS, whole=True)
        number("autoscaling.max", self.max, 1, MAX_REPLICAS, whole=True)
        if self.max < self.min:
            raise InvalidOption("autoscaling.max", f"must be at least min, which is {self.min}, got {self.max}")
        for name in ("target_open", "target_waiting_tokens"):
            number(f"autoscaling.{name}", getattr(self, name), 0.1, 1e9)
        # Replicas report every 10 seconds.
        number("autoscaling.window_seconds", self.window_seconds, 11, 3600)
        for name in ("upscale_seconds", "downscale_seconds"):
            number(f"autoscaling.{name}", getattr(self, name), 0, 86400)


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressSettings:
    """How many processes tokenise and route, and what each of them gets."""

    replicas: int = 1
    cpus: float = 1.0

    def __post_init__(self) -> None:
        # An engine accepts up to 16 routers.
        number("ingress.replicas", self.replicas, 1, 16, whole=True)
        number("ingress.cpus", self.cpus, 0, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSettings:
    """Replicas that compute prompts for the others, and the file with the secret that all of them share."""

    secret_file: str = ""
    replicas: int = 1

    def __post_init__(self) -> None:
        number("prefill.replicas", self.replicas, 1, MAX_REPLICAS, whole=True)
        if not self.secret_file:
            raise InvalidOption("prefill.secret_file", "must name a file with a secret, the same on every machine")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """What `weft.ray` deploys. `options` are those of `weft serve`; `gpus` defaults to one for each rank with cuda.

    With `prefill`, the other replicas are decode engines, and `replicas` and `autoscaling` are theirs.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    replicas: int = 1
    autoscaling: Autoscaling | None = None
    cpus: float = 1.0
    gpus: float | None = None
    ingress: IngressSettings = field(default_factory=IngressSettings)
    prefill: PrefillSettings | None = None

    def __post_init__(self) -> None:
        number("replicas", self.replicas, 1, MAX_REPLICAS, whole=True)
        number("cpus", self.cpus, 0, 1024)
        options = self.serve_options
        if self.gpus is not None:
            number("gpus", self.gpus, 0, options.tensor_parallel)
        self._check_gpus(options.memory_fraction, options.tensor_parallel)
        self._check_prefill(options)

    def _check_prefill(self, options: ServeOptions) -> None:
        if self.prefill is None:
            if "arrivals" in self.options:
                raise InvalidOption("arrivals", "needs the section prefill, whose replicas send prefixes to the others")
            return
        if options.in_process or not options.cache:
            what = "in_process" if options.in_process else "no cache"
            raise InvalidOption("prefill", f"cannot be combined with {what}: engine processes exchange cached prefixes")
        memory_bytes(self.options.get("arrivals", "auto"), "arrivals")

    def _check_gpus(self, memory_fraction: float, ranks: int) -> None:
        gpus, device = self.gpus_per_replica, self.options.get("device", "auto")
        if device != "auto" and bool(gpus) != (device == "cuda"):
            raise InvalidOption("gpus", f"is {gpus:g} but options.device is {device}; change one of them")
        if ranks > 1 and gpus not in (0, ranks):
            raise InvalidOption(
                "gpus", f"is {gpus:g} but must be {ranks}, one for each rank of options.tensor_parallel"
            )
        if 0 < gpus < 1 and gpus < memory_fraction:
            raise InvalidOption(
                "gpus",
                f"is {gpus:g} but options.memory_fraction is {memory_fraction:g}: replicas that share a GPU would ask "
                f"for more memory than it has; set memory_fraction to {gpus:g} or less",
            )

    @property
    def serve_options(self) -> ServeOptions:
        """Return the options of `weft serve`, but for those that depend on a role, which no replica is given there."""
        return ServeOptions(**{name: _as_option(value) for name, value in self.options.items() if name not in BY_ROLE})

    @property
    def gpus_per_replica(self) -> float:
        if self.gpus is not None:
            return self.gpus
        return float(self.options.get("tensor_parallel", 1)) if self.options.get("device") == "cuda" else 0.0

    def transfer(self, role: str, host: str) -> TransferSettings | None:
        """Return how a replica with this role on this host exchanges prefixes. Reads the secret."""
        if self.prefill is None:
            return None
        secret = read_secret("prefill.secret_file", self.prefill.secret_file)
        return TransferSettings(role, secret, self.options.get("arrivals", "auto"), host)

    def engine_options(self, replica: str) -> Options:
        """Return the options of one engine: its device by its resources, and a seed of its own.

        With one seed, replicas would draw the same numbers for different answers to one prompt.
        """
        given = self.serve_options
        values = {name: getattr(given, name) for name in _ENGINE}
        # Random weights come from the seed, and must be the same.
        if given.weights != "dummy":
            values["seed"] += int.from_bytes(sha256(replica.encode()).digest()[:4], "big")
        values["device"] = "cuda" if self.gpus_per_replica else "cpu"
        if values["device"] == "cpu":
            values["threads"] = given.threads or max(1, int(self.cpus) // given.tensor_parallel)
        return Options(**values)

    @property
    def version(self) -> str:
        """Digest of what must be the same for an ingress and the replicas that it uses."""
        engine = {name: value for name, value in self.options.items() if name in _ENGINE}
        return sha256(msgspec.json.encode([__version__, engine], order="sorted")).hexdigest()[:16]

    def plain(self) -> dict[str, Any]:
        """Return the settings as `parse` reads them."""
        without = "autoscaling" if self.autoscaling is None else "replicas"
        return {name: value for name, value in asdict(self).items() if value is not None and name != without}


def log_format(options: ServeOptions) -> LogFormat:
    return "json" if options.log_format == "json" else "text"


def _as_option(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# reading --------------------------------------------------------------------------------------------------------------


def read(args: Mapping[str, Any]) -> FleetSettings:
    """Return the settings in the arguments of an application, in the file that they name, or in the one of WEFT_FLEET.

    A file is named by the single argument `config`.
    """
    path = args.get("config") if args else os.environ.get(VARIABLE)
    if args and "config" not in args:
        return parse(args)
    if set(args) - {"config"}:
        raise OptionError("config names a file with all settings; omit the other arguments, or config")
    if not isinstance(path, str) or not path:
        raise OptionError(f"no settings: pass config=FILE to `serve run`, or set {VARIABLE} to the path of a YAML file")
    return parse(_from_file(path))


def _from_file(path: str) -> Any:
    import yaml

    try:
        with Path(path).expanduser().open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror or error}") from None
    if len(text) > MAX_BYTES:
        raise OptionError(f"{path} must have at most {MAX_BYTES} bytes")
    if b"&" in text and any(isinstance(token, yaml.AliasToken) for token in _tokens(path, text)):
        # A few lines of nested aliases expand to more than any memory holds.
        raise OptionError(f"{path} must not use aliases (*name); write values out")
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _not_yaml(path, error) from None


def _tokens(path: str, text: bytes) -> list[Any]:
    import yaml

    try:
        return list(yaml.scan(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _not_yaml(path, error) from None


def _not_yaml(path: str, error: Exception) -> OptionError:
    reason = " ".join(str(error).split())[:300]
    return OptionError(f"{path} is not valid YAML: {reason}")


def parse(given: Any) -> FleetSettings:
    """Return settings, with every name and type checked. Raises `OptionError`, with the name's place."""
    values = _checked("", given, FleetSettings)
    if "replicas" in values and "autoscaling" in values:
        raise InvalidOption("replicas", "and autoscaling exclude each other; omit one of them")
    for name, kind in (("autoscaling", Autoscaling), ("ingress", IngressSettings), ("prefill", PrefillSettings)):
        if name in values:
            values[name] = kind(**_checked(f"{name}.", values[name], kind))
    options = values.get("options", {})
    for name in options if isinstance(options, Mapping) else ():
        if name in ELSEWHERE:
            raise InvalidOption(f"options.{name}", ELSEWHERE[name])
    values["options"] = _checked("options.", options, ServeOptions)
    try:
        return FleetSettings(**values)
    except InvalidOption as error:
        if error.option in values["options"]:
            raise InvalidOption(f"options.{error.option}", error.complaint) from None
        raise


def _checked(place: str, given: Any, kind: type) -> dict[str, Any]:
    """Return the values of one section: known names only, each of its field's type. None stands for the default."""
    where = place.removesuffix(".") or "the settings"
    if not isinstance(given, Mapping):
        raise OptionError(f"{where} must be a mapping of names to values, got {_shown(given)}")
    known: dict[str, Field[Any]] = {each.name: each for each in fields(kind)}
    hints = get_type_hints(kind)
    for name, value in given.items():
        if name not in known:
            near = did_you_mean(str(name), known)
            raise OptionError(f"{place}{_shown(name)} is unknown{near or '; known are ' + ', '.join(known)}")
        if value is not None and not _fits(value, hints[name]):
            raise InvalidOption(f"{place}{name}", f"must be {_kind_of(hints[name])}, got {_shown(value)}")
    return {str(name): value for name, value in given.items() if value is not None}


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
    if hint in (int, float):
        return isinstance(value, int | float if hint is float else int) and not isinstance(value, bool)
    # Sections are read on their own.
    return isinstance(value, hint) if hint in (str, bool) else hint is not type(None)


def _kind_of(hint: Any) -> str:
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    if get_origin(hint) is tuple:
        return "a list of strings"
    found = [names[each] for each in get_args(hint) or (hint,) if each in names]
    return " or ".join(found)


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, str) else value
    return text if len(text) <= 60 else text[:57] + "..."
