"""The comparison of presets over seeds: its arithmetic, and what it refuses (same accuracy at equal prompts)."""

from pathlib import Path

import numpy as np
import pytest

from pipelines.bench import accuracy
from pipelines.bench.training import TrainingRun
from storage.errors import UserError


def run_of(after, *, trained=1024):
    records = [
        {"eval/heldout/accuracy": 0.5, "time": 1.0},
        {"ledger/trained": trained, "staleness/max": 2, "time/step_s": 3.0, "time": 2.0},
        {"eval/heldout/accuracy": after, "time": 3.0},
    ]
    return TrainingRun(directory=Path("nowhere"), began=0.0, seconds=9.0, records=records, peak=None)


def report(baseline, other):
    return accuracy.report(
        {"baseline": [run_of(x) for x in baseline], "areal": [run_of(x) for x in other]}, heldout=512
    ).figures


def test_a_gap_inside_the_spread_of_seeds_is_noise_and_one_outside_is_not():
    near = report([0.90, 0.92, 0.94], [0.89, 0.92, 0.93])
    assert near["gap_areal"] == pytest.approx(-0.02 / 3)
    assert near["within_noise"] == 1
    far = report([0.90, 0.92, 0.94], [0.80, 0.82, 0.84])
    assert far["worst_gap"] == pytest.approx(-0.1)
    assert far["within_noise"] == 0


def test_runs_of_different_numbers_of_prompts_are_not_compared():
    with pytest.raises(ValueError, match="different numbers"):
        accuracy.report({"baseline": [run_of(0.9), run_of(0.9)], "areal": [run_of(0.9), run_of(0.9, trained=8)]}, 512)


def test_noise_covers_the_difference_of_equal_arms_as_often_as_it_says():
    generator = np.random.default_rng(1)
    draws = generator.normal(0.9, 0.02, size=(4000, 4, 3))
    gaps = np.abs(draws[:, 1].mean(-1) - draws[:, 0].mean(-1))
    noise = [accuracy.gap_noise(arms.tolist()) for arms in draws]
    assert np.mean(gaps <= noise) == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("options", [{"presets": "arael"}, {"presets": "baseline"}, {"presets": ""}, {"seeds": 1}])
def test_what_cannot_be_compared_is_refused_before_anything_runs(options):
    with pytest.raises(UserError, match="option"):
        accuracy.run({**accuracy.OPTIONS, **options})
