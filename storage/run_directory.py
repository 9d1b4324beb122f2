"""The folder of one run: where each thing is, who may write, and how to find a run again."""

from __future__ import annotations

import difflib
import logging
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from storage.errors import UserError
from storage.files import StorageError, describe_failure, remove_temporaries, try_lock
from storage.remote.address import Address
from storage.remote.marker import read_marker

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*$")
_CONFIG = "config.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTicket:
    """What a process of a run with a remote directory needs to write where the run writes.

    Attributes:
        uri: Address of the run.
        token: Of its lease.
        spread: Roles may be on machines that do not see the folder of the run: what they load and save travels.
    """

    uri: str
    token: str
    spread: bool = False


class RunDirectory:
    """Paths of one run. A folder is a run once it holds ``config.yaml``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / _CONFIG
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.log"
        self.ledger = path / "ledger.jsonl"
        self.status = path / "status.json"
        self.restarts = path / "restarts.json"
        self.tensorboard = path / "tensorboard"
        self.rollouts = path / "rollouts"
        self.history = path / "history"
        self.checkpoints = path / "checkpoints"
        self._lock = path / ".lock"

    @property
    def address(self) -> str:
        """Where people find the run: the URI that this folder is a copy of, or its path."""
        marker = read_marker(self.path)
        return str(self.path) if marker is None else marker.uri

    @property
    def ticket(self) -> RunTicket | None:
        """What the conductor needs beside the path; None where that is enough."""
        return None

    def where(self, path: Path | str) -> str:
        """Name a file or folder of the run for people, as :attr:`address` names the run."""
        marker = read_marker(self.path)
        if marker is None:
            return str(path)
        return str(Address.parse(marker.uri).child(Path(path).relative_to(self.path).as_posix()))

    def reach(self, path: Path) -> str:
        """How a role finds a folder of the run, wherever it is: a path, or a URI that it fetches."""
        return str(path)

    def parcel(self, step: int) -> str:
        """Address to which a role sends what it cannot write into this folder; empty where all roles see it."""
        return ""

    def send(self) -> None:
        """Make the other side of the run, if it has one, what this folder is."""

    def refill(self) -> None:
        """Have in this folder what another machine sent to the other side of the run, if it has one."""

    @classmethod
    def create(cls, parent: Path, name: str) -> RunDirectory:
        """Make the folder of a new run.

        Raises:
            UserError: The folder has something in it already, or cannot be made.
        """
        if not _NAME.match(name):
            raise UserError(
                f"run.name={name!r}: use letters, digits, '.', '_' and '-', starting with a letter or digit"
            )
        path = parent / name
        try:
            path.mkdir(parents=True, exist_ok=True)
            occupied = any(not child.name.startswith(".") for child in path.iterdir())  # a lock is no run
        except OSError as error:
            raise StorageError(describe_failure("cannot make run directory", path, error)) from error
        if occupied:
            raise UserError(
                f"run directory {path} exists already: go on with --resume {path}, or choose another run.name"
            )
        return cls(path)

    @classmethod
    def open(cls, path: Path, parent: Path | None = None) -> RunDirectory:
        """Find an existing run.

        Args:
            path: Its folder, or the bare name of one in ``parent``.
            parent: Folder of runs to look in as well.

        Raises:
            UserError: There is no such folder or it is not a run; names the nearest runs.
        """
        places = [path] if parent is None or path.is_absolute() else [path, parent / path]
        for place in places:
            if (place / _CONFIG).is_file():
                return cls(place)
        reason = next(
            (f"{p} is not a run: it has no {_CONFIG}" for p in places if p.exists()), f"{path} does not exist"
        )
        known = {
            name: str(folder / name) for folder in _unique(p.parent for p in places) for name in run_names_in(folder)
        }
        known |= {name: str(place / name) for place in places for name in run_names_in(place)}
        near = difflib.get_close_matches(path.name, known, n=3, cutoff=0.4) or list(known)[:3]
        hint = f"; did you mean {' or '.join(known[name] for name in near)}?" if near else "; no runs are near it"
        raise UserError(reason + hint)

    @classmethod
    def latest(cls, parent: Path, beside: Sequence[Path] = ()) -> RunDirectory:
        """The run in ``parent``, or among the folders ``beside`` it, that changed last.

        Raises:
            UserError: There is none.
        """
        runs = [*(cls(parent / name) for name in run_names_in(parent)), *map(cls, beside)]
        runs = [run for run in runs if run.ledger.exists()] or runs  # evaluations have directories, too
        if not runs:
            raise UserError(f"{parent} holds no runs: start one with `slipstream train`, or name a run directory")
        return max(runs, key=cls._changed)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run directory for writing while the block lasts; the lock dies with the process.

        Raises:
            UserError: Another process holds it; names its pid and host.
        """
        try:
            descriptor = try_lock(self._lock)
        except BlockingIOError:
            holder = self._lock.read_text(errors="replace").strip() or "another process"
            raise UserError(
                f"{self.path} is in use by {holder}: wait for it, stop it, or choose another run.name"
            ) from None
        except OSError as error:
            raise StorageError(describe_failure("cannot lock", self._lock, error)) from error
        if descriptor is None:
            logger.warning("%s: no locks on this file system; make sure that nothing else trains here", self.path)
        try:
            with suppress(OSError):  # a note for others only; a full disk is reported by whoever needs the space
                self._lock.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
            remove_temporaries(self.path)
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _changed(self) -> float:
        times = [0.0]
        for path in (self.config, self.metrics, self.status, self.ledger):
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)


def find_run(name: str, parent: Path) -> Path | None:
    """Return the run directory that ``name`` is, or that it names in ``parent``; None when there is none."""
    return next((path for path in (Path(name), parent / name) if (path / _CONFIG).is_file()), None)


def run_names_in(folder: Path) -> list[str]:
    """Names of the runs directly in a folder, sorted; none where there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(child.name for child in folder.iterdir() if (child / _CONFIG).is_file())


def _unique(paths: Iterator[Path]) -> list[Path]:
    return list(dict.fromkeys(paths))
