"""The budget of a pass is the one that emits most per second."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rollout.draft_budget import allocate
from actors.rollout.draft_cost import PassCost


def brute_force(cumulative: np.ndarray, lengths: np.ndarray, weights: np.ndarray, cost: PassCost) -> float:
    candidates, rows, _ = cumulative.shape
    options = [
        [(0.0, 0)]
        + [
            (weights[row] * float(cumulative[c, row, : k + 1].sum()), k + 1)
            for c in range(candidates)
            for k in range(lengths[c, row])
        ]
        for row in range(rows)
    ]
    best = 0.0
    for choice in itertools.product(*options):
        drafted = sum(k for _, k in choice)
        seconds = cost.plain(rows) + cost.token * drafted + (cost.ragged if drafted else 0.0)
        best = max(best, (weights.sum() + sum(value for value, _ in choice)) / seconds)
    return best


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 3),
    candidates=st.integers(1, 2),
    token=st.floats(0.0, 1.0),
    ragged=st.sampled_from([0.0, 0.1, 1.0]),
    weighted=st.booleans(),
)
def test_allocation_is_the_optimum_of_all_allocations(
    seed: int, rows: int, candidates: int, token: float, ragged: float, weighted: bool
) -> None:
    rng = np.random.default_rng(seed)
    cumulative = np.cumprod(rng.uniform(0, 1, (candidates, rows, 4)), axis=2).astype(np.float32)
    lengths = rng.integers(0, 5, (candidates, rows))
    weights = rng.uniform(1, 2, rows) if weighted else np.ones(rows)
    cost = PassCost(fixed=1.0, row=0.1, token=token, ragged=ragged)
    budget = allocate(cumulative, lengths, weights, cost)
    reached = weights.sum()
    for row in range(rows):
        assert (budget.source[row] < 0) == (budget.lengths[row] == 0)
        if budget.lengths[row]:
            assert budget.lengths[row] <= lengths[budget.source[row], row]
            reached += weights[row] * float(cumulative[budget.source[row], row, : budget.lengths[row]].sum())
    drafted = int(budget.lengths.sum())
    reached /= cost.plain(rows) + token * drafted + (ragged if drafted else 0.0)
    assert reached == pytest.approx(brute_force(cumulative, lengths, weights, cost), rel=1e-6)
    assert budget.gain == pytest.approx(reached * cost.plain(rows) / weights.sum(), rel=1e-6)


def test_no_drafts_where_a_token_costs_more_than_it_brings() -> None:
    cumulative = np.full((1, 2, 3), 0.2, np.float32)
    budget = allocate(cumulative, np.full((1, 2), 3), np.ones(2), PassCost(fixed=0.0, row=0.5, token=0.5))
    assert budget.lengths.tolist() == [0, 0]
    assert budget.source.tolist() == [-1, -1]
    assert budget.gain == 1.0


def test_a_fixed_price_of_ragged_passes_keeps_out_drafts_that_only_just_pay() -> None:
    cumulative = np.full((1, 1, 1), 0.3, np.float32)
    lengths = np.ones((1, 1), np.int64)
    assert allocate(cumulative, lengths, np.ones(1), PassCost(1.0, 0.0, 0.01)).lengths[0] == 1
    assert allocate(cumulative, lengths, np.ones(1), PassCost(1.0, 0.0, 0.01, ragged=0.5)).lengths[0] == 0


def test_a_row_of_higher_priority_gets_the_longer_draft() -> None:
    one = np.cumprod(np.full(8, 0.6)).astype(np.float32)
    cumulative = np.stack([one, one])[None]
    cost = PassCost(fixed=1.0, row=0.1, token=0.15)
    budget = allocate(cumulative, np.full((1, 2), 8), np.array([1.0, 2.0]), cost)
    assert budget.lengths[1] > budget.lengths[0] > 0


def test_the_candidate_that_brings_more_is_taken_whatever_its_place() -> None:
    good, bad = np.array([0.9, 0.8], np.float32), np.array([0.95, 0.1], np.float32)
    cost = PassCost(fixed=1.0, row=0.0, token=0.05)
    for order, expected in (((good, bad), 0), ((bad, good), 1)):
        budget = allocate(np.stack(order)[:, None], np.full((2, 1), 2), np.ones(1), cost)
        assert budget.source[0] == expected
        assert budget.lengths[0] == 2
