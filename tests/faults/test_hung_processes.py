"""Workers that live and do nothing are found, replaced, and lose nothing. Issue 5: a hung engine."""

import signal

from pipelines.launch import train
from tests.faults.killing import Killer
from tests.faults.test_killed_processes import SLOW
from tests.runs import small_config, steps_of, trained_keys


def test_hung_rollout_worker_is_replaced_and_loses_no_group(ray_session, random_llama, tmp_path):
    config = small_config(random_llama, tmp_path, "hung", "run.steps=3", "rollout.stall_deadline_s=4", *SLOW)
    stopper = Killer("hung", "rollout-0", sent=signal.SIGSTOP)
    stopper.start()
    assert train(config, name="hung") == 0
    stopper.join(5)
    assert stopper.killed is not None
    keys = trained_keys(tmp_path / "hung")
    assert len(keys) == len(set(keys)) == 12
    assert steps_of(tmp_path / "hung")[-1]["faults/crashes"] == 1
    assert "made no progress" in (tmp_path / "hung" / "events.log").read_text()
