"""The log of a run, in its directory, where it survives Ray's session folder."""

from __future__ import annotations

import logging
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

from storage.files import describe_failure

LOG_BYTES = 16 << 20
"""Most that a file of it may hold; there are two at most."""


class EventsLog(RotatingFileHandler):
    """A bounded file that a run can do without: a disk that refuses a line costs the line, and is told.

    Attributes:
        failure: Why lines are missing; empty while none is.
    """

    def __init__(self, path: Path, *, max_bytes: int = LOG_BYTES) -> None:
        """Log to ``path``, which is opened with the first line."""
        super().__init__(path, maxBytes=max_bytes, backupCount=1, encoding="utf-8", delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self.failure = ""

    def handleError(self, record: logging.LogRecord) -> None:
        """Remember what the disk said; anything else is a mistake in the call and is printed, as usual."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self.failure = describe_failure("cannot write", Path(self.baseFilename), error)
        else:
            super().handleError(record)


def log_to(path: Path) -> EventsLog:
    """Send this process's log, from INFO on, to a file."""
    handler = EventsLog(path)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    return handler
