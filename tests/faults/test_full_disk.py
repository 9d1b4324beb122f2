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
from tests.runs import small_config, steps_of, trained_keys

OPTIONS = ("evaluation.before=false", "evaluation.after=false", "checkpoint.every=1")


class Disk:
    """A file system in memory whose size can be changed."""

    def __init__(self, path):
        self.path = path

    def resize(self, size):
        subprocess.run(["mount", "-o", f"remount,size={size}", self.path], check=True, capture_output=True)

    @property
    def used(self):
        return shutil.disk_usage(self.path).used


@pytest.fixture
def disk(tmp_path):
    point = tmp_path / "disk"
    point.mkdir()
    made = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "none", point], capture_output=True
    )
    if not made or made.returncode:
        pytest.skip("mounting is not permitted here")
    yield Disk(point)
    subprocess.run(["umount", "--lazy", point], check=True)


def test_run_with_a_full_disk_ends_with_its_checkpoints_and_goes_on_with_space(ray_session, random_llama, disk, capfd):
    two, four = (small_config(random_llama, disk.path, "full", *OPTIONS, f"run.steps={n}") for n in (2, 4))
    run = disk.path / "full"
    store = CheckpointStore(run / "checkpoints", keep_last=2)
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
