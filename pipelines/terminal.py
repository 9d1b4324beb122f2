"""Where the commands print."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_FILE_WIDTH = 160


def report_console() -> Console:
    """A console for tables: as wide as the terminal, or wide enough for every column when written to a file or pipe."""
    fixed = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if fixed else _FILE_WIDTH)
