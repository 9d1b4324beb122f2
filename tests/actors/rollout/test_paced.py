"""Pacing stretches steps to the time law and says when the machine was too slow for it."""

from __future__ import annotations

import time

import pytest

from actors.rollout.engine import StepStats
from actors.rollout.options import PacingOptions
from actors.rollout.paced import PROFILES, PacedEngine

from .conftest import finish, request, tokens_of


class Sleeper:
    """An engine whose steps take a given real time."""

    def __init__(self, seconds):
        self._seconds = seconds
        self._observers = []

    def add_observer(self, observer):
        self._observers.append(observer)

    def step(self):
        time.sleep(self._seconds)
        stats = StepStats(
            rows=4,
            tokens=10,
            prefill_tokens=0,
            emitted=4,
            drafted=0,
            accepted=0,
            waiting=0,
            seconds=self._seconds,
            paced_seconds=self._seconds,
        )
        for observer in self._observers:
            observer(stats)
        return []


def test_a_step_takes_t0_plus_rows_and_tokens():
    paced = PacedEngine(Sleeper(0.001), PacingOptions(profile="middle", t0_ms=30))
    seen = []
    paced.add_observer(seen.append)
    begin = time.perf_counter()
    paced.step()
    elapsed = time.perf_counter() - begin
    expected = 0.030 * (1 + 4 * PROFILES["middle"].row + 10 * PROFILES["middle"].token)
    assert expected <= elapsed < expected + 0.05
    assert seen[0].paced_seconds == pytest.approx(elapsed, abs=0.01)
    assert seen[0].seconds == 0.001
    assert not paced.invalid


def test_a_machine_too_slow_for_the_pace_makes_the_run_invalid():
    paced = PacedEngine(Sleeper(0.02), PacingOptions(profile="latency_bound", t0_ms=5))
    for _ in range(3):
        paced.step()
    assert paced.overrun_share == 1.0
    assert paced.invalid


def test_profiles_go_from_latency_to_throughput_bound():
    rows = [PROFILES[name].row for name in ("latency_bound", "middle", "throughput_bound")]
    assert rows == pytest.approx([0.0049, 0.0204, 0.0816], rel=0.02)
    assert all(p.token == pytest.approx(0.0054, rel=0.02) for p in PROFILES.values())


def test_a_paced_engine_writes_what_the_engine_writes(engine_of):
    plain = finish(engine_of(), [request(i, max_tokens=5) for i in range(3)])
    paced = PacedEngine(engine_of(), PacingOptions(profile="middle", t0_ms=0.5))
    done = finish(paced, [request(i, max_tokens=5) for i in range(3)])
    assert {i: tokens_of(c) for i, c in done.items()} == {i: tokens_of(c) for i, c in plain.items()}
    with pytest.raises(ValueError, match="off"):
        PacedEngine(engine_of(), PacingOptions())
