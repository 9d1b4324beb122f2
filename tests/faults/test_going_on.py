"""A run whose learner, queue or conductor dies goes on by itself from its newest checkpoint; every step counts once."""

import io
import json
import os
import signal

import pytest
import ray
from rich.console import Console
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import pipelines
from pipelines.active_runs import find_conductor
from pipelines.chaos.laws import check_run
from pipelines.launch import train
from storage.checkpoints import CheckpointStore
from storage.history.archive import RolloutArchive
from storage.run_directory import RunDirectory
from tests.faults.killing import Killer
from tests.pipelines.test_attach import DETACHED, python, until, when
from tests.pipelines.test_colocated_run import VARIED
from tests.runs import small_config, small_run, steps_of, trained_keys

STEPS = 6
LONG = ("rollout.max_tokens=60", "rollout.max_rows=2", "evaluation.before=false", "evaluation.after=false")
SAVED = ("checkpoint.every=2", "tracking.tensorboard=true", f"run.steps={STEPS}")
SLOW = DETACHED.replace("BriefConductor", "SlowConductor")


def assert_every_step_counts_once(path, steps=STEPS):
    run = RunDirectory(path)
    verdict = check_run(run)
    assert verdict.holds, verdict
    assert (verdict.steps, verdict.trained) == (steps, 4 * steps)
    keys = trained_keys(path)
    assert len(keys) == len(set(keys)) == 4 * steps
    assert [record["step"] for record in steps_of(path)] == list(range(1, steps + 1))
    events = EventAccumulator(str(run.tensorboard), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("time/step_s")] == list(range(1, steps + 1))


