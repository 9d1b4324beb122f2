"""No room where a run is mirrored to, or on the machine that fetches it: told with the place, nothing half is left."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pipelines.launch import train
from storage.checkpoints import CheckpointStore
from storage.files import StorageError
from storage.remote.address import Address
from storage.remote.held_run import hold_new
from storage.remote.mirror import Mirror
from storage.remote.objects import Objects, RemoteError
from storage.remote.parcels import local_folder
from storage.remote.staging import fill_staging, staging_directory
from storage.run_directory import RunDirectory
from tests.faults.conftest import Disk
from tests.runs import small_config, steps_of, trained_keys
from tests.storage.remote.life import Life, assert_resumable
from tests.storage.remote.stores import file_address, move_to


def sent(run: Any) -> Mirror:
    mirror: Mirror = run.mirror()
    mirror.sync()
    return mirror


def resumed_step(directory: Path) -> int:
    newest = assert_resumable(directory, 0)
    return newest.step if newest else 0


def test_a_full_store_is_named_and_takes_the_rest_when_it_has_room_again(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_to(monkeypatch, tmp_path / "machine")
    with hold_new(file_address(disk.path)) as run:
        life = Life(run.path)
        life.train()
        mirror = sent(run)
        disk.resize(disk.used)
        life.train()
        with pytest.raises(RemoteError, match=rf"cannot write file://{disk.path}/run/.*: no space left there; free"):
            mirror.sync()
        move_to(monkeypatch, tmp_path / "second")
        there = fill_staging(file_address(disk.path), Objects(file_address(disk.path)), lambda text: None)
        assert resumed_step(there) == 1, "what was there is as it was"
        disk.resize("16m")
        mirror.sync()
        life.close()
    move_to(monkeypatch, tmp_path / "third")
    there = fill_staging(file_address(disk.path), Objects(file_address(disk.path)), lambda text: None)
    assert resumed_step(there) == 2


def test_a_machine_without_room_fetches_nothing_and_says_how_much_is_missing(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_to(monkeypatch, tmp_path / "machine")
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "weights.bin").write_bytes(b"w" * (4 << 20))
    with hold_new(file_address(tmp_path / "store")) as run:
        Life(run.path).train()
        uri = run.send_model(base)
        move_to(monkeypatch, disk.path / "machine")
        disk.resize("2m")
        with pytest.raises(StorageError, match=rf"{disk.path}/machine/.* takes 4\.0 MiB, \d\.\d MiB are free; .*CACHE"):
            local_folder(uri)
        # and where others take the room while it is being fetched
        monkeypatch.setattr("storage.remote.parcels.require_room", lambda *_: None)
        with pytest.raises(StorageError, match=rf"cannot write {disk.path}/machine/.*weights\.bin.*: No space left"):
            local_folder(uri)
        assert disk.used < 1 << 20, "what was fetched in vain takes no room"
        disk.resize("16m")
        assert (local_folder(uri) / "weights.bin").stat().st_size == 4 << 20


@pytest.mark.slow
def test_a_run_goes_on_while_the_store_is_full_and_what_could_not_be_sent_is_sent_when_it_is_resumed(
    ray_session: None, random_llama: Path, disk: Disk, capfd: pytest.CaptureFixture[str]
) -> None:
    place = f"file://{disk.path}"
    address = Address.parse(place).child("far")
    options = ("checkpoint.every=1", "evaluation.before=false", "evaluation.after=false", "data.prompts=16")
    config = small_config(random_llama, place, "far", *options, "run.steps=8")  # type: ignore[arg-type]

    def fill() -> None:
        while not (disk.path / "far" / "checkpoints" / "step_000002" / "CHECKPOINT.json").exists():
            time.sleep(0.01)
        disk.resize(disk.used)

    filling = threading.Thread(target=fill, daemon=True)
    filling.start()
    assert train(config, name="far") == 2
    error = capfd.readouterr().err
    here = staging_directory(address)
    assert error.count("error: ") == 1
    assert "Traceback" not in error
    assert "the run has finished, but the last of it could not be sent" in error
    assert "no space left there" in error
    assert str(here) in error
    status = json.loads((here / "status.json").read_text())
    assert any("is not sent at the moment, the run goes on" in alarm for alarm in status["alarms"])
    assert CheckpointStore(here / "checkpoints").latest().step == 8  # type: ignore[union-attr]
    assert len(set(trained_keys(here))) == 32

    disk.resize("32m")
    assert train(config, name="far", resume=str(address)) == 0
    there = RunDirectory(disk.path / "far").path
    assert not here.exists(), "all of it is in the store"
    assert [record["step"] for record in steps_of(there)] == list(range(1, 9))
    assert len(trained_keys(there)) == len(set(trained_keys(there))) == 32
    Objects(address).check()
