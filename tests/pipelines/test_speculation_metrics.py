"""What the counters of rollout workers become in the metrics of a step."""

from __future__ import annotations

import pytest

from pipelines.metrics_table import undocumented
from pipelines.speculation_metrics import speculation_metrics


def test_unknown_mass_is_the_mean_over_the_draws_of_the_step() -> None:
    before = {"a": {"residual_draws": 10.0, "residual_tail": 5.0}}
    after = {
        "a": {"residual_draws": 14.0, "residual_tail": 5.4},
        "b": {"residual_draws": 6.0, "residual_tail": 0.1},  # replaced meanwhile: it counts from 0 again
        "c": {"drafted_lenient": 3.0, "accepted_lenient": 2.0},
    }
    metrics = speculation_metrics(before, after)
    assert metrics["speculation/residual_draws"] == 10
    assert metrics["speculation/residual_tail_mass"] == pytest.approx(0.05)
    assert metrics["speculation/drafted/lenient"] == 3
    assert undocumented(metrics) == []


def test_a_step_without_residual_draws_says_nothing_of_them() -> None:
    counters = {"a": {"residual_draws": 4.0, "residual_tail": 1.0}}
    assert speculation_metrics(counters, counters) == {}
