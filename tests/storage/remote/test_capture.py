"""A look at a run directory that is being written holds files that fit together, whatever happens meanwhile."""

from __future__ import annotations

import os

import pytest

from storage.files import StorageError
from storage.remote import capture as capture_module
from storage.remote.capture import capture
from tests.storage.remote.life import Life


def names(found) -> set[str]:
    return {file.name for file in found.changed}


def test_files_that_are_removed_after_the_look_can_still_be_read(tmp_path):
    life = Life(tmp_path)
    life.train()
    with capture(tmp_path, {}) as found:
        life.train()  # prunes the checkpoint, seals the history and compacts the ledger
        life.close()
        by_name = {file.name: file for file in found.changed}
        assert not (tmp_path / "checkpoints" / "step_000001").exists()
        weights = by_name["checkpoints/step_000001/model/weights.bin"]
        assert os.pread(weights.descriptor, weights.stamp.size, 0) == b"1" * 1000


def test_what_is_known_and_unchanged_is_not_opened(tmp_path):
    life = Life(tmp_path)
    life.train()
    life.close()
    with capture(tmp_path, {}) as first:
        known = {file.name: file.stamp for file in first.changed}
    with capture(tmp_path, known) as second:
        assert not second.changed
        assert second.unchanged == set(known)
        assert set(second.live) == {"config.yaml", "status.json"}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    with capture(tmp_path, known) as third:
        assert names(third) == {"metrics.jsonl"}


@pytest.mark.parametrize("place", ["checkpoints/step_000001/CHECKPOINT.json", "history/MANIFEST.json", "ledger.jsonl"])
def test_a_step_in_the_middle_of_the_look_makes_it_look_again(tmp_path, monkeypatch, place):
    life = Life(tmp_path)
    life.train()
    opened: list[str] = []
    original = os.open

    def opening(path, *arguments, **named):
        relative = str(path).removeprefix(f"{tmp_path}/")
        if relative == place and place not in opened:
            opened.append(place)
            life.train()
        return original(path, *arguments, **named)

    monkeypatch.setattr(capture_module.os, "open", opening)
    with capture(tmp_path, {}) as found:
        steps = {name.split("/")[1] for name in names(found) if name.startswith("checkpoints/")}
        assert steps == {"step_000002"}
        segments = {name for name in names(found) if name.startswith(("history/segments", "history/wal"))}
        assert segments == {path.relative_to(tmp_path).as_posix() for path in (tmp_path / "history").glob("*/*.arrow*")}
    life.close()
    assert opened


def test_a_directory_that_never_rests_is_an_error_and_leaks_nothing(tmp_path, monkeypatch):
    life = Life(tmp_path)
    life.train()
    life.close()
    counter = iter(range(10**6))
    monkeypatch.setattr(capture_module, "_versions", lambda directory: (frozenset(), str(next(counter)).encode()))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match="changes faster than it can be mirrored"):
        capture(tmp_path, {})
    assert len(os.listdir("/proc/self/fd")) == before
