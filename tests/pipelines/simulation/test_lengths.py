"""The law of lengths, its predictor, and lengths taken from a recorded run."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from pipelines.simulation.lengths import LogNormalLengths, RecordedLengths
from pipelines.simulation.measures import ks_distance
from storage.errors import UserError
from storage.history.archive import RolloutArchive
from storage.records import TRAIN_SPLIT, Group, GroupKey, Prompt, Sample, SamplingParams, Segment


def key(prompt, epoch=0):
    return GroupKey(TRAIN_SPLIT, epoch, prompt)


def draws(law, prompts=3000, samples=8):
    return np.stack([law.draw(key(i), 0, samples) for i in range(prompts)])


def test_the_law_has_the_quantiles_and_shares_that_it_was_given():
    lengths = draws(LogNormalLengths(cap=10**9))
    assert np.percentile(lengths, 50) == pytest.approx(1160, rel=0.05)
    assert np.percentile(lengths, 90) == pytest.approx(4115, rel=0.06)
    logs = np.log(lengths)
    between = logs.mean(axis=1).var(ddof=1) - logs.var(axis=1, ddof=1).mean() / 8
    assert between / logs.var() == pytest.approx(0.72, abs=0.03)  # prompt .65 and drift .07


def test_the_cap_truncates():
    lengths = draws(LogNormalLengths(cap=2000), 200)
    assert lengths.max() == 2000
    assert (lengths == 2000).mean() > 0.2


def test_the_same_question_has_the_same_answer_and_another_attempt_another():
    law = LogNormalLengths()
    assert (law.draw(key(5), 0, 8) == law.draw(key(5), 0, 8)).all()
    assert (law.draw(key(5), 0, 8) != law.draw(key(5), 1, 8)).any()
    assert (law.draw(key(5), 0, 8) != law.draw(key(5, epoch=1), 0, 8)).any()


@pytest.mark.parametrize("correlation", [0.5, 0.9])
def test_the_predictor_is_as_good_as_it_says(correlation):
    law = LogNormalLengths(correlation=correlation, drift_share=0.0, cap=10**9)
    effects = np.array([law._prompt_effect(i)[0] for i in range(1500)])
    forecasts = [law.forecast(key(i), 8) for i in range(1500)]
    assert np.corrcoef(effects, np.log([f.longest for f in forecasts]))[0, 1] == pytest.approx(correlation, abs=0.06)
    longest = draws(law, 1500).max(axis=1)
    assert np.median(longest / [f.longest for f in forecasts]) == pytest.approx(1.0, abs=0.08)
    below = np.mean(draws(law, 1500) < np.array([[f.p90] for f in forecasts]))
    assert below == pytest.approx(0.9, abs=0.02)


def test_without_correlation_the_predictor_is_silent():
    assert LogNormalLengths().forecast(key(0), 8) is None


@pytest.mark.parametrize("share", [0.02, 0.1, 0.2])
def test_the_share_of_long_answers_can_be_set(share):
    law = LogNormalLengths.with_long_share(share, base=LogNormalLengths(cap=10**9))
    lengths = draws(law)
    assert np.median(lengths) == pytest.approx(1160, rel=0.06)
    assert (lengths > 4 * 1160).mean() == pytest.approx(share, abs=0.015)


def test_runaway_answers_come_in_clusters_and_run_into_the_cap():
    lengths = draws(LogNormalLengths(cap=10**8, runaway_share=0.03, runaway_prompts=0.2))
    away = lengths == 10**8
    assert away.mean() == pytest.approx(0.03, abs=0.005)
    assert away.any(axis=1).mean() == pytest.approx(0.2 * (1 - 0.85**8), abs=0.02)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"runaway_share": 0.3, "runaway_prompts": 0.2}, "share of runaway answers"),
        ({"p50": 5000.0}, "P50 <= P90"),
        ({"cap": 0}, "cap of at least 1"),
        ({"prompt_share": 0.99}, r"must lie in \[0, 1\]"),
        ({"correlation": 1.5}, "correlation"),
    ],
)
def test_a_law_that_does_not_exist_is_a_user_error(fields, words):
    with pytest.raises(UserError, match=words):
        LogNormalLengths(**fields)


def group(prompt, epoch, lengths):
    name = GroupKey(TRAIN_SPLIT, epoch, prompt)
    samples = tuple(
        Sample(
            key=name,
            index=index,
            segments=(
                Segment(
                    source="policy",
                    version=0,
                    token_ids=np.zeros(length, np.int32),
                    logprobs=np.zeros(length, np.float32),
                ),
            ),
            text="",
            finish_reason="stop",
        )
        for index, length in enumerate(lengths)
    )
    return Group(key=name, prompt=Prompt(index=prompt, token_ids=np.zeros(2, np.int32), text=""), samples=samples)


def test_a_recorded_run_gives_its_own_lengths_back(tmp_path):
    archive = RolloutArchive(tmp_path)
    sampling = SamplingParams(max_tokens=64)
    archive.append(0, [group(0, 0, [3, 4]), group(1, 0, [50, 60])], {}, sampling=sampling)
    archive.append(1, [group(0, 1, [5, 6])], {}, sampling=sampling)
    law = RecordedLengths.read(tmp_path, correlation=1.0)
    assert law.draw(key(0), 0, 2).tolist() == [3, 4]
    assert law.draw(key(0, epoch=1), 0, 2).tolist() == [5, 6]
    assert law.draw(key(1), 0, 2).tolist() == [50, 60]
    assert law.draw(key(3), 0, 2).tolist() == [50, 60], "prompts beyond the recorded ones are visits of those"
    assert set(law.draw(key(0), 1, 50)) == {3, 4, 5, 6}, "a restart draws from all answers to the prompt"
    assert law.forecast(key(1), 2).longest > law.forecast(key(0), 2).longest
    assert "6 answers to 2 prompts" in law.describe()


def test_a_run_without_rollouts_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"tracking\.rollouts"):
        RecordedLengths.read(tmp_path)


def test_the_ks_distance_is_that_of_scipy():
    rng = np.random.default_rng(0)
    one, two = rng.integers(0, 50, 300), rng.integers(5, 60, 200)
    assert ks_distance(one, two) == pytest.approx(stats.ks_2samp(one, two).statistic)
    assert ks_distance(one, one) == 0.0
