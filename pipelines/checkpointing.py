"""Writes a checkpoint of all components: the learner's, the predictor's, and where the run stands."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import ray

from actors.bundles import SaveEnvelope
from pipelines.archiving import Archiving
from pipelines.faults import user_error
from pipelines.length_forecasts import LengthForecasts, save_predictor
from pipelines.monitoring import MonitorGroup
from pipelines.roles import Roles
from storage.checkpoints import CheckpointError, CheckpointStore
from storage.files import StorageError
from storage.ledger import Ledger
from storage.remote.parcels import receive
from storage.run_directory import RunDirectory

log = logging.getLogger(__name__)

_COMPACT_BYTES = 1 << 20


class Checkpointing:
    """The checkpoints of one run, and the journal behind the oldest of them, which nobody needs any more."""

    def __init__(
        self,
        directory: RunDirectory,
        store: CheckpointStore,
        roles: Roles,
        archiving: Archiving,
        ledger: Ledger,
        monitors: MonitorGroup,
    ) -> None:
        """Write to ``store``, the checkpoints of ``directory``."""
        self._directory = directory
        self._store = store
        self._roles = roles
        self._archiving = archiving
        self._ledger = ledger
        self._monitors = monitors
        self._compacted = 0

    def latest(self) -> str:
        """Where people find the newest checkpoint; empty without any."""
        newest = self._store.latest()
        return "" if newest is None else self._directory.where(newest.path)

    def has(self, state: Mapping[str, Any]) -> bool:
        """True when the newest checkpoint is of this step and these knobs."""
        newest = self._store.latest()
        return newest is not None and newest.step == state["step"] and newest.meta.get("knobs", {}) == state["knobs"]

    async def _receive(self, uri: str, folder: Path) -> None:
        """Fetch what a learner that does not see the folder has sent."""
        try:
            await asyncio.to_thread(receive, uri, folder)
        except StorageError as error:
            raise CheckpointError(f"{error}. Earlier checkpoints are intact.") from None

    async def write(
        self, state: Mapping[str, Any], learner_saved: Callable[[], Awaitable[Any]], forecasts: LengthForecasts
    ) -> None:
        """Write a checkpoint; ``learner_saved`` waits until the learner has written its part.

        Raises:
            CheckpointError: The disk refused it, or the learner does not see it; earlier checkpoints are as they were.
        """
        with self._store.begin(state["step"]) as writer:
            uri = self._directory.parcel(state["step"])
            await self._roles.learner_queue.put_async(SaveEnvelope(directory=str(writer.path), uri=uri))
            try:
                header, _ = await learner_saved()
            except ray.exceptions.RayError as error:
                fault = user_error(error)
                if fault is None:
                    raise
                raise CheckpointError(f"{fault}. Earlier checkpoints are intact.") from None
            if uri and header.directory == uri:
                await self._receive(uri, writer.path)
            await self._archiving.drain()
            await save_predictor(forecasts, writer)
            self._ledger.sync()
            self._monitors.sync()
            writer.commit(state)
        # Not before the one that the run began with: the journal of a long run would never end.
        oldest = self._store.checkpoints()[-self._store.keep_last :][0].meta["ledger_offset"]
        if oldest - self._compacted > _COMPACT_BYTES:
            try:
                self._ledger.compact(oldest)
            except StorageError as error:  # it needs room for a copy, and saves some only after that
                log.warning("the journal stays as long as it is: %s", error)
            else:
                self._compacted = oldest
