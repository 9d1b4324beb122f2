"""Hands finished groups to the history role and keeps them alive until it has written them down.

The archive is for people and for later techniques, not for the run: when its role dies, training goes on without it and
says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from actors.bundles import RecordEnvelope
from pipelines.faults import brief
from pipelines.flow import SampleFlow, pairs, run_stream
from pipelines.roles import Roles
from pipelines.status import StatusBoard
from storage.records import GroupKey, SampleHeader

log = logging.getLogger(__name__)

_DEADLINE_S = 120.0


class Archiving:
    """What is on its way to the archive; one per run. Without a history role, groups are forgotten at once."""

    def __init__(self, roles: Roles, flow: SampleFlow, board: StatusBoard) -> None:
        """Archive groups of ``flow``; call :meth:`start` once the roles were created."""
        self._roles = roles
        self._flow = flow
        self._board = board
        self._pending: dict[tuple[str, int], tuple[GroupKey, ...]] = {}
        self._sending: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to hear from the history role."""
        if self._roles.history is not None:
            self._reading = asyncio.create_task(self._read(run_stream(self._roles.history, self._roles.history_queue)))

    async def add(
        self,
        split: str,
        step: int,
        keys: tuple[GroupKey, ...],
        headers: Mapping[GroupKey, Sequence[SampleHeader]],
        advantages: Mapping[GroupKey, Any],
    ) -> None:
        """Send groups on their way; waits only while the queue is full."""
        if self._sending is not None:
            self._board.wait("history queue", "history")
            try:
                await asyncio.wait({self._sending})
            finally:
                self._board.arrived("history queue")
        if self._roles.history is None:
            self._flow.forget(keys)
            return
        groups = tuple(self._flow.group(key, [h.index for h in headers[key]]) for key in keys)
        self._pending[split, step] = keys
        envelope = RecordEnvelope(split=split, step=step, groups=groups, advantages=advantages)
        self._sending = asyncio.create_task(self._roles.history_queue.put_async(envelope))

    async def drain(self) -> None:
        """Wait until everything is written; past a deadline an alarm says that it is not."""
        try:
            async with asyncio.timeout(_DEADLINE_S):
                while self._pending:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            message = f"the history role has not written {len(self._pending)} steps of rollouts after {_DEADLINE_S:g} s"
            log.warning(message)
            self._board.alarm(message)

    def close(self) -> None:
        """Stop listening."""
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self, stream: Any) -> None:
        try:
            async for (split, step), _ in pairs(stream):
                self._flow.forget(self._pending.pop((split, step), ()))
        except ray.exceptions.RayError as error:
            self._board.alarm(f"the history role died, rollouts are no longer archived: {brief(error)}")
            self._roles.history = None
            if self._sending is not None:
                self._sending.cancel()
            for keys in self._pending.values():
                self._flow.forget(keys)
            self._pending.clear()
