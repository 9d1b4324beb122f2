"""Counts the calls that an actor is working on, for the moment when none may be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class UnderWay:
    """Thread-safe count of calls."""

    def __init__(self) -> None:
        """Begin with none."""
        self._changed = threading.Condition()
        self._calls = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a call for as long as it lasts."""
        with self._changed:
            self._calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def wait_for_none(self, timeout_s: float) -> None:
        """Return when there is none; raises ``RuntimeError`` when there still is after ``timeout_s``."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._calls, timeout_s):
                raise RuntimeError(f"{self._calls} calls have not ended within {timeout_s:g} s")
