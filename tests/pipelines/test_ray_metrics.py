"""Live metrics against a stand-in of ray.util.metrics that is as strict as the original."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from pipelines.ray_metrics import OPERATIONS, QUEUES, REASONS, WAITS, RunMetrics
from pipelines.status import STATES, Wait


class Fake:
    """Holds all series by (metric name, tag values)."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, ...], float] = {}
        self.observed: dict[tuple[str, ...], list[float]] = {}
        fake = self

        class Metric:
            def __init__(self, name, description="", tag_keys=(), boundaries=None):
                assert name.startswith("slipstream_")
                assert description
                assert isinstance(tag_keys, tuple)
                self.name, self.tag_keys = name, tag_keys

            def set_default_tags(self, tags):
                assert tags == {"run": "run-1"}
                return self

            def key(self, value, tags):
                assert isinstance(value, int | float), type(value)
                assert ("run", *(tags or ())) == self.tag_keys
                return (self.name, *(tags or {}).values())

        class Gauge(Metric):
            def set(self, value, tags=None):
                fake.series[self.key(value, tags)] = value

        class Counter(Metric):
            def inc(self, value=1.0, tags=None):
                assert value > 0  # the original raises on 0
                key = self.key(value, tags)
                fake.series[key] = fake.series.get(key, 0.0) + value

        class Histogram(Metric):
            def observe(self, value, tags=None):
                fake.observed.setdefault(self.key(value, tags), []).append(value)

        self.Gauge, self.Counter, self.Histogram = Gauge, Counter, Histogram


@pytest.fixture
def fake() -> Fake:
    return Fake()


def test_series_exist_and_are_zero_before_anything_happens(fake):
    RunMetrics("run-1", fake)
    for queue in QUEUES:
        assert fake.series["slipstream_queue_depth", queue] == 0
    for reason in REASONS:
        assert fake.series["slipstream_errors", reason] == 0
    for label in WAITS:
        assert fake.series["slipstream_wait_seconds", label] == 0
    for operation in OPERATIONS:
        assert fake.series["slipstream_last_seconds", operation] == 0
    assert fake.series["slipstream_reward",] == 0


@pytest.mark.parametrize("state", STATES)
def test_exactly_one_phase_is_one(fake, state):
    metrics = RunMetrics("run-1", fake)
    metrics.phase("generating")
    metrics.phase(state)
    phases = {key[1]: value for key, value in fake.series.items() if key[0] == "slipstream_phase"}
    assert phases == {s: float(s == state) for s in STATES}


def test_a_step_sets_gauges_counts_tokens_and_times_its_parts(fake):
    metrics = RunMetrics("run-1", fake)
    step = {
        "reward/mean": np.float32(0.5),
        "accuracy/train": 0.25,
        "rollout/tokens_per_s": 900.0,
        "staleness/max": 1.0,
        "time/learn_s": 2.0,
        "time/step_s": 5.0,
        "learner/loss": 3.0,
    }
    metrics.step(1, step, generated=1000, trained=900)
    metrics.step(2, step, generated=1000)
    assert fake.series["slipstream_step",] == 2
    assert fake.series["slipstream_reward",] == 0.5
    assert fake.series["slipstream_accuracy",] == 0.25
    assert fake.series["slipstream_tokens", "generated"] == 2000
    assert fake.series["slipstream_tokens", "trained"] == 900
    assert fake.observed["slipstream_seconds", "learn"] == [2.0, 2.0]
    assert fake.series["slipstream_last_seconds", "step"] == 5.0


def test_a_number_that_is_not_finite_leaves_the_gauge_alone(fake):
    metrics = RunMetrics("run-1", fake)
    metrics.step(1, {"reward/mean": 0.5})
    metrics.step(2, {"reward/mean": float("nan")})
    assert fake.series["slipstream_reward",] == 0.5


def test_unknown_labels_become_other_and_add_no_series(fake):
    metrics = RunMetrics("run-1", fake)
    before = set(fake.series)
    metrics.queue("prompt-1234", 5)
    metrics.error("ZeroDivisionError at line 7", 2)
    metrics.error("something else")
    metrics.waits([Wait(label="group 17", who="rollout-0", seconds=3.0)])
    assert set(fake.series) == before
    assert fake.series["slipstream_queue_depth", "other"] == 5
    assert fake.series["slipstream_errors", "other"] == 3
    assert fake.series["slipstream_wait_seconds", "other"] == 3


def test_a_wait_that_ended_goes_back_to_zero(fake):
    metrics = RunMetrics("run-1", fake)
    metrics.waits([Wait(label="learn", who="learner", seconds=9.0), Wait(label="learn", who="learner", seconds=4.0)])
    assert fake.series["slipstream_wait_seconds", "learn"] == 9
    metrics.waits([])
    assert fake.series["slipstream_wait_seconds", "learn"] == 0


def test_failures_of_a_step_are_counted_by_reason(fake):
    metrics = RunMetrics("run-1", fake)
    step = {"reward/error_share": 3 / 64, "rollout/samples": 64, "learner/unfinished": 2.0, "faults/crashes": 1.0}
    metrics.step(1, step)
    metrics.step(2, step | {"faults/crashes": 3.0})
    assert fake.series["slipstream_errors", "reward"] == 6
    assert fake.series["slipstream_errors", "generation"] == 4
    assert fake.series["slipstream_errors", "worker_lost"] == 3, "the run counts crashes from its start"


def test_a_wait_beyond_its_deadline_is_one_stall_until_it_ends(fake):
    metrics = RunMetrics("run-1", fake)
    late = Wait(label="learn", who="learner", seconds=9.0, deadline_s=5.0)
    for waits in ([late], [late], [], [late], [Wait(label="reward", who="reward-0", seconds=9.0)]):
        metrics.waits(waits)
    assert fake.series["slipstream_errors", "stall"] == 2


def test_groups_that_ended_show_by_reason(fake):
    metrics = RunMetrics("run-1", fake)
    metrics.step(1, {"ledger/ended/zero_variance": 4.0, "ledger/ended/sunk": 1.0, "ledger/ended/lost": 2.0})
    assert fake.series["slipstream_ended_groups", "zero_variance"] == 4
    assert fake.series["slipstream_ended_groups", "unscored"] == 0
    assert fake.series["slipstream_ended_groups", "other"] == 3


def test_publishing_is_timed(fake):
    metrics = RunMetrics("run-1", fake)
    metrics.seconds("publish", 0.4)
    assert fake.observed["slipstream_seconds", "publish"] == [0.4]


def test_importing_the_module_does_not_import_ray():
    import subprocess

    code = "import sys, pipelines.ray_metrics; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
