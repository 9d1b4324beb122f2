"""Whether a run still goes on, judged from what it left in its directory."""

from __future__ import annotations

import socket
import time

import psutil

from pipelines.status import RunStatus

SILENT_S = 60.0
"""A run on another machine that has not reported for so long may have died with it."""


def is_alive(current: RunStatus) -> bool | None:
    """Say whether the process that wrote a status still runs; ``None`` if it belongs to another host.

    A process that was created after the run started has merely inherited the number.
    """
    if current.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(current.pid)
        return process.status() != psutil.STATUS_ZOMBIE and bool(process.create_time() <= current.started + 1.0)
    except psutil.NoSuchProcess:
        return False


def condition(current: RunStatus | None) -> str:
    """Return one or two words for a table: the state of a run, ``dead``, or ``no news``."""
    if current is None:
        return "no status"
    if current.terminal:
        return current.state
    alive = is_alive(current)
    if alive is False:
        return "dead"
    return "no news" if alive is None and time.time() - current.updated > SILENT_S else current.state
