"""Answers that died with their node or found no room: the role says so, and goes on with what comes after them."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from actors import turns
from actors.bundles import RecordEnvelope, StopEnvelope
from actors.drafts import worker
from actors.drafts.options import SpeculationOptions
from actors.turns import TurnOver
from storage.files import StorageError
from storage.history.archive import RolloutArchive
from storage.history.store import HistoryStore
from storage.records import SamplingParams
from tests.storage.history.answers import make_group


class Reader:
    def __init__(self, envelopes: list[Any]) -> None:
        self._envelopes = envelopes

    def get(self) -> Any:
        return self._envelopes.pop(0)

    def close(self) -> None: ...


def record(step: int) -> RecordEnvelope:
    return RecordEnvelope(split="train", step=step, groups=(step,), advantages={})  # type: ignore[arg-type]


def steps_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, error: Exception) -> list[Any]:
    """What a role yields for three steps, the second of which cannot be fetched for ``error``."""

    def fetched(groups: tuple[int, ...]) -> list[Any]:
        if groups == (2,):
            raise error
        return [make_group(groups[0])]

    monkeypatch.setattr(turns, "PAIRS_A_TURN", 1)
    monkeypatch.setattr(worker, "fetch_groups", fetched)
    monkeypatch.setattr(worker, "QueueReader", Reader)
    envelopes = [record(1), record(2), record(3), StopEnvelope()]
    role = worker.DraftRetrievalWorker(
        str(tmp_path / "train"), None, 1, {"train": SamplingParams(max_tokens=8)}, SpeculationOptions()
    )
    headers = []
    for _ in range(len(envelopes)):  # turns; a turn after the end is empty
        for header in role.run(envelopes):
            if header is not None and not isinstance(header, TurnOver):
                headers.append(header)
                assert header[3] == "" or role._observed == header[1], "packs would wait for it"
    return headers


def test_lost_answers_cost_their_step_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    error = ray.exceptions.ObjectLostError("ab" * 28, None, "")
    told = steps_told(monkeypatch, tmp_path, error)
    assert [(step, bool(lost)) for _, step, _, lost in told] == [(1, False), (2, True), (3, False)]
    assert RolloutArchive(tmp_path / "train").steps() == [1, 3]


def test_a_disk_that_refuses_the_archive_costs_its_step_and_no_drafts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    append = RolloutArchive.append

    def refused(self: RolloutArchive, step: int, *arguments: Any, **more: Any) -> Any:
        if step == 2:
            raise StorageError("no room")
        return append(self, step, *arguments, **more)

    monkeypatch.setattr(RolloutArchive, "append", refused)
    monkeypatch.setattr(worker, "fetch_groups", lambda groups: [make_group(groups[0])])
    monkeypatch.setattr(worker, "QueueReader", Reader)
    archive, history = str(tmp_path / "train"), str(tmp_path / "history")
    sampling = {"train": SamplingParams(max_tokens=8)}
    role = worker.DraftRetrievalWorker(archive, history, 1, sampling, SpeculationOptions(source="history"))
    told = [header for header in role.run([record(1), record(2), record(3), StopEnvelope()]) if header is not None]
    assert [(step, failure, lost) for _, step, failure, lost in told] == [(1, "", ""), (2, "", "no room"), (3, "", "")]
    assert RolloutArchive(archive).steps() == [1, 3]
    with HistoryStore(history, None) as store:
        assert store.stats().answers == sum(len(make_group(i).samples) for i in (1, 2, 3))


def test_a_dead_owner_ends_the_role(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with pytest.raises(ray.exceptions.OwnerDiedError):
        steps_told(monkeypatch, tmp_path, ray.exceptions.OwnerDiedError("ab" * 28, None, ""))
