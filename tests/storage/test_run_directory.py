"""A run directory is made once, found again, and written by one process at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from storage.errors import UserError
from storage.files import StorageError, atomic_write, require_free_space, truncate_file
from storage.run_directory import RunDirectory


def make_run(parent: Path, name: str, changed: int = 1_000_000) -> RunDirectory:
    run = RunDirectory.create(parent, name)
    run.config.write_text("run: {}\n")
    os.utime(run.config, (changed, changed))
    return run


def test_new_run_has_its_paths(tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "first-1.2")
    assert run.path == tmp_path / "runs" / "first-1.2"
    assert run.path.is_dir()
    paths = (
        run.config,
        run.metrics,
        run.events,
        run.tensorboard,
        run.rollouts,
        run.checkpoints,
        run.ledger,
        run.status,
    )
    assert [p.relative_to(run.path).as_posix() for p in paths] == [
        "config.yaml",
        "metrics.jsonl",
        "events.log",
        "tensorboard",
        "rollouts",
        "checkpoints",
        "ledger.jsonl",
        "status.json",
    ]


def test_existing_run_is_never_mixed_with_a_new_one(tmp_path):
    RunDirectory.create(tmp_path, "a")
    RunDirectory.create(tmp_path, "a")  # still empty: nothing to lose
    run = make_run(tmp_path, "a")
    with pytest.raises(UserError, match=rf"{run.path} exists already: go on with --resume {run.path}, or choose"):
        RunDirectory.create(tmp_path, "a")


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a b"])
def test_name_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"run\.name="):
        RunDirectory.create(tmp_path, name)


def test_parent_that_is_a_file_is_one_clear_error(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match=r"cannot make run directory .*is a file, not a folder"):
        RunDirectory.create(tmp_path / "runs", "a")


def test_run_is_found_by_path_and_by_name(tmp_path, monkeypatch):
    run = make_run(tmp_path / "runs", "alpha")
    assert RunDirectory.open(run.path).path == run.path
    monkeypatch.chdir(tmp_path)
    assert RunDirectory.open(Path("alpha"), Path("runs")).path == Path("runs/alpha")
    assert RunDirectory.open(Path("runs/alpha"), Path("runs")).path == Path("runs/alpha")


def test_wrong_path_names_the_nearest_runs(tmp_path):
    runs = tmp_path / "runs"
    for name in ("baseline-0412", "baseline-0413", "other"):
        make_run(runs, name)
    with pytest.raises(UserError, match=r"baseline-0411 does not exist; did you mean .*baseline-041[23]") as caught:
        RunDirectory.open(runs / "baseline-0411")
    assert "other" not in str(caught.value)
    with pytest.raises(UserError, match=r"runs is not a run: it has no config.yaml; did you mean .*runs/baseline-0412"):
        RunDirectory.open(runs)
    with pytest.raises(UserError, match=r"did you mean .*runs/other"):
        RunDirectory.open(Path("othr"), runs)
    with pytest.raises(UserError, match="nowhere does not exist; no runs are near it"):
        RunDirectory.open(tmp_path / "empty" / "nowhere")


def test_latest_run_is_the_one_that_changed_last(tmp_path):
    with pytest.raises(UserError, match="holds no runs"):
        RunDirectory.latest(tmp_path / "runs")
    make_run(tmp_path, "b", changed=2_000_000)
    a = make_run(tmp_path, "a", changed=1_000_000)
    (tmp_path / "zzz").mkdir()
    assert RunDirectory.latest(tmp_path).path.name == "b"
    a.metrics.write_text("{}\n")
    assert RunDirectory.latest(tmp_path).path.name == "a"


def test_two_processes_cannot_train_in_one_directory(tmp_path):
    run = make_run(tmp_path, "a")
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from storage.run_directory import RunDirectory\n"
            "with RunDirectory.open(Path(sys.argv[1])).lock():\n    print('held', flush=True); sys.stdin.read()",
            str(run.path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match=rf"in use by process {holder.pid} on "), run.lock():
        pass
    holder.kill()  # the lock dies with its process, however that ends
    holder.communicate()
    with run.lock():
        pass
    with run.lock():
        pass


def test_lock_clears_what_killed_writers_left(tmp_path):
    run = make_run(tmp_path, "a")
    leftover = run.path / ".status.json.tmp-123"
    leftover.write_text("half")
    with run.lock():
        assert not leftover.exists()


def test_atomic_write_keeps_the_old_file_when_the_disk_refuses(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    atomic_write(path, b"old")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(StorageError, match=r"status\.json: No space left on device; free space"):
            atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_truncation_refuses_what_is_not_there(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    truncate_file(path, 3)
    assert path.read_bytes() == b"123"
    with pytest.raises(StorageError, match="has 3 bytes where 4 were saved"):
        truncate_file(path, 4)
    with pytest.raises(StorageError, match="No such file"):
        truncate_file(tmp_path / "gone", 0)


def test_missing_space_is_seen_before_writing(tmp_path):
    require_free_space(tmp_path / "not" / "yet", 1, "a checkpoint")
    with pytest.raises(StorageError, match=r"a checkpoint needs .* MiB are free"):
        require_free_space(tmp_path / "not" / "yet", 1 << 60, "a checkpoint")
