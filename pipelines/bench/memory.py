"""Memory of everything that a run started, as proportional set size: shared pages are counted once, not per process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

_SESSION = re.compile(r"session_\d{4}-\d\d-\d\d_[\d-]+_\d+_\d+")
_ROLES = (
    ("RolloutWorker", "rollout"),
    ("rollout-", "rollout"),
    ("LearnerWorker", "learner"),
    ("learner", "learner"),
    ("RewardWorker", "reward"),
    ("reward-", "reward"),
    ("actors.reward.child", "reward functions"),
    ("DraftRetrievalWorker", "history"),
    ("history", "history"),
    ("Conductor", "conductor"),
    ("_QueueActor", "queues"),
    ("ray::IDLE", "idle Ray workers"),
    ("gcs_server", "Ray: control store"),
    ("raylet", "Ray: raylet"),
    ("dashboard", "Ray: dashboard and agents"),
    ("runtime_env", "Ray: dashboard and agents"),
    ("ray", "Ray: other"),
)


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process: id, parent and command line."""

    pid: int
    parent: int
    command: str


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes of proportional set size by what holds them, at one moment."""

    by_role: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all processes together."""
        return sum(self.by_role.values())


def sample_tree(root: int) -> MemorySample:
    """Measure a process, all its descendants, and all processes of Ray sessions that they belong to (Linux)."""
    sizes: dict[str, int] = {}
    for process in members(root, running_processes()):
        try:
            size = psutil.Process(process.pid).memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        role = "driver" if process.pid == root else role_of(process.command)
        sizes[role] = sizes.get(role, 0) + size
    return MemorySample(sizes)


def running_processes() -> list[ProcessInfo]:
    """Return all processes of this machine."""
    return [
        ProcessInfo(p.info["pid"], p.info["ppid"], " ".join(p.info["cmdline"] or ()))
        for p in psutil.process_iter(("pid", "ppid", "cmdline"))
    ]


def members(root: int, running: Iterable[ProcessInfo]) -> Sequence[ProcessInfo]:
    """Return ``root``, its descendants, and whatever names a Ray session of theirs on its command line.

    The last part finds processes whose parent has died, so that they hang on another one now.
    """
    known = {process.pid: process for process in running}
    children: dict[int, list[int]] = {}
    for process in known.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: dict[int, ProcessInfo] = {}
    waiting = [root] if root in known else []
    sessions: set[str] = set()
    while waiting:
        pid = waiting.pop()
        if pid in found:
            continue
        found[pid] = known[pid]
        waiting += children.get(pid, [])
        new = set(_SESSION.findall(known[pid].command)) - sessions
        sessions |= new
        waiting += [p.pid for p in known.values() for session in new if session in p.command]
    return list(found.values())


def role_of(command: str) -> str:
    """Say what a process of a run does, from its command line (Ray workers name the actor there)."""
    return next((role for part, role in _ROLES if part in command), "other")
