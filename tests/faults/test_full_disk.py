"""A disk that fills up: one message, earlier checkpoints stay whole, and the run goes on once there is space."""

import json
import os
import re
import shutil
import subprocess

import pytest

from pipelines.launch import train
from storage.checkpoints import CheckpointStore
from storage.errors import UserError
from storage.history.archive import RolloutArchive
from storage.history.store import HistoryStore
from tests.faults.killing import Killer
from tests.runs import small_config, steps_of, trained_keys

OPTIONS = ("evaluation.before=false", "evaluation.after=false", "checkpoint.every=1")
PAGE = 4096


def test_run_with_a_full_disk_ends_with_its_checkpoints_and_goes_on_with_space(ray_session, random_llama, disk, capfd):
    two, four = (small_config(random_llama, disk.path, "full", *OPTIONS, f"run.steps={n}") for n in (2, 4))
    run = disk.path / "full"
    store = CheckpointStore(run / "checkpoints", keep_last=2)

    # no space for the files of a new run: its name stays free
    disk.resize(disk.used + 2 * PAGE)
    with pytest.raises(UserError, match=r"cannot (write|make) .*/full/.*: No space left on device; free space"):
        train(two, name="full")
    assert {child.name for child in run.iterdir()} <= {".lock"}

    disk.resize("16m")
    assert train(two, name="full") == 0
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1, 2]

    # journal, metrics and rollouts of a step fit, a checkpoint does not
    disk.resize(disk.used + store.latest().size() // 2)
    assert train(four, name="full", resume=run) == 2
    error = capfd.readouterr().err
    assert re.search(r"error: .*checkpoint of step 3 needs .* MiB, .* MiB are free; free space on that disk", error), (
        error
    )
    assert f"Earlier checkpoints are intact; resume with: slipstream train --resume {run}" in error
    assert "Traceback" not in error
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [1, 2]
    for checkpoint in store.checkpoints():
        checkpoint.verify()

    # no space for anything: the next attempt is refused before a model loads
    ballast = run / "ballast"
    ballast.write_bytes(os.urandom(shutil.disk_usage(disk.path).free))
    with pytest.raises(UserError, match=f"run.directory={disk.path}: cannot write in {disk.path}: No space left"):
        train(four, name="full", resume=run)
    ballast.unlink()

    disk.resize("16m")
    assert train(four, name="full", resume=run) == 0
    keys = trained_keys(run)
    assert len(keys) == len(set(keys)) == 16
    assert [record["step"] for record in steps_of(run)] == [1, 2, 3, 4]
    assert RolloutArchive(run / "rollouts").steps() == [1, 2, 3, 4]
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


def test_disk_that_fills_up_under_the_learner_is_one_clear_error(ray_session, random_llama, disk, capfd):
    """Here the learner's process meets the full disk, in the middle of the second checkpoint."""
    disk.resize("256k")
    assert train(small_config(random_llama, disk.path, "small", *OPTIONS, "run.steps=2"), name="small") == 2
    error = capfd.readouterr().err
    assert "Traceback" not in error
    assert error.count("error: ") == 1
    # which file hits the limit, the learner's or the conductor's, depends on what else is on the disk
    assert re.search(r"error: .*/checkpoints.* free space.* Earlier checkpoints are intact", error)
    [kept] = CheckpointStore(disk.path / "small" / "checkpoints").checkpoints()
    assert kept.step == 1
    kept.verify()


class OnDisk:
    """A file or folder of a run, on a disk of its own for a while."""

    def __init__(self, path, disk):
        self.path, self.there = path, disk.path / path.name
        if path.is_dir():
            shutil.copytree(path, self.there)
        else:
            shutil.copy(path, self.there)
        subprocess.run(["mount", "--bind", self.there, path], check=True)
        self._mounted = True

    def back(self):
        """Have what was written there where it belongs."""
        if not self._mounted:
            return
        self._mounted = False
        subprocess.run(["umount", "--lazy", self.path], check=True)
        if self.path.is_dir():
            shutil.rmtree(self.path)
            shutil.copytree(self.there, self.path)
        else:
            shutil.copy(self.there, self.path)


EACH = (*OPTIONS, "tracking.tensorboard=true", "speculation.source=history", "data.prompts=16")
STEPS = 9


@pytest.fixture(scope="module")
def two_steps(ray_session, random_llama, tmp_path_factory):
    """A run of two steps that has written everything there is."""
    parent = tmp_path_factory.mktemp("begun")
    assert train(small_config(random_llama, parent, "each", *EACH, "run.steps=2"), name="each") == 0
    return parent / "each"


@pytest.fixture
def begun(two_steps, random_llama, tmp_path):
    """A copy of that run, and the configuration with which it goes on."""
    run = tmp_path / "each"
    shutil.copytree(two_steps, run)
    return run, small_config(random_llama, tmp_path, "each", *EACH, f"run.steps={STEPS}")


@pytest.fixture
def full(begun, disk):
    """Puts a part of the run on a disk that has no room for anything more."""
    moved = []

    def put(name):
        part = begun[0] / name
        if name == "events.log":  # few lines come in some steps: they must not find room in the last page
            part.write_bytes(part.read_bytes() + b"\n" * (-part.stat().st_size % PAGE))
        moved.append(OnDisk(part, disk))
        disk.resize(disk.used)
        return moved[-1]

    yield put
    for one in moved:
        one.back()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "checkpoints"])
