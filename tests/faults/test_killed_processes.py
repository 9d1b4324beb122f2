"""Workers that are killed in the middle of a step lose nothing, and are replaced while the run goes on."""

import json

import pytest

from pipelines.chaos.laws import check_run
from pipelines.launch import train
from storage.checkpoints import CheckpointStore
from storage.history.archive import RolloutArchive
from storage.history.store import HistoryStore
from storage.run_directory import RunDirectory
from tests.faults.killing import Killer
from tests.runs import small_config, steps_of, trained_keys

SLOW = ("rollout.max_tokens=60", "rollout.max_rows=2", "reward.functions=[{function: tests.reward_functions.slow}]")


@pytest.mark.parametrize("role", ["rollout-0", "reward-0"])
def test_killed_worker_loses_no_group(ray_session, random_llama, tmp_path, role):
    name = f"kill-{role}"
    config = small_config(random_llama, tmp_path, name, "run.steps=4", *SLOW)
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


@pytest.mark.parametrize("role", ["history", pytest.param("history-queue", marks=pytest.mark.slow)])
def test_killed_history_is_replaced_and_every_step_is_archived_once(ray_session, random_llama, tmp_path, role):
    name = f"kill-{role}"
    drafts = ("speculation.source=history", "speculation.window=8")
    config = small_config(random_llama, tmp_path, name, "run.steps=8", *SLOW, *drafts)
    killer = Killer(name, role)
    killer.start()
    assert train(config, name=name) == 0
    killer.join(5)
    assert killer.killed is not None
    run = RunDirectory(tmp_path / name)
    verdict = check_run(run)
    assert verdict.holds, verdict
    assert verdict.trained == 32
    assert RolloutArchive(run.rollouts).steps() == list(range(1, 9))
    with HistoryStore(run.history, None) as history:
        assert history.stats().answers == 32 * 4, "each answer of each step once"
    assert json.loads(run.status.read_text())["alarms"] == []


@pytest.mark.slow
def test_worker_that_dies_long_after_a_resume_finds_the_model_that_the_run_went_on_with(
    ray_session, random_llama, tmp_path
):
    """Its checkpoint has been followed by more than are kept, and each of those has a tokenizer of its own."""
    saved = (*SLOW, "checkpoint.every=1", "checkpoint.keep_last=1", "evaluation.before=false", "evaluation.after=false")
    assert train(small_config(random_llama, tmp_path, "late", *saved, "run.steps=1"), name="late") == 0
    killer = Killer("late", "rollout-0", after_steps=4)
    killer.start()
    config = small_config(random_llama, tmp_path, "late", *saved, "run.steps=6")
    assert train(config, name="late", resume=tmp_path / "late") == 0
    killer.join(5)
    assert killer.killed is not None
    assert steps_of(tmp_path / "late")[-1]["faults/crashes"] == 1
    assert check_run(RunDirectory(tmp_path / "late")).holds
    newest = CheckpointStore(tmp_path / "late" / "checkpoints").latest()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (newest.component("model") / name).read_bytes() == (random_llama / name).read_bytes()
