"""The index of a mirrored run: which objects make up which file, replaced as a whole by every upload.

Object stores have no renames and no transactions over several objects, so the index is what counts: whatever else is
there was left by an upload that did not end, and a run is as of the last index. A file may lie in several objects, one
behind the other, and an object may be longer than what the index takes from it: files that only grow are overwritten
by longer ones with the same beginning, which leaves the present index true until the next one is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from storage.journal import decode_line, encode_line
from storage.remote.objects import Objects, RemoteError

INDEX = "INDEX.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file.

    Attributes:
        parts: Names of its objects, and how many bytes of each belong to it, in order.
        xxh3: Hexadecimal xxh3-64 of the content.
    """

    parts: tuple[tuple[str, int], ...]
    xxh3: str

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(size for _, size in self.parts)


@dataclass(frozen=True, slots=True)
class Index:
    """What a mirror holds.

    Attributes:
        run: Random name of the run, to tell it from another one that had the same address.
        commit: Random name of this state; empty before the first upload.
        files: Every file by its path relative to the run directory, with slashes.
    """

    run: str
    commit: str = ""
    files: Mapping[str, RemoteFile] = field(default_factory=dict)

    def objects(self) -> set[str]:
        """Names of all objects that belong to a file."""
        return {name for file in self.files.values() for name, _ in file.parts}

    def below(self, *prefixes: str) -> dict[str, RemoteFile]:
        """The files whose paths begin with one of the prefixes."""
        return {name: file for name, file in self.files.items() if name.startswith(prefixes)}

    def encode(self) -> bytes:
        """Return it as one line with a checksum."""
        files = {name: {"parts": [list(part) for part in f.parts], "xxh3": f.xxh3} for name, f in self.files.items()}
        return encode_line({"format_version": FORMAT_VERSION, "run": self.run, "commit": self.commit, "files": files})


def read_index(objects: Objects) -> Index | None:
    """Return the index below an address, None where there is none.

    Raises:
        RemoteError: It cannot be read, is damaged, or of another version.
    """
    line = objects.read(INDEX)
    if line is None:
        return None
    place = objects.address.child(INDEX)
    try:
        record = decode_line(line)
        version = record["format_version"]
        if version != FORMAT_VERSION:
            raise RemoteError(f"{place} has format version {version}, this program reads {FORMAT_VERSION}")
        files = {
            name: RemoteFile(tuple((str(part[0]), int(part[1])) for part in file["parts"]), file["xxh3"])
            for name, file in record["files"].items()
        }
        return Index(record["run"], record["commit"], files)
    except (ValueError, KeyError, TypeError) as error:
        raise RemoteError(
            f"{place} is damaged ({error}): restore an earlier version of it, if the store keeps them"
        ) from error
