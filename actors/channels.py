"""Reading bounded Ray queues without waiting for ever.

A pending ``get`` outlives a consumer that is killed and swallows the next item, so consumers ask with short deadlines
and the conductor issues again what they had taken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import Empty as LocalEmpty
from queue import Queue as LocalQueue
from typing import Any

from actors.bundles import GroupEnvelope, gather
from storage.records import Group

GET_DEADLINE_S = 2.0


class QueueReader:
    """Pulls envelopes from a ``ray.util.queue.Queue`` on a thread, at most ``ahead`` of them before they are wanted."""

    def __init__(self, queue: Any, ahead: int = 2) -> None:
        """Start pulling; ``queue`` needs ``get(timeout=...)`` that raises ``ray.util.queue.Empty``."""
        self._queue = queue
        self._local: LocalQueue[Any] = LocalQueue(maxsize=ahead)
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._pull, name="queue-reader", daemon=True)
        self._thread.start()

    def get(self, timeout_s: float | None = None) -> Any | None:
        """Return the next envelope, or None when none came in time; raises what broke the queue."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._failure is not None and self._local.empty():
                raise self._failure
            wait = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
            try:
                return self._local.get(timeout=max(0.0, wait))
            except LocalEmpty:
                if deadline is not None and time.monotonic() >= deadline:
                    return None

    def close(self) -> None:
        """Stop pulling."""
        self._closed.set()

    def _pull(self) -> None:
        from ray.util.queue import Empty

        try:
            while not self._closed.is_set():
                try:
                    item = self._queue.get(timeout=GET_DEADLINE_S)
                except Empty:
                    continue
                self._local.put(item)
        except BaseException as error:  # handed to the reader, who knows what the queue was for
            self._failure = error


def fetch_groups(envelopes: Sequence[GroupEnvelope]) -> list[Group]:
    """Fetch the bundles that some group envelopes point to, each once, and assemble the groups in key order."""
    import ray

    refs = list(dict.fromkeys(ref for envelope in envelopes for ref in envelope.refs))
    fetched = dict(zip(refs, ray.get(refs), strict=True))
    groups = []
    for envelope in envelopes:
        prompt, samples = gather([fetched[ref] for ref in envelope.refs], envelope.places)
        groups.append(Group(key=envelope.key, prompt=prompt, samples=samples))
    return sorted(groups, key=lambda group: group.key)
