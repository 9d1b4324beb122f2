"""The note in a local folder that says which remote run it is a copy of: ``.remote``."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from storage.files import atomic_write

_FILE = ".remote"


@dataclass(frozen=True, slots=True)
class Marker:
    """What a local copy belongs to.

    Attributes:
        uri: Address of the run.
        run: Random name of the run; empty for a copy that is only read.
        commits: States of the mirror that this copy is ahead of or equal to, the newest last.
        names: Paths of all files of the run, for a copy that is only read and need not hold them.
    """

    uri: str
    run: str = ""
    commits: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def save(self, directory: Path) -> None:
        """Put the note there. Raises ``StorageError``."""
        atomic_write(directory / _FILE, json.dumps(asdict(self)).encode())


def read_marker(directory: Path) -> Marker | None:
    """Return the note of a folder; None for a folder that is no copy."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads((directory / _FILE).read_bytes())
        return Marker(str(record["uri"]), str(record["run"]), tuple(record["commits"]), tuple(record["names"]))
    return None
