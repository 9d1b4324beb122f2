"""`slipstream show` and `slipstream status` on run directories as a run leaves them."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from rich.console import Console

from pipelines import show as show_module
from pipelines.liveness import is_alive
from pipelines.monitoring import JsonlMonitor
from pipelines.show import plot, show, status
from pipelines.status import RunStatus
from storage.checkpoints import CheckpointStore
from storage.errors import UserError
from storage.history.archive import RolloutArchive
from storage.records import Group, GroupKey, Prompt, Sample, SamplingParams, Segment
from storage.run_directory import RunDirectory


def segment(version: int, count: int, source: str = "policy") -> Segment:
    return Segment(
        source=source,
        version=version,
        token_ids=np.arange(count, dtype=np.int32),
        logprobs=np.full(count, -0.5, np.float32),
    )


def group(prompt: int, rewards: list[float | None], *, split: str = "train", texts: list[str] | None = None) -> Group:
    key = GroupKey(split, 0, prompt)
    samples = tuple(
        Sample(
            key=key,
            index=i,
            segments=(segment(3, 5), segment(4, 2)) if i == 0 else (segment(3, 5),),
            text=texts[i] if texts else f"answer {i} to prompt {prompt}",
            finish_reason="length" if i == 1 else "stop",
            reward=reward,
            reward_parts={} if reward is None else {"exact": reward, "style": 0.25},
            reward_status="error" if reward is None else "ok",
            error="ZeroDivisionError: division\nby zero" if reward is None else "",
        )
        for i, reward in enumerate(rewards)
    )
    text = f"Add up {prompt}+[1] [bold]now[/bold]"
    return Group(
        key=key, prompt=Prompt(index=prompt, token_ids=np.arange(4, dtype=np.int32), text=text), samples=samples
    )


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path, "demo")
    directory.config.write_text("run: {}\n")
    return directory


@pytest.fixture
def archived(run) -> RunDirectory:
    archive = RolloutArchive(run.rollouts)
    sampling = SamplingParams(max_tokens=16)
    for step in (1, 2, 3):
        groups = [group(7, [1.0, 0.0, 0.0]), group(2, [1.0, 1.0, 1.0]), group(5, [0.0, None, 0.0])]
        advantages = {groups[0].key: np.array([1.25, -0.5, -0.75], np.float32)}
        archive.append(step, groups, advantages, sampling=sampling)
    archive.append(2, [group(0, [1.0], split="heldout")], {}, sampling=sampling, split="heldout")
    return run


def shown(run: RunDirectory, **options) -> str:
    console = Console(file=io.StringIO(), width=80)
    show(run.path, console=console, **options)
    return console.file.getvalue()


def test_default_is_the_last_step_with_prompts_answers_rewards_and_advantages(archived):
    text = shown(archived)
    assert "demo: train step 3, 3 prompts, 9 answers, mean reward 0.500" in text
    assert "Add up 7+[1] [bold]now[/bold]" in text  # brackets in a prompt are text, not markup
    assert "answer 0 to prompt 7" in text
    assert "#0  reward 1  advantage +1.25  stop  7 tokens  v3-4  exact=1 style=0.25" in text
    assert "#1  reward 0  advantage -0.50  length  5 tokens  v3" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_failed_score_is_shown_as_no_reward_with_its_error(archived):
    text = shown(archived, prompt=5)
    assert "no reward (error)" in text
    assert "ZeroDivisionError: division by zero" in " ".join(text.split())
    assert text.index("reward 0") < text.index("no reward")


def test_order_and_limit_choose_prompts(archived):
    best, worst = shown(archived, order="best", limit=1), shown(archived, order="worst", limit=1)
    assert "prompt 2 " in best
    assert "prompt 7 " not in best
    assert "prompt 5 " in worst
    assert "2 more prompts (--limit); steps 1-3 are kept (--step)" in best
    data = shown(archived)
    assert data.index("prompt 7 ") < data.index("prompt 2 ") < data.index("prompt 5 ")


def test_evaluation_answers_can_be_shown(archived):
    assert "demo: heldout step 2, 1 answer," in shown(archived, split="heldout")


def test_unknown_steps_prompts_and_splits_say_what_there_is(archived):
    with pytest.raises(UserError, match="from 1 to 3"):
        shown(archived, step=99)
    with pytest.raises(UserError, match=r"its prompts are 2, 5, 7"):
        shown(archived, prompt=3)
    with pytest.raises(UserError, match=r"heldout, train"):
        shown(archived, split="typo")


def test_a_run_without_rollouts_says_why(run):
    with pytest.raises(UserError, match=r"tracking\.rollouts"):
        shown(run)
    with pytest.raises(UserError, match="does not exist"):
        show(run.path.parent / "typo")


def test_long_answers_are_cut_unless_one_prompt_is_asked_for(run):
    long = "\n".join(f"line {i}" for i in range(100)) + "\x1b[31m red"
    rewards = [float(i) for i in range(10)]
    groups = [group(0, rewards, texts=[long] * 10)]
    RolloutArchive(run.rollouts).append(1, groups, {}, sampling=SamplingParams(max_tokens=16))
    brief, whole = shown(run), shown(run, prompt=0)
    assert "... 88 lines ..." in brief
    assert "... 6 answers in between (--prompt 0 shows all)" in brief
    assert "line 50" not in brief
    assert whole.count("line 50") == 10
    assert "\x1b" not in whole  # an answer cannot take over the terminal
    assert "\\x1b[31m red" in whole


def test_empty_answers_are_named(run):
    RolloutArchive(run.rollouts).append(1, [group(0, [0.0], texts=[" "])], {}, sampling=SamplingParams(max_tokens=16))
    assert "(empty)" in shown(run)


def write_status(run: RunDirectory, **changes) -> RunStatus:
    now = time.time()
    fields = {
        "name": "demo",
        "directory": str(run.path),
        "state": "generating",
        "step": 12,
        "steps": 40,
        "started": now - 100,
        "updated": now - 2,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "eta_seconds": 61.0,
    }
    written = RunStatus(**(fields | changes))
    written.save(run.status)
    return written


def reported(run: RunDirectory) -> str:
    console = Console(file=io.StringIO(), width=100)
    status(run.path, console)
    return console.file.getvalue()


def checkpoint(run: RunDirectory, step: int) -> None:
    writer = CheckpointStore(run.checkpoints, 2).begin(step)
    (writer.component("learner") / "state.bin").write_bytes(b"x")
    writer.commit({})


def test_status_of_a_running_run(run, monkeypatch):
    monkeypatch.setattr(show_module, "is_alive", lambda current: True)
    write_status(run)
    monitor = JsonlMonitor(run.metrics)
    monitor.log(
        0, {"eval/heldout/accuracy": 0.469, "eval/heldout/accuracy_low": 0.38, "eval/heldout/accuracy_high": 0.55}
    )
    for step in range(1, 13):
        monitor.log(step, {"reward/mean": step / 20, "accuracy/train": 0.5, "time/step_s": 3.9})
    monitor.close()
    checkpoint(run, 10)
    text = reported(run)
    assert "step 12/40" in text
    assert "ETA 1 m 01 s" in text
    assert f"running: process {os.getpid()} on {socket.gethostname()}, reported 2 s ago" in text
    assert "0.469 [0.380, 0.550]" in text
    assert "0.600" in text
    assert "0.100" not in text  # old steps have scrolled away
    assert "checkpoints: step 10" in text
    assert "--resume" not in text


def test_status_of_a_killed_run_says_so_and_how_to_go_on(run):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    write_status(run, pid=child.pid)
    assert "dead: process" in reported(run)
    assert "start again: slipstream train" in reported(run)
    checkpoint(run, 10)
    assert f"go on: slipstream train --resume {run.path}" in reported(run)


def test_status_of_a_run_that_ended(run):
    write_status(run, state="stopped", message="SIGTERM")
    checkpoint(run, 10)
    text = reported(run)
    assert "stopped 2 s ago: SIGTERM" in text
    assert "--resume" in text
    write_status(run, state="finished", step=40)
    assert "train longer: slipstream train --resume" in reported(run)
    write_status(run, state="failed", message="reward.functions: no module named scorer")
    assert "no module named scorer" in reported(run)


def test_a_silent_process_and_an_unstarted_run_are_told_apart(run, monkeypatch):
    assert "has not reported anything yet" in reported(run)
    monkeypatch.setattr(show_module, "is_alive", lambda current: True)
    write_status(run, updated=time.time() - 600)
    assert "no news" in reported(run)
    run.status.write_text("{")
    assert "has not reported anything yet" in reported(run)


def test_a_reused_process_number_is_not_the_run():
    mine = {"name": "a", "directory": "b", "host": socket.gethostname(), "pid": os.getpid()}
    assert is_alive(RunStatus(**mine, started=time.time())) is True
    assert is_alive(RunStatus(**mine, started=1000.0)) is False
    assert is_alive(RunStatus(**(mine | {"host": "elsewhere"}), started=time.time())) is None


def test_plot_draws_into_the_run_directory(run):
    monitor = JsonlMonitor(run.metrics)
    monitor.log(1, {"reward/mean": 0.5})
    monitor.close()
    console = Console(file=io.StringIO(), width=80)
    picture = plot(run.path, console)
    assert picture.parent == run.path
    assert picture.exists()
    assert str(picture) in console.file.getvalue()
