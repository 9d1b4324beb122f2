"""What a run holds at one moment: memory, threads and open files of its processes, its object store, its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipelines.bench.memory import members, role_of, running_processes
from storage.remote.kept import folder_size
from storage.run_directory import RunDirectory

_SESSION_FOLDER = re.compile(r"(/[^\s=,:]*/session_\d{4}-\d\d-\d\d_[\d-]+_\d+_\d+)\b")
_STORE = re.compile(
    r'Local resources: \{"total":\{[^}]*?object_store_memory: \[(\d+)\].*?"available": \{[^}]*?'
    r"object_store_memory: \[(\d+)\]"
)
_OWN = re.compile(r"^(RssAnon|VmSwap):\s+(\d+) kB$", re.MULTILINE)
_RESOURCE_UNIT = 10_000
"""Ray counts resources in ten-thousandths."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the processes of one role hold together.

    Attributes:
        memory: Bytes that no other process shares and no file backs, swapped out or not. Proportional set sizes would
            move with every other process on the machine that uses the same libraries.
        threads: Threads.
        descriptors: Open files.
    """

    memory: int
    threads: int
    descriptors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """One reading.

    Attributes:
        roles: What processes hold, by role.
        store: Bytes of objects in the object store; None while Ray has not said.
        files: Bytes on disk by what they are for.
    """

    roles: Mapping[str, Usage]
    store: int | None
    files: Mapping[str, int]


def take_census(root: int, directory: Path) -> Census:
    """Look at a run whose driver is process ``root`` and whose Ray was started by it (Linux)."""
    processes = members(root, running_processes())
    session = session_folder(process.command for process in processes)
    roles: dict[str, Usage] = {}
    for process in processes:
        role = "driver" if process.pid == root else role_of(process.command)
        with suppress(psutil.Error, OSError):
            one = psutil.Process(process.pid)
            held = roles.get(role, Usage(0, 0, 0))
            roles[role] = Usage(
                held.memory + anonymous_memory(process.pid),
                held.threads + one.num_threads(),
                held.descriptors + one.num_fds(),
            )
    files = run_files(RunDirectory(directory))
    if session is not None:
        files["Ray logs"] = folder_size(session / "logs")
    return Census(roles=roles, store=None if session is None else store_bytes(session), files=files)


def anonymous_memory(pid: int) -> int:
    """Return the bytes of a process that are neither of a file nor shared, from ``/proc``; raises OSError."""
    sizes = dict(_OWN.findall(Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")))
    return 1024 * sum(map(int, sizes.values()))


def run_files(run: RunDirectory) -> dict[str, int]:
    """Return the bytes of each part of a run directory."""
    return {
        "history": folder_size(run.history),
        "archive": folder_size(run.rollouts),
        "ledger": _size(run.ledger),
        "metrics": _size(run.metrics),
        "TensorBoard": folder_size(run.tensorboard),
        "checkpoints": folder_size(run.checkpoints),
        "status": _size(run.status),
        "events log": sum(map(_size, run.path.glob(f"{run.events.name}*"))),
    }


def session_folder(commands: Iterable[str]) -> Path | None:
    """Return the folder of the Ray session that command lines name; None where none does."""
    for command in commands:
        found = _SESSION_FOLDER.search(command)
        if found is not None:
            return Path(found[1])
    return None


def store_bytes(session: Path) -> int | None:
    """Return the bytes that a node's objects take, from the state that its raylet writes down every ten seconds."""
    with suppress(OSError):
        found = _STORE.search((session / "logs" / "debug_state.txt").read_text(encoding="utf-8", errors="replace"))
        if found is not None:
            return (int(found[1]) - int(found[2])) // _RESOURCE_UNIT
    return None


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