@pytest.mark.parametrize(
    "role", ["learner", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reward-queue", "learner-queue"))]
)
def test_run_goes_on_after_the_death_of_what_has_no_successor(ray_session, random_llama, tmp_path, role):
    name = f"after-{role}"
    killer = Killer(name, role, after_steps=3)
    killer.start()
    assert train(small_config(random_llama, tmp_path, name, *LONG, *SAVED), name=name) == 0
    killer.join(5)
    assert killer.killed is not None
    assert_every_step_counts_once(tmp_path / name)
    status = json.loads((tmp_path / name / "status.json").read_text())
    alarms = status["alarms"]
    [alarm] = [text for text in alarms if "the run went on from step" in text]
    assert alarm.startswith("the reward queue died" if role == "reward-queue" else "the learner died")
    last = steps_of(tmp_path / name)[-1]
    assert last["run/restarts"] == status["restarts"] == 1
    assert last["run/steps_lost"] == status["steps_lost"]
    log = (tmp_path / name / "events.log").read_text()
    assert log.count("rollout-0 begins anew in its process") == 1, "what lives need not be started again"
    lost = status["steps_lost"]
    assert lost == 0 if role == "reward-queue" else lost in (0, 1), "a checkpoint every two steps"
    assert ("finished steps lost: 1" in alarm) == (lost == 1)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
def test_a_run_whose_learner_died_ends_with_the_weights_of_one_that_lived(
    ray_session, random_llama, tmp_path, placement
):
    settings = (
        *LONG,
        *SAVED,
        f"cluster.placement={placement}",
        "rollout.workers=2",
        "speculation.source=history",
        VARIED,
    )
    lived = small_run(random_llama, tmp_path, "lived", *settings)
    killer = Killer("died", "learner", after_steps=3)
    killer.start()
    died = small_run(random_llama, tmp_path, "died", *settings)
    killer.join(5)
    assert killer.killed is not None
    log = (died / "events.log").read_text()
    assert [log.count(f"rollout-{index} begins anew in its process") for index in (0, 1)] == [1, 1]
    # Which rows share a pass is a matter of time, and with it the last bit of a logprob.
    assert apart(model_of(died), model_of(lived)) < 1e-3 * apart(model_of(lived), random_llama)
    assert [sorted(tokens(died, step)) for step in range(1, STEPS + 1)] == [
        sorted(tokens(lived, step)) for step in range(1, STEPS + 1)
    ]


def model_of(run):
    checkpoint = CheckpointStore(run / "checkpoints", 2).latest()
    assert checkpoint.step == STEPS
    return checkpoint.component("model")


def apart(model, other):
    first, second = (load_file(folder / "model.safetensors") for folder in (model, other))
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def tokens(run, step):
    return RolloutArchive(run / "rollouts").read(step)["tokens"].to_pylist()


@pytest.mark.slow
def test_death_before_the_first_checkpoint_begins_the_run_anew(ray_session, random_llama, tmp_path):
    killer = Killer("anew", "learner", after_steps=2)
    killer.start()
    config = small_config(random_llama, tmp_path, "anew", *LONG, *SAVED, "checkpoint.every=0")
    assert train(config, name="anew") == 0
    killer.join(5)
    assert killer.killed is not None
    assert_every_step_counts_once(tmp_path / "anew")
    log = (tmp_path / "anew" / "events.log").read_text()
    assert "the run went on from the beginning, as there is no checkpoint yet" in log


@pytest.mark.slow
def test_learner_that_dies_again_and_again_ends_the_run_with_a_way_to_go_on(ray_session, random_llama, tmp_path, capfd):
    killer = Killer("hopeless", "learner", after_steps=2, times=9)
    killer.start()
    config = small_config(random_llama, tmp_path, "hopeless", *LONG, *SAVED, "checkpoint.every=100", "run.restarts=1")
    assert train(config, name="hopeless") == 1
    killer.times = 0
    assert len(killer.pids) == 2
    error = capfd.readouterr().err
    assert "2 deaths without a new checkpoint in between, run.restarts=1 are allowed" in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_without_restarts_a_dead_learner_ends_the_run_and_resume_goes_on(ray_session, random_llama, tmp_path, capfd):
    killer = Killer("once", "learner", after_steps=3)
    killer.start()
    config = small_config(random_llama, tmp_path, "once", *LONG, *SAVED, "run.restarts=0")
    assert train(config, name="once") == 1
    error = capfd.readouterr().err
    assert "it is not started again: run.restarts=0; resume with: slipstream train --resume" in error
    assert train(config, name="once", resume=tmp_path / "once") == 0
    assert_every_step_counts_once(tmp_path / "once")


def test_driver_starts_another_conductor_when_the_first_one_dies(ray_session, random_llama, tmp_path):
    out = io.StringIO()
    killer = Killer("driven", "conductor", after_steps=3)
    killer.start()
    config = small_config(random_llama, tmp_path, "driven", *LONG, *SAVED)
    assert train(config, name="driven", console=Console(file=out, width=200)) == 0
    killer.join(5)
    assert killer.killed is not None
    assert "the conductor died" in out.getvalue()
    assert "going on from step 2" in out.getvalue()
    assert_every_step_counts_once(tmp_path / "driven")


@pytest.mark.slow
def test_conductor_that_dies_again_and_again_ends_the_run(ray_session, random_llama, tmp_path, capfd):
    killer = Killer("doomed", "conductor", after_steps=2, times=9)
    killer.start()
    config = small_config(random_llama, tmp_path, "doomed", *LONG, *SAVED, "checkpoint.every=100", "run.restarts=1")
    assert train(config, name="doomed") == 1
    killer.times = 0
    assert len(killer.pids) == 2
    error = capfd.readouterr().err
    assert "the conductor died" in error
    assert "2 deaths without a new checkpoint in between, run.restarts=1 are allowed" in error
    assert json.loads((tmp_path / "doomed" / "status.json").read_text())["state"] == "failed"


def test_conductor_of_a_detached_run_takes_over_from_its_dead_self(ray_session, random_llama, tmp_path):
    """Even where Ray has dealt with the call by which it does before it calls the conductor alive."""
    done = python(SLOW, str(random_llama), str(tmp_path), "alone", "0", *LONG, *SAVED)
    assert done.returncode == 0, done.stderr
    run = pipelines.attach("alone")
    status = until(run, step=3)
    os.kill(status.pid, signal.SIGKILL)
    last = list(run.follow(0.2))[-1]
    assert (last.state, last.step) == ("finished", STEPS)
    assert last.pid != status.pid
    assert any("the conductor died; the run went on from step 2" in alarm for alarm in last.alarms)
    when(lambda: find_conductor("alone") is None, "the end of the conductor")
    assert_every_step_counts_once(tmp_path / "alone")
    names = [actor["namespace"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    assert "slipstream-alone" not in names


@pytest.mark.slow
def test_what_drivers_set_outlives_the_learner(ray_session, random_llama, tmp_path):
    """The knobs hold in the session that follows, though no checkpoint knows them, and it can be paused as before."""
    options = (*LONG, *SAVED, "run.steps=2000")
    done = python(DETACHED, str(random_llama), str(tmp_path), "resting", "0", *options)
    assert done.returncode == 0, done.stderr
    run = pipelines.attach("resting")
    until(run, step=2)
    run.set("learner.learning_rate", 0.125)
    killer = Killer("resting", "learner", state="generating", after_steps=3)
    killer.start()
    killer.join(60)
    run.pause()
    until(run, "paused")
    assert run.knobs()["learner.learning_rate"].value == 0.125
    step = run.status().step
    run.resume()
    until(run, step=step + 2)
    run.stop()
    when(lambda: run.status().terminal, "the end")
    verdict = check_run(RunDirectory(tmp_path / "resting"))
    assert verdict.holds, verdict
    conductor = find_conductor("resting")
    if conductor is not None:
        ray.kill(conductor)
