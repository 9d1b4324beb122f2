"""Bad input, from the command line to the end of the run: one message that names the place, status 2, nothing lost."""

from __future__ import annotations

import json
import re
import shutil
import socket
from types import SimpleNamespace

import pytest
import ray

from pipelines import cli, cluster
from pipelines.config_loader import load, write_config
from pipelines.launch import train
from pipelines.sizes import Machine, MemoryEstimate, ModelShape
from storage.checkpoints import CheckpointStore
from storage.errors import UserError
from storage.run_directory import RunDirectory
from tests.runs import SMALL, small_config

REWARDS = """
import os
import missing_dependency_of_a_test
"""

FUNCTIONS = """
def needs_solution(completions, solution):
    return [1.0]

def scaled(completions, scale=1.0):
    return [scale]

def positional(prompts, completions, /):
    return [1.0]

def without_completions(prompts):
    return [1.0]

constant = 3
"""


def write_rows(path, count, prompt="1+1="):
    path.write_text("".join(json.dumps({"prompt": f"{prompt}{n}", "answer": str(n)}) + "\n" for n in range(count)))


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A working directory in which nothing may start Ray."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def started(*_):
        pytest.fail("Ray was started in spite of bad input")

    monkeypatch.setattr("pipelines.launch.local_or_joined_ray", started)
    write_rows(tmp_path / "train.jsonl", 8)
    write_rows(tmp_path / "held.jsonl", 4, "2+2=")
    write_rows(tmp_path / "few.jsonl", 3)
    write_rows(tmp_path / "long.jsonl", 8, "9" * 505)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "no_column.jsonl").write_text('{"promt": "1"}\n' * 8)
    (tmp_path / "broken.jsonl").write_text('{"prompt": "1", "answer": "2"}\n' * 5 + '{"prompt": \n')
    (tmp_path / "text.yaml").write_text("prompt: 1")
    (tmp_path / "broken_rewards.py").write_text(REWARDS)
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    return tmp_path


def refusal(capsys, *arguments):
    """Run the command line; returns the message of the one error."""
    assert cli.main(arguments) == cli.USER_ERROR
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    assert captured.err.count("error: ") == 1
    return captured.err


def settings(model, *overrides):
    sources = ("data.train=train.jsonl", 'evaluation.sets={"held": "held.jsonl"}', f"model={model}", "run.name=bad")
    return [*sources, *SMALL, *overrides]


