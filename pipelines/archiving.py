"""Hands finished groups to the history role and keeps them alive until it has written them down.

The archive is for people and for later techniques, not for the run. When its role dies, a successor gets everything
that was not written down yet; when successors die as well, training goes on without an archive and says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from actors.bundles import RecordEnvelope
from pipelines.faults import brief, user_error
from pipelines.flow import SampleFlow
from pipelines.role_streams import run_pairs
from pipelines.roles import Roles
from pipelines.status import StatusBoard
from storage.records import TRAIN_SPLIT, GroupKey, SampleHeader

log = logging.getLogger(__name__)

MAX_FRUITLESS_RESTARTS = 3
_DEADLINE_S = 120.0


class Archiving:
    """What is on its way to the archive; one per run. Without a history role, groups are forgotten at once."""

    def __init__(self, roles: Roles, flow: SampleFlow, board: StatusBoard) -> None:
        """Archive groups of ``flow``; call :meth:`start` once the roles were created."""
        self._roles = roles
        self._flow = flow
        self._board = board
        self._pending: dict[tuple[str, int], RecordEnvelope] = {}
        self._sending: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._recorded = 0
        self._fruitless = 0
        self._told = ""
        self._losing = False

    def start(self, recorded: int) -> None:
        """Begin to hear from the history role, which knows the training steps up to ``recorded``."""
        self._recorded = recorded
        if self._roles.history is not None:
            self._reading = asyncio.create_task(self._read())

    async def add(
        self,
        split: str,
        step: int,
        keys: tuple[GroupKey, ...],
        headers: Mapping[GroupKey, Sequence[SampleHeader]],
        advantages: Mapping[GroupKey, Any],
    ) -> None:
        """Send groups on their way; waits only while the queue is full."""
        while (sending := self._sending) is not None and not sending.done():
            self._board.wait("history queue", "history")
            try:
                await asyncio.wait({sending})
            finally:
                self._board.arrived("history queue")
        if self._roles.history is None:
            self._flow.forget(keys)
            return
        groups = tuple(self._flow.group(key, [h.index for h in headers[key]]) for key in keys)
        envelope = RecordEnvelope(split=split, step=step, groups=groups, advantages=advantages)
        self._pending[split, step] = envelope
        self._sending = asyncio.create_task(self._send([envelope]))

    async def drain(self) -> None:
        """Wait until everything is written; past a deadline an alarm says that it is not."""
        try:
            async with asyncio.timeout(_DEADLINE_S):
                while self._pending:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            self._say(
                f"the history role has not written {len(self._pending)} steps of rollouts after {_DEADLINE_S:g} s"
            )

    def close(self) -> None:
        """Stop listening."""
        for task in (self._reading, self._sending):
            if task is not None:
                task.cancel()

    async def _read(self) -> None:
        assert self._roles.history is not None
        while True:
            await self._roles.locate_history()
            stream = run_pairs(self._roles.history, self._roles.history_queue)
            try:
                async for (split, step, failure, lost), _ in stream:
                    self._fruitless = 0
                    self._say(f"answers are no longer kept for drafts: {failure}" if failure else "")
                    self._note(step, lost)
                    if split == TRAIN_SPLIT:
                        self._recorded = step
                    self._forget(self._pending.pop((split, step), None))
                return
            except ray.exceptions.RayError as error:
                if self._sending is not None:
                    self._sending.cancel()
                self._fruitless += 1
                if user_error(error) is not None or self._fruitless > MAX_FRUITLESS_RESTARTS:
                    self._give_up(error)
                    return
                log.warning("the history role died (%s); starting another one", brief(error))
                # Everything that is not acknowledged goes out once more; what the dead one had written of it without
                # saying so is cut off by its successor, or replaced.
                self._roles.replace_history(self._recorded)
                self._sending = asyncio.create_task(self._send(list(self._pending.values())))

    async def _send(self, envelopes: Sequence[RecordEnvelope]) -> None:
        try:
            for envelope in envelopes:
                await self._roles.history_queue.put_async(envelope)
        except ray.exceptions.RayError as error:  # the role, which reads from that queue, dies of it and is replaced
            log.warning("the history queue died (%s)", brief(error))

    def _give_up(self, error: BaseException) -> None:
        self._say(f"the history role died, rollouts are no longer archived: {brief(error)}")
        self._roles.history = None
        for envelope in self._pending.values():
            self._forget(envelope)
        self._pending.clear()

    def _note(self, step: int, lost: str) -> None:
        """Tell of the first of several steps whose answers are not archived, and of the first that is again."""
        text = f"the answers of step {step} are not archived: {lost}"
        if lost and self._losing:
            log.warning("%s", text)
        elif lost:
            self._say(text)
        elif self._losing:
            self._say(f"answers are archived again, from step {step} on")
        self._losing = bool(lost)

    def _say(self, message: str) -> None:
        """Tell people, once, where nobody else would."""
        if message and message != self._told:
            self._told = message
            log.warning("%s", message)
            self._board.alarm(message)

    def _forget(self, envelope: RecordEnvelope | None) -> None:
        if envelope is not None:
            self._flow.forget([group.key for group in envelope.groups])
