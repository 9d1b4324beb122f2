"""Answers that died with the node they lay on: the role says so, and goes on with what comes after them."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from actors.bundles import RecordEnvelope, StopEnvelope
from actors.drafts import worker
from actors.drafts.options import SpeculationOptions
from storage.history.archive import RolloutArchive
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

    monkeypatch.setattr(worker, "fetch_groups", fetched)
    monkeypatch.setattr(worker, "QueueReader", Reader)
    envelopes = [record(1), record(2), record(3), StopEnvelope()]
    role = worker.DraftRetrievalWorker(
        str(tmp_path / "train"), None, 1, {"train": SamplingParams(max_tokens=8)}, SpeculationOptions()
    )
    headers = []
    for header in role.run(envelopes):
        if header is not None:
            headers.append(header)
            assert header[3] == "" or role._observed == header[1], "packs would wait for it"
    return headers


def test_lost_answers_cost_their_step_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    error = ray.exceptions.ObjectLostError("ab" * 28, None, "")
    told = steps_told(monkeypatch, tmp_path, error)
    assert [(step, bool(lost)) for _, step, _, lost in told] == [(1, False), (2, True), (3, False)]
    assert RolloutArchive(tmp_path / "train").steps() == [1, 3]


def test_a_dead_owner_ends_the_role(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with pytest.raises(ray.exceptions.OwnerDiedError):
        steps_told(monkeypatch, tmp_path, ray.exceptions.OwnerDiedError("ab" * 28, None, ""))