def functions(name, **arguments):
    return "reward.functions=" + json.dumps([{"function": name, "arguments": arguments}])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train=nowhere.jsonl", r"data\.train: nowhere\.jsonl: there is no such file"),
        ("data.train=empty.jsonl", r"data\.train: empty\.jsonl is empty: give at least one row"),
        ("data.train=no_column.jsonl", r"no column 'prompt'; did you mean 'promt'\?.*data\.prompt_column"),
        ("data.train=broken.jsonl", r"broken\.jsonl, line 6: it is not JSON"),
        ("data.train=text.yaml", r"text\.yaml: files of type '\.yaml' cannot be read"),
        ("data.train=builtin:running_sum", r"no built-in task 'running_sum'; did you mean 'running_sums'"),
        ("data.train=few.jsonl", r"few\.jsonl has 3 prompts, fewer than rollout\.prompts_per_step=4: lower that"),
        ("data.train=long.jsonl", r"long\.jsonl, row 0 \(line 1\): .*model's context of 512 tokens"),
        ("data.max_prompt_tokens=4", r"train\.jsonl, row 0 .*data\.max_prompt_tokens=4"),
        ("data.prompt_column=question", r"no column 'question'"),
        ('evaluation.sets={"held": "train.jsonl"}', r"all of its 8 rows are training prompts too"),
        ('evaluation.sets={"hard": "hard.jsonl"}', r"evaluation\.sets\.hard: hard\.jsonl: there is no such file"),
        ('evaluation.sets={"train": "held.jsonl"}', r"evaluation\.sets\.train: the name train is taken"),
        ('evaluation.sets={"held@k": "held.jsonl"}', r"name 'held@k' may hold letters, digits, - and _ only"),
        ('evaluation.sets={"../held": "held.jsonl"}', r"name '\.\./held' may hold"),
        ('evaluation.sets={"": "held.jsonl"}', r"name '' may hold"),
        ("rollout.max_tokens=512", r"context of 512 tokens: lower rollout\.max_tokens"),
        ("rollout.threads=1000", r"rollout\.threads=1000: this process may use \d+ cores only"),
        ("learner.threads=1000", r"learner\.threads=1000: this process may use \d+ cores only"),
        ("rollout.num_cpus=1000", r"rollout\.num_cpus=1000: the largest node has \d+ CPUs"),
        ("learner.num_gpus=64", r"learner\.num_gpus"),
        ('rollout={"max_rows": 4096, "max_tokens": 1000000}', r"GB of memory and .* free; .*rollout\.max_rows=4096"),
        ("algorithm.dual_clip=1.1", r"algorithm\.dual_clip=1\.1 must lie above"),
        ("run.directory=train.jsonl", r"run\.directory=train\.jsonl: .*not a directory"),
        ("run.name=../elsewhere", r"run\.name"),
        (functions("exakt"), r"'exakt' is neither built in .*did you mean 'exact'"),
        (functions("no_such_module.reward"), r"no module 'no_such_module'"),
        (functions("tests.reward_functions.lenght"), r"reward function tests\.reward_functions\.lenght"),
        (functions("nowhere.py:reward"), r"there is no file .*nowhere\.py"),
        (functions("broken_rewards.py:reward"), r"missing_dependency_of_a_test"),
        (functions("rewards.py:constant"), r"this is a int, not a function"),
        (functions("rewards.py:needs_solution"), r"needs a column 'solution'.*columns: answer"),
        (functions("rewards.py:scaled", scala=2), r"no parameter 'scala'; did you mean 'scale'"),
        (functions("rewards.py:positional"), r"'prompts' cannot be given by name"),
        (functions("rewards.py:without_completions"), r"no parameter 'completions'"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(work, random_llama, capsys, override, expected):
    text = refusal(capsys, "train", *settings(random_llama, override))
    assert re.search(expected, text), text
    assert not (work / "runs").exists()
    assert not (work / "bad").exists()


def test_each_refusal_above_is_due_to_its_one_bad_setting(work, random_llama, capsys):
    """The negative control: without any of them the run would start."""
    with pytest.raises(pytest.fail.Exception, match="Ray was started"):
        cli.main(["train", *settings(random_llama)])


@pytest.mark.parametrize(
    ("removed", "expected"),
    [
        ("tokenizer*", r"it has no tokenizer .*save_pretrained"),
        ("config.json", r"it has no config\.json; give a Hugging Face model directory"),
        ("*.safetensors", r"it has no weights \(model\.safetensors\)"),
        ("", r"there is no such directory"),
    ],
)
def test_incomplete_model_directory_is_refused(work, random_llama, capsys, removed, expected):
    model = work / "model"
    if removed:
        shutil.copytree(random_llama, model)
        for path in model.glob(removed):
            path.unlink()
    text = refusal(capsys, "train", *settings(model))
    assert re.search(rf"model\.path={model}: {expected}", text), text


def test_evaluation_is_checked_as_strictly_as_training(work, random_llama, capsys):
    text = refusal(
        capsys, "eval", str(random_llama), *settings(random_llama, functions("exakt"))[:-1], functions("exakt")
    )
    assert "did you mean 'exact'" in text


def test_memory_is_checked_again_once_prompts_are_known(work, random_llama, capsys, monkeypatch):
    write_rows(work / "train.jsonl", 8, "9" * 450)
    options = ("rollout.max_rows=4096",)
    config = small_config(random_llama, work, "bad", *options)
    shape = ModelShape.read(random_llama)
    least, real = (MemoryEstimate.of(config, shape, tokens).total for tokens in (12, 450 + 12))
    assert real - least > 400e6
    monkeypatch.setattr(Machine, "look", lambda gpus: Machine(cores=64, memory=(least + real) // 2, gpus=None))
    text = refusal(capsys, "train", *settings(random_llama, *options))
    assert f"the run needs about {real / 1e9:.1f} GB of memory" in text


def test_name_of_another_run_is_refused_and_the_run_is_left_alone(work, random_llama, capsys):
    (work / "runs" / "bad").mkdir(parents=True)
    (work / "runs" / "bad" / "config.yaml").write_text("mine")
    text = refusal(capsys, "train", *settings(random_llama))
    assert re.search(r"runs/bad exists already: go on with --resume runs/bad, or choose another run\.name", text)
    assert (work / "runs" / "bad" / "config.yaml").read_text() == "mine"


def test_what_cannot_be_resumed_is_refused(work, random_llama, capsys):
    assert "nowhere does not exist" in refusal(capsys, "train", "--resume", "nowhere")
    (work / "folder").mkdir()
    assert re.search(r"folder is not a run: it has no config\.yaml", refusal(capsys, "train", "--resume", "folder"))
    run = work / "runs" / "fresh"
    run.mkdir(parents=True)
    write_config(small_config(random_llama, work / "runs", "fresh"), run / "config.yaml")
    text = refusal(capsys, "train", "--resume", "fresh")
    assert "has no complete checkpoint to resume from: start a new run" in text
    assert "cannot change when a run is resumed" in refusal(capsys, "train", "--resume", "fresh", "run.seed=3")


def test_run_in_use_by_another_process_is_neither_resumed_nor_touched(work, random_llama, capsys):
    run = work / "runs" / "busy"
    run.mkdir(parents=True)
    write_config(small_config(random_llama, work / "runs", "busy"), run / "config.yaml")
    store = CheckpointStore(run / "checkpoints")
    for step in (1, 2):
        with store.begin(step) as writer:
            (writer.component("model") / "weights").write_bytes(b"x" * 100)
            writer.commit({})
    # as if the other process were replacing it while it is read
    (run / "checkpoints" / "step_000002" / "model" / "weights").write_bytes(b"y" * 100)

    def found():
        return {path.relative_to(run): path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"}

    before = found()
    with RunDirectory(run).lock():
        text = refusal(capsys, "train", "--resume", "busy")
    assert re.search(r"runs/busy is in use by process \d+ on .*: wait for it, stop it", text)
    assert found() == before


def test_cluster_that_does_not_answer_is_refused_at_once(work, random_llama, capsys, monkeypatch):
    monkeypatch.setattr("pipelines.launch.local_or_joined_ray", cluster.local_or_joined_ray)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        address = f"127.0.0.1:{server.getsockname()[1]}"
        text = refusal(capsys, "train", *settings(random_llama, f"cluster.address={address}"))
    assert f"cluster.address={address}: nothing answers there" in text
    assert not (work / "runs" / "bad" / "config.yaml").exists(), "the name stays free"


def test_local_ray_that_cannot_start_is_explained(work, random_llama, capsys, monkeypatch):
    monkeypatch.setattr("pipelines.launch.local_or_joined_ray", cluster.local_or_joined_ray)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def refuse(**_):
        raise ValueError("The configured object store size exceeds the memory.\nAnd more.")

    monkeypatch.setattr(ray, "init", refuse)
    text = refusal(capsys, "train", *settings(random_llama))
    assert "cluster.object_store_mb=256" in text
    assert "exceeds the memory.;" in text


@pytest.mark.parametrize("failures", [1, 2])
def test_local_ray_that_starts_too_slowly_is_started_again(work, monkeypatch, failures):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    started = []

    def init(**_):
        started.append(1)
        if len(started) <= failures:
            raise Exception("The current node timed out during startup. This could happen because it is busy.")
        return SimpleNamespace(dashboard_url="")

    monkeypatch.setattr(ray, "init", init)
    if failures == 1:
        cluster._start(load(["model=tiny"]).config)
    else:
        with pytest.raises(UserError, match=r"timed out during startup.*keeps this machine busy"):
            cluster._start(load(["model=tiny"]).config)
    assert len(started) == 2


def test_damaged_weights_found_by_a_worker_are_a_user_error(ray_session, random_llama, tmp_path, capfd):
    """What only a process that loads the weights can see reaches the user without the traceback of that process."""
    model = tmp_path / "model"
    shutil.copytree(random_llama, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": 64, "head_dim": 16}))
    assert train(small_config(model, tmp_path, "damaged"), name="damaged") == cli.USER_ERROR
    text = capfd.readouterr().err
    assert "Traceback" not in text
    assert text.count("error: ") == 1
    assert str(model) in text


def test_cluster_with_too_few_resources_is_refused_at_once(ray_session, random_llama, tmp_path, capsys):
    config = small_config(random_llama, tmp_path, "short", "cluster.address=somewhere", "learner.num_cpus=9")
    with pytest.raises(UserError, match=r"learner\.num_cpus=9: the largest node has 8 CPUs; ask for at most that"):
        train(config, name="short")
    assert "learner    CPU       1 x 9 = 9  8" in capsys.readouterr().out
    assert not (tmp_path / "short" / "config.yaml").exists(), "the name stays free"


def test_cluster_that_may_grow_is_given_up_at_the_deadline(ray_session, random_llama, tmp_path, capfd):
    overrides = ("learner.num_cpus=9", "cluster.start_deadline_s=3", "cluster.wait_for_nodes=true")
    config = small_config(random_llama, tmp_path, "short", "cluster.address=somewhere", *overrides)
    assert train(config, name="short") == cli.USER_ERROR
    text = capfd.readouterr()
    assert "learner.num_cpus=9: the largest node has 8 CPUs" in text.out, "said before the wait"
    assert re.search(r"not started within cluster\.start_deadline_s=3 s: learner .*the largest node has 8", text.err)
    status = json.loads((tmp_path / "short" / "status.json").read_text())
    assert status["state"] == "failed"
