"""Folders of a run on their way between machines that share no disk: models to whoever loads them, and back."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from storage.files import StorageError, describe_failure, try_lock
from storage.remote.address import Address, is_address
from storage.remote.index import RemoteFile, read_index
from storage.remote.kept import keep
from storage.remote.mirror import retrying
from storage.remote.objects import Objects, RemoteError, require_room
from storage.remote.staging import fetch

PARCELS = ".parcels"
_CONTENTS = "CONTENTS.json"
_MAKING = ".making-"
_DEEPEST = 4
_POLL_S = 0.2
_PATIENCE_S = 300.0
"""How long a role tries to send what a checkpoint waits for."""


@dataclass(slots=True)
class Outgoing:
    """A folder to write into, and where its reader finds what was written: the folder itself, or a URI."""

    path: Path
    place: str


@contextmanager
def outgoing(directory: str, uri: str) -> Iterator[Outgoing]:
    """Yield a folder for files that somebody on another machine wants in ``directory``.

    Where this machine sees that folder it is written to directly. Otherwise what the block wrote is sent to ``uri``.

    Raises:
        StorageError: The folder is not on this machine, and there is no ``uri``; or the disk or the store failed.
    """
    if Path(directory).is_dir():
        yield Outgoing(Path(directory), directory)
        return
    if not uri:
        raise StorageError(
            f"{directory} is not on this machine: put run.directory on a file system that all nodes share, or on an "
            "object store (run.directory=s3://BUCKET/FOLDER)"
        )
    try:
        with tempfile.TemporaryDirectory(prefix="slipstream-parcel-") as folder:
            yield Outgoing(Path(folder), uri)
            objects = Objects(Address.parse(uri))
            retrying(lambda: _send(Path(folder), objects), deadline_s=_PATIENCE_S)
    except OSError as error:
        raise StorageError(describe_failure("cannot write", Path(tempfile.gettempdir()), error)) from error


def parcel_address(run: str, step: int) -> str:
    """Return a new address for a parcel of the run at URI ``run``."""
    return str(Address.parse(run).child(f"{PARCELS}/step_{step:06d}-{secrets.token_hex(4)}"))


def receive(uri: str, folder: Path) -> None:
    """Put what was sent to ``uri`` into a folder, verified, and remove it there.

    Raises:
        StorageError: It is not whole, or the store or the disk failed.
    """
    objects = Objects(Address.parse(uri))
    data = objects.read(_CONTENTS)
    if data is None:
        raise RemoteError(f"{uri}: nothing has arrived there")
    for name, (size, digest) in json.loads(data).items():
        fetch(objects, name, RemoteFile(((name, int(size)),), str(digest)), folder)
    parent = Objects(Address.parse(uri).parent)
    parent.remove_folder(Address.parse(uri).name)


def local_folder(text: str) -> Path:
    """Return the folder that ``text`` names on this machine: itself, or for a URI a copy that is fetched once.

    Raises:
        StorageError: There is no such folder in the run, or the store or the disk failed.
    """
    if not is_address(text):
        return Path(text)
    address = Address.parse(text, "model")
    run, files = _find(address)
    below = "/".join(sorted(f"{name}={file.xxh3}" for name, file in files.items()))
    kind = keep("fetched", str(run.address)) / address.name
    target = kind / xxhash.xxh3_64_hexdigest(below.encode())
    try:
        kind.mkdir(parents=True, exist_ok=True)
        with _locked(kind / ".lock"):
            if not target.is_dir():
                for leftover in kind.glob(f"{_MAKING}*"):  # of a process that was killed
                    shutil.rmtree(leftover, ignore_errors=True)
                require_room(kind, sum(file.size for file in files.values()), f"the copy of {address}")
                temporary = kind / f"{_MAKING}{os.getpid()}"
                try:
                    for name, file in files.items():
                        fetch(run, name, file, temporary)
                    (temporary / next(iter(files)).rpartition("/")[0]).rename(target)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
                for other in kind.iterdir():  # of an earlier part of the run; whoever has it open keeps it
                    if other.is_dir() and other != target:
                        shutil.rmtree(other, ignore_errors=True)
    except OSError as error:
        raise StorageError(describe_failure("cannot write", target, error)) from error
    return target


def _find(address: Address) -> tuple[Objects, dict[str, RemoteFile]]:
    """Find the run that a folder belongs to, and the files of the folder."""
    run, below = address.parent, address.name
    for _ in range(_DEEPEST):
        objects = Objects(run)
        index = read_index(objects)
        if index is not None:
            files = index.below(f"{below}/")
            if not files:
                break
            return objects, files
        if run.is_root:
            break
        run, below = run.parent, f"{run.name}/{below}"
    raise RemoteError(f"{address}: no such folder in a run")


def _send(folder: Path, objects: Objects) -> None:
    contents = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, size = path.relative_to(folder).as_posix(), path.stat().st_size
        digest = xxhash.xxh3_64()
        with path.open("rb") as source:
            objects.upload(name, source.fileno(), 0, size)
            while block := source.read(1 << 20):
                digest.update(block)
        contents[name] = (size, digest.hexdigest())
    if contents:
        objects.write(_CONTENTS, json.dumps(contents).encode())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    while True:
        try:
            descriptor = try_lock(path)
            break
        except BlockingIOError:
            time.sleep(_POLL_S)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
