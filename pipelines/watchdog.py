"""Finds actors that live but do nothing, and says who waits for what.

A worker that has work but made no progress within its deadline is killed; the flow then sees a dead worker and issues
its leases again. One that does not answer for a while is named in the log before that: it may be its network. Waits
past their deadline become alarms, so that no stall is silent.
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
_SLOW_S = 5.0
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
        self._silent: dict[str, float] = {}

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
        asked = time.time()
        answer = asyncio.ensure_future(_awaited(role.actor.health.remote()))
        try:
            done, _ = await asyncio.wait({answer}, timeout=min(_SLOW_S, deadline_s))
            if not done:
                self._silence(role, asked)
            report: dict[str, Any] = await asyncio.wait_for(answer, max(0.0, asked + deadline_s - time.time()))
        except TimeoutError:
            return {}
        except ray.exceptions.RayError:  # it died, which the flow has noticed
            self._silent.pop(role.name, None)
            return {}
        finally:
            answer.cancel()
        if (since := self._silent.pop(role.name, None)) is not None:
            log.warning("%s answers again, after %.0f s", role.name, time.time() - since)
        return report

    def _silence(self, role: Role, since: float) -> None:
        """Say once that a role does not answer; it may have been created a moment ago, or its network may be gone."""
        if role.name not in self._silent:
            self._silent[role.name] = since
            log.warning(
                "%s has not answered for %.0f s: it is still starting, its node is overloaded, or the network to it is "
                "slow",
                role.name,
                time.time() - since,
            )


async def _awaited(reference: Any) -> Any:
    return await reference
