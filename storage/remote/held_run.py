"""A run with a remote directory, held for writing: its lease, its folder on this machine and its mirror.

The driver takes the lease before anything is loaded and gives a ticket to the conductor, which may be on another
machine: there the same run is adopted, and what the driver has sent is fetched.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.files import StorageError
from storage.remote.address import Address
from storage.remote.lease import REFRESH_S, Holder, Lease, LeaseLost
from storage.remote.mirror import Mirror, retrying
from storage.remote.objects import Objects, RemoteError
from storage.remote.parcels import parcel_address
from storage.remote.staging import Progress, create_staging, fill_staging, refuse_existing, require_run
from storage.run_directory import RunDirectory, RunTicket

logger = logging.getLogger(__name__)

MODEL = "model"
"""Folder of a mirrored run with the model that it began with, where roles on other machines load it."""
_PATIENCE_S = 60.0


class HeldRun(RunDirectory):
    """A run below an address, with the right to write there; its paths are those of its folder on this machine.

    Attributes:
        spread: Roles may be on machines that do not see that folder.
    """

    def __init__(self, address: Address, objects: Objects, lease: Lease, path: Path) -> None:
        """Hold what was opened; see :func:`hold_new`, :func:`hold_existing` and :meth:`adopt`."""
        super().__init__(path)
        self._address = address
        self._objects = objects
        self._lease = lease
        self.spread = False

    @classmethod
    def adopt(cls, ticket: RunTicket) -> HeldRun:
        """Take part in a run that another process holds, on whatever machine this is.

        Raises:
            UserError: The run is gone.
            StorageError: The store or the disk failed.
            LeaseLost: Somebody else holds it by now.
        """
        address = Address.parse(ticket.uri)
        objects = Objects(address)
        lease = Lease(objects, Holder.myself(ticket.token))
        lease.check()
        run = cls(address, objects, lease, fill_staging(address, objects, logger.info))
        run.spread = ticket.spread
        return run

    @property
    def address(self) -> str:
        """URI of the run."""
        return str(self._address)

    @property
    def ticket(self) -> RunTicket:
        """For other processes of the run."""
        return RunTicket(uri=str(self._address), token=self._lease.holder.token, spread=self.spread)

    def reach(self, path: Path) -> str:
        """How a role finds a folder of the run, wherever it is."""
        return self.where(path) if self.spread else str(path)

    def parcel(self, step: int) -> str:
        """Address to which a role sends what it cannot write into this folder."""
        return parcel_address(self.address, step) if self.spread else ""

    def where(self, path: Path | str) -> str:
        """URI of a file or folder of the run."""
        return str(self._address.child(Path(path).relative_to(self.path).as_posix()))

    def mirror(self) -> Mirror:
        """Start to mirror the folder. Raises ``StorageError``."""
        return Mirror.open(self.path, self._objects, self._lease)

    def send(self) -> None:
        """Make the remote side what the folder is; for a process other than the conductor, while that is not there.

        Raises:
            StorageError: It did not succeed within a minute.
            LeaseLost: Somebody else writes there.
        """
        retrying(self.mirror().sync, deadline_s=_PATIENCE_S)

    def send_model(self, folder: Path) -> str:
        """Put a model beside the run for roles on other machines; returns its URI. Raises as :meth:`send`."""
        mirror = self.mirror()
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            mirror.add(f"{MODEL}/{path.relative_to(folder).as_posix()}", path)
        retrying(mirror.sync, deadline_s=_PATIENCE_S)
        return str(self._address.child(MODEL))

    def refill(self) -> None:
        """Have in the folder what the conductor sent last, if it was on another machine. Raises ``StorageError``."""
        fill_staging(self._address, self._objects, logger.info)

    def release(self) -> None:
        """Give the lease up; a failure leaves it to grow stale."""
        try:
            self._lease.release()
        except RemoteError as error:
            logger.warning("the lease stays until it is stale: %s", error)


@contextmanager
def hold_new(address: Address) -> Iterator[HeldRun]:
    """Claim an address for a new run while the block lasts.

    Raises:
        UserError: There is a run already, or somebody is about to start one.
        StorageError: The store or the disk failed.
    """
    objects = Objects(address)
    refuse_existing(objects)
    with _leased(objects) as lease:
        refuse_existing(objects)
        yield HeldRun(address, objects, lease, create_staging(address))


@contextmanager
def hold_existing(address: Address, say: Progress) -> Iterator[HeldRun]:
    """Hold a run to go on with while the block lasts; its folder on this machine has all that it needs.

    Raises:
        UserError: There is no such run, or somebody writes there.
        StorageError: The store or the disk failed.
    """
    objects = Objects(address)
    require_run(objects)
    with _leased(objects) as lease:
        yield HeldRun(address, objects, lease, fill_staging(address, objects, say))


@contextmanager
def _leased(objects: Objects) -> Iterator[Lease]:
    """Take the lease and keep it fresh on a thread while the block lasts."""
    lease = Lease.acquire(objects)
    over = threading.Event()

    def refresh() -> None:
        while not over.wait(REFRESH_S):
            try:
                lease.refresh()
            except StorageError as error:
                logger.warning("the lease of %s was not refreshed: %s", objects.address, error)
            except LeaseLost:  # whoever writes finds out and says so
                return

    thread = threading.Thread(target=refresh, name="lease", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        over.set()
        thread.join()
        try:
            lease.release()
        except RemoteError as error:
            logger.warning("the lease stays until it is stale: %s", error)
