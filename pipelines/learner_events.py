"""What the learner answers to the conductor, and that it is gone, as soon as it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import ray

from pipelines.faults import RunLost, cause_of_death, user_error


class LearnerEvents:
    """The learner answers each batch and each save with one event; make one of these per session.

    The next event is always awaited, also while nothing was asked for: a learner that dies while answers are written
    would otherwise be missed only when they have all been written.
    """

    def __init__(self, stream: AsyncIterator[tuple[Any, Any]], on_death: Callable[[BaseException], None]) -> None:
        """Listen to ``stream``; ``on_death`` is told what ended it, once."""
        self._stream = stream
        self._on_death = on_death
        self._closed = False
        self._coming = self._listen()

    async def next(self) -> tuple[Any, Any]:
        """Return the next (header, payload reference).

        Raises:
            RunLost: The learner died.
            RayError: It raised what the user can mend.
        """
        event = await asyncio.shield(self._coming)
        self._coming = self._listen()
        return event

    def close(self) -> None:
        """Listen no more; what still comes is nobody's business."""
        self._closed = True
        self._coming.cancel()

    def _listen(self) -> asyncio.Task[tuple[Any, Any]]:
        task = asyncio.get_running_loop().create_task(self._one())
        task.add_done_callback(self._came)
        return task

    async def _one(self) -> tuple[Any, Any]:
        try:
            return await anext(self._stream)
        except StopAsyncIteration:
            raise RunLost("the learner ended, though nobody asked it to") from None
        except ray.exceptions.RayError as error:
            if user_error(error) is not None:
                raise
            raise RunLost(f"the learner died{cause_of_death(error)}") from error

    def _came(self, task: asyncio.Task[tuple[Any, Any]]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._closed:
            self._on_death(error)
