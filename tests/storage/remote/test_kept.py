"""Copies of remote runs on this machine: bounded, the least recently used first, and never one that is in use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.files import StorageError
from storage.remote import kept
from storage.remote.held_run import hold_new
from storage.remote.kept import entries, keep, limit_bytes, remove, trim
from storage.remote.parcels import local_folder
from storage.remote.view import open_view
from tests.storage.remote.life import Life
from tests.storage.remote.stores import file_address, leave, move_to

HOLD = """
import sys
from storage.remote.kept import keep
print(keep("views", sys.argv[1]), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Iterator[Path]:
    move_to(monkeypatch, tmp_path / "cache")
    yield tmp_path / "cache"
    leave()


def fill(uri: str, nbytes: int, age_s: float, kind: kept.Kind = "views") -> Path:
    folder = keep(kind, uri)
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / "data").write_bytes(b"x" * nbytes)
    then = time.time() - age_s
    os.utime(folder / ".used", (then, then))
    return folder


def test_the_least_recently_used_goes_first():
    oldest, older, newest = (fill(f"s3://bucket/{age}", 1000, age, "fetched") for age in (300, 200, 100))
    leave()
    assert [entry.path for entry in entries()] == [oldest, older, newest]
    gone = trim(max_bytes=1500)
    assert [entry.uri for entry in gone] == ["s3://bucket/300", "s3://bucket/200"]
    assert [entry.path for entry in entries()] == [newest]
    assert trim(max_bytes=1500) == []
    assert not oldest.exists()
    assert not list(oldest.parent.glob(".going-*"))


def test_what_was_not_used_for_long_goes_whatever_its_size():
    old, young = fill("s3://bucket/old", 1, 40 * 86400), fill("s3://bucket/young", 1, 86400)
    leave()
    assert [entry.path for entry in trim()] == [old]
    assert young.exists()


def test_using_a_folder_again_makes_it_the_newest():
    a, b = fill("s3://bucket/a", 1000, 300), fill("s3://bucket/b", 1000, 200)
    leave()
    assert keep("views", "s3://bucket/a") == a
    leave()
    trim(max_bytes=1500)
    assert a.exists()
    assert not b.exists()


def test_a_new_folder_makes_room_for_itself():
    old = fill("s3://bucket/old", 1, 40 * 86400)
    leave()
    keep("fetched", "s3://bucket/new")
    assert not old.exists()


def test_what_another_process_uses_stays():
    mine = fill("s3://bucket/mine", 1000, 0)
    with subprocess.Popen([sys.executable, "-c", HOLD, "s3://bucket/its"], stdin=-1, stdout=-1, text=True) as holder:
        its = Path(holder.stdout.readline().strip())
        (its / "data").write_bytes(b"x" * 1000)
        assert {entry.uri: entry.busy for entry in entries()} == {"s3://bucket/mine": True, "s3://bucket/its": True}
        assert trim(max_bytes=0, max_age_s=0) == []
        leave()
        assert [entry.uri for entry in trim(max_bytes=0)] == ["s3://bucket/mine"]
        assert (its / "data").exists()
        holder.kill()  # its locks die with it
        holder.wait()
    assert [entry.path for entry in trim(max_bytes=0)] == [its]
    assert not mine.exists()


def test_whoever_comes_while_a_folder_is_removed_gets_a_new_one():
    folder = fill("s3://bucket/a", 10, 0)
    leave()
    assert remove(entries()[0])
    assert keep("views", "s3://bucket/a") == folder
    assert [path.name for path in folder.iterdir()] == [".used"]
    (folder / ".used").unlink()  # by hand, while it is in use
    assert keep("views", "s3://bucket/a") == folder
    assert (folder / ".used").exists()


def test_what_a_killed_process_had_begun_to_remove_goes(cache):
    going = cache / "views" / ".going-0123-99"
    going.mkdir(parents=True)
    (going / "data").write_bytes(b"x")
    keep("views", "s3://bucket/a")
    assert not going.exists()


def test_copies_of_an_earlier_version_are_known_by_their_marker(tmp_path):
    with hold_new(file_address(tmp_path / "store", "first")) as held:
        life = Life(held.path)
        life.train()
        held.send()
        folder = open_view(held.address).fetch()
        life.close()
        address = held.address
    leave()
    (folder.parent / ".used").unlink()
    (entry,) = entries()
    assert (entry.uri, entry.kind, entry.busy) == (address, "views", False)
    assert remove(entry)


def test_views_and_models_are_kept_while_they_are_used(tmp_path):
    with hold_new(file_address(tmp_path / "store", "first")) as held:
        life = Life(held.path)
        life.train()
        held.send()
        view = open_view(held.address).fetch("checkpoints/")
        model = local_folder(f"{held.address}/checkpoints/step_000001")
        life.close()
    assert [entry.busy for entry in entries()] == [True, True]
    assert trim(max_bytes=0, max_age_s=-1) == []
    assert (view / "metrics.jsonl").exists()
    leave()
    assert len(trim(max_bytes=0, max_age_s=-1)) == 2
    assert not view.exists()
    assert not model.exists()


def test_the_bound_is_a_share_of_a_small_disk(monkeypatch):
    usage = type("usage", (), {"total": 10 << 30, "free": 1})
    monkeypatch.setattr(kept.shutil, "disk_usage", lambda path: usage)
    assert limit_bytes() == 1 << 30
    usage.total = 10 << 40
    assert limit_bytes() == kept.MAX_BYTES
    usage.total = 0  # some network mounts say so
    assert limit_bytes() == kept.MAX_BYTES


def test_a_disk_that_refuses_is_one_clear_error(cache):
    cache.write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*SLIPSTREAM_CACHE"):
        keep("views", "s3://bucket/a")
