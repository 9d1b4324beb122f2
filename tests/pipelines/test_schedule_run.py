"""Schedules in a whole run (REQUIREMENTS: RollPacker, StreamRL dispatch): every prompt once, whatever is deferred."""

import pytest

from pipelines.launch import train
from storage.history.archive import RolloutArchive
from storage.records import GroupKey
from tests.recomputed import EVERY_VERSION, recompute
from tests.runs import small_config, small_run, steps_of, trained_keys

REWARD = "reward.functions=[{function: tests.reward_functions.varied}]"
LONG_TAIL = (REWARD, "rollout.max_tokens=160", "data.prompts=16")


def keys_of(run):
    return [GroupKey.parse(text) for text in trained_keys(run)]


def every_prompt_once(run, epochs, prompts=16):
    keys = keys_of(run)
    assert len(keys) == len(set(keys))
    assert {k for k in keys if k.epoch < epochs} == {
        GroupKey("train", e, p) for e in range(epochs) for p in range(prompts)
    }


@pytest.fixture(scope="module")
def race(ray_session, random_llama, tmp_path_factory):
    """Lengths differ by hundreds of passes, and passes take so long that a race is over long before its losers are."""
    return small_run(
        random_llama,
        tmp_path_factory.mktemp("race"),
        "race",
        *LONG_TAIL,
        *EVERY_VERSION,
        "run.steps=0",
        "run.epochs=2",
        "rollout.max_tokens=400",
        "rollout.pacing={profile: latency_bound, t0_ms: 4}",
        "rollout.stream_interval_s=0.02",
        "schedule.batching=tail",
        "asynchrony.max_staleness=6",
        "algorithm.name=decoupled_ppo",
    )


def test_tail_batching_trains_every_prompt_once_an_epoch(race):
    every_prompt_once(race, 2)


def test_deferred_groups_keep_their_tokens_within_the_bound(race):
    records = steps_of(race)
    assert any(r["schedule/waiting"] > 0 for r in records)
    assert any(r["schedule/long_round"] for r in records)
    assert max(r["staleness/max"] for r in records) > 0
    assert all(r["staleness/max"] <= 6 for r in records)
    assert all(r["waste/tokens"] == 0 for r in records)


def test_tokens_of_deferred_answers_carry_the_probabilities_of_their_versions(race, random_llama):
    """Wrong stamps, or tokens written from stale key/value state, would show here."""
    answers = recompute(race, random_llama)
    assert len(answers) == 2 * 16 * 4
    assert any(answer.is_mixed for answer in answers)
    assert max(answer.error for answer in answers) < 1e-4


def test_recomputing_sees_a_wrong_stamp(race, random_llama):
    """Negative control: one version off is far outside the tolerance."""
    shifted = recompute(race, random_llama, shift=1)
    assert max(answer.error for answer in shifted) > 1e-2


@pytest.mark.slow
def test_interrupted_race_resumes_without_losing_or_repeating_a_group(ray_session, random_llama, tmp_path):
    overrides = (*LONG_TAIL, "schedule.batching=tail", "asynchrony.max_staleness=6", "algorithm.name=decoupled_ppo")
    run = small_run(random_llama, tmp_path, "cut", *overrides, "run.steps=2")
    config = small_config(random_llama, tmp_path, "cut", *overrides, "run.steps=8")
    assert train(config, name="cut", resume=run) == 0
    every_prompt_once(run, 2)


@pytest.mark.slow
def test_restarted_groups_are_fresh_and_their_tokens_count_as_waste(ray_session, random_llama, tmp_path):
    run = small_run(
        random_llama, tmp_path, "restart", *LONG_TAIL, "run.steps=0", "run.epochs=1", "schedule.batching=tail",
        "schedule.deferred=restart",
    )  # fmt: skip
    every_prompt_once(run, 1)
    records = steps_of(run)
    assert all(r["staleness/max"] == 0 for r in records)
    assert sum(r["waste/tokens"] for r in records) > 0


@pytest.mark.slow
def test_length_split_with_repeats_gives_them_keys_of_their_own(ray_session, random_llama, tmp_path):
    run = small_run(
        random_llama, tmp_path, "split", *LONG_TAIL, "run.steps=8", "schedule.batching=length_split",
        "schedule.oversample=repeat", "schedule.oversample_ratio=1.4",
    )  # fmt: skip
    keys = keys_of(run)
    assert len(keys) == len(set(keys)) == 32
    assert any(key.duplicate for key in keys)
    assert {k.prompt for k in keys if k.epoch == 0 and not k.duplicate} == set(range(16))


def test_skew_aware_dispatch_with_a_long_pool_trains_everything(ray_session, random_llama, tmp_path):
    run = small_run(
        random_llama, tmp_path, "skew", *LONG_TAIL, "run.steps=0", "run.epochs=2", "rollout.workers=3",
        "rollout.max_rows=4", "schedule.dispatch=skew_aware", "schedule.pools.long.workers=1",
        "schedule.pools.long.max_rows=2",
    )  # fmt: skip
    every_prompt_once(run, 2)
    assert all(r["waste/tokens"] == 0 and r["staleness/max"] == 0 for r in steps_of(run))


def test_answers_that_outstay_are_interrupted_and_end_as_truncated(ray_session, random_llama, tmp_path):
    run = small_run(
        random_llama, tmp_path, "stay", *LONG_TAIL, "run.steps=2", "schedule.timeouts.tokens=5",
        "schedule.timeouts.max_resumes=2",
    )  # fmt: skip
    table = RolloutArchive(run / "rollouts").read(1)
    lengths = dict(zip(table["length"].to_pylist(), table["finish_reason"].to_pylist(), strict=False))
    longest = max(lengths)
    assert longest == 15  # three stays of five tokens
    assert lengths[longest] == "length"
    assert len(trained_keys(run)) == 8
