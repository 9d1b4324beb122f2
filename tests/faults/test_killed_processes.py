"""Roles that are killed in the middle of a step lose nothing."""

import json
import os
import signal
import threading
import time

import pytest
import ray

from pipelines.launch import train
from tests.runs import small_config, steps_of, trained_keys


def pid_of(namespace, role):
    """Process id of a living named actor."""
    actor = ray.get_actor(role, namespace=namespace)
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=10)


class Killer(threading.Thread):
    """Kills a role of a run as soon as it is in a given state."""

    def __init__(self, run, role, state="generating", after_steps=1):
        super().__init__(daemon=True)
        self.namespace, self.role, self.state, self.after = f"slipstream-{run}", role, state, after_steps
        self.pid = self.killed = None

    def run(self):
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and self.killed is None:
            try:
                conductor = ray.get_actor("conductor", namespace=self.namespace)
                status = ray.get(conductor.status.remote(), timeout=5)
            except (ValueError, ray.exceptions.RayError, TimeoutError):
                time.sleep(0.05)
                continue
            if status.step >= self.after and self.pid is None:
                self.pid = pid_of(self.namespace, self.role)
            if status.state == self.state and self.pid is not None:
                os.kill(self.pid, signal.SIGKILL)
                self.killed = self.pid
            time.sleep(0.02)


@pytest.mark.parametrize("role", ["rollout-0", "reward-0"])
def test_killed_worker_loses_no_group(ray_session, random_llama, tmp_path, role):
    name = f"kill-{role}"
    config = small_config(
        random_llama,
        tmp_path,
        name,
        "run.steps=4",
        "rollout.max_tokens=60",
        "rollout.max_rows=2",
        "reward.functions=[{function: tests.reward_functions.slow}]",
    )
    killer = Killer(name, role)
    killer.start()
    assert train(config, name=name) == 0
    killer.join(5)
    assert killer.killed is not None
    keys = trained_keys(tmp_path / name)
    assert len(keys) == len(set(keys)) == 16
    records = steps_of(tmp_path / name)
    assert records[-1]["faults/crashes"] == 1
    assert all(r["rollout/samples"] == 16 and r["staleness/max"] == 0 for r in records)


def test_killed_learner_ends_the_run_with_a_way_to_go_on(ray_session, random_llama, tmp_path, capfd):
    config = small_config(
        random_llama, tmp_path, "kill-learner", "run.steps=6", "checkpoint.every=1", "rollout.max_tokens=60",
        "rollout.max_rows=2",
    )  # fmt: skip
    killer = Killer("kill-learner", "learner", after_steps=2)
    killer.start()
    assert train(config, name="kill-learner") == 1
    assert "--resume" in capfd.readouterr().err
    run = tmp_path / "kill-learner"
    assert train(config, name="kill-learner", resume=run) == 0
    keys = trained_keys(run)
    assert len(keys) == len(set(keys)) == 24


def test_killed_history_costs_the_archive_and_not_the_run(ray_session, random_llama, tmp_path):
    config = small_config(
        random_llama, tmp_path, "kill-history", "run.steps=4", "rollout.max_tokens=60", "rollout.max_rows=2",
        "speculation.source=history",
    )  # fmt: skip
    killer = Killer("kill-history", "history")
    killer.start()
    assert train(config, name="kill-history") == 0
    killer.join(5)
    assert killer.killed is not None
    run = tmp_path / "kill-history"
    assert len(trained_keys(run)) == len(set(trained_keys(run))) == 16
    [alarm] = json.loads((run / "status.json").read_text())["alarms"]
    assert alarm.startswith("the history role died, rollouts are no longer archived: ")
    assert "\n" not in alarm
