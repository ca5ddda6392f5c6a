"""The deployments of a fleet. The only module that imports Ray, which is optional: inside functions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from weft.base.errors import OptionError
from weft.cli.serve import set_up_logs
from weft.ray.ingress import IngressApp, Members
from weft.ray.members import MemberList
from weft.ray.replica import EngineReplica
from weft.ray.settings import Autoscaling, FleetSettings, parse

MEMBERS, ENGINE, PREFILL, INGRESS = "members", "engine", "prefill", "ingress"
POLICY = "weft.ray.scaling:wanted_replicas"
# Calls of an ingress that are no generation: metrics, health, tokens.
OTHER_CALLS = 64
# Time after the drain until Ray kills a replica.
MARGIN_SECONDS = 20.0
# Weft has its own.
QUIET = {"enable_access_log": False}
# Time that an engine may need to answer a health check while it compiles or loads.
HEALTH_TIMEOUT_SECONDS = 60.0


class EngineDeployment:
    """What Ray Serve sees of a replica. Requests do not pass through it."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, settings: Mapping[str, Any], members: Any, role: str = "decode"
    ) -> None:
        from ray import serve
        from ray.util import get_node_ip_address

        parsed = parse(settings)
        set_up_logs(parsed.serve_options)
        name = serve.get_replica_context().replica_tag

        async def announce(announcement: dict[str, Any]) -> None:
            await members.announce.remote(announcement)

        self._replica = EngineReplica(parsed, name, get_node_ip_address(), announce, role)
        await self._replica.start()

    def check_health(self) -> None:
        self._replica.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return self._replica.stats()

    async def __del__(self) -> None:
        await self._replica.stop()


class IngressDeployment:
    """The class that Ray Serve wraps around the ASGI application; keeps the other deployments in its application."""

    def __init__(self, settings: Mapping[str, Any], members: Any, *engines: Any) -> None:
        set_up_logs(parse(settings).serve_options)


def members_of_this_application() -> Members:
    """Return a function that reads the list of replicas of the application that this process belongs to."""
    from ray import serve

    handle = serve.get_deployment_handle(MEMBERS, serve.get_replica_context().app_name)

    async def members() -> list[dict[str, Any]]:
        return list(await asyncio.wait_for(handle.members.remote(), 5.0))

    return members


def application(settings: FleetSettings) -> Any:
    """Return the application, an object of Ray Serve. Raises `OptionError` if Ray is not installed."""
    try:
        from ray import serve
    except ModuleNotFoundError:
        raise OptionError("Ray Serve is not installed; install it with: pip install 'weft-serve[ray]'") from None
    plain, options = settings.plain(), settings.serve_options
    grace = options.drain_seconds + MARGIN_SECONDS
    most = options.max_open_requests
    members = serve.deployment(
        MemberList,
        name=MEMBERS,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0},
        logging_config=QUIET,
    ).bind()
    engines = [deploy_engine(settings, ENGINE, scale_of(settings)).bind(plain, members)]
    if settings.prefill is not None:
        pool = deploy_engine(settings, PREFILL, {"num_replicas": settings.prefill.replicas})
        engines.append(pool.bind(plain, members, "prefill"))
    ingress = serve.deployment(
        serve.ingress(IngressApp(plain, members_of_this_application))(IngressDeployment),
        name=INGRESS,
        num_replicas=settings.ingress.replicas,
        max_ongoing_requests=most + OTHER_CALLS,
        max_queued_requests=most,
        ray_actor_options={"num_cpus": settings.ingress.cpus},
        graceful_shutdown_timeout_s=grace,
        logging_config=QUIET,
    )
    return ingress.bind(plain, members, *engines)


def deploy_engine(settings: FleetSettings, name: str, scale: Mapping[str, Any]) -> Any:
    """Return the deployment of engines with one role, an object of Ray Serve."""
    from ray import serve

    return serve.deployment(
        EngineDeployment,
        name=name,
        **scale,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus_per_replica},
        graceful_shutdown_timeout_s=settings.serve_options.drain_seconds + MARGIN_SECONDS,
        logging_config=QUIET,
        health_check_timeout_s=HEALTH_TIMEOUT_SECONDS,
    )


def scale_of(settings: FleetSettings) -> dict[str, Any]:
    """Return the number of replicas as Ray Serve's arguments."""
    found: Autoscaling | None = settings.autoscaling
    if found is None:
        return {"num_replicas": settings.replicas}
    return {
        "autoscaling_config": {
            "min_replicas": found.min,
            "max_replicas": found.max,
            "look_back_period_s": found.window_seconds,
            "upscale_delay_s": found.upscale_seconds,
            "downscale_delay_s": found.downscale_seconds,
            "policy": {"policy_function": POLICY},
        }
    }
