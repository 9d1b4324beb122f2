from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.length_predictor.fusion import Ranking, combine_rankings
from actors.length_predictor.quality import spearman
from storage.errors import UserError

SCORES = st.lists(st.lists(st.integers(-50, 50), min_size=6, max_size=6), min_size=1, max_size=4)
WEIGHTS = st.lists(st.floats(0, 1), min_size=4, max_size=4)


def ranking(scores: list[float] | np.ndarray, tokens: float = 100.0) -> Ranking:
    array = np.array(scores, np.float64)
    quantiles = np.where(np.isfinite(array)[:, None], tokens * np.array([1.0, 2.0, 3.0]), np.nan)
    return Ranking(array, quantiles)


@given(SCORES, WEIGHTS)
def test_what_every_ranker_puts_ahead_stays_ahead(scores: list[list[int]], weights: list[float]) -> None:
    fused = combine_rankings([ranking(row) for row in scores], weights[: len(scores)]).rank
    table = np.array(scores)
    for i in range(6):
        for j in range(6):
            if (table[:, i] >= table[:, j]).all():
                assert fused[i] >= fused[j]


@given(SCORES, WEIGHTS, st.floats(0.001, 1000), st.floats(-1000, 1000))
def test_the_scale_of_a_ranker_does_not_matter(
    scores: list[list[int]], weights: list[float], factor: float, shift: float
) -> None:
    rankings = [ranking(row) for row in scores]
    rescaled = [ranking(np.array(row) * factor + shift) for row in scores]
    bent = [ranking(np.exp(np.array(row) / 20.0)) for row in scores]
    used = weights[: len(scores)]
    expected = combine_rankings(rankings, used)
    for other in (combine_rankings(rescaled, used), combine_rankings(bent, used)):
        np.testing.assert_allclose(other.rank, expected.rank)
        np.testing.assert_allclose(other.confidence, expected.confidence)


@given(SCORES, WEIGHTS)
def test_everything_stays_in_its_range(scores: list[list[int]], weights: list[float]) -> None:
    fused = combine_rankings([ranking(row) for row in scores], weights[: len(scores)])
    assert ((fused.rank >= 0) & (fused.rank <= 1)).all()
    assert ((fused.confidence >= 0) & (fused.confidence <= 1)).all()
    assert fused.rank.mean() == pytest.approx(0.5)


def test_the_order_of_the_prompts_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal(20), rng.standard_normal(20)
    order = rng.permutation(20)
    straight = combine_rankings([ranking(a), ranking(b)], [0.9, 0.4])
    shuffled = combine_rankings([ranking(a[order]), ranking(b[order])], [0.9, 0.4])
    np.testing.assert_allclose(straight.rank[order], shuffled.rank)


def test_a_weight_of_zero_or_nan_leaves_a_ranker_out() -> None:
    a, b = [1.0, 2.0, 3.0], [3.0, 2.0, 1.0]
    alone = combine_rankings([ranking(a)], [0.8])
    for weight in (0.0, -0.5, float("nan")):
        fused = combine_rankings([ranking(a), ranking(b, tokens=9000.0)], [0.8, weight])
        np.testing.assert_allclose(fused.rank, alone.rank)
        np.testing.assert_allclose(fused.quantiles, alone.quantiles)
        np.testing.assert_allclose(fused.confidence, alone.confidence)


def test_the_stronger_ranker_wins_a_disagreement_and_disagreement_costs_confidence() -> None:
    a, b = [1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]
    fused = combine_rankings([ranking(a), ranking(b)], [0.9, 0.5])
    assert list(np.argsort(fused.rank)) == [0, 1, 2, 3]
    agreed = combine_rankings([ranking(a), ranking(a)], [0.9, 0.5])
    assert agreed.confidence == pytest.approx([0.9] * 4)
    assert fused.confidence[0] < 0.7


def test_weights_by_skill_beat_equal_weights_and_the_single_rankers() -> None:
    rng = np.random.default_rng(1)
    truth = rng.standard_normal(2000)
    good, bad = truth + 0.5 * rng.standard_normal(2000), truth + 3.0 * rng.standard_normal(2000)
    skills = [spearman(good, truth), spearman(bad, truth)]
    fused = combine_rankings([ranking(good), ranking(bad)], skills).rank
    equal = combine_rankings([ranking(good), ranking(bad)], [0.7, 0.7]).rank
    assert spearman(fused, truth) >= max(skills) - 0.002
    assert spearman(fused, truth) > spearman(equal, truth) + 0.02


def test_prompts_that_a_ranker_does_not_know_are_ordered_by_the_others() -> None:
    fused = combine_rankings([ranking([1.0, 9.0, 3.0, 4.0]), ranking([np.nan, np.nan, 8.0, 7.0])], [0.5, 0.9])
    assert fused.rank[0] < fused.rank[1]
    assert fused.rank[3] < fused.rank[2]
    assert list(fused.confidence[:2]) == pytest.approx([0.5, 0.5])
    nobody = combine_rankings([ranking([np.nan] * 3)], [0.9])
    assert list(nobody.rank) == [0.5] * 3
    assert list(nobody.confidence) == [0.0] * 3
    assert np.isnan(nobody.quantiles).all()


def test_quantiles_are_averaged_in_log_space_and_stay_in_order() -> None:
    fused = combine_rankings([ranking([1.0, 2.0], 100.0), ranking([1.0, 2.0], 400.0)], [0.8, 0.8])
    np.testing.assert_allclose(fused.quantiles[0], [200.0, 400.0, 600.0])


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(UserError, match="one weight each"):
        combine_rankings([ranking([1.0])], [])
    with pytest.raises(UserError, match="one weight each"):
        combine_rankings([], [])
    with pytest.raises(UserError, match="not of the same prompts"):
        combine_rankings([ranking([1.0]), ranking([1.0, 2.0])], [0.5, 0.5])
