"""Writes a checkpoint of all components: the learner's, the predictor's, and where the run stands."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import ray

from actors.bundles import SaveEnvelope
from pipelines.archiving import Archiving
from pipelines.faults import user_error
from pipelines.length_forecasts import LengthForecasts, save_predictor
from pipelines.monitoring import MonitorGroup
from pipelines.roles import Roles
from storage.checkpoints import CheckpointError, CheckpointStore
from storage.ledger import Ledger

_COMPACT_BYTES = 1 << 20


class Checkpointing:
    """The checkpoints of one run, and the journal behind the oldest of them, which nobody needs any more."""

    def __init__(
        self, store: CheckpointStore, roles: Roles, archiving: Archiving, ledger: Ledger, monitors: MonitorGroup
    ) -> None:
        """Write to ``store``."""
        self._store = store
        self._roles = roles
        self._archiving = archiving
        self._ledger = ledger
        self._monitors = monitors
        self._compacted = 0

    def latest(self) -> str:
        """Folder of the newest checkpoint; empty without any."""
        newest = self._store.latest()
        return "" if newest is None else str(newest.path)

    def has(self, state: Mapping[str, Any]) -> bool:
        """True when the newest checkpoint is of this step and these knobs."""
        newest = self._store.latest()
        return newest is not None and newest.step == state["step"] and newest.meta.get("knobs", {}) == state["knobs"]

    async def write(
        self, state: Mapping[str, Any], learner_saved: Callable[[], Awaitable[Any]], forecasts: LengthForecasts
    ) -> None:
        """Write a checkpoint; ``learner_saved`` waits until the learner has written its part.

        Raises:
            CheckpointError: The disk refused it; earlier checkpoints are as they were.
        """
        with self._store.begin(state["step"]) as writer:
            await self._roles.learner_queue.put_async(SaveEnvelope(directory=str(writer.path)))
            try:
                await learner_saved()
            except ray.exceptions.RayError as error:
                fault = user_error(error)
                if fault is None:
                    raise
                raise CheckpointError(f"{fault}. Earlier checkpoints are intact.") from None
            await self._archiving.drain()
            await save_predictor(forecasts, writer)
            self._ledger.sync()
            self._monitors.sync()
            writer.commit(state)
        oldest = self._store.checkpoints()[0].meta["ledger_offset"]
        if oldest - self._compacted > _COMPACT_BYTES:
            self._ledger.compact(oldest)
            self._compacted = oldest
