"""Finds actors that live but do nothing, and says who waits for what.

A worker that has work but made no progress within its deadline is killed; the flow then sees a dead worker and issues
its leases again. Waits past their deadline become alarms, so that no stall is silent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray

from pipelines.config import Config
from pipelines.flow import SampleFlow
from pipelines.roles import Role, Roles
from pipelines.status import StatusBoard

log = logging.getLogger(__name__)

_EVERY_S = 5.0
_HEALTH_DEADLINE_S = 30.0
_REWARD_GRACE_S = 60.0


class Watchdog:
    """Looks after the roles of one session."""

    def __init__(self, roles: Roles, flow: SampleFlow, board: StatusBoard, config: Config) -> None:
        """Watch; :meth:`run` is a background task."""
        self._roles = roles
        self._flow = flow
        self._board = board
        self._config = config
        self._since: dict[str, float] = {}

    async def run(self) -> None:
        """Check for ever."""
        while True:
            await asyncio.sleep(_EVERY_S)
            busy = self._flow.busy_workers()
            await asyncio.gather(
                *(
                    self._check(role, index in busy, self._config.rollout.stall_deadline_s)
                    for index, role in enumerate(self._roles.rollout)
                ),
                *(
                    self._check(role, self._flow.outstanding("scoring") > 0, self._reward_deadline())
                    for role in self._roles.reward
                ),
            )
            for wait in self._board.snapshot().waits:
                if wait.deadline_s and wait.seconds > wait.deadline_s:
                    self._board.alarm(f"waiting for {wait.who} ({wait.label}) beyond {wait.deadline_s:.0f} s")

    def _reward_deadline(self) -> float:
        return self._config.reward.timeout_s + _REWARD_GRACE_S

    async def _check(self, role: Role, has_work: bool, deadline_s: float) -> None:
        now = time.time()
        if not has_work:
            self._since.pop(role.name, None)
            return
        since = self._since.setdefault(role.name, now)
        report = await self._health(role, min(_HEALTH_DEADLINE_S, deadline_s))
        if report.get("pending") == 0:  # a reward worker that is free while another one scores
            self._since.pop(role.name, None)
            return
        quiet = now - max(since, report.get("last_progress", 0.0))
        if quiet > deadline_s:
            message = (
                f"{role.name} had work but made no progress for {quiet:.0f} s; it is replaced and its work issued again"
            )
            log.warning(message)
            self._board.alarm(message)
            self._since.pop(role.name, None)
            ray.kill(role.actor)

    async def _health(self, role: Role, deadline_s: float) -> dict[str, Any]:
        """Return a role's health report; empty when it does not answer in time, which counts as no progress."""
        try:
            report: dict[str, Any] = await asyncio.wait_for(role.actor.health.remote(), deadline_s)
        except (ray.exceptions.RayError, TimeoutError):
            return {}
        return report
