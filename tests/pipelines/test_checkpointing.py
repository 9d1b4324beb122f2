"""What a checkpoint does beside being written."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines import checkpointing
from pipelines.checkpointing import Checkpointing
from storage.checkpoints import CheckpointStore
from storage.files import StorageError
from storage.run_directory import RunDirectory


async def nothing(*_: object, **__: object) -> Any:
    return SimpleNamespace(directory=""), None


class FullLedger:
    """A journal on a disk without room for a copy."""

    def __init__(self) -> None:
        self.tried: list[int] = []

    def sync(self) -> None: ...

    def compact(self, before: int) -> None:
        self.tried.append(before)
        if len(self.tried) < 3:
            raise StorageError("no room")


def test_a_journal_that_cannot_be_shortened_costs_no_checkpoint_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpointing, "save_predictor", nothing)
    directory = RunDirectory(tmp_path)
    store, ledger = CheckpointStore(directory.checkpoints, keep_last=1), FullLedger()
    roles = SimpleNamespace(learner_queue=SimpleNamespace(put_async=nothing))
    parts: Any = (directory, store, roles, SimpleNamespace(drain=nothing), ledger, SimpleNamespace(sync=lambda: None))
    made = Checkpointing(*parts)
    forecasts: Any = None
    far = 2 << 20
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3, 4):
            asyncio.run(made.write({"step": step, "ledger_offset": far + step}, nothing, forecasts))
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [4]
    assert ledger.tried == [far + 1, far + 2, far + 3], "and once that was done, not for a while"
    assert [record.message for record in caplog.records] == ["the journal stays as long as it is: no room"] * 2
