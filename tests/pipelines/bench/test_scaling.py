"""The scaling benchmark: its figures from made-up runs, the clock of the conductor, and what it refuses."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from pipelines.bench import scaling
from pipelines.bench.harness import BENCHES
from pipelines.bench.paced_runs import PacedRun
from pipelines.bench.scaling import ConductorClock, Scaled, conductor_clock, report
from pipelines.bench.training import TrainingRun
from pipelines.status import RunStatus
from storage.errors import UserError


def training(steps: int, step_s: float) -> TrainingRun:
    records: list[dict[str, Any]] = [
        {
            "step": n,
            "time": 100.0 + n * step_s,
            "time/step_s": step_s,
            "time/learn_s": 0.1,
            "ledger/trained": 4.0 * n,
            "rollout/pacing_overrun_share": 0.01,
        }
        for n in range(1, steps + 1)
    ]
    return TrainingRun(directory=Path("run"), began=0.0, seconds=1.0, records=records, peak=None)


def scaled(workers: int, tokens: int, cpu: float) -> Scaled:
    return Scaled(workers, max(1, workers // 2), PacedRun(f"workers-{workers}", training(6, 2.0), 2), tokens, cpu)


def test_goodput_is_compared_with_that_of_the_fewest_workers_times_their_number() -> None:
    result = report([scaled(1, 800, 2.0), scaled(8, 5760, 3.0)], (training(6, 1.6), 5.0))
    assert result.figures["scaling_1"] == 1.0
    assert result.figures["scaling_8"] == pytest.approx(0.9)
    assert result.figures["conductor_growth"] == pytest.approx(1.5)
    assert result.figures["groups_per_s"] == pytest.approx(64 / 1.6)
    assert [row[1] for row in result.rows] == ["1", "4"]
    assert set(BENCHES["scaling"].options) == set(scaling.OPTIONS)


def test_cpu_of_the_conductor_counts_between_the_skipped_steps_and_the_last() -> None:
    clock = ConductorClock([(0.0, 1.0), (107.9, 2.0), (108.1, 50.0), (111.9, 6.0), (120.0, 99.0)])
    assert clock.per_group(training(6, 2.0), 16) == pytest.approx(1e3 * (6.0 - 2.0) / 16)
    with pytest.raises(UserError, match="was not seen"):
        ConductorClock().per_group(training(6, 2.0), 16)


def test_the_clock_reads_the_process_that_the_status_names(tmp_path: Path) -> None:
    RunStatus(name="run", directory="", pid=os.getpid()).save(tmp_path / "status.json")
    with conductor_clock(tmp_path, interval_s=0.01) as clock:
        deadline = time.monotonic() + 10
        while len(clock.readings) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    seconds = [cpu for _, cpu in clock.readings]
    assert len(seconds) >= 3
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"workers": "1,two"}, "option workers='1,two'"),
        ({"workers": "0"}, "option workers='0'"),
        ({"steps": 3}, "option steps=3"),
        ({"groups": 64}, "option groups=64"),
    ],
)
def test_options_that_make_no_sense_are_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        scaling.run({**scaling.OPTIONS, **changed})
