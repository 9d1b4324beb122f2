"""A whole run on real Ray processes: what it leaves behind, and that it can be cut and continued."""

import json

import numpy as np
import pytest

import pipelines.launch
from pipelines.launch import train
from pipelines.plots import draw_curves
from storage.checkpoints import CheckpointStore
from storage.history.archive import RolloutArchive
from storage.records import GroupKey
from tests.runs import small_config, small_run, steps_of, trained_keys


@pytest.fixture(scope="module")
def run(ray_session, random_llama, tmp_path_factory):
    parent = tmp_path_factory.mktemp("runs")
    options = ("run.steps=4", "tracking.tensorboard=true", "evaluation.samples=2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelines.launch, "draw_curves", draw_curves)
        return small_run(random_llama, parent, "whole", *options)


def test_each_prompt_is_trained_exactly_once_per_epoch(run):
    keys = [GroupKey.parse(text) for text in trained_keys(run)]
    assert sorted(keys) == sorted({GroupKey("train", epoch, p) for epoch in (0, 1) for p in range(8)})


def test_metrics_are_complete_and_on_policy(run):
    records = steps_of(run)
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    for record in records:
        assert record["staleness/max"] == 0
        assert record["waste/share"] == 0
        assert record["reward/error_share"] == 0
        assert record["rollout/samples"] == 16
        assert record["time/step_s"] > 0
        assert 0 < record["rollout/length_max"] <= 12


def test_engine_and_learner_agree_on_the_probability_of_every_token(run):
    # ratio of current to behaviour policy before the update: 1 up to fp32 noise when logprobs and versions are right
    for record in steps_of(run):
        if record["learner/tokens_trained"]:
            assert record["learner/ratio_mean"] == pytest.approx(1, abs=1e-4)
            assert record["learner/kl_behaviour"] == pytest.approx(0, abs=1e-6)


def test_every_rollout_is_archived_with_its_advantage(run):
    archive = RolloutArchive(run / "rollouts")
    assert archive.steps() == [1, 2, 3, 4]
    table = archive.read(2)
    assert table.num_rows == 16
    rewards = np.array(table["reward"].to_pylist()).reshape(4, 4)
    advantages = np.array(table["advantage"].to_pylist()).reshape(4, 4)
    assert np.allclose(advantages.sum(axis=1), 0, atol=1e-4)
    assert all((a == 0).all() == (r == r[0]).all() for r, a in zip(rewards, advantages, strict=True))


def test_the_generated_data_can_be_read_and_trained_on_again(run):
    from storage.datasets import load_rows

    train = load_rows(str(run / "data" / "train.parquet"), count=100, seed=0, prompt_column="prompt")
    held_out = load_rows(str(run / "data" / "heldout.parquet"), count=100, seed=0, prompt_column="prompt")
    assert (len(train), len(held_out)) == (8, 6)
    assert not train.prompt_texts("prompt") & held_out.prompt_texts("prompt")
    archived = set(RolloutArchive(run / "rollouts").read(1)["prompt_text"].to_pylist())
    assert {text.removeprefix("<bos>") for text in archived} <= train.prompt_texts("prompt")


def test_evaluations_before_and_after_are_recorded(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [r for r in records if "eval/heldout/accuracy" in r]
    assert [r["step"] for r in evaluated] == [0, 4]
    assert all({"eval/heldout/mean_at_k", "eval/heldout/pass_at_k"} <= set(r) for r in evaluated)


def test_the_checkpoint_is_a_hugging_face_model(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = CheckpointStore(run / "checkpoints", 2).latest()
    assert checkpoint is not None
    assert checkpoint.step == 4
    checkpoint.verify()
    model = AutoModelForCausalLM.from_pretrained(checkpoint.component("model"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.component("model"))
    ids = tokenizer("a1b2=", return_tensors="pt").input_ids
    assert model(input_ids=ids).logits.shape[1] == ids.shape[1]


def test_status_tensorboard_and_curves_are_there(run):
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "finished"
    assert status["step"] == status["steps"] == 4
    assert list((run / "tensorboard").glob("events*"))
    assert (run / "curves.png").stat().st_size > 10_000


def test_ten_steps_equal_five_and_resume_and_five(ray_session, random_llama, tmp_path):
    long = small_run(random_llama, tmp_path, "ten", "run.steps=10", "learner.schedule=constant")
    short = small_run(random_llama, tmp_path, "five", "run.steps=5", "learner.schedule=constant")
    config = small_config(random_llama, tmp_path, "five", "run.steps=10", "learner.schedule=constant")
    assert train(config, name="five", resume=short) == 0
    a = CheckpointStore(long / "checkpoints", 2).latest()
    b = CheckpointStore(short / "checkpoints", 2).latest()
    assert (a.component("model") / "model.safetensors").read_bytes() == (
        b.component("model") / "model.safetensors"
    ).read_bytes()
    assert trained_keys(long) == trained_keys(short)
    assert [r["reward/mean"] for r in steps_of(long)] == [r["reward/mean"] for r in steps_of(short)]
    assert [r["rollout/tokens"] for r in steps_of(long)] == [r["rollout/tokens"] for r in steps_of(short)]
    assert RolloutArchive(short / "rollouts").steps() == list(range(1, 11))


@pytest.mark.slow
def test_another_seed_is_another_run(ray_session, random_llama, tmp_path):
    """The negative control of the equality above."""
    a = small_run(random_llama, tmp_path, "a", "run.steps=2", "run.seed=1")
    b = small_run(random_llama, tmp_path, "b", "run.steps=2", "run.seed=2")
    assert [r["rollout/tokens"] for r in steps_of(a)] != [r["rollout/tokens"] for r in steps_of(b)]


def test_dynamic_sampling_counts_the_groups_that_it_filters(ray_session, random_llama, tmp_path):
    run = small_run(
        random_llama, tmp_path, "dapo", "run.steps=1", "algorithm=dapo", "reward.functions=[{function: exact}]"
    )
    record = steps_of(run)[-1]
    ended = sum(value for name, value in record.items() if name.startswith("ledger/ended/"))
    assert record["ledger/launched"] == record["ledger/trained"] + ended
    assert ended > 0


def test_a_step_that_teaches_nothing_makes_no_new_version(ray_session, random_llama, tmp_path):
    run = small_run(
        random_llama, tmp_path, "flat", "run.steps=2", "reward.functions=[{function: tests.reward_functions.constant}]"
    )
    assert [r["progress/version"] for r in steps_of(run)] == [0, 0]
    assert steps_of(run)[-1]["reward/zero_variance_share"] == 1


def test_two_rollout_workers_and_two_reward_workers_share_the_work(ray_session, random_llama, tmp_path):
    run = small_run(random_llama, tmp_path, "two", "run.steps=2", "rollout.workers=2", "reward.workers=2")
    table = RolloutArchive(run / "rollouts").read(1)
    assert set(table["worker"].to_pylist()) == {"rollout-0", "rollout-1"}
    assert len(trained_keys(run)) == len(set(trained_keys(run))) == 8
