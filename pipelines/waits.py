"""What a session does and waits for, where people can see it: on the status board and on the gauges."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from pipelines.interruption import unless_stopped
from pipelines.ray_metrics import RunMetrics
from pipelines.status import State, StatusBoard

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waits:
    """Names each state and each wait of one session.

    Attributes:
        board, gauges: Who is told.
        stop: Set when the run should save and end.
    """

    board: StatusBoard
    gauges: RunMetrics
    stop: asyncio.Event

    def enter(self, state: State) -> None:
        """Say what the session does from now on."""
        self.board.enter(state)
        self.gauges.phase(state)

    async def wait(self, label: str, who: str, awaitable: Awaitable[T], deadline_s: float, *, safe: bool = True) -> T:
        """Await with a label that people can see; where it is ``safe``, a stop raises ``Interrupted`` at once."""
        self.board.wait(label, who, deadline_s)
        try:
            return await (unless_stopped(awaitable, self.stop) if safe else awaitable)
        finally:
            self.board.arrived(label)
