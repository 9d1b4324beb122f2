"""Frees answers that Ray forgets to free.

Ray 2.60 keeps what a call returned within its reply (up to 100 kB) for good if another process was the last to hold a
reference to it: the owner then drops its count of references, and not the answer. Taking a reference to such an answer
and letting go of it frees it. To one that is still referred to, that does nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray

AGES_S = (30.0, 300.0, 3600.0)
"""Ages at which an answer is let go of: soon after most are done with, and later for those that waited. Seconds."""

_SLICE_S = 1.0


class ForgottenAnswers:
    """Remembers the ids of answers, 28 bytes each, and lets go of each answer at some ages."""

    def __init__(
        self,
        let_go: Callable[[bytes], Any] = ray.ObjectRef,
        clock: Callable[[], float] = time.monotonic,
        ages_s: Sequence[float] = AGES_S,
    ) -> None:
        """Make it empty; ``let_go`` takes a reference to the answer of an id, which ends with the call."""
        self._let_go = let_go
        self._clock = clock
        self._ages_s = ages_s
        self._waiting: tuple[deque[_Slice], ...] = tuple(deque() for _ in ages_s)

    def note(self, answer: ray.ObjectRef) -> None:
        """Remember an answer, and let go of those that are old enough."""
        now = self._clock()
        newest = self._waiting[0]
        if not newest or now - newest[-1].begun >= _SLICE_S:
            newest.append(_Slice(now))
        newest[-1].add(answer.binary(), now)
        for stage, age in enumerate(self._ages_s):
            line = self._waiting[stage]
            while line and now - line[0].ended >= age:
                old = line.popleft()
                for answer_id in old.ids():
                    self._let_go(answer_id)
                if stage + 1 < len(self._ages_s):
                    self._waiting[stage + 1].append(old)


class _Slice:
    """Ids of the answers of about a second, end to end: objects of their own would take five times the memory."""

    __slots__ = ("_packed", "begun", "ended")

    def __init__(self, begun: float) -> None:
        self._packed = bytearray()
        self.begun = self.ended = begun

    def add(self, answer_id: bytes, now: float) -> None:
        self._packed += answer_id
        self.ended = now

    def ids(self) -> Iterator[bytes]:
        size = ray.ObjectRef.size()
        for start in range(0, len(self._packed), size):
            yield bytes(self._packed[start : start + size])
