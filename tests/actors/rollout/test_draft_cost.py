"""The cost of a pass is learned from steps, honestly where they cannot tell rows from tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from actors.rollout.draft_cost import CostFit, PassCost
from actors.rollout.engine import StepStats

TRUE = PassCost(fixed=0.004, row=1e-4, token=3e-5, ragged=1e-3)


def step(rows: int, drafted: int = 0, prefill: int = 0, *, seconds: float | None = None, passes: int = 1) -> StepStats:
    tokens = rows + drafted + prefill
    if seconds is None:
        seconds = TRUE.seconds(rows, tokens, passes=passes, ragged=drafted + prefill > 0)
    return StepStats(
        rows=rows,
        tokens=tokens,
        prefill_tokens=prefill,
        emitted=rows,
        drafted=drafted,
        accepted=0,
        waiting=0,
        seconds=seconds,
        paced_seconds=seconds,
        passes=passes,
    )


def test_coefficients_are_found_from_plain_drafting_and_prefill_steps() -> None:
    fit, rng = CostFit(), np.random.default_rng(0)
    for i in range(300):
        drafted = int(rng.integers(1, 200)) if i % 3 == 0 else 0
        stats = step(int(rng.integers(4, 64)), drafted, 300 if i % 37 == 0 else 0, passes=1 + (i % 11 == 0))
        fit.observe(stats)
    assert fit.cost is not None
    for name in ("fixed", "row", "token", "ragged"):
        assert getattr(fit.cost, name) == pytest.approx(getattr(TRUE, name), rel=0.02)


def test_nothing_is_claimed_before_enough_steps_were_seen() -> None:
    fit = CostFit()
    for _ in range(7):
        fit.observe(step(8))
    assert fit.cost is None
    fit.observe(step(8))
    assert fit.cost is not None


def test_one_slow_first_step_and_later_outliers_do_not_spoil_the_fit() -> None:
    fit, rng = CostFit(), np.random.default_rng(1)
    fit.observe(step(32, seconds=20.0))
    for i in range(200):
        clean = step(int(rng.integers(8, 64)), int(rng.integers(0, 100)))
        fit.observe(clean if i % 25 else step(clean.rows, clean.drafted, seconds=30 * clean.seconds))
    assert fit.cost is not None
    assert fit.cost.plain(32) == pytest.approx(TRUE.plain(32), rel=0.1)


@pytest.mark.parametrize("absurd", [math.nan, math.inf, -math.inf, -1.0, 0.0])
@pytest.mark.parametrize("at", [0, 20])
def test_a_time_that_is_none_is_ignored(absurd: float, at: int) -> None:
    fit = CostFit()
    for i in range(60):
        fit.observe(step(8, seconds=absurd) if i == at else step(8))
    assert fit.cost is not None
    assert fit.cost.plain(8) == pytest.approx(TRUE.plain(8), rel=0.02)


def test_without_drafts_the_plain_pass_is_right_and_the_token_keeps_its_prior() -> None:
    fit, rng = CostFit(), np.random.default_rng(2)
    for _ in range(200):
        fit.observe(step(int(rng.integers(4, 64))))
    assert fit.cost is not None
    assert fit.drafting_steps == 0
    assert fit.cost.plain(50) == pytest.approx(TRUE.plain(50), rel=0.01)
    assert 0 < fit.cost.token < fit.cost.plain(32) / 32


def test_what_drafting_taught_survives_a_long_phase_without_drafts() -> None:
    fit, rng = CostFit(), np.random.default_rng(3)
    for _ in range(100):
        fit.observe(step(int(rng.integers(4, 64)), int(rng.integers(0, 200))))
    for _ in range(2000):
        fit.observe(step(int(rng.integers(4, 64))))
    assert fit.cost is not None
    assert fit.cost.token == pytest.approx(TRUE.token, rel=0.05)


def test_a_lasting_change_of_pace_is_followed() -> None:
    fit = CostFit()
    for i in range(100):
        fit.observe(step(16 + i % 16))
    for i in range(400):
        rows = 16 + i % 16
        fit.observe(step(rows, seconds=4 * TRUE.plain(rows)))
    assert fit.cost is not None
    assert fit.cost.plain(24) == pytest.approx(4 * TRUE.plain(24), rel=0.1)


def test_coefficients_are_never_negative() -> None:
    fit = CostFit()
    for i in range(100):  # more rows take less time, which no coefficients of this law can say
        fit.observe(step(10 + i % 20, seconds=0.05 / (10 + i % 20)))
    assert fit.cost is not None
    assert min(fit.cost.fixed, fit.cost.row, fit.cost.token, fit.cost.ragged) >= 0


def test_a_hopeful_cost_makes_tokens_cheap_and_leaves_the_plain_pass() -> None:
    hopeful = PassCost(fixed=1.0, row=0.1, token=0.5, ragged=3.0).hopeful(10)
    assert hopeful.plain(10) == pytest.approx(1.0 + 1.0 + 5.0)
    assert hopeful.token == pytest.approx(0.05 * 7.0 / 10)
    assert hopeful.ragged == 0.0
