"""The gate closes while drafts lose, opens while they gain, and never flaps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from actors.rollout.draft_cost import PassCost
from actors.rollout.draft_gate import (
    CONTROL_EVERY,
    FIRST_WAIT,
    IDLE_PASSES,
    LEARNING_PASSES,
    LONGEST_WAIT,
    PROBE_PASSES,
    DraftGate,
)
from actors.rollout.engine import StepStats

COST = PassCost(fixed=0.01, row=0.0, token=0.0)
ROWS = 16


def run(
    gate: DraftGate, passes: int, gain: float, *, acceptance: float = 0.5, noise: float = 0.0, seed: int = 0
) -> int:
    """Let a synthetic engine make so many passes; drafts emit ``gain`` times a plain pass's tokens per second."""
    rng = np.random.default_rng(seed)
    drafted_passes = 0
    for _ in range(passes):
        drafting = gate.admit()
        drafted_passes += drafting
        if drafting:
            gate.expect(1.5, 4 * ROWS)
        seconds = 0.01 * (1 + noise * rng.standard_normal())
        drafted = 100 if drafting else 0
        emitted = ROWS * 2 if drafting else ROWS
        gate.measure(
            StepStats(
                rows=ROWS,
                tokens=ROWS + drafted,
                prefill_tokens=0,
                emitted=emitted,
                drafted=drafted,
                accepted=int(acceptance * drafted),
                waiting=0,
                seconds=seconds,
                paced_seconds=seconds * (2 / gain if drafting else 1),
            ),
            COST,
        )
    return drafted_passes


def test_drafts_that_gain_stay_on_but_for_control_passes() -> None:
    gate = DraftGate("auto")
    assert run(gate, 1000, gain=1.5) >= 1000 - 1000 // CONTROL_EVERY - 1
    assert gate.state == "open"
    assert gate.measured == pytest.approx(1.5, rel=0.01)
    assert "measured gain 1.50" in gate.reason


def test_drafts_that_lose_are_switched_off_after_one_probe_and_tried_ever_more_seldom() -> None:
    gate = DraftGate("auto")
    run(gate, LEARNING_PASSES + PROBE_PASSES, gain=0.5)
    assert gate.state == "closed"
    assert "measured gain 0.50" in gate.reason
    first = run(gate, 5000, gain=0.5)
    assert first <= 8 * (LEARNING_PASSES + PROBE_PASSES)
    assert run(gate, LONGEST_WAIT, gain=0.5) <= LEARNING_PASSES + PROBE_PASSES


def test_it_opens_again_when_drafts_begin_to_gain() -> None:
    gate = DraftGate("auto")
    run(gate, 300, gain=0.6)
    assert gate.state == "closed"
    run(gate, 4 * FIRST_WAIT + 300, gain=1.6)
    assert gate.state == "open"


@pytest.mark.parametrize("gain", [0.8, 0.99, 1.0, 1.01, 1.2])
def test_noise_never_makes_it_flap(gain: float) -> None:
    gate = DraftGate("auto")
    run(gate, 4000, gain, noise=0.1)
    assert gate.changes <= 4000 / (FIRST_WAIT + PROBE_PASSES) * 2
    before = gate.changes
    for seed in range(20):
        run(gate, 10, gain, noise=0.1, seed=seed)
    assert gate.changes - before <= 200 / PROBE_PASSES


def test_an_open_gate_survives_a_gain_a_little_below_one() -> None:
    gate = DraftGate("auto")
    run(gate, 100, gain=1.3)
    run(gate, 300, gain=0.985)
    assert gate.state == "open"
    run(gate, 300, gain=0.9)
    assert gate.state != "open"


def test_it_stops_looking_when_no_draft_pays() -> None:
    gate = DraftGate("auto")
    for _ in range(IDLE_PASSES):
        assert gate.admit()
        gate.expect(1.0, 0)
    assert not gate.admit()
    assert "no draft pays" in gate.reason


def test_new_drafts_bring_the_next_probe_forward() -> None:
    gate = DraftGate("auto")
    run(gate, 3000, gain=0.5)
    assert gate.state == "closed"
    run(gate, LONGEST_WAIT // 8, gain=0.5)
    gate.invite()
    assert gate.admit()
    closed = DraftGate("auto")
    run(closed, LEARNING_PASSES + PROBE_PASSES, gain=0.5)
    closed.invite(first=True)
    assert closed.admit()


def test_acceptance_rule_falls_below_its_floor_whatever_the_gain() -> None:
    gate = DraftGate("acceptance", 0.7)
    run(gate, 100, gain=3.0, acceptance=0.4)
    assert gate.state == "closed"
    assert "acceptance 40%" in gate.reason
    assert "70%" in gate.reason
    fine = DraftGate("acceptance", 0.7)
    assert run(fine, 100, gain=0.5, acceptance=0.8) == 100


def test_always_never_closes() -> None:
    gate = DraftGate("always")
    assert run(gate, 500, gain=0.2, acceptance=0.0) == 500
    assert not math.isnan(gate.measured)


def test_a_probe_learns_the_cost_before_it_judges() -> None:
    gate = DraftGate("auto")
    assert gate.learning
    run(gate, LEARNING_PASSES, gain=0.01)
    assert not gate.learning
    assert math.isnan(gate.measured)
    run(gate, 200, gain=1.5)
    assert gate.state == "open"
    assert not gate.learning
    assert not DraftGate("acceptance").learning
    assert not DraftGate("always").learning
