import numpy as np
import pytest

from actors.learner.advantages import group_advantages, soft_overlong_penalty
from actors.learner.options import OverlongOptions
from tests.actors.learner.batches import make_group

OFF = OverlongOptions()


def advantages(group, kind="group_std", overlong=OFF, max_tokens=100):
    return group_advantages(group, kind, overlong=overlong, max_tokens=max_tokens)


def group_of(rewards, **fields):
    return make_group(0, [[4, 5]] * len(rewards), rewards, **fields)


def test_group_std_uses_population_deviation():
    rewards = [1.0, 0.0, 0.0, 2.0]
    got = advantages(group_of(rewards))
    mean = sum(rewards) / 4
    std = (sum((r - mean) ** 2 for r in rewards) / 4) ** 0.5
    np.testing.assert_allclose(got.values, [(r - mean) / (std + 1e-4) for r in rewards], rtol=1e-6)
    assert got.values.dtype == np.float32
    assert got.in_loss.all()


def test_group_mean_keeps_the_scale_of_rewards():
    np.testing.assert_allclose(advantages(group_of([1.0, 0.0, 5.0]), "group_mean").values, [-1.0, -2.0, 3.0])


@pytest.mark.parametrize("kind", ["group_std", "group_mean"])
def test_equal_rewards_give_exactly_zero(kind):
    # 0.1 * 3 does not sum exactly in binary: a mean subtracted naively leaves 1e-17, which the division blows up
    got = advantages(group_of([0.1] * 7), kind)
    assert (got.values == 0).all()
    assert got.zero_variance


@pytest.mark.parametrize("status", ["error", "timeout", "abstained", "pending"])
def test_unscored_answer_is_not_a_reward_of_zero(status):
    got = advantages(group_of([1.0, 3.0, 0.0], status=["ok", "ok", status]), "group_mean")
    np.testing.assert_allclose(got.values, [-1.0, 1.0, 0.0])
    assert got.in_loss.tolist() == [True, True, False]


def test_reward_that_is_not_a_number_counts_as_unscored():
    got = advantages(group_of([1.0, 3.0, float("nan")]), "group_mean")
    np.testing.assert_allclose(got.values, [-1.0, 1.0, 0.0])
    assert not got.in_loss[2]


def test_aborted_answer_is_not_judged():
    got = advantages(group_of([1.0, 3.0, 9.0], finish=["stop", "length", "abort"]), "group_mean")
    np.testing.assert_allclose(got.values, [-1.0, 1.0, 0.0])


@pytest.mark.parametrize("status", [["ok", "error", "error"], ["error"] * 3])
def test_fewer_than_two_scored_answers_teach_nothing(status):
    got = advantages(group_of([1.0, 0.0, 0.0], status=status))
    assert (got.values == 0).all()
    assert not got.zero_variance


def test_soft_penalty_is_a_ramp():
    lengths = [0, 80, 81, 90, 99, 100, 150]
    got = [soft_overlong_penalty(n, 100, 20) for n in lengths]
    np.testing.assert_allclose(got, [0, 0, -0.05, -0.5, -0.95, -1, -1], atol=1e-12)


def test_soft_penalty_enters_before_the_baseline():
    group = make_group(0, [[4] * 10, [4] * 5], [1.0, 1.0], finish=["length", "stop"])
    soft = OverlongOptions(mode="soft", buffer_tokens=4)
    got = advantages(group, "group_mean", soft, max_tokens=10)
    np.testing.assert_allclose(got.values, [-0.5, 0.5])  # rewards become 0 and 1
    assert not got.zero_variance


def test_masked_truncation_stays_in_the_baseline():
    # Same tokens in both answers: only the record says which one was cut.
    group = group_of([0.0, 1.0, 2.0], finish=["length", "stop", "stop"])
    got = advantages(group, "group_mean", OverlongOptions(mode="mask"))
    np.testing.assert_allclose(got.values, [0.0, 0.0, 1.0])  # baseline 1, not 1.5
    assert got.in_loss.tolist() == [False, True, True]
