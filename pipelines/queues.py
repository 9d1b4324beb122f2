"""The bounded queues of a run: Ray's, whose actor frees the answers that pass through it.

Ray sends a small value (up to 100 kB) along with the reference to it, and the queue's actor keeps a copy while it has
the reference. When a consumer waits and takes the item before the call that put it has returned, Ray 2.60 keeps that
copy for good; see ``forgotten_answers``.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.queue import Queue, _QueueActor

from actors.bundles import refs_in
from pipelines.forgotten_answers import ForgottenAnswers


class ForgettingQueueActor(_QueueActor):  # type: ignore[misc]  # Ray's classes have no types
    """Ray's queue actor; remembers what leaves it for a while and then lets go of it for good."""

    def __init__(self, maxsize: int) -> None:
        """Make an empty queue of at most ``maxsize`` items."""
        super().__init__(maxsize)
        self._passed = ForgottenAnswers()

    async def get(self, timeout: float | None = None) -> Any:
        """Return the next item; raises ``ray.util.queue.Empty`` if none comes within ``timeout`` seconds."""
        item = await super().get(timeout)
        for ref in refs_in(item):
            self._passed.note(ref)
        return item


class BoundedQueue(Queue):  # type: ignore[misc]
    """A ``ray.util.queue.Queue`` for items of ``actors.bundles`` that may live for days."""

    def __init__(self, maxsize: int, actor_options: dict[str, Any]) -> None:
        """Start the actor; ``put`` waits while ``maxsize`` items are in it."""
        self.maxsize = maxsize
        self.actor = ray.remote(ForgettingQueueActor).options(**actor_options).remote(maxsize)
