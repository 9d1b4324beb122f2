"""Remote runs as their readers see them: a local folder that holds what was asked for, fetched when it has changed."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import xxhash

from storage.errors import UserError
from storage.files import atomic_write
from storage.history.archive import RolloutArchive
from storage.records import TRAIN_SPLIT
from storage.remote.address import Address
from storage.remote.capture import LIVE
from storage.remote.index import Index, RemoteFile, read_index
from storage.remote.kept import keep
from storage.remote.marker import Marker, read_marker
from storage.remote.objects import Objects, RemoteError
from storage.remote.staging import fetch_all, require_run, require_sent, run_names
from storage.run_directory import RunDirectory

_ALWAYS = ("metrics.jsonl",)
_LOOKS = 5
_CHECKPOINT = re.compile(r"checkpoints/step_(\d{6,})/CHECKPOINT\.json")
_ANSWERS = re.compile(r"rollouts/([^/]+)/step_(\d{6,})\.parquet")


class RemoteView:
    """A run below an address, to be read while it goes on and afterwards; nothing is written there."""

    def __init__(self, address: Address, objects: Objects) -> None:
        """Look at the run; use :func:`open_view`. Raises ``UserError``, ``StorageError``."""
        self.address = address
        self._objects = objects
        index = read_index(objects)
        if index is None:
            require_sent(objects)
        self._index = index or Index(run="")
        self.path = keep("views", str(address)) / address.name

    def fetch(self, *prefixes: str) -> Path:
        """Have the files whose paths begin with one of the prefixes in the local folder, which is returned.

        What the run has removed or replaced since the last look goes from there.

        Raises:
            StorageError: The store or the disk failed.
        """
        for _ in range(_LOOKS):
            try:
                return self._fetch(prefixes)
            except RemoteError:  # the run may have replaced what was asked for
                before, self._index = self._index, read_index(self._objects) or Index(run="")
                if self._index.commit == before.commit:
                    raise
        return self._fetch(prefixes)

    def _fetch(self, prefixes: tuple[str, ...]) -> Path:
        self.path.mkdir(parents=True, exist_ok=True)
        wanted = self._index.below(*_ALWAYS, *prefixes)
        self._drop_old()
        stale = {name: file for name, file in wanted.items() if not _is(self.path / name, file)}
        for name in LIVE:
            data = self._objects.read(name)
            if data is not None:
                atomic_write(self.path / name, data)
        fetch_all(self._objects, stale, self.path)
        Marker(str(self.address), names=tuple(self._index.files)).save(self.path)
        return self.path

    def newest_checkpoint(self) -> str:
        """Folder of the newest checkpoint, relative to the run; empty without one."""
        steps = checkpoint_steps(self._index.files)
        return f"checkpoints/step_{steps[-1]:06d}" if steps else ""

    def _drop_old(self) -> None:
        """Remove files that the run does not have any more, and folders that are empty then."""
        for folder, _, files in os.walk(self.path, topdown=False):
            for name in files:
                path = Path(folder) / name
                relative = path.relative_to(self.path).as_posix()
                if relative not in self._index.files and relative not in LIVE and not name.startswith("."):
                    path.unlink(missing_ok=True)
            if Path(folder) != self.path:
                with suppress(OSError):  # it still has something in it
                    os.rmdir(folder)


class RemoteArchive(RolloutArchive):
    """The answers of a remote run: a step is fetched when it is read."""

    def __init__(self, directory: RunDirectory, marker: Marker) -> None:
        """Read the answers of the run that ``directory`` is a view of."""
        super().__init__(directory.rollouts)
        self._marker = marker
        self._kept = [
            (unquote(found[1]), int(found[2])) for name in marker.names if (found := _ANSWERS.fullmatch(name))
        ]
        self._root = directory.path

    def splits(self) -> list[str]:
        """Splits that have rollouts, sorted."""
        return sorted({split for split, _ in self._kept})

    def steps(self, split: str = TRAIN_SPLIT) -> list[int]:
        """Steps of ``split`` that have rollouts, ascending."""
        return sorted(step for kept, step in self._kept if kept == split)

    def read(self, step: int, split: str = TRAIN_SPLIT) -> Any:
        """Return the table of one step. Raises as the archive does, and ``RemoteError``."""
        if step in self.steps(split):
            _view_of(self._marker).fetch(self._path(step, split).relative_to(self._root).as_posix())
        return super().read(step, split)


def open_view(text: str) -> RemoteView:
    """Find the run at a URI; one below which there are runs means the newest of them.

    Raises:
        UserError: There is none; names those that are near.
        RemoteError: The store failed.
    """
    address = Address.parse(text, "run")
    objects = Objects(address)
    if objects.info(LIVE[0]) is None:
        names = run_names(address)
        if not names:
            _refuse(address, objects)
        address = address.child(max(names, key=lambda name: _changed(objects, name)))
        objects = Objects(address)
    return RemoteView(address, objects)


def archive_of(directory: RunDirectory) -> RolloutArchive:
    """Return the answers of a run, those of a remote one as far as they are read."""
    marker = read_marker(directory.path)
    if marker is None or not marker.names:
        return RolloutArchive(directory.rollouts)
    return RemoteArchive(directory, marker)


def checkpoint_steps(names: Iterable[str]) -> list[int]:
    """Steps of the complete checkpoints among the paths of a run, ascending."""
    return sorted(int(found[1]) for name in names if (found := _CHECKPOINT.fullmatch(name)))


def _view_of(marker: Marker) -> RemoteView:
    address = Address.parse(marker.uri, "run")
    return RemoteView(address, Objects(address))


def _refuse(address: Address, objects: Objects) -> None:
    if not address.is_root:
        names = run_names(address.parent)
        near = difflib.get_close_matches(address.name, names, 3, 0.4)
        if near:
            raise UserError(f"{address} is not a run: did you mean {' or '.join(near)}?")
    require_run(objects)


def _changed(objects: Objects, name: str) -> float:
    info = objects.info(f"{name}/status.json") or objects.info(f"{name}/{LIVE[0]}")
    return info.written.timestamp() if info is not None and info.written is not None else 0.0


def _is(path: Path, file: RemoteFile) -> bool:
    try:
        return path.stat().st_size == file.size and xxhash.xxh3_64_hexdigest(path.read_bytes()) == file.xxh3
    except OSError:
        return False