def test_what_the_run_cannot_do_without_ends_it_in_one_clear_error(begun, full, disk, capfd, name):
    run, config = begun
    part = full(name)
    capfd.readouterr()
    assert train(config, name="each", resume=run) == 2
    error = capfd.readouterr().err
    assert "Traceback" not in error
    assert error.count("error: ") == 1
    assert str(run / name) in error
    assert "free space on that disk" in error
    assert f"resume with: slipstream train --resume {run}" in error
    for checkpoint in CheckpointStore(run / "checkpoints").checkpoints():
        checkpoint.verify()

    disk.resize("16m")
    part.back()
    assert train(config, name="each", resume=run) == 0
    keys = trained_keys(run)
    assert len(keys) == len(set(keys)) == 4 * STEPS
    assert [record["step"] for record in steps_of(run)] == list(range(1, STEPS + 1))
    assert RolloutArchive(run / "rollouts").steps() == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("history", "answers are no longer kept for drafts: cannot append to"),
        pytest.param("rollouts", "the answers of step 3 are not archived: cannot write", marks=pytest.mark.slow),
        pytest.param("tensorboard", "tensorboard failed and is switched off", marks=pytest.mark.slow),
        pytest.param("events.log", "lines of the log are missing: cannot write", marks=pytest.mark.slow),
    ],
)
def test_what_the_run_can_do_without_costs_an_alarm_and_no_prompt(begun, random_llama, full, disk, name, told):
    run, config = begun
    part = full(name)
    assert train(config, name="each", resume=run) == 0
    keys = trained_keys(run)
    assert len(keys) == len(set(keys)) == 4 * STEPS
    alarms = json.loads((run / "status.json").read_text())["alarms"]
    [alarm] = [text for text in alarms if told in text]
    assert "No space left on device" in alarm
    assert len(alarms) == 1, "one cause, one alarm"
    assert (told in (run / "events.log").read_text()) == (name != "events.log")
    CheckpointStore(run / "checkpoints").latest().verify()
    assert RolloutArchive(run / "rollouts").steps() == list(range(1, 3 if name == "rollouts" else STEPS + 1))
    assert answers_kept(run) == (2 if name == "history" else STEPS) * 4 * 4

    disk.resize("16m")
    part.back()
    more = small_config(random_llama, run.parent, "each", *EACH, f"run.steps={STEPS + 1}")
    assert train(more, name="each", resume=run) == 0
    assert json.loads((run / "status.json").read_text())["alarms"] == []
    assert RolloutArchive(run / "rollouts").steps()[-1] == STEPS + 1
    assert answers_kept(run) == (3 if name == "history" else STEPS + 1) * 4 * 4


def answers_kept(run):
    with HistoryStore(run / "history", None) as history:
        return history.stats().answers


@pytest.mark.slow
def test_death_while_the_disk_is_full_ends_the_run_and_says_so(ray_session, random_llama, disk, capfd):
    """It cannot go on by itself, as it could not count how often it did."""
    slow = ("rollout.max_tokens=60", "rollout.max_rows=2", "reward.functions=[{function: tests.reward_functions.slow}]")
    options = (*OPTIONS, *slow, "run.steps=4")
    config, run = small_config(random_llama, disk.path, "dead", *options), disk.path / "dead"
    killer = Killer("dead", "learner", before=lambda: disk.resize(disk.used))
    killer.start()
    assert train(config, name="dead") == 2
    killer.join(5)
    assert killer.killed is not None
    error = capfd.readouterr().err
    assert "Traceback" not in error
    assert error.count("error: ") == 1
    assert f"cannot write {run / 'restarts.json'}: No space left on device; free space" in error
    assert f"resume with: slipstream train --resume {run}" in error

    disk.resize("16m")
    assert train(config, name="dead", resume=run) == 0
    keys = trained_keys(run)
    assert len(keys) == len(set(keys)) == 16
    assert [record["step"] for record in steps_of(run)] == [1, 2, 3, 4]
