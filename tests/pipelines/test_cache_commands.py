"""`slipstream cache`: what is kept on this machine, and giving it back."""

from __future__ import annotations

import os
import time

import pytest

from pipelines import cli
from storage.files import try_lock
from storage.remote import kept
from storage.remote.marker import Marker
from tests.storage.remote.stores import leave


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(folder))
    monkeypatch.setenv("COLUMNS", "160")
    yield folder
    leave()


def test_all_kinds_are_listed_with_size_and_state(cache, capsys):
    (cache / "models" / "tiny-0123").mkdir(parents=True)
    (cache / "models" / "tiny-0123" / "weights").write_bytes(b"w" * 2_500_000)
    (kept.keep("fetched", "s3://bucket/used") / "weights").write_bytes(b"w" * 1500)
    for name in ("at-work", "left"):
        run = cache / "runs" / "0123" / name
        run.mkdir(parents=True)
        Marker(f"s3://bucket/{name}").save(run)
    lock = try_lock(cache / "runs" / "0123" / "at-work" / ".lock")
    assert cli.main(["cache"]) == 0
    told = capsys.readouterr().out
    lines = {line.split()[1]: " ".join(line.split()) for line in told.splitlines() if "://" in line or "tiny" in line}
    assert "2.5 MB" in lines["tiny-0123"]
    assert lines["s3://bucket/used"].startswith("fetched s3://bucket/used 1.5 kB")
    assert lines["s3://bucket/used"].endswith("in use")
    assert lines["s3://bucket/at-work"].endswith("at work")
    assert lines["s3://bucket/left"].endswith("left behind")
    assert "slipstream train --resume 's3://bucket/left'" in told
    assert "--resume 's3://bucket/at-work'" not in told
    os.close(lock)


def test_an_empty_cache_says_so(cache, capsys):
    assert cli.main(["cache"]) == 0
    assert f"{cache}: nothing is kept" in capsys.readouterr().out


def test_clear_removes_what_nobody_uses(capsys):
    old = kept.keep("views", "s3://bucket/old")
    then = time.time() - 3 * 86400
    os.utime(old / ".used", (then, then))
    leave()
    recent = kept.keep("fetched", "s3://bucket/recent")
    assert cli.main(["cache", "clear", "--unused-days", "2"]) == 0
    assert not old.exists()
    assert cli.main(["cache", "clear"]) == 0
    assert f"in use, and not removed: {recent} (s3://bucket/recent)" in capsys.readouterr().out
    leave()
    assert cli.main(["cache", "clear", "views"]) == 0
    assert recent.exists()
    assert cli.main(["cache", "clear", "fetched"]) == 0
    assert not recent.exists()


def test_clear_leaves_alone_what_is_not_there_twice(cache, capsys):
    run = cache / "runs" / "0123" / "left"
    run.mkdir(parents=True)
    assert cli.main(["cache", "clear"]) == 0
    assert run.exists()
    assert cli.main(["cache", "clear", "runs"]) == 2
    assert "it can be views or fetched" in capsys.readouterr().err
