"""Keeps the remote side of a run up with it, beside the training: never in its way for longer than one upload.

After each step what has changed is sent in the background; while an upload is under way, steps only make it go on once
more at its end. A checkpoint waits for an upload that makes progress, so that the remote side is never more than one
checkpoint behind, but not for one that fails: the run goes on, its folder is safe, and the failure is told.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from storage.checkpoints import Checkpoint
from storage.errors import UserError
from storage.files import StorageError
from storage.remote.held_run import HeldRun
from storage.remote.lease import REFRESH_S, LeaseLost
from storage.remote.mirror import Mirror, Upload, retrying
from storage.remote.staging import discard_staging

log = logging.getLogger(__name__)

FINAL_DEADLINE_S = 120.0
"""How long the end of a run tries to send what is left. Unit: seconds."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(slots=True)
class Account:
    """What was sent since the start of the process.

    Attributes:
        last: The newest upload; None before the first.
        nbytes: Bytes of all uploads.
        failures: Attempts that failed.
        step: Training steps that are on the remote side.
    """

    last: Upload | None = None
    nbytes: int = 0
    failures: int = 0
    step: int = -1


class Mirroring:
    """Uploads of one run, on the event loop of its conductor."""

    def __init__(self, run: HeldRun, mirror: Mirror, alarm: Callable[[str], None]) -> None:
        """Send what ``mirror`` finds; ``alarm`` is told what people should know."""
        self._run = run
        self._mirror = mirror
        self._alarm = alarm
        self._step = -1
        self._more = False
        self._failing = False
        self._lost: LeaseLost | None = None
        self._over = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self.account = Account()

    @classmethod
    async def open(cls, run: HeldRun, alarm: Callable[[str], None]) -> Mirroring:
        """Begin to mirror ``run``. Raises ``StorageError`` and ``LeaseLost``."""
        mirroring = cls(run, await asyncio.to_thread(run.mirror), alarm)
        mirroring._beating = asyncio.create_task(mirroring._beat())
        return mirroring

    async def begin_at(self, checkpoint: Checkpoint) -> None:
        """The run goes on from a checkpoint; what lies beyond on the remote side only is of another path.

        Raises:
            StorageError: Roles on other machines could not load it, as it cannot be sent.
            LeaseLost: Another process writes to the run.
        """
        self._mirror.forget_after(checkpoint.step)
        self._step = checkpoint.step
        if self._run.spread:
            self._mirror.pin(f"checkpoints/{checkpoint.path.name}/model/")
            await self.sent()

    def stepped(self, step: int) -> None:
        """Send what has changed with a step, as soon as nothing else is under way.

        Raises:
            LeaseLost: Another process writes to the run.
        """
        self._check()
        self._step = step
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        else:
            self._more = True

    async def saved(self, step: int) -> None:
        """Send a checkpoint: at once, when the upload before it has ended or fails. Raises as :meth:`stepped`."""
        while self._sending is not None and not self._sending.done() and not self._failing:
            await asyncio.wait({self._sending}, timeout=0.2)
        self.stepped(step)

    async def sent(self) -> None:
        """Wait until all that has happened is on the remote side.

        Raises:
            StorageError: It cannot be sent now.
            LeaseLost: Another process writes to the run.
        """
        self.stepped(self._step)
        while self._sending is not None and not self._sending.done():
            await asyncio.wait({self._sending}, timeout=0.2)
            if self._failing:
                raise StorageError(f"{self._run.address} does not take what is sent now: see the alarms of the run")
        self._check()

    def metrics(self) -> dict[str, float]:
        """What a step reports of the uploads."""
        account, last = self.account, self.account.last
        found = {"storage/upload_failures": float(account.failures), "storage/upload_mb": account.nbytes / 1e6}
        if last is not None:
            found["storage/upload_s"] = last.seconds
        if account.step >= 0:
            found["storage/lag_steps"] = float(self._step - account.step)
        return found

    async def close(
        self, *, finished: bool, refresh: Callable[[], None] = lambda: None, deadline_s: float = FINAL_DEADLINE_S
    ) -> str:
        """Send the rest, give the lease up and, where all is sent and the run is over, remove its folder here.

        Args:
            finished: The run needs its folder no more.
            refresh: Writes the status of the run once more, with the last alarms, before it is sent for good.
            deadline_s: How long to try.

        Returns:
            What went wrong, in one sentence that says where the local copy is; empty if nothing did.
        """
        self._over.set()
        for task in (self._sending, self._beating):
            if task is not None:
                await task  # a thread cannot be cut off, and two must not write at once
        if self._lost is not None:
            return str(self._lost)
        try:
            # the first pass may leave a file under another name, as its own is still in use; the second one moves it
            await asyncio.to_thread(self._settle, deadline_s)
            self._works()
            refresh()
            await asyncio.to_thread(self._settle, deadline_s)
        except LeaseLost as error:
            return str(error)
        except UserError as error:
            return (
                f"the last of it could not be sent to {self._run.address} ({error}); the whole run is in "
                f"{self._run.path} on {socket.gethostname()}, and resuming it there sends it"
            )
        await asyncio.to_thread(self._run.release)
        if finished:
            await asyncio.to_thread(discard_staging, self._run.path)
        return ""

    def _settle(self, deadline_s: float) -> None:
        retrying(lambda: self._mirror.sync(settle=True), deadline_s=deadline_s)

    def _works(self) -> None:
        if self._failing:
            log.warning("uploads work again")
            self._alarm("the run directory is sent again; nothing is missing")
        self._failing = False

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def _send(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            self._more, step = False, self._step
            try:
                done = await asyncio.to_thread(self._mirror.sync)
            except LeaseLost as error:
                self._lose(error)
                return
            except Exception as error:  # supervision: an upload that breaks must not break the training
                self.account.failures += 1
                self._failing = True
                unforeseen = not isinstance(error, UserError)
                log.warning("upload failed, trying again in %.0f s: %s", pause, error, exc_info=unforeseen)
                self._alarm(f"the run directory is not sent at the moment, the run goes on: {error}")
                if await self._ends_within(pause):
                    return
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                continue
            self._works()
            pause = _FIRST_PAUSE_S
            self.account.last, self.account.step = done, step
            self.account.nbytes += done.nbytes
            if not self._more:
                return

    async def _beat(self) -> None:
        """Show that the run lives, and its status, while steps take long."""
        while True:
            try:
                await asyncio.to_thread(self._mirror.beat)
            except LeaseLost as error:
                self._lose(error)
                return
            except StorageError as error:
                log.warning("no sign of life was sent: %s", error)
            if await self._ends_within(REFRESH_S):
                return

    async def _ends_within(self, seconds: float) -> bool:
        """Wait for a while; True at once when the mirroring is closed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)
        return self._over.is_set()

    def _lose(self, error: LeaseLost) -> None:
        if self._lost is None:
            self._lost = error
            log.error("%s", error)
            self._alarm(str(error))
