"""Signals to a real process: the first one saves and ends the run, the second one ends it now."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pipelines.launch import train
from pipelines.monitoring import read_records
from storage.checkpoints import CheckpointStore
from tests.conftest import ROOT
from tests.runs import SMALL, small_config, steps_of, trained_keys

OPTIONS = ("run.steps=2000", "evaluation.before=false", "evaluation.after=false", "rollout.max_tokens=60")
START_S, STOP_S, QUIT_S = 300, 120, 60
"""Generous, because the machine may be busy: a run that ignores the signal goes on for far longer."""


@pytest.fixture
def start(tmp_path):
    """Starts the program in a process group of its own, as a terminal does."""
    started = []

    def begin(*arguments):
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment["PYTHONPATH"] = str(ROOT)
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelines", "train", *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for_step(run, process, step):
    """Wait until the run has finished a step, by its status file."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        try:
            status = json.loads((run / "status.json").read_text())
        except FileNotFoundError:
            status = {"step": -1}
        if status["step"] >= step:
            return
        time.sleep(0.1)
    pytest.fail(f"step {step} was not reached")


def wait_for_the_end_of_group(group):
    """Wait until no process of the group lives any more: a local Ray goes with the program that started it."""
    deadline = time.monotonic() + QUIT_S
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.2)
    pytest.fail("processes of the run are left over")


def assert_each_prompt_once_per_epoch(run, steps):
    keys = trained_keys(run)
    assert len(keys) == len(set(keys)) == 4 * steps
    assert [record["step"] for record in steps_of(run)] == list(range(1, steps + 1))


def test_sigterm_saves_and_the_run_goes_on_where_it_stopped(ray_session, random_llama, tmp_path, start):
    run = tmp_path / "runs" / "stopped"
    sources = (f"model={random_llama}", "run.name=stopped", "cluster.dashboard=false")
    process = start("baseline", *SMALL, *sources, *OPTIONS)
    wait_for_step(run, process, 2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=STOP_S)
    assert process.returncode == 0, output
    assert "SIGTERM: saving and stopping" in output
    assert "Traceback" not in output
    assert f"slipstream train --resume {run.relative_to(tmp_path)}" in output
    assert json.loads((run / "status.json").read_text())["state"] == "stopped"
    saved = CheckpointStore(run / "checkpoints").latest()
    saved.verify()
    assert saved.step >= 2

    config = small_config(random_llama, tmp_path / "runs", "stopped", *OPTIONS, f"run.steps={saved.step + 2}")
    assert train(config, name="stopped", resume=run) == 0
    assert_each_prompt_once_per_epoch(run, saved.step + 2)


def write_held_out(path, pause):
    """Prompts whose answers take ``pause`` seconds each to be scored: 50 of them."""
    rows = [{"prompt": f"{number}?", "answer": "x", "pause": pause} for number in range(50)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def press_ctrl_c_in_an_evaluation(run, pressed):
    """Wait until the run evaluates between its steps, and send the signal that a terminal sends."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            status = json.loads((run / "status.json").read_text())
        except FileNotFoundError:
            status = {"state": "", "step": 0}
        if status["state"] == "evaluating" and status["step"] > 0:
            pressed.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
            return
        time.sleep(0.1)


@pytest.mark.parametrize("pipeline", ["step", pytest.param("stream", marks=pytest.mark.slow)])
def test_ctrl_c_in_the_middle_of_an_evaluation_saves_the_step_before_it(ray_session, random_llama, tmp_path, pipeline):
    """It ends in seconds, where the evaluation would take minutes; the resumed run begins with that evaluation."""
    held_out, run, pressed = tmp_path / "held_out.jsonl", tmp_path / "cut", []
    write_held_out(held_out, pause=5.0)
    options = (
        "run.steps=4",
        "evaluation.every=2",
        "evaluation.before=false",
        "evaluation.after=false",
        "evaluation.prompts=50",
        f"evaluation.sets={{heldout: {held_out}}}",
        "reward.functions=[{function: tests.reward_functions.patient}]",
        "algorithm.name=decoupled_ppo",
        f"asynchrony={{pipeline: {pipeline}, max_staleness: 1}}",
    )
    config = small_config(random_llama, tmp_path, "cut", *options)
    threading.Thread(target=press_ctrl_c_in_an_evaluation, args=(run, pressed), daemon=True).start()
    assert train(config, name="cut") == 0
    assert time.monotonic() - pressed[0] < 60
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"]) == ("stopped", 2)
    saved = CheckpointStore(run / "checkpoints").latest()
    saved.verify()
    assert saved.step == 2

    write_held_out(held_out, pause=0.0)
    assert train(config, name="cut", resume=run) == 0
    assert_each_prompt_once_per_epoch(run, 4)
    evaluated = [record["step"] for record in read_records(run / "metrics.jsonl") if "eval/heldout/accuracy" in record]
    assert evaluated == [2, 4]


@pytest.mark.slow
def test_ctrl_c_saves_and_a_second_one_ends_at_once(random_llama, tmp_path, start):
    """Ctrl-C reaches the whole process group; the roles must not die of it before the run is saved."""
    run = tmp_path / "runs" / "cut"
    sources = (f"model={random_llama}", "run.name=cut", "cluster.dashboard=false")
    process = start("baseline", *SMALL, *sources, *OPTIONS)
    wait_for_step(run, process, 2)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=STOP_S)
    assert process.returncode == 0, output
    assert "SIGINT: saving and stopping" in output
    saved = CheckpointStore(run / "checkpoints").latest()
    assert saved.step >= 2
    assert_each_prompt_once_per_epoch(run, saved.step)

    process = start("--resume", str(run))
    wait_for_step(run, process, saved.step + 1)
    os.killpg(process.pid, signal.SIGINT)
    assert any("SIGINT: saving" in line for line in process.stdout)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=QUIT_S)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    wait_for_the_end_of_group(process.pid)
    kept = CheckpointStore(run / "checkpoints").latest()
    kept.verify()
    assert kept.step >= saved.step
