from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.learner.asynchrony_options import AsynchronyOptions
from actors.learner.staleness import batch_weights, decay_weights, group_ages, newest_tokens, staleness_metrics
from storage.records import Segment, Timings
from tests.actors.learner.batches import make_group


def mixed(versions_per_answer, number=0):
    """A group whose answers have one token per given version; -1 stands for a tool's token."""
    answers = [[4] * len(v) for v in versions_per_answer]
    group = make_group(number, answers, [float(i) for i in range(len(answers))])
    samples = []
    for sample, versions in zip(group.samples, versions_per_answer, strict=True):
        segments = tuple(
            Segment(
                source="environment" if v < 0 else "policy",
                version=v,
                token_ids=np.array([4], np.int32),
                logprobs=np.array([0.0 if v < 0 else -1.0], np.float32),
            )
            for v in versions
        )
        samples.append(replace(sample, segments=segments))
    return replace(group, samples=tuple(samples))


def everything(groups):
    return [np.ones(len(g.samples), np.bool_) for g in groups]


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 1e4), min_size=1, max_size=40),
    st.floats(1e-3, 1e6),
    st.floats(0, 1e6),
)
def test_decay_weights_have_mean_one_and_see_only_differences_of_age(ages, half_life, shift):
    ages = np.array(ages)
    weights = decay_weights(ages, half_life)
    assert np.isfinite(weights).all()
    assert weights.mean() == pytest.approx(1)
    assert (np.diff(weights[np.argsort(ages, kind="stable")]) <= 1e-12).all()
    np.testing.assert_allclose(decay_weights(ages + shift, half_life), weights, rtol=1e-3, atol=1e-6)


def test_data_one_half_life_older_count_half():
    weights = decay_weights(np.array([0.0, 4.0, 8.0]), 4.0)
    np.testing.assert_allclose(weights, np.array([4, 2, 1]) * 3 / 7)
    # control: without the division by the mean the batch would count 7/12 of what it does
    assert np.exp2(-np.array([0.0, 4.0, 8.0]) / 4).mean() == pytest.approx(7 / 12)


def test_no_half_life_gives_no_weights():
    assert batch_weights([mixed([[3], [3]])], [np.ones(2, np.bool_)], 5, AsynchronyOptions()) is None


def test_siblings_share_the_weight_of_the_groups_oldest_token():
    groups = [mixed([[5, 5], [3, 5]]), mixed([[5], [5]], 1)]
    options = AsynchronyOptions(max_staleness=4, half_life=2.0)
    weights = batch_weights(groups, everything(groups), 5, options)
    old, fresh = 0.5 / 0.75, 1 / 0.75
    for array in weights[0]:
        np.testing.assert_allclose(array, old)
    for array in weights[1]:
        np.testing.assert_allclose(array, fresh)


def test_groups_outside_the_loss_do_not_move_the_mean():
    groups = [mixed([[5], [5]]), mixed([[3], [3]], 1), mixed([[1], [1]], 2)]
    in_loss = [np.ones(2, np.bool_), np.ones(2, np.bool_), np.zeros(2, np.bool_)]
    weights = batch_weights(groups, in_loss, 5, AsynchronyOptions(max_staleness=4, half_life=2.0))
    assert np.mean([weights[0][0][0], weights[1][0][0]]) == pytest.approx(1)


def test_token_decay_goes_by_each_tokens_own_version_and_skips_tool_output():
    groups = [mixed([[3, -1, 5], [5]])]
    options = AsynchronyOptions(max_staleness=4, half_life=2.0, grad_tokens="decay")
    (first, second), *_ = batch_weights(groups, everything(groups), 5, options)
    mean = (0.5 + 1 + 1) / 3
    np.testing.assert_allclose(first[[0, 2]], np.array([0.5, 1]) / mean, rtol=1e-6)
    np.testing.assert_allclose(second, 1 / mean, rtol=1e-6)


def test_token_decay_ends_in_all_tokens_and_in_the_newest_only():
    groups = [mixed([[3, 4, 5], [5, 5]])]
    found = {}
    for half_life in (1e9, 1e-3):
        options = AsynchronyOptions(max_staleness=4, half_life=half_life, grad_tokens="decay")
        found[half_life] = np.concatenate(batch_weights(groups, everything(groups), 5, options)[0])
    np.testing.assert_allclose(found[1e9], 1, atol=1e-6)
    np.testing.assert_allclose(found[1e-3], np.array([0, 0, 1, 1, 1]) * 5 / 3, atol=1e-6)


def timed(number, *firsts, dispatched=0.0):
    group = mixed([[0]] * len(firsts), number)
    samples = [
        replace(s, timings=Timings(first_token=f, dispatched=dispatched))
        for s, f in zip(group.samples, firsts, strict=True)
    ]
    return replace(group, samples=tuple(samples))


def test_seconds_count_from_the_first_token_of_the_oldest_sibling():
    groups = [timed(0, 1000.0, 1008.0), timed(1, 1030.0, 1020.0), timed(2, 0.0, dispatched=1010.0)]
    np.testing.assert_allclose(group_ages(groups, 0, "seconds"), [20, 0, 10])
    options = AsynchronyOptions(half_life=10.0, half_life_unit="seconds", max_staleness=1)
    weights = [w[0][0] for w in batch_weights(groups, everything(groups), 0, options)]
    np.testing.assert_allclose(weights, np.array([1, 4, 2]) * 3 / 7, rtol=1e-6)


def test_seconds_need_times():
    with pytest.raises(ValueError, match=r"train/e0/p7/d0 carries no times.*half_life_unit=seconds"):
        group_ages([timed(7, 0.0)], 0, "seconds")


def test_newest_tokens_are_those_behind_the_last_change_of_weights():
    samples = mixed([[3, 4, 4, -1, 4], [3, 3], [-1, -1]]).samples
    assert newest_tokens(samples[0]).tolist() == [False, True, True, False, True]
    assert newest_tokens(samples[1]).tolist() == [True, True]  # one version, however old, is trained whole
    assert not newest_tokens(samples[2]).any()


def test_histograms_hold_shares_by_token_and_by_oldest_token():
    metrics = staleness_metrics([mixed([[7, 8, 9, 9], [9]]), mixed([[0, -1], [9]], 1)], 9)
    shares = {name: value for name, value in metrics.items() if "/" in name}
    assert shares == pytest.approx(
        {
            "staleness_tokens/0": 4 / 7,
            "staleness_tokens/1": 1 / 7,
            "staleness_tokens/2": 1 / 7,
            "staleness_tokens/9_to_16": 1 / 7,
            "staleness_groups/2": 0.5,
            "staleness_groups/9_to_16": 0.5,
        }
    )
    assert metrics["staleness_max"] == 9
    assert metrics["staleness_mean"] == pytest.approx((2 + 1 + 9) / 7)
    assert metrics["staleness_group_mean"] == pytest.approx(5.5)
    assert metrics["mixed_version_share"] == 0.25
    assert metrics["version_span_max"] == 2


def test_batch_without_tokens_has_finite_metrics():
    assert all(np.isfinite(v) for v in staleness_metrics([], 3).values())
    assert all(np.isfinite(v) for v in staleness_metrics([mixed([[], []])], 3).values())
