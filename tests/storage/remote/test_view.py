"""Reading a run at a URI: what is asked for is fetched, and follows the run."""

from __future__ import annotations

import pytest

from storage.errors import UserError
from storage.history.archive import RolloutArchive
from storage.remote.address import Address
from storage.remote.held_run import HeldRun, hold_new
from storage.remote.objects import Objects
from storage.remote.staging import fill_staging
from storage.remote.view import RemoteArchive, archive_of, checkpoint_steps, open_view
from storage.run_directory import RunDirectory
from tests.storage.history.answers import SAMPLING, make_group
from tests.storage.remote.life import Life
from tests.storage.remote.stores import file_address, move_to


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of two steps at an address; the machine is one that only reads."""
    move_to(monkeypatch, tmp_path / "machine")
    with hold_new(file_address(tmp_path / "store", "first")) as held:
        life = Life(held.path)
        for _ in range(2):
            life.train()
            groups = [make_group(prompt, epoch=life.step) for prompt in range(2)]
            RolloutArchive(held.rollouts, 1).append(life.step, groups, {}, sampling=SAMPLING)
        held.send()
        move_to(monkeypatch, tmp_path / "reader")
        held.life = life
        yield held
        life.close()


def send_from(held: HeldRun, monkeypatch, tmp_path) -> None:
    move_to(monkeypatch, tmp_path / "machine")
    held.send()
    move_to(monkeypatch, tmp_path / "reader")


def test_a_view_has_what_was_asked_for_and_no_more(run):
    folder = open_view(run.address).fetch("history/")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"config.yaml", "status.json", "metrics.jsonl", "history/MANIFEST.json"} <= names
    assert not [name for name in names if name.startswith(("checkpoints/", "rollouts/"))]
    assert RunDirectory(folder).address == run.address
    assert RunDirectory(folder).where(folder / "events.log") == f"{run.address}/events.log"


def test_a_view_follows_the_run(run, monkeypatch, tmp_path):
    folder = open_view(run.address).fetch("checkpoints/")
    assert (folder / "checkpoints" / "step_000002" / "CHECKPOINT.json").exists()
    run.life.train()
    send_from(run, monkeypatch, tmp_path)
    view = open_view(run.address)
    assert view.newest_checkpoint() == "checkpoints/step_000003"
    assert view.fetch() == folder
    assert (folder / "metrics.jsonl").read_bytes() == run.metrics.read_bytes()
    assert not (folder / "checkpoints" / "step_000002").exists(), "the run has removed it"


def test_answers_are_fetched_when_they_are_read(run):
    folder = open_view(run.address).fetch()
    archive = archive_of(RunDirectory(folder))
    assert isinstance(archive, RemoteArchive)
    assert archive.splits() == ["train"]
    assert archive.steps() == [1, 2]
    assert not (folder / "rollouts").exists()
    assert archive.read(2).num_rows == 4
    assert [path.name for path in (folder / "rollouts").rglob("*.parquet")] == ["step_000002.parquet"]
    with pytest.raises(UserError, match=r"no rollouts of step 7 .* there are 2 steps from 1 to 2"):
        archive.read(7)


def test_the_answers_of_a_folder_are_read_where_they_are(tmp_path):
    assert type(archive_of(RunDirectory.create(tmp_path, "plain"))) is RolloutArchive


def test_a_folder_of_runs_means_the_newest_and_a_wrong_name_is_corrected(run):
    parent = run.address.rpartition("/")[0]
    assert str(open_view(parent).address) == run.address
    with pytest.raises(UserError, match=r"frist is not a run: did you mean first\?"):
        open_view(f"{parent}/frist")
    with pytest.raises(UserError, match=r"nowhere is not a run: it has no config\.yaml"):
        open_view(f"{parent}/other/nowhere")


def test_a_plain_run_directory_is_not_taken_for_a_run_at_a_uri(tmp_path):
    directory = RunDirectory.create(tmp_path, "plain")
    directory.config.write_text("{}")
    directory.ledger.write_text("")
    with pytest.raises(UserError, match=f"as a folder, .*name it by its path, {directory.path}$"):
        open_view(f"file://{tmp_path}/plain")
    address = Address.parse(f"file://{tmp_path}/plain")
    with pytest.raises(UserError, match="name it by its path"):
        fill_staging(address, Objects(address), print)


def test_steps_of_checkpoints_are_told_by_their_markers():
    names = ["checkpoints/step_000010/CHECKPOINT.json", "checkpoints/step_000002/CHECKPOINT.json"]
    names += ["checkpoints/step_000012/model/a", "metrics.jsonl"]
    assert checkpoint_steps(names) == [2, 10]
