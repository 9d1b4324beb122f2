"""Acceptance is learned from the draft tokens that verification reached, and from nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from actors.rollout.draft_calibration import SHAPE, Calibration

PROMPT = 1


def scored(calibration: Calibration, matched: list[int], counts: list[float], ratios: list[float]) -> np.ndarray:
    """Cells and cumulative acceptance of one draft of source 'prompt'."""
    width = len(matched)
    shape = (SHAPE[0], 1, width)
    arrays = {name: np.zeros(shape, dtype) for name, dtype in (("m", np.int32), ("c", np.float32), ("r", np.float32))}
    arrays["m"][PROMPT, 0], arrays["c"][PROMPT, 0], arrays["r"][PROMPT, 0] = matched, counts, ratios
    lengths = np.zeros((SHAPE[0], 1), np.int64)
    lengths[PROMPT] = width
    cumulative, cells = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    calibration.score(arrays["m"], arrays["c"], arrays["r"], lengths, cumulative, cells)
    return np.stack([cells[PROMPT, 0].astype(np.float64), cumulative[PROMPT, 0].astype(np.float64)])


def test_estimates_converge_to_the_true_acceptance_of_each_cell() -> None:
    calibration, rng = Calibration(), np.random.default_rng(0)
    truth = {(4, 3.0, 0.6): 0.4, (20, 3.0, 0.6): 0.8, (20, 20.0, 0.99): 0.95}
    cells = {fact: int(scored(calibration, [fact[0]], [fact[1]], [fact[2]])[0, 0]) for fact in truth}
    assert len(set(cells.values())) == 3
    for _ in range(300):
        for fact, chance in truth.items():
            accepted = (rng.random(8) < chance).astype(np.int64)
            calibration.learn(np.full((8, 1), cells[fact], np.int32), np.arange(8), np.ones(8, np.int64), accepted)
    for fact, chance in truth.items():
        assert scored(calibration, [fact[0]], [fact[1]], [fact[2]])[1, 0] == pytest.approx(chance, abs=0.04)


def test_positions_behind_the_first_rejection_are_not_counted() -> None:
    calibration = Calibration()
    first, second, third = scored(calibration, [2, 12, 40], [1.0] * 3, [0.9] * 3)[0].astype(np.int32)
    before = calibration.export()
    cells = np.array([[first, second, third]], np.int32)
    calibration.learn(cells, np.array([0]), np.array([3]), np.array([1]))
    after = calibration.export()
    tried = (after["tried"] - before["tried"]).ravel()
    accepted = (after["accepted"] - before["accepted"]).ravel()
    assert [tried[first], tried[second], tried[third]] == [1, 1, 0]
    assert [accepted[first], accepted[second], accepted[third]] == [1, 0, 0]
    assert tried.sum() == 2


def test_cumulative_acceptance_is_the_product_and_falls() -> None:
    calibration = Calibration()
    single = [scored(calibration, [m], [3.0], [0.8])[1, 0] for m in (3, 4, 5)]
    together = scored(calibration, [3, 4, 5], [3.0] * 3, [0.8] * 3)[1]
    assert together == pytest.approx(np.cumprod(single), rel=1e-5)


def test_a_thin_cell_leans_on_cells_of_the_same_match() -> None:
    calibration = Calibration()
    seen = int(scored(calibration, [12], [3.0], [0.6])[0, 0])
    unseen_before = scored(calibration, [12], [20.0], [0.6])[1, 0]
    for _ in range(100):
        calibration.learn(np.full((8, 1), seen, np.int32), np.arange(8), np.ones(8, np.int64), np.zeros(8, np.int64))
    unseen = scored(calibration, [12], [20.0], [0.6])[1, 0]
    elsewhere = scored(calibration, [40], [20.0], [0.6])[1, 0]
    assert unseen < 0.3 < unseen_before
    assert elsewhere > unseen


def test_old_trials_are_forgotten() -> None:
    calibration = Calibration(horizon=1000)
    cell = int(scored(calibration, [12], [3.0], [0.6])[0, 0])
    ones = np.ones(16, np.int64)
    for accepted in (0, 1):
        for _ in range(400):
            calibration.learn(np.full((16, 1), cell, np.int32), np.arange(16), ones, accepted * ones)
    assert scored(calibration, [12], [3.0], [0.6])[1, 0] > 0.95


def test_a_checkpoint_restores_the_estimates() -> None:
    calibration, other = Calibration(), Calibration()
    cell = int(scored(calibration, [12], [3.0], [0.6])[0, 0])
    for _ in range(64):
        calibration.learn(
            np.full((16, 1), cell, np.int32), np.arange(16), np.ones(16, np.int64), np.zeros(16, np.int64)
        )
    other.load(calibration.export())
    assert np.array_equal(other.probability, calibration.probability)
    with pytest.raises(ValueError, match="shape"):
        other.load({"tried": np.zeros(3), "accepted": np.zeros(3)})
