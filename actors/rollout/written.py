"""What one call of a rollout worker has written so far."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence

from actors.rollout.engine import Completion
from storage.records import Assignment, FinishReason, GroupKey, Sample, Timings

Recorder = Callable[[Completion, Assignment, int, FinishReason, Timings], Sample]
"""Makes the record of a completion: which, of what, position among its siblings, why it ended, when."""


class Written:
    """Collects the completions of one call; filled on the engine's thread, emptied on the call's."""

    def __init__(
        self, record: Recorder, assignments: Sequence[Assignment], owners: Mapping[int, tuple[GroupKey, int]]
    ) -> None:
        """``record`` makes the records; ``owners`` says whose sample each request writes."""
        self._record = record
        self._assignments = {a.key: a for a in assignments}
        self._owners = dict(owners)
        self._arrived: queue.SimpleQueue[tuple[float, Completion | BaseException]] = queue.SimpleQueue()
        self._dispatched = time.time()
        self.over = False
        """The time of the stay is used up."""

    def put(self, item: Completion | BaseException) -> None:
        """Take a completion, or what broke the engine."""
        self._arrived.put((time.time(), item))

    def unfinished(self) -> list[int]:
        """Requests that have not come back."""
        return list(self._owners)

    def next_batch(self, interval_s: float, ends: float) -> list[Sample]:
        """Wait for samples and return those of one interval; none when ``ends`` (monotonic seconds) comes first."""
        try:
            timeout = None if ends == math.inf else max(0.0, ends - time.monotonic())
            batch = [self._arrived.get(timeout=timeout)]
        except queue.Empty:
            return []
        deadline = time.monotonic() + interval_s
        while len(batch) < len(self._owners):
            try:
                batch.append(self._arrived.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                break
        samples = []
        for finished, item in batch:
            if isinstance(item, BaseException):
                raise item
            key, index = self._owners.pop(item.request_id)
            assignment = self._assignments[key]
            timings = Timings(dispatched=self._dispatched, first_token=item.first_token, finished=finished)
            samples.append(self._record(item, assignment, index, self._reason(item, assignment), timings))
        return samples

    def _reason(self, item: Completion, assignment: Assignment) -> FinishReason:
        """Why a sample ended, once the limits of its stay are told from its own."""
        if item.finish_reason == "abort" and self.over and assignment.last_stay:
            return "length"
        if item.finish_reason == "length" and assignment.stay_tokens and not assignment.last_stay:
            tokens = sum(len(segment.token_ids) for segment in item.segments)
            return "abort" if tokens < assignment.sampling.max_tokens else "length"
        return item.finish_reason
