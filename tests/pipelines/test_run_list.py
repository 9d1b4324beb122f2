"""`slipstream runs`, and how status, show and history find a run where a place or a wrong name is given."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from pipelines import cli
from pipelines.status import RunStatus
from storage.remote.held_run import hold_new
from storage.remote.kept import keep
from storage.remote.marker import Marker
from storage.remote.staging import staging_directory
from storage.run_directory import RunDirectory
from tests.storage.remote.stores import file_address, move_to

NOW = 1_800_000_000.0


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    move_to(monkeypatch, tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def report(directory: Path, step: int, updated: float, **facts) -> None:
    """Have a run report itself."""
    (directory / "config.yaml").write_text("run: {}\n")
    os.utime(directory / "config.yaml", (updated, updated))
    status = RunStatus(name=directory.name, directory=str(directory), step=step, steps=9, updated=updated, **facts)
    (directory / "status.json").write_text(status.to_json())
    os.utime(directory / "status.json", (updated, updated))


def local_run(name: str, step: int, updated: float, **facts) -> Path:
    directory = RunDirectory.create(Path("runs"), name)
    (directory.ledger).write_text("")
    os.utime(directory.ledger, (updated, updated))
    report(directory.path, step, updated, **facts)
    return directory.path


def remote_run(tmp_path: Path, name: str, step: int, updated: float, **facts) -> str:
    """A run at a URI that has ended, of which this machine has nothing."""
    address = file_address(tmp_path / "store", name)
    with hold_new(address) as held:
        report(held.path, step, updated, **facts)
        held.send()
    for path in staging_directory(address).parent.iterdir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    return str(address)


def table(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split() for line in text.splitlines() if len(line.split()) > 4}


def test_runs_of_a_folder_the_newest_first(capsys):
    local_run("older", 9, NOW - 100, state="finished", latest={"reward/mean": 0.5})
    local_run("newer", 3, NOW, state="generating", host=socket.gethostname(), pid=2**22 + 1)
    RunDirectory.create(Path("runs"), "mute").config.write_text("run: {}\n")
    assert cli.main(["runs"]) == 0
    told = capsys.readouterr().out
    rows = table(told)
    assert list(rows)[1:] == ["newer", "older", "mute"]
    assert rows["newer"][1:3] == ["dead", "3/9"]
    assert rows["older"][1:4] == ["finished", "9/9", "0.500"]
    assert rows["mute"][1:3] == ["no", "status"]
    assert cli.main(["runs", "runs", "--limit", "1"]) == 0
    told = capsys.readouterr().out
    assert "2 older runs (--limit)" in told
    assert "older " not in table(told)


def test_runs_below_a_uri(tmp_path, capsys):
    remote_run(tmp_path, "first", 2, NOW, state="finished", latest={"reward/mean": 0.25})
    uri = remote_run(tmp_path, "second", 1, NOW + 5, state="generating", host="another", pid=1)
    parent = uri.rpartition("/")[0]
    assert cli.main(["runs", parent]) == 0
    rows = table(capsys.readouterr().out)
    assert list(rows)[1:] == ["second", "first"]
    assert rows["first"][1:4] == ["finished", "2/9", "0.250"]
    assert cli.main(["runs", uri]) == 2
    assert f"look at it with `slipstream status '{uri}'`" in capsys.readouterr().err
    assert cli.main(["status", parent]) == 0
    told = capsys.readouterr().out
    assert "second" in told
    assert f"1 more run there: slipstream runs {parent}" in told
    assert cli.main(["status", uri]) == 0
    assert "more run" not in capsys.readouterr().out


def test_a_status_that_cannot_be_read_spoils_no_list(tmp_path, capsys):
    uri = remote_run(tmp_path, "first", 2, NOW, state="finished")
    (tmp_path / "store" / "first" / "status.json").write_bytes(b'{"state": "finished", "curves": 7}')
    assert cli.main(["runs", uri.rpartition("/")[0]]) == 0
    assert table(capsys.readouterr().out)["first"][1:3] == ["no", "status"]


def test_without_an_argument_the_newest_of_several_is_shown_and_the_others_are_counted(capsys):
    local_run("older", 9, NOW - 100, state="finished")
    assert cli.main(["status"]) == 0
    assert "more run" not in capsys.readouterr().out
    local_run("newer", 4, NOW, state="finished")
    assert cli.main(["status"]) == 0
    told = capsys.readouterr().out
    assert "step 4/9" in told
    assert "1 more run there: slipstream runs" in told
    assert cli.main(["status", "runs"]) == 0, "a folder of runs means the newest, as a URI does"
    assert "step 4/9" in capsys.readouterr().out


def test_a_run_at_work_here_for_a_uri_is_found_without_an_argument(tmp_path, capsys):
    local_run("local", 4, NOW - 100, state="finished")
    address = file_address(tmp_path / "store", "remote")
    with hold_new(address) as held:
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
        report(held.path, 7, NOW, state="generating", **facts)
        held.ledger.write_text("")
        assert cli.main(["status"]) == 0
        assert "step 7/9" in capsys.readouterr().out
        assert cli.main(["runs"]) == 0
        assert str(address) in table(capsys.readouterr().out)
        report(held.path, 7, NOW, state="generating", **(facts | {"pid": 2**22 + 1}))
        assert cli.main(["status"]) == 0
        assert "step 4/9" in capsys.readouterr().out, "what a dead run left here is not the newest run"


@pytest.mark.parametrize("command", [["status"], ["show"], ["history", "stats"]])
def test_without_any_run_the_ones_that_this_machine_has_seen_are_named(tmp_path, command, capsys):
    assert cli.main(command) == 2
    assert "runs holds no runs: start one with `slipstream train`" in capsys.readouterr().err
    folder = keep("views", "s3://bucket/runs/first")
    (folder / "first").mkdir()
    Marker("s3://bucket/runs/first").save(folder / "first")
    assert cli.main(command) == 2
    assert "at URIs this machine knows s3://bucket/runs/first" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["status"], ["show"], ["history", "stats"]])
def test_a_wrong_name_is_corrected_by_what_is_here_and_what_was_seen(tmp_path, command, capsys):
    local_run("baseline-1", 4, NOW, state="finished")
    keep("views", "s3://bucket/runs/baseline-2")
    assert cli.main([*command, "baselin-2"]) == 2
    told = capsys.readouterr().err
    assert "did you mean runs/baseline-1?" in told
    assert "(at a URI: s3://bucket/runs/baseline-2)" in told
    assert cli.main([*command, "runs/baselin-1"]) == 2
    assert "did you mean runs/baseline-1?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["status"], ["show"], ["history", "stats"]])
def test_a_wrong_name_below_a_uri_is_corrected(tmp_path, command, capsys):
    uri = remote_run(tmp_path, "baseline-1", 4, NOW, state="finished")
    assert cli.main([*command, uri.replace("baseline-1", "baselin-1")]) == 2
    assert "did you mean baseline-1?" in capsys.readouterr().err
    assert cli.main(["runs", f"file://{tmp_path / 'nothing'}"]) == 2
    assert "holds no runs" in capsys.readouterr().err
