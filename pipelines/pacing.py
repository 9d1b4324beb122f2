"""Whether a paced run kept its pace: a figure made with pacing is void where the machine was slower than the pace."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import ray

from pipelines.config import Config
from pipelines.roles import Role

_DEADLINE_S = 10.0


async def pacing_metrics(rollout: Sequence[Role], config: Config) -> dict[str, float]:
    """Return ``rollout/pacing_overrun_share``, that of the worst worker; nothing without pacing.

    Workers that do not answer within 10 s are left out: whether they live is the watchdog's business.
    """
    if config.rollout.pacing.profile == "off":
        return {}
    shares = await asyncio.gather(*(_overrun_share(role) for role in rollout))
    known = [share for share in shares if share is not None]
    return {"rollout/pacing_overrun_share": max(known)} if known else {}


async def _overrun_share(role: Role) -> float | None:
    try:
        report = await asyncio.wait_for(role.actor.health.remote(), _DEADLINE_S)
    except (ray.exceptions.RayError, TimeoutError):
        return None
    return float(report["pacing_overrun_share"])
