"""Frees answers that Ray forgets to free.

Ray 2.60 keeps what a call returned within its reply (up to 100 kB) for good if another process was the last to hold a
reference to it: the owner then drops its count of references, and not the answer. Taking a reference to such an answer
and letting go of it frees it. To one that is still referred to, that does nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from typing import Any

import ray

SOON_S = 30.0
"""Age at which an answer is let go of for the first time: most are done with by then. Seconds."""
LATER_S = 300.0
"""Time to the next attempt, and to each one after that while somebody still refers to the answer. Seconds."""

_SLICES = 30
"""Answers of a thirtieth of these times are treated as one."""


def referred_to() -> Container[bytes]:
    """Ids, as hexadecimal digits, of all objects that this process owns or borrows, and somebody refers to."""
    counts: Container[bytes] = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
    return counts


class ForgottenAnswers:
    """Remembers the ids of answers, 28 bytes each, and lets go of each answer until nobody else refers to it."""

    def __init__(
        self,
        let_go: Callable[[bytes], Any] = ray.ObjectRef,
        referred_to: Callable[[], Container[bytes]] = referred_to,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make it empty; ``let_go`` takes a reference to the answer of an id, which ends with the call."""
        self._let_go = let_go
        self._referred_to = referred_to
        self._clock = clock
        self._fresh = _Line(SOON_S)
        self._older = _Line(LATER_S)

    def note(self, answer: ray.ObjectRef) -> None:
        """Remember an answer, and let go of those that are old enough."""
        now = self._clock()
        self._fresh.add(answer.binary(), now)
        for packed in self._fresh.ripe(now):
            for answer_id in packed:
                self._let_go(answer_id)
                self._older.add(answer_id, now)
        for packed in self._older.ripe(now):
            for answer_id in packed:
                self._let_go(answer_id)
            held = self._referred_to()
            for answer_id in packed:
                if answer_id.hex().encode() in held:
                    self._older.add(answer_id, now)


class _Line:
    """Ids that wait for some seconds, end to end: objects of their own would take five times the memory."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._slices: deque[_Slice] = deque()

    def add(self, answer_id: bytes, now: float) -> None:
        if not self._slices or now - self._slices[-1].begun >= self._wait_s / _SLICES:
            self._slices.append(_Slice(now))
        self._slices[-1].packed += answer_id
        self._slices[-1].ended = now

    def ripe(self, now: float) -> Iterator[_Slice]:
        """Take out what has waited for long enough."""
        while self._slices and now - self._slices[0].ended >= self._wait_s:
            yield self._slices.popleft()


class _Slice:
    """Ids that came at about the same time."""

    __slots__ = ("begun", "ended", "packed")

    def __init__(self, begun: float) -> None:
        self.begun = self.ended = begun
        self.packed = bytearray()

    def __iter__(self) -> Iterator[bytes]:
        size = ray.ObjectRef.size()
        for start in range(0, len(self.packed), size):
            yield bytes(self.packed[start : start + size])
