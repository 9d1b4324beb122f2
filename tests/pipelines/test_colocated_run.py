"""Whole runs in which engines and learner take turns: the same tokens and weights as on hardware of their own."""

import pytest

from pipelines.launch import train
from storage.checkpoints import CheckpointStore
from storage.history.archive import RolloutArchive
from tests.pipelines.test_attach import LONG, steered, until
from tests.runs import small_config, small_run, steps_of, trained_keys

COLOCATED = "cluster.placement=colocated"
CLOCKS = ("_s", "seconds_", "per_s", "busy_share", "utilisation", "overhead", "time", "idle", "bubble")


def weights(run):
    checkpoint = CheckpointStore(run / "checkpoints", 2).latest()
    return checkpoint.step, (checkpoint.component("model") / "model.safetensors").read_bytes()


def counted(run):
    """What the steps report, without what clocks say."""
    return [
        {name: value for name, value in record.items() if not any(clock in name for clock in CLOCKS)}
        for record in steps_of(run)
    ]


PLAIN = ("rollout.workers=2", "evaluation.every=1", "evaluation.samples=2", "checkpoint.every=2")
VARIED = "reward.functions=[{function: tests.reward_functions.varied}]"


@pytest.fixture(scope="module")
def both(ray_session, random_llama, tmp_path_factory):
    parent = tmp_path_factory.mktemp("colocated")
    apart = small_run(random_llama, parent, "apart", *PLAIN, VARIED)
    return apart, small_run(random_llama, parent, "turns", *PLAIN, VARIED, COLOCATED)


def test_a_colocated_run_is_the_disaggregated_one_bit_for_bit(both):
    apart, turns = both
    assert weights(turns) == weights(apart)
    assert trained_keys(turns) == trained_keys(apart)
    records = counted(turns)
    assert len(records) == 3
    freed = [record.pop("rollout/freed_mb") for record in records]
    assert all(megabytes > 0 for megabytes in freed)
    assert records == counted(apart)
    tokens = [RolloutArchive(run / "rollouts").read(3)["tokens"].to_pylist() for run in both]
    assert sorted(tokens[0]) == sorted(tokens[1])
    assert [record["progress/version"] for record in records] == [1, 2, 3]


def test_the_time_of_sleep_and_wake_up_is_reported(both):
    apart, turns = both
    for record in steps_of(turns):
        assert record["time/sleep_s"] > record["time/publish_s"] > 0
        assert record["faults/crashes"] == 0
    assert not any("time/sleep_s" in record or "rollout/freed_mb" in record for record in steps_of(apart))


@pytest.mark.slow
def test_a_resumed_colocated_run_goes_on_bit_for_bit(both, random_llama, tmp_path):
    apart, _ = both
    short = small_run(random_llama, tmp_path, "short", *PLAIN, VARIED, COLOCATED, "run.steps=2")
    config = small_config(random_llama, tmp_path, "short", *PLAIN, VARIED, COLOCATED)
    assert train(config, name="short", resume=short) == 0
    assert weights(short) == weights(apart)


@pytest.mark.slow
def test_engines_wake_with_the_weights_they_had_when_a_step_makes_no_others(ray_session, random_llama, tmp_path):
    constant = "reward.functions=[{function: tests.reward_functions.constant}]"
    run = small_run(random_llama, tmp_path, "flat", constant, COLOCATED)
    assert [record["progress/version"] for record in steps_of(run)] == [0, 0, 0]
    assert len(trained_keys(run)) == 12


@pytest.mark.slow
def test_races_leave_nothing_running_beside_the_learner(ray_session, random_llama, tmp_path):
    """What a round does not need any more is cut while engines go to sleep, and nothing is lost by it."""
    overrides = (
        VARIED,
        "schedule.batching=tail",
        "schedule.overlaunch_prompts=1.5",
        "schedule.overlaunch_samples=1.5",
        "schedule.deferred=resume",
        "asynchrony.max_staleness=3",
        "algorithm.name=decoupled_ppo",
        "rollout.max_tokens=60",
        "rollout.workers=2",
        "run.steps=0",
        "run.epochs=2",
    )
    run = small_run(random_llama, tmp_path, "tail", *overrides, COLOCATED)
    keys = trained_keys(run)
    assert len(keys) == len(set(keys)) == 16
    assert all(record["staleness/max"] <= 3 for record in steps_of(run))
    assert all(record["faults/crashes"] == 0 for record in steps_of(run))


@pytest.mark.slow
def test_a_driver_is_answered_whatever_the_engines_do(ray_session, random_llama, tmp_path):
    config = small_config(random_llama, tmp_path, "asked", *LONG, COLOCATED)

    def drive(run):
        until(run, step=1)
        texts = [run.sample("1+2=", n=2, max_tokens=4) for _ in range(12)]
        saved = run.checkpoint()
        run.pause()
        rests = until(run, "paused")
        paused = run.sample("1+2=", max_tokens=4)
        accuracy = run.evaluate()["eval/heldout/accuracy"]
        run.resume()
        until(run, step=rests.step + 2)
        return texts, saved, paused, accuracy

    texts, saved, paused, accuracy = steered(config, "asked", drive)
    assert [len(both) for both in texts] == [2] * 12
    assert saved
    assert len(paused) == 1
    assert 0 <= accuracy <= 1
    keys = trained_keys(tmp_path / "asked")
    assert len(keys) == len(set(keys))
