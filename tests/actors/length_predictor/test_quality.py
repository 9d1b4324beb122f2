from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from actors.length_predictor.quality import (
    PrequentialQuality,
    average_ranks,
    kendall_tau,
    recall_of_longest,
    spearman,
)

INTEGERS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=60)


@given(INTEGERS)
def test_spearman_and_kendall_agree_with_scipy_under_ties(pairs: list[tuple[int, int]]) -> None:
    x, y = (np.array(side, np.float64) for side in zip(*pairs, strict=True))
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert math.isnan(spearman(x, y))
        assert math.isnan(kendall_tau(x, y))
        return
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-9)
    assert kendall_tau(x, y) == pytest.approx(stats.kendalltau(x, y).statistic, abs=1e-9)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_ranks_are_scipys_average_ranks(values: list[int]) -> None:
    array = np.array(values, np.float64)
    np.testing.assert_allclose(average_ranks(array), stats.rankdata(array))


def test_missing_predictions_are_left_out() -> None:
    predicted = np.array([1.0, np.nan, 2.0, 3.0, np.nan])
    actual = np.array([10.0, 0.0, 20.0, 30.0, 99.0])
    assert spearman(predicted, actual) == pytest.approx(1.0)
    assert kendall_tau(predicted, actual) == pytest.approx(1.0)
    assert math.isnan(spearman(np.full(5, np.nan), actual))


def test_recall_counts_the_longest_fifth() -> None:
    actual = np.arange(10.0)
    assert recall_of_longest(actual, actual) == 1.0
    assert recall_of_longest(-actual, actual) == 0.0
    half = actual.copy()
    half[8] = -1.0
    assert recall_of_longest(half, actual) == 0.5


def test_recall_of_a_constant_prediction_is_that_of_chance() -> None:
    assert recall_of_longest(np.zeros(100), np.arange(100.0)) == pytest.approx(0.2)


def test_recall_does_not_care_which_of_equally_long_prompts_is_found() -> None:
    actual = np.array([5.0, 5.0, 5.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    for found in ([0, 1], [2, 3], [1, 3]):
        predicted = np.zeros(10)
        predicted[found] = 1.0
        assert recall_of_longest(predicted, actual) == 1.0
    assert math.isnan(recall_of_longest(np.arange(10.0), np.ones(10)))


def test_recent_pairs_weigh_more_and_old_ones_leave_the_window() -> None:
    quality = PrequentialQuality(["a"], window=200, half_life=20)
    right = np.arange(100.0)
    quality.add(right[:, None], right)
    quality.add(-right[:, None], right)
    recent, groups = quality.correlation("a")
    assert recent < -0.5
    assert groups < 80  # the effective number, far below the 200 pairs
    quality.add(right[:, None], right)
    quality.add(right[:, None], right)
    assert len(quality) == 200
    assert quality.figures()["a"].spearman == pytest.approx(1.0)


def test_a_ranker_without_opinions_has_no_figures() -> None:
    quality = PrequentialQuality(["a", "b"], window=50, half_life=10)
    quality.add(np.column_stack([np.arange(20.0), np.full(20, np.nan)]), np.arange(20.0))
    figures = quality.figures()
    assert figures["a"].spearman == pytest.approx(1.0)
    assert figures["b"].groups == 0
    assert all(math.isnan(v) for v in (figures["b"].spearman, figures["b"].kendall, figures["b"].recall20))
    assert math.isnan(quality.correlation("b")[0])
