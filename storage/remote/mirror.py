"""Sends what a run directory holds to its address, so that the remote side is a run to resume from at any moment.

An upload sends new content under names that the present index does not use (or makes a growing file longer, of which
the index takes the beginning), then replaces the index, then removes what no longer counts. Wherever it is cut off, the
present index stays true. Within an upload the files of a checkpoint go before its marker, and both behind the ledger
that they refer to: a plain copy of the bucket taken at any time has no checkpoint that looks complete and is not.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from storage.checkpoints import MANIFEST as CHECKPOINT_MARKER
from storage.files import StorageError
from storage.remote.capture import Capture, CapturedFile, Stamp, capture
from storage.remote.index import INDEX, Index, RemoteFile, read_index
from storage.remote.lease import Lease, LeaseLost
from storage.remote.marker import Marker, read_marker
from storage.remote.objects import BLOCK_BYTES, Objects, RemoteError, read_block

logger = logging.getLogger(__name__)

T = TypeVar("T")

PARTS = ".parts"
WHOLE_BYTES = 4 << 20
"""A growing file below this size is sent whole when it has grown; of a larger one only the new part."""
_MOST_PARTS = 64
_OURS = (f"{PARTS}/", ".parcels/", "checkpoints/", "history/", "rollouts/", "tensorboard/", "model/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """What an upload did: bytes and objects sent, and seconds."""

    nbytes: int
    objects: int
    seconds: float


class Mirror:
    """The remote side of one run. One thread uploads at a time; :meth:`beat` may be called beside it."""

    def __init__(self, directory: Path, objects: Objects, lease: Lease, index: Index) -> None:
        """Go on from ``index``; use :meth:`open`."""
        self.directory = directory
        self._objects = objects
        self._lease = lease
        self._index = index
        self._absent = {name for name in index.files if not (directory / name).exists()}
        self._begun_at = max(map(_checkpoint_step, index.files), default=-1)
        self._added: dict[str, RemoteFile] = {}
        self._pinned: tuple[str, ...] = ()
        self._cut: int | None = None
        self._sent: dict[str, tuple[Stamp, RemoteFile]] = {}
        """Files as they were last sent, whether an index says so yet or not."""
        self._touched: set[str] = set()
        """Objects that were written or given up and that an index has not settled yet."""
        self._live: dict[str, str] = {}
        self._live_lock = threading.Lock()
        self._nbytes = self._count = 0

    @classmethod
    def open(cls, directory: Path, objects: Objects, lease: Lease) -> Mirror:
        """Start to mirror a run directory, new or one that goes on, and clear away what a killed upload left.

        Raises:
            StorageError: The store failed, the index is damaged, or it is of a later state than the directory.
            LeaseLost: Another process writes there.
        """
        lease.check()
        index = read_index(objects) or Index(run=secrets.token_hex(8))
        marker = read_marker(directory)
        if index.commit and (marker is None or index.commit not in marker.commits):
            raise StorageError(f"{directory} is older than {objects.address}: it must not be sent there")
        counted = index.objects()
        for name in objects.names():
            if name.startswith(_OURS) and name not in counted:
                objects.remove(name)
        mirror = cls(directory, objects, lease, index)
        mirror._mark(index.commit)
        return mirror

    @property
    def address(self) -> str:
        """URI of the run."""
        return str(self._objects.address)

    def forget_after(self, step: int) -> None:
        """Leave out what lies beyond ``step`` on the remote side only: the run goes on from there on another path."""
        self._cut = step

    def capture(self) -> Capture:
        """Look at what has changed; the caller closes it. Raises ``StorageError``."""
        return capture(self.directory, {name: stamp for name, (stamp, _) in self._sent.items()})

    def upload(self, captured: Capture, *, settle: bool = False) -> Upload:
        """Make the remote side what was captured.

        Args:
            captured: From :meth:`capture`.
            settle: Also put every file into one object of its own name, for whoever reads the bucket with other tools.

        Raises:
            RemoteError: The store failed. The remote side is as it was, and what was sent already is not sent again.
            LeaseLost: Another process writes there.
        """
        began, self._nbytes, self._count = time.perf_counter(), 0, 0
        commit = secrets.token_hex(8)
        self._lease.check()
        if (cut := self._cut) is not None:
            self._absent = {name for name in self._absent if not _is_after(name, cut)}
            self._begun_at, self._cut = cut, None
        self._send_live(captured, only=("config.yaml",))
        for file in sorted(captured.changed, key=lambda file: _rank(file.name)):
            self._sent[file.name] = (file.stamp, self._store(file, commit, settle=settle))
        here = {file.name for file in captured.changed} | captured.unchanged
        self._absent -= here
        files = {name: self._sent[name][1] for name in here}
        if settle:
            files |= self._settled(captured.unchanged, files)
        files |= self._kept(here) | self._added
        self._commit(Index(self._index.run, commit, files))
        self._absent |= set(self._added)
        self._added.clear()
        self._send_live(captured)
        for name in [name for name in self._sent if name not in here]:
            del self._sent[name]
        return Upload(nbytes=self._nbytes, objects=self._count, seconds=time.perf_counter() - began)

    def sync(self, *, settle: bool = False) -> Upload:
        """Capture and upload. Raises as both."""
        with self.capture() as captured:
            return self.upload(captured, settle=settle)

    def beat(self) -> None:
        """Show that we live, and what the run is doing. Raises ``RemoteError`` and ``LeaseLost``."""
        self._lease.refresh()
        with suppress(FileNotFoundError):
            self._send("status.json", (self.directory / "status.json").read_bytes())

    def add(self, name: str, path: Path) -> None:
        """Send a file from outside of the run directory; the next upload makes it count. Raises ``StorageError``."""
        with path.open("rb") as source:
            size = path.stat().st_size
            self._put(name, source.fileno(), 0, size)
            entry = RemoteFile(((name, size),), _digests(source.fileno(), (size,))[0])
        self._added[name] = entry

    def pin(self, prefix: str) -> None:
        """Keep the files below a prefix also when the run removes them, until this is called again or the end."""
        self._pinned = (prefix,)

    def _kept(self, here: set[str]) -> dict[str, RemoteFile]:
        """What stays though it is not in the run directory: never fetched, or pinned."""
        newest = max(map(_checkpoint_step, here), default=-1)
        kept = {}
        for name, file in self._index.files.items():
            # older checkpoints that were not fetched go when there is a newer one than at the start
            waits = name in self._absent and (_checkpoint_step(name) < 0 or newest <= self._begun_at)
            if name not in here and (waits or name.startswith(self._pinned)):
                kept[name] = file
        return kept

    def _store(self, file: CapturedFile, commit: str, *, settle: bool) -> RemoteFile:
        """Send what is new of a file, and say where it lies."""
        name, size, fd = file.name, file.stamp.size, file.descriptor
        old = self._sent[name][1] if name in self._sent else self._index.files.get(name)
        if old is not None and size >= old.size:
            beginning, digest = _digests(fd, (old.size, size))
            if beginning == old.xxh3:
                return self._extend(file, old, digest, commit, settle=settle)
        else:
            (digest,) = _digests(fd, (size,))
        target = f"{PARTS}/{name}.{commit}" if name in self._index.objects() else name
        self._send_file(file, digest, target, 0)
        return RemoteFile(((target, size),), digest)

    def _extend(self, file: CapturedFile, old: RemoteFile, digest: str, commit: str, *, settle: bool) -> RemoteFile:
        """Send what a file has grown by; whole where that is little, or where its parts have become many."""
        name, size = file.name, file.stamp.size
        first, base = old.parts[0]
        if settle and first != name and name not in self._index.objects():
            first, base = name, -1
        is_settled = len(old.parts) == 1 and first == old.parts[0][0]
        if size == old.size and (is_settled or not settle):
            return old
        few = size - base <= max(WHOLE_BYTES, base) and len(old.parts) < _MOST_PARTS
        if size > WHOLE_BYTES and few and not settle:
            part = f"{PARTS}/{name}.{old.size}-{commit}"
            self._send_file(file, digest, part, old.size)
            return RemoteFile((*old.parts, (part, size - old.size)), digest)
        self._send_file(file, digest, first, 0)  # what the index takes of it stays as it is
        return RemoteFile(((first, size),), digest)

    def _send_file(self, file: CapturedFile, digest: str, target: str, start: int) -> None:
        """Send a file from a position on, and make sure that what was sent is what was hashed."""
        size = file.stamp.size
        self._put(target, file.descriptor, start, size - start)
        # a run that goes back to a checkpoint cuts its files where they are
        if not file.name.startswith("checkpoints/") and _digests(file.descriptor, (size,)) != [digest]:
            raise StorageError(f"{file.name} was cut while it was sent")

    def _settled(self, names: Iterable[str], files: dict[str, RemoteFile]) -> dict[str, RemoteFile]:
        """Move files that have not changed into objects of their own names."""
        moved = {}
        for name in names:
            entry = files[name]
            if len(entry.parts) == 1 and entry.parts[0][0] == name:
                continue
            with (self.directory / name).open("rb") as source:
                stamp = self._sent[name][0]
                file = CapturedFile(name, source.fileno(), stamp)
                moved[name] = self._extend(file, entry, entry.xxh3, "", settle=True)
                self._sent[name] = (stamp, moved[name])
        return moved

    def _commit(self, index: Index) -> None:
        if index.files != self._index.files or not self._index.commit:
            self._mark(self._index.commit, index.commit)
            self._lease.check()
            self._objects.write(INDEX, index.encode())
            self._touched |= self._index.objects()
            self._index = index
        self._clear_away()

    def _clear_away(self) -> None:
        """Remove objects that no longer count, markers of checkpoints first; a failure costs space until the next."""
        counted = self._index.objects()
        gone = self._touched - counted
        folders = {name.rpartition("/")[0] for name in counted}
        try:
            for name in sorted(gone, key=lambda name: (not name.endswith(CHECKPOINT_MARKER), name)):
                self._objects.remove(name)
                self._touched.discard(name)
            for step in {"/".join(name.split("/")[:2]) for name in gone if name.startswith("checkpoints/")}:
                if not any(folder == step or folder.startswith(f"{step}/") for folder in folders):
                    self._objects.remove_folder(step)  # some stores keep empty folders
        except RemoteError as error:
            logger.warning("what is no longer needed stays for now: %s", error)

    def _send_live(self, captured: Capture, only: tuple[str, ...] = ()) -> None:
        for name, data in captured.live.items():
            if not only or name in only:
                self._send(name, data)

    def _send(self, name: str, data: bytes) -> None:
        digest = xxhash.xxh3_64_hexdigest(data)
        with self._live_lock:
            if self._live.get(name) != digest:
                self._objects.write(name, data)
                self._live[name] = digest

    def _put(self, name: str, descriptor: int, start: int, size: int) -> None:
        self._touched.add(name)
        self._objects.upload(name, descriptor, start, size)
        self._nbytes += size
        self._count += 1

    def _mark(self, *commits: str) -> None:
        known = tuple(commit for commit in commits if commit)
        Marker(self.address, self._index.run, known).save(self.directory)


def retrying(
    act: Callable[[], T], *, deadline_s: float, first_s: float = 1.0, sleep: Callable[[float], None] = time.sleep
) -> T:
    """Call ``act`` until it succeeds or ``deadline_s`` has passed, with pauses that double.

    Raises:
        StorageError: Its last failure.
        LeaseLost: At once.
    """
    end, pause = time.monotonic() + deadline_s, first_s
    while True:
        try:
            return act()
        except LeaseLost:
            raise
        except StorageError as error:
            if time.monotonic() + pause > end:
                raise
            logger.warning("%s; trying again in %.0f s", error, pause)
        sleep(pause)
        pause = min(2 * pause, 30.0)


def _digests(descriptor: int, ends: tuple[int, ...]) -> list[str]:
    """Hexadecimal xxh3-64 of the beginnings of an open file up to each of some ascending positions."""
    digest, position, found = xxhash.xxh3_64(), 0, []
    for end in ends:
        while position < end:
            block = read_block(descriptor, min(BLOCK_BYTES, end - position), position)
            digest.update(block)
            position += len(block)
        found.append(digest.hexdigest())
    return found


def _rank(name: str) -> tuple[int, str]:
    """Order within an upload: what others refer to first."""
    if name.endswith((f"/{CHECKPOINT_MARKER}", "history/MANIFEST.json")):
        return 3, name
    return (2 if name.startswith("checkpoints/") else 1 if name == "ledger.jsonl" else 0), name


def _checkpoint_step(name: str) -> int:
    """Step of the checkpoint that a file belongs to; -1 for other files."""
    folder, _, rest = name.partition("/")
    step = rest.partition("/")[0].removeprefix("step_")
    return int(step) if folder == "checkpoints" and step.isdigit() else -1


def _is_after(name: str, step: int) -> bool:
    """Whether a file is of a later step: of a checkpoint, or of the archive of answers."""
    kind, last = name.partition("/")[0], name.rpartition("/")[2]
    if kind == "rollouts":
        number = last.removeprefix("step_").partition(".")[0]
        return number.isdigit() and int(number) > step
    return _checkpoint_step(name) > step
