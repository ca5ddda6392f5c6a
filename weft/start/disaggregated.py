"""Prepares an engine for its role: memory for prefixes that come or go, and the transport that carries them."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from weft.base.errors import InvalidOption, OptionError
from weft.base.options import PAGE_BYTES, auto_share, memory_bytes
from weft.base.transfers import TransferSettings, Transport
from weft.memory.identity import Identity
from weft.memory.kinds import Kind, unit_bytes
from weft.memory.spec import MemorySpec
from weft.memory.tiers.exchange.departures import SHARE, area_bytes
from weft.transfer.connection import Memories
from weft.transfer.group import GroupTransport
from weft.transfer.messages import Contract, TransferError
from weft.transfer.nixl_carrier import NixlCarrier
from weft.transfer.pulling import Carriage
from weft.transfer.tcp import TcpTransport, TransferDoor
from weft.wire.tls import TlsFiles

if TYPE_CHECKING:
    from weft.runner.ranks.leading import LeadingRunner
    from weft.runner.ranks.part import LoadedPart
    from weft.runner.runner import Runner
    from weft.start.loading import Loaded

# The least size of a staging area, and the most that it has so that a whole step can leave while it is computed.
STAGING_BYTES = 256 << 20
MOST_STAGING_BYTES = 2 << 30
AUTO_ARRIVALS_BYTES = 4 << 30
# A prefix of this many cells must fit into arrivals twice.
LEAST_CELLS = 16
# Resume points for which a staging area has room, even if some transfers are stuck.
LEAST_POINTS = 8
# Engines that bind these are reached from this machine only.
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class JoinedTransfers:
    """The transport of an engine, and what routers must know of it."""

    transport: Transport
    facts: dict[str, Any]


def staging_bytes(spec: MemorySpec, step_tokens: int) -> int:
    """Return the size of the staging area: a few receivers that are stuck leave room for others.

    If that is not too much, a share of it has room for all that a step computes of one prompt.
    """
    least = max(STAGING_BYTES, area_bytes(spec, LEAST_CELLS), LEAST_POINTS * area_bytes(spec, 1))
    return max(least, min(MOST_STAGING_BYTES, int(area_bytes(spec, step_tokens // spec.cell + 1) / SHARE)))


def with_areas(loaded: Loaded, settings: TransferSettings) -> Loaded:
    """Return the model with a configuration that has memory for prefixes that come or go."""
    from weft.device.devices import free_bytes

    if settings.role == "prefill":
        size = staging_bytes(loaded.spec, loaded.config.max_tokens_per_step)
        return replace(loaded, config=replace(loaded.config, departures_bytes=size))
    size = memory_bytes(settings.arrivals, "arrivals") or 0
    if not size:
        # Ranks share the machine's memory.
        ranks = 1 if loaded.others is None else loaded.others.ranks
        size = min(AUTO_ARRIVALS_BYTES, free_bytes() // 4) // (auto_share(settings.arrivals) or 1) // ranks
    least = 2 * area_bytes(loaded.spec, LEAST_CELLS)
    if size < least:
        raise InvalidOption("arrivals", f"is {size} bytes but must be at least {least} for this model; pass more")
    return replace(loaded, config=replace(loaded.config, arrivals_bytes=size - size % PAGE_BYTES))


def join(loaded: Loaded, runner: Runner | LeadingRunner, settings: TransferSettings) -> JoinedTransfers:
    """Return the transport of an engine whose runner has the areas for its role; a decode engine binds its ports."""
    from weft.runner.ranks.leading import LeadingRunner, rank_ends

    transport: Transport
    if isinstance(runner, LeadingRunner):
        others = runner.others
        ends = rank_ends(others)
        own, port = transport_of(contract_of(loaded, others.ranks), runner.runner, settings)
        transport, ports = GroupTransport([own, *ends]), [port, *others.join_transfers(settings)]
    else:
        transport, port = transport_of(contract_of(loaded), runner, settings)
        ports = [port]
    facts: dict[str, Any] = {"role": settings.role}
    if settings.role == "decode":
        door = {"port": ports[0], "further_ports": ports[1:], "secure": settings.certfile is not None}
        facts["transfer"] = door | {"host": settings.reached_at}
    return JoinedTransfers(transport, facts)


def rank_transport(part: LoadedPart, runner: Runner, settings: TransferSettings) -> tuple[TcpTransport, int | None]:
    """Return the transport of a rank other than the first, and the port on which it receives its part of prefixes."""
    port = settings.port and settings.port + part.rank
    assert part.identity is not None
    contract = contract_with(part.identity, unit_sizes(runner.spec), "", part.rank, part.ranks)
    return transport_of(contract, runner, replace(settings, port=port))


def contract_of(loaded: Loaded, ranks: int = 1) -> Contract:
    assert loaded.identity is not None
    form = loaded.config.form if loaded.config.exact else ""
    return contract_with(loaded.identity, unit_sizes(loaded.spec), form, 0, ranks)


def contract_with(identity: Identity, sizes: dict[Kind, int], form: str, rank: int, ranks: int) -> Contract:
    """Return the contract of an engine or a rank. Its form begins with the numbers of what the code computes."""
    named = f"{identity.revisions}; exact: {form}" if form else identity.revisions
    return Contract(identity.fingerprint, sizes, named, rank, ranks)


def unit_sizes(spec: MemorySpec) -> dict[Kind, int]:
    return {kind: size for kind, size in unit_bytes(spec).items() if kind is not Kind.TAIL}


def transport_of(contract: Contract, runner: Runner, settings: TransferSettings) -> tuple[TcpTransport, int | None]:
    """Return the transport of one process; of a decode engine also the port on which it receives prefixes."""
    units, carriage = runner.tiers.area_units, carriage_of(settings, runner.tiers.area)
    if settings.role == "prefill":
        return TcpTransport(contract, settings.secret, Memories(staged=units), carriage=carriage), None
    tls = None
    if settings.certfile is not None:
        tls = TlsFiles(settings.certfile, settings.keyfile, settings.password_file)
    listener = _bound(settings.host, settings.port)
    door = TransferDoor(listener, tls)
    transport = TcpTransport(contract, settings.secret, Memories(arrived=units), door, carriage)
    return transport, listener.getsockname()[1]


def carriage_of(settings: TransferSettings, area: memoryview) -> Carriage:
    """Return how the bytes of prefixes travel from or to an area of host memory."""
    if settings.way == "tcp":
        return Carriage()
    try:
        return Carriage(settings.way, NixlCarrier(area, local=settings.host in LOCAL_HOSTS))
    except TransferError as error:
        if settings.way == "nixl":
            raise InvalidOption("transfer", f"is nixl, but {error}; install weft-serve[nixl], or pass tcp") from None
        carriage = Carriage(settings.way, None, str(error))
        carriage.note_fallback(str(error))
        return carriage


def _bound(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"transfer_listen: cannot bind {host}:{port}: {reason}") from None
