"""Folders that travel between machines without a common disk: verified, fetched once, and cleared away."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from storage.files import StorageError
from storage.remote.address import Address
from storage.remote.held_run import hold_new
from storage.remote.objects import Objects, RemoteError
from storage.remote.parcels import PARCELS, local_folder, outgoing, parcel_address, receive
from storage.remote.staging import fetch
from tests.storage.remote.life import Life
from tests.storage.remote.stores import file_address, move_to


@pytest.fixture
def run(tmp_path, monkeypatch):
    move_to(monkeypatch, tmp_path / "machine")
    with hold_new(file_address(tmp_path / "store")) as held:
        held.config.write_text("run: {}\n")
        held.spread = True
        yield held


def test_a_folder_that_is_here_is_written_to(tmp_path):
    with outgoing(str(tmp_path), "file:///nowhere") as parcel:
        (parcel.path / "a").write_text("1")
    assert parcel.place == str(tmp_path)
    assert (tmp_path / "a").read_text() == "1"


def test_a_folder_that_is_elsewhere_gets_it_by_parcel(run, tmp_path):
    uri = run.parcel(5)
    with outgoing("/on/another/machine", uri) as parcel:
        (parcel.path / "model").mkdir()
        (parcel.path / "model" / "weights.bin").write_bytes(b"w" * 100_000)
        (parcel.path / "model" / "empty").write_bytes(b"")
    assert parcel.place == uri
    assert not parcel.path.exists()
    receive(uri, tmp_path / "arrived")
    assert (tmp_path / "arrived" / "model" / "weights.bin").read_bytes() == b"w" * 100_000
    assert (tmp_path / "arrived" / "model" / "empty").exists()
    assert not [name for name in Objects(Address.parse(run.address)).names() if name.startswith(PARCELS)]


def test_a_parcel_that_was_changed_on_its_way_is_refused(run, tmp_path):
    uri = parcel_address(run.address, 5)
    with outgoing("/on/another/machine", uri) as parcel:
        (parcel.path / "weights.bin").write_bytes(b"w" * 1000)
    Objects(Address.parse(uri)).write("weights.bin", b"v" * 1000)
    with pytest.raises(RemoteError, match="its checksum differs"):
        receive(uri, tmp_path / "arrived")


def test_without_a_shared_disk_and_a_uri_there_is_a_clear_error():
    with pytest.raises(
        StorageError, match=r"is not on this machine: put run\.directory on a file system that all nodes"
    ):
        outgoing("/on/another/machine", "").__enter__()


def test_a_model_is_fetched_once_per_machine_and_a_path_stays_a_path(run, tmp_path, monkeypatch):
    assert local_folder("/models/a") == Path("/models/a")
    model = tmp_path / "base"
    (model / "deep").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "deep" / "weights.bin").write_bytes(b"w" * 10)
    uri = run.send_model(model)
    move_to(monkeypatch, tmp_path / "other")
    fetched: list[str] = []

    def counting(objects, name, file, folder):
        fetched.append(name)
        fetch(objects, name, file, folder)

    monkeypatch.setattr("storage.remote.parcels.fetch", counting)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(local_folder(uri))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert sorted(fetched) == ["model/config.json", "model/deep/weights.bin"]
    assert (found[0] / "deep" / "weights.bin").read_bytes() == b"w" * 10


def test_the_model_of_a_checkpoint_is_found_and_stays_while_it_is_pinned(run, tmp_path, monkeypatch):
    life = Life(run.path)
    life.train()
    mirror = run.mirror()
    mirror.pin("checkpoints/step_000001/model/")
    mirror.sync()
    uri = run.reach(run.checkpoints / "step_000001" / "model")
    life.train()  # prunes the first checkpoint
    mirror.sync()
    life.close()
    move_to(monkeypatch, tmp_path / "other")
    assert (local_folder(uri) / "weights.bin").read_bytes() == b"1" * 1000
    with pytest.raises(RemoteError, match="no such folder in a run"):
        local_folder(uri.replace("model", "learner"))
