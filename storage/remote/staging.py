"""The local folder that a run with a remote directory works in: made, taken up again, or filled from there."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

import xxhash

from storage.checkpoints import MANIFEST as CHECKPOINT_MARKER
from storage.errors import UserError
from storage.files import StorageError, atomic_write, describe_failure
from storage.models import cache_directory
from storage.remote.address import Address
from storage.remote.capture import LIVE
from storage.remote.index import Index, RemoteFile, read_index
from storage.remote.marker import Marker, read_marker
from storage.remote.objects import Objects, RemoteError, fetch_file, require_room
from storage.run_directory import RunDirectory

logger = logging.getLogger(__name__)

_LEFT = ".left-"
_UNREAD = ("rollouts/", "tensorboard/", "data/", "model/", "wandb/", "checkpoints/")
"""What a resumed run does not read; of the checkpoints it needs the newest."""

_LEDGER = "ledger.jsonl"
"""Every run has one in its folder, and none has it by this name at a URI."""

Progress = Callable[[str], None]


def staging_directory(address: Address) -> Path:
    """Return the folder on this machine in which the run at ``address`` works."""
    return cache_directory().absolute() / "runs" / xxhash.xxh3_64_hexdigest(str(address.parent).encode()) / address.name


def staged_runs() -> list[Path]:
    """Return the folders of runs that work on this machine with their directory at a URI, or were left by such runs."""
    found = (cache_directory().absolute() / "runs").glob(f"*/*/{LIVE[0]}")
    return sorted(path.parent for path in found if _LEFT not in path.parent.name)


def refuse_existing(objects: Objects) -> None:
    """Raise ``UserError`` where there is a run already, and ``RemoteError`` where that cannot be seen."""
    if objects.info(LIVE[0]) is not None:
        raise UserError(
            f"run directory {objects.address} exists already: go on with --resume '{objects.address}', or choose "
            "another run.name"
        )


def require_run(objects: Objects) -> None:
    """Raise ``UserError`` where there is no run, naming those near it, or ``RemoteError`` if that is not clear."""
    if objects.info(LIVE[0]) is None:
        near = run_names(objects.address.parent) if not objects.address.is_root else []
        hint = f"; there are {', '.join(near[:8])}" if near else ""
        raise UserError(f"{objects.address} is not a run: it has no {LIVE[0]}{hint}")


def require_sent(objects: Objects) -> None:
    """Raise ``UserError`` where a run without an index lies there as a folder, and not as a run with a URI sends it."""
    if objects.info(_LEDGER) is not None:
        address = objects.address
        name = f"name it by its path, {unquote(address.body)}" if address.scheme == "file" else "fetch it to a folder"
        raise UserError(
            f"{address} is a run directory that lies there as a folder, not one that a run with run.directory at a URI "
            f"has sent there: {name}"
        )


def create_staging(address: Address) -> Path:
    """Make the empty folder of a new run; a leftover of the same name is moved aside.

    The caller holds the lease, so nobody works there.

    Raises:
        StorageError: The disk refused it.
    """
    path = staging_directory(address)
    _set_aside(path)
    RunDirectory.create(path.parent, path.name)
    Marker(str(address)).save(path)
    return path


def fill_staging(address: Address, objects: Objects, say: Progress) -> Path:
    """Have all that a run needs to go on in its folder on this machine.

    What is there is used when it is as new as the remote side or newer: then only an upload is missing. Otherwise
    everything is fetched, each file verified; the newest checkpoint that is whole, and none that is later.

    Args:
        address: The run.
        objects: Its objects; the caller holds the lease.
        say: Told what takes time.

    Raises:
        UserError: There is no run, or none that can be resumed.
        StorageError: The store or the disk failed.
    """
    path = staging_directory(address)
    index = read_index(objects)
    if index is None:
        require_run(objects)
        require_sent(objects)
        raise UserError(
            f"{address} has no complete checkpoint to resume from, it ended before anything was sent: start a new run, "
            "under another name"
        )
    marker = read_marker(path)
    if marker is not None and marker.run == index.run and index.commit in marker.commits:
        return path
    if marker is not None and marker.run == index.run:
        logger.warning("%s is removed: the run went on elsewhere since, see %s", path, address)
        shutil.rmtree(path, ignore_errors=True)
    _set_aside(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(describe_failure("cannot make", path, error)) from error
    rest = {name: file for name, file in index.files.items() if not name.startswith(_UNREAD)}
    newest = max(_checkpoints(index), key=_step, default="")
    size = sum(file.size for file in (*rest.values(), *index.below(f"{newest}/" if newest else " ").values()))
    require_room(path, size, f"the run at {address}")
    say(f"fetching {size / 1e6:,.0f} MB of {address}")
    for name in LIVE[:2]:
        data = objects.read(name)
        if data is not None:
            atomic_write(path / name, data)
    for name, file in rest.items():
        try:
            fetch(objects, name, file, path)
        except RemoteError as error:
            if not name.startswith("history/"):
                raise
            logger.warning("%s", error)  # the history finds out what of it is damaged, and goes on without that
    for folder in sorted(_checkpoints(index), key=_step, reverse=True):
        try:
            fetch_all(objects, index.below(f"{folder}/"), path)
            break
        except RemoteError as error:
            say(f"skipping {folder}: {error}")
            shutil.rmtree(path / folder, ignore_errors=True)
    Marker(str(address), index.run, (index.commit,)).save(path)
    return path


def fetch(objects: Objects, name: str, file: RemoteFile, folder: Path) -> None:
    """Fetch one file of an index into a folder and verify it. Raises ``RemoteError``; then it may not be there."""
    digest = fetch_file(objects, file.parts, folder / name)
    if digest != file.xxh3:
        raise RemoteError(f"{objects.address.child(name)} does not hold what was sent: its checksum differs")


def fetch_all(objects: Objects, files: dict[str, RemoteFile], folder: Path) -> None:
    """Fetch files into a folder, markers of checkpoints last. Raises as :func:`fetch`."""
    for name in sorted(files, key=lambda name: (name.endswith(CHECKPOINT_MARKER), name)):
        fetch(objects, name, files[name], folder)


def run_names(parent: Address) -> list[str]:
    """Names of the runs directly below an address. Raises ``RemoteError``."""
    objects = Objects(parent)
    return [name for name in objects.folders() if objects.info(f"{name}/{LIVE[0]}") is not None]


def _checkpoints(index: Index) -> set[str]:
    """Folders of the checkpoints that are complete: they have their marker."""
    return {name.rpartition("/")[0] for name in index.below("checkpoints/") if name.endswith(f"/{CHECKPOINT_MARKER}")}


def _step(folder: str) -> int:
    return int(folder.rpartition("_")[2])


def _set_aside(path: Path) -> None:
    """Move a leftover away where it holds checkpoints, of which there may be no other copy; else remove it."""
    if not path.exists():
        return
    try:
        if any(path.glob(f"checkpoints/*/{CHECKPOINT_MARKER}")):
            aside = path.with_name(f"{path.name}{_LEFT}{time.time_ns()}")
            path.rename(aside)
            logger.warning("%s was left by a run of the same name and is kept as %s", path, aside)
        else:
            shutil.rmtree(path)
    except OSError as error:
        raise StorageError(describe_failure("cannot clear", path, error)) from error


def discard_staging(path: Path) -> None:
    """Remove the folder of a run that is on the remote side as a whole."""
    with suppress(OSError):
        shutil.rmtree(path)
