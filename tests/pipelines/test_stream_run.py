"""The streaming pipeline in a whole run (REQUIREMENTS: AReaL, StreamRL): bounded staleness, exact bookkeeping."""

import pytest

from pipelines.launch import train
from storage.history.archive import RolloutArchive
from storage.records import GroupKey
from tests.recomputed import EVERY_VERSION, recompute
from tests.runs import small_config, small_run, steps_of, trained_keys

REWARD = "reward.functions=[{function: tests.reward_functions.varied}]"
STREAM = (
    REWARD,
    "data.prompts=16",
    "rollout.max_tokens=160",
    "asynchrony.pipeline=stream",
    "algorithm.name=decoupled_ppo",
)


def every_prompt_once(run, epochs):
    keys = [GroupKey.parse(text) for text in trained_keys(run)]
    assert len(keys) == len(set(keys))
    assert set(keys) == {GroupKey("train", e, p) for e in range(epochs) for p in range(16)}


@pytest.fixture(scope="module", params=["off", "interrupt"])
def stream(request, ray_session, random_llama, tmp_path_factory):
    return small_run(
        random_llama,
        tmp_path_factory.mktemp("stream"),
        f"stream-{request.param}",
        *STREAM,
        *EVERY_VERSION,
        "run.steps=0",
        "run.epochs=2",
        "asynchrony.max_staleness=2",
        f"asynchrony.partial={request.param}",
    )


def test_stream_trains_every_prompt_once_an_epoch_within_the_bound(stream):
    every_prompt_once(stream, 2)
    records = steps_of(stream)
    assert len(records) == 8
    assert all(0 <= r["staleness/max"] <= 2 for r in records)
    assert max(r["staleness/max"] for r in records) > 0


def test_answers_of_a_stream_are_of_one_version_unless_they_may_be_interrupted(stream):
    archive = RolloutArchive(stream / "rollouts")
    rows = [row for step in archive.steps() for row in archive.read(step)["segments"].to_pylist()]
    mixed = sum(len({part["version"] for part in row}) > 1 for row in rows)
    assert (mixed > 0) == ("interrupt" in stream.name)


def test_tokens_of_a_stream_carry_the_probability_of_their_version(stream, random_llama):
    answers = recompute(stream, random_llama)
    assert len(answers) == 2 * 16 * 4
    assert max(answer.error for answer in answers) < 1e-4


def test_stream_without_staleness_is_the_synchronous_run(ray_session, random_llama, tmp_path):
    plain = small_run(random_llama, tmp_path, "plain", REWARD, "run.steps=4")
    bound = small_run(random_llama, tmp_path, "bound", REWARD, "run.steps=4", "asynchrony.pipeline=stream")
    assert all(r["staleness/max"] == 0 for r in steps_of(bound))
    for step in range(1, 5):
        expected, found = (
            sorted(zip(t["prompt"].to_pylist(), t["sample_idx"].to_pylist(), t["tokens"].to_pylist(), strict=True))
            for t in (RolloutArchive(run / "rollouts").read(step) for run in (plain, bound))
        )
        assert expected == found


def test_cut_stream_resumes_without_losing_or_repeating_a_group(ray_session, random_llama, tmp_path):
    overrides = (*STREAM, "asynchrony.max_staleness=1", "asynchrony.partial=interrupt")
    run = small_run(random_llama, tmp_path, "cut", *overrides, "run.steps=3")
    config = small_config(random_llama, tmp_path, "cut", *overrides, "run.steps=8")
    assert train(config, name="cut", resume=run) == 0
    keys = [GroupKey.parse(text) for text in trained_keys(run)]
    assert len(keys) == len(set(keys)) == 32
    assert {k.prompt for k in keys if k.epoch == 0} == set(range(16))
