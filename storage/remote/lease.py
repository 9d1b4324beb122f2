"""The lease of a mirrored run: an object that says who writes, as a lock file does on a disk.

Object stores cannot compare and swap through pyarrow, so a lease is written, left to settle and read again: of two who
take it at once, the later write holds. Its age is told by the clock of the store, never by those of two machines.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from storage.errors import UserError
from storage.remote.objects import Objects

logger = logging.getLogger(__name__)

LEASE = ".lock"
REFRESH_S = 20.0
STALE_S = 180.0
"""Age at which a lease counts as left behind: nine refreshes were missed."""
SETTLE_S = 1.0


class LeaseLost(UserError):
    """Another process writes to the run now; this one must not write any more."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who writes: a random token, the host and the process id there, and when it took the lease (Unix seconds)."""

    token: str
    host: str
    pid: int
    since: float

    @classmethod
    def myself(cls, token: str = "") -> Holder:
        """This process, with a new token unless it takes over one."""
        return cls(token or secrets.token_hex(8), socket.gethostname(), os.getpid(), time.time())

    @property
    def is_dead(self) -> bool:
        """True when it was a process of this host that is gone; False when that is not known."""
        if self.host != socket.gethostname():
            return False
        try:
            process = psutil.Process(self.pid)
            return bool(process.status() == psutil.STATUS_ZOMBIE or process.create_time() > self.since + 1.0)
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        """For people."""
        return f"process {self.pid} on {self.host}"


class Lease:
    """The right to write below an address; several processes of one run may share it by its token."""

    def __init__(self, objects: Objects, holder: Holder) -> None:
        """Hold what was acquired; see :meth:`acquire`."""
        self._objects = objects
        self.holder = holder

    @classmethod
    def acquire(cls, objects: Objects, *, stale_s: float = STALE_S, settle_s: float | None = None) -> Lease:
        """Take the lease.

        Args:
            objects: The run.
            stale_s: Age at which somebody else's lease may be taken over.
            settle_s: How long to wait before looking whether somebody else took it at the same time; None for
                :data:`SETTLE_S`.

        Raises:
            UserError: Somebody holds it; says who.
            RemoteError: The store failed.
        """
        other = _read(objects)
        if other is not None:
            age = _age_s(objects)
            if age < stale_s and not other.is_dead:
                raise UserError(_refusal(objects, other, age, stale_s))
            logger.warning(
                "%s: took over from %s, which %s",
                objects.address,
                other,
                "is gone" if other.is_dead else f"has not been heard of for {age:.0f} s",
            )
        lease = cls(objects, Holder.myself())
        lease.write()
        time.sleep(SETTLE_S if settle_s is None else settle_s)
        winner = _read(objects)
        if winner is None or winner.token != lease.holder.token:
            raise UserError(_refusal(objects, winner or lease.holder, 0.0, stale_s))
        return lease

    def check(self) -> None:
        """Make sure that nobody has taken the lease over.

        Raises:
            LeaseLost: Somebody has.
            RemoteError: The store failed.
        """
        found = _read(self._objects)
        if found is not None and found.token != self.holder.token:
            raise LeaseLost(
                f"{self._objects.address} was taken over by {found}, because this run had not been heard of for a "
                "while: it stops here, and its last steps stay on this machine only"
            )

    def refresh(self) -> None:
        """Show that we live. Raises as :meth:`check`."""
        self.check()
        self.write()

    def write(self) -> None:
        """Put our name there. Raises ``RemoteError``."""
        self._objects.write(LEASE, json.dumps(asdict(self.holder)).encode())

    def release(self) -> None:
        """Give it up, if it is still ours. Raises ``RemoteError``."""
        found = _read(self._objects)
        if found is not None and found.token == self.holder.token:
            self._objects.remove(LEASE)


def _read(objects: Objects) -> Holder | None:
    data = objects.read(LEASE)
    if data is None:
        return None
    try:
        record: dict[str, Any] = json.loads(data)
        return Holder(str(record["token"]), str(record["host"]), int(record["pid"]), float(record["since"]))
    except (ValueError, KeyError, TypeError):
        return Holder("", "unknown host", 0, 0.0)


def _age_s(objects: Objects) -> float:
    """How old the lease is by the clock of the store; 0 where it keeps no times."""
    probe = f".probe-{secrets.token_hex(8)}"
    objects.write(probe, b"may be removed\n")
    try:
        now, then = objects.info(probe), objects.info(LEASE)
    finally:
        objects.remove(probe)
    if then is None:
        return float("inf")
    if now is None or now.written is None or then.written is None:
        return 0.0
    return (now.written - then.written).total_seconds()


def _refusal(objects: Objects, other: Holder, age: float, stale_s: float) -> str:
    seen = f", seen {age:.0f} s ago" if age else ""
    return (
        f"{objects.address} is in use by {other}{seen}: wait for it, stop it, or choose another run.name; if it was "
        f"killed, it can be taken over {stale_s:.0f} s after it was last seen"
    )
