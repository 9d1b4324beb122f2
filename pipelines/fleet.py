"""Keeps the workers alive and on the published weights: replaces the dead, and brings their successors up to date."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import ray

from actors.rollout.engine import Swap
from pipelines.faults import RunLost, brief, user_error
from pipelines.roles import Role, Roles

log = logging.getLogger(__name__)

MAX_FRUITLESS_RESTARTS = 4
_WEIGHTS_DEADLINE_S = 300.0
_DRAIN_DEADLINE_S = 3600.0
"""Where rows finish under the weights before, a worker is as slow as its longest answer; the watchdog sees it work."""


class Fleet:
    """The rollout and reward workers of one run.

    Attributes:
        crashes: Workers that died.
        versions: Version that each rollout worker has acknowledged, by number.
        opening_versions: Version of the weights that its new rows begin under; the one before where a snapshot lags.
        nodes: Ray's id of the node that each runs on, by number.
        on_version: Called whenever one has acknowledged.
        last_pause_s: Seconds for which the last change of weights kept a worker from decoding.
        asleep: Whether the rollout workers have given their memory to the learner; successors then sleep, too.
    """

    def __init__(self, roles: Roles, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """Look after ``roles``; ``spawn`` runs tasks whose failure ends the run."""
        self._roles = roles
        self._spawn = spawn
        self._locks: dict[str, asyncio.Lock] = {}
        self._fruitless: dict[str, int] = {}
        self._updating: set[int] = set()
        self.crashes = 0
        self.versions: dict[int, int] = {}
        self.opening_versions: dict[int, int] = {}
        self.nodes: dict[int, str] = {}
        self.on_version: Callable[[], None] = lambda: None
        self.last_pause_s = 0.0
        self.asleep = False

    async def publish(self, swap: Swap | None = None) -> list[dict[str, Any]]:
        """Give all rollout workers the published weights and wait for their acknowledgements; who sleeps wakes.

        A worker that fails or misses the deadline is replaced; its successor starts from the same snapshot.
        """
        self.asleep = False
        return list(await asyncio.gather(*(self._bring_up(i, swap or Swap()) for i in range(len(self._roles.rollout)))))

    async def sleep(self) -> int:
        """Have all rollout workers give their memory back until the next :meth:`publish`; returns its bytes.

        A worker that fails or misses the deadline is replaced; its successor sleeps until then.
        """
        self.asleep = True
        return sum(await asyncio.gather(*(self._lay_down(i) for i in range(len(self._roles.rollout)))))

    def announce(self, swap: Swap) -> None:
        """Give all rollout workers the published weights without waiting; a slow one skips to the newest."""
        for index in range(len(self._roles.rollout)):
            if index not in self._updating:
                self._updating.add(index)
                self._spawn(self._catch_up(index, swap))

    async def _catch_up(self, index: int, swap: Swap) -> None:
        try:
            while self._roles.published and self.versions.get(index, -1) < self._roles.published.manifest.version:
                acknowledged = await self._bring_up(index, swap)
                self.last_pause_s = acknowledged.get("pause_s", 0.0)
        finally:
            self._updating.discard(index)

    async def _bring_up(self, index: int, swap: Swap) -> dict[str, Any]:
        role = self._roles.rollout[index]
        try:
            return await self._set_weights(index, role, swap)
        except (ray.exceptions.RayError, TimeoutError) as error:
            await self.replace_rollout(index, role, error)
            return {}

    async def _lay_down(self, index: int) -> int:
        role = self._roles.rollout[index]
        try:
            return await self._put_to_sleep(index, role)
        except (ray.exceptions.RayError, TimeoutError) as error:
            await self.replace_rollout(index, role, error)
            return 0

    async def rollout(self, index: int) -> Role:
        """Return a rollout worker; a successor only once it has the weights, since it must not write without them."""
        async with self._changing(f"rollout-{index}"):
            return self._roles.rollout[index]

    def delivered(self, slot: str) -> None:
        """Take note that a worker brought a result: ``rollout-<number>`` or ``reward-<number>``."""
        self._fruitless.pop(slot, None)

    def replace_reward(self, index: int, error: BaseException) -> None:
        """Replace a reward worker that died of ``error``; raises as :meth:`replace_rollout`."""
        self._count_crash(f"reward-{index}", self._roles.reward[index], error)
        self._roles.replace_reward(index)

    async def replace_rollout(self, index: int, dead: Role, error: BaseException) -> None:
        """Replace the rollout worker ``dead``, unless that was done; returns when its successor has weights, or sleeps.

        Raises:
            UserError: A successor would fail in the same way until the user mends something.
            RuntimeError: Too many died in turn without a result.
            RunLost: The published weights were lost with their node.
        """
        async with self._changing(f"rollout-{index}"):
            if self._roles.rollout[index] is not dead:
                return  # somebody else noticed first
            while True:
                self._count_crash(f"rollout-{index}", dead, error)
                ray.kill(dead.actor)
                dead = self._roles.replace_rollout(index)
                if self._roles.published is None:
                    return
                try:
                    if self.asleep:
                        await self._put_to_sleep(index, dead)
                    if not self.asleep:  # or not any more
                        await self._set_weights(index, dead, Swap())
                    return
                except (ray.exceptions.RayError, TimeoutError) as again:
                    error = again  # the successor died as well: the count decides when to give up

    def _changing(self, what: str) -> asyncio.Lock:
        return self._locks.setdefault(what, asyncio.Lock())

    def _count_crash(self, slot: str, role: Role, error: BaseException) -> None:
        fault = user_error(error)
        if fault is not None:
            raise fault  # a successor would fail in the same way
        self.crashes += 1
        self._fruitless[slot] = self._fruitless.get(slot, 0) + 1
        if self._fruitless[slot] > MAX_FRUITLESS_RESTARTS:
            count = self._fruitless[slot]
            raise RuntimeError(
                f"{role.name} died {count} times in a row without a result; the last time: {brief(error)}"
            ) from error
        log.warning("%s died (%s); starting another one", role.name, brief(error))

    async def _set_weights(self, index: int, role: Role, swap: Swap) -> dict[str, Any]:
        deadline = _DRAIN_DEADLINE_S if swap.mode == "drain" else _WEIGHTS_DEADLINE_S
        async with self._changing(f"weights of rollout-{index}"):  # two at once might arrive the wrong way round
            published = self._roles.published
            assert published is not None
            call = role.actor.set_weights.remote(published.manifest, [published.ref], swap)
            try:
                acknowledged: dict[str, Any] = await asyncio.wait_for(call, deadline)
            except ray.exceptions.RayTaskError as error:
                # The worker lives and calls no actor: it was told what became of the snapshot, or of who made it, and
                # so would be all of its successors.
                if isinstance(error.cause, ray.exceptions.ObjectLostError | ray.exceptions.RayActorError):
                    raise RunLost(f"the published weights were lost ({brief(error)})") from error
                raise
        self.versions[index] = published.manifest.version
        self.opening_versions[index] = int(acknowledged["opening_version"])
        self.nodes[index] = str(acknowledged["node"])
        self.on_version()
        return acknowledged

    async def _put_to_sleep(self, index: int, role: Role) -> int:
        """Return the bytes that a worker gives back; 0 when all have been woken meanwhile."""
        async with self._changing(f"weights of rollout-{index}"):  # sent after the weights, it would undo them
            if not self.asleep:
                return 0
            freed: int = await asyncio.wait_for(role.actor.sleep.remote(), _WEIGHTS_DEADLINE_S)
            return freed
