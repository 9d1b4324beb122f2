"""Where metrics go: the file that must not fail and the trackers that may."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import types

import numpy as np
import pytest

from pipelines import monitoring
from pipelines.evaluation import Estimate, EvaluationResult
from pipelines.monitoring import (
    METRICS,
    JsonlMonitor,
    MonitorGroup,
    TensorboardMonitor,
    describe,
    open_monitors,
    read_records,
    undocumented,
)
from pipelines.status import CURVES, HEADLINES
from storage.errors import UserError
from storage.options import TrackingOptions

JSONL_ONLY = TrackingOptions(tensorboard=False)


class Recorder:
    def __init__(self, failing: bool = False) -> None:
        self.calls: list[tuple[int, dict]] = []
        self.failing = failing
        self.closed = False

    def log(self, step, metrics):
        self.calls.append((step, dict(metrics)))
        if self.failing:
            raise ConnectionError("server gone")

    def close(self):
        self.closed = True


def test_records_hold_step_time_wall_clock_and_values(tmp_path):
    now = iter([100.0, 101.5, 103.0])
    monitor = JsonlMonitor(tmp_path / "metrics.jsonl", clock=lambda: next(now))
    monitor.log(1, {"reward/mean": np.float32(0.5), "ledger/trained": np.int64(3), "note": "hello"})
    monitor.log(2, {"learner/loss": float("nan"), "rollout/length_max": float("inf")})
    monitor.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "step": 1,
        "time": 101.5,
        "wall_s": 1.5,
        "reward/mean": 0.5,
        "ledger/trained": 3,
        "note": "hello",
    }
    assert lines[1] == {"step": 2, "time": 103.0, "wall_s": 3.0, "learner/loss": None, "rollout/length_max": None}
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_resume_drops_records_after_the_checkpoint_and_the_clock_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    now = iter([0.0, 10.0, 20.0])
    first = JsonlMonitor(path, clock=lambda: next(now))
    first.log(1, {"reward/mean": 0.1})
    offset = first.offset()
    first.log(2, {"reward/mean": 0.2})
    first.close()
    later = iter([1000.0, 1001.0])
    second = JsonlMonitor(path, resume_offset=offset, clock=lambda: next(later))
    second.log(2, {"reward/mean": 0.3})
    second.close()
    assert [(r["step"], r["reward/mean"], r["wall_s"]) for r in read_records(path)] == [(1, 0.1, 10.0), (2, 0.3, 11.0)]


def test_a_torn_last_line_is_not_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "rew')
    assert read_records(path) == [{"step": 1}]
    assert read_records(tmp_path / "missing.jsonl") == []


def test_a_failing_tracker_is_reported_once_and_switched_off(tmp_path, caplog):
    group = MonitorGroup(JsonlMonitor(tmp_path / "metrics.jsonl"))
    good, bad = Recorder(), Recorder(failing=True)
    group.add("good", lambda: good)
    group.add("bad", lambda: bad)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            group.log(step, {"reward/mean": step / 10})
    group.close()
    assert len(bad.calls) == 1
    assert len(good.calls) == len(read_records(tmp_path / "metrics.jsonl")) == 3
    assert group.failures == ["bad failed and is switched off for this run: ConnectionError: server gone"]
    assert len([r for r in caplog.records if "switched off" in r.message]) == 1
    assert good.closed


def test_a_tracker_that_cannot_open_does_not_stop_the_run(tmp_path):
    def opener():
        raise RuntimeError("no network")

    group = MonitorGroup(JsonlMonitor(tmp_path / "metrics.jsonl"))
    group.add("wandb", opener)
    group.log(1, {"reward/mean": 1.0})
    group.close()
    assert "no network" in group.failures[0]


def test_a_failure_of_the_record_itself_is_fatal(tmp_path):
    class Full(JsonlMonitor):
        def log(self, step, metrics):
            raise OSError(28, "No space left on device")

    group = MonitorGroup(Full(tmp_path / "metrics.jsonl"))
    with pytest.raises(OSError, match="No space"):
        group.log(1, {})


def test_open_monitors_writes_the_file_and_scalars_only_to_tensorboard(tmp_path):
    group = open_monitors(TrackingOptions(), tmp_path)
    group.log(1, {"reward/mean": 0.25, "note": "text", "learner/loss": float("nan")})
    group.close()
    assert not group.failures
    assert read_records(tmp_path / "metrics.jsonl")[0]["note"] == "text"
    assert scalars(tmp_path / "tensorboard") == {"reward/mean": [(1, 0.25)]}


def test_resumed_tensorboard_steps_do_not_go_backwards(tmp_path):
    first = TensorboardMonitor(tmp_path)
    for step in (1, 2, 3, 4):
        first.log(step, {"reward/mean": step / 8})
    first.close()
    second = TensorboardMonitor(tmp_path, resume_step=2)
    for step in (3, 4, 5):
        second.log(step, {"reward/mean": 1.0})
    second.close()
    seen = scalars(tmp_path)["reward/mean"]
    assert seen == [(1, 0.125), (2, 0.25), (3, 1.0), (4, 1.0), (5, 1.0)]


def scalars(directory) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_events_cost_the_conductor_no_torch(tmp_path):
    code = (
        "import sys, pathlib\n"
        "from pipelines.monitoring import TensorboardMonitor\n"
        "monitor = TensorboardMonitor(pathlib.Path(sys.argv[1]))\n"
        "monitor.log(1, {'reward/mean': 1.0})\n"
        "monitor.close()\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'tensorflow', 'ray')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


def test_missing_wandb_is_a_user_error_that_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(monitoring, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"slipstream\[wandb\]"):
        open_monitors(TrackingOptions(wandb=True), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_wandb_continues_the_same_run_after_a_resume(tmp_path, monkeypatch):
    opened: list[dict] = []
    logged: list[dict] = []

    class Run:
        def define_metric(self, name, step_metric=None):
            pass

        def log(self, record):
            logged.append(record)

        def finish(self):
            pass

    fake = types.ModuleType("wandb")
    fake.init = lambda **arguments: opened.append(arguments) or Run()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(monitoring, "find_spec", lambda name: object())
    options = TrackingOptions(tensorboard=False, wandb=True, wandb_project="racing")
    for step in (7, 3):
        group = open_monitors(options, tmp_path, config={"run": {"steps": 9}})
        group.log(step, {"reward/mean": np.float32(0.5)})
        group.close()
        assert not group.failures
    assert opened[0]["id"] == opened[1]["id"]
    assert opened[0]["resume"] == "allow"
    assert opened[0]["project"] == "racing"
    assert opened[0]["name"] == tmp_path.name
    assert logged == [{"step": 7, "reward/mean": 0.5}, {"step": 3, "reward/mean": 0.5}]


def test_trackers_are_imported_only_when_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    group = open_monitors(JSONL_ONLY, tmp_path)
    group.log(1, {"reward/mean": 1.0})
    group.close()
    assert not group.failures


def test_every_evaluation_figure_and_headline_is_documented():
    estimate = Estimate(value=0.5, stderr=0.1, low=0.4, high=0.6, prompts=10)
    result = EvaluationResult(
        prompts=10,
        greedy=estimate,
        k=4,
        mean_at_k=estimate,
        pass_at={1: estimate, 2: estimate, 4: estimate},
        reward_mean=0.5,
        length_mean=12.0,
        truncated_share=0.0,
        answers=50,
    )
    assert undocumented([*result.metrics("eval/heldout"), *HEADLINES, *CURVES, "step", "time", "wall_s"]) == []


def test_every_metric_of_a_step_is_documented():
    from pipelines.round_books import RoundResult
    from pipelines.step_metrics import StepClock, step_metrics
    from storage.ledger import LedgerCounts
    from storage.records import GroupKey, SampleHeader, Timings

    key = GroupKey("train", 0, 0)
    sample = SampleHeader(
        key=key,
        index=0,
        attempt=0,
        tokens=8,
        oldest_version=0,
        newest_version=0,
        finish_reason="stop",
        drafted=4,
        accepted=2,
        forward_passes=6,
        reward=1.0,
        reward_parts={"exact": 1.0},
        reward_status="ok",
        timings=Timings(),
    )
    result = RoundResult(
        keys=(key,),
        headers={key: (sample,)},
        filtered={"zero_variance": 1},
        started=0.0,
        ended=1.0,
        generated_tokens=8,
        dropped_tokens=0,
        errors=0,
        scored=1,
    )
    metrics = step_metrics(
        result,
        StepClock(step=1.0, generate=0.5, learn=0.2, publish=0.1, pause=0.0),
        {"entropy": 0.3},
        LedgerCounts(launched=2, queued=0, leased=0, ready=0, trained=1, ended={"zero_variance": 1}),
        version=0,
        learner_version=1,
        correct_at=1.0,
    )
    assert undocumented([*metrics, "progress/epoch", "faults/crashes", "time/evaluate_s"]) == []
    assert len(metrics) > 20


def test_every_metric_of_the_learner_is_documented_with_its_unit():
    statistics = pytest.importorskip("actors.learner.statistics")
    for name, (_, unit) in statistics.METRICS.items():
        documented = describe(f"learner/{name}")
        assert documented is not None, name
        assert documented.unit == unit, name


def test_placeholders_match_names_and_unknown_names_are_reported():
    assert describe("eval/my-set.1/accuracy") is METRICS["eval/<set>/accuracy"]
    assert describe("ledger/ended/zero_variance") is METRICS["ledger/ended/<reason>"]
    assert describe("eval/a/b/accuracy") is None
    assert undocumented(["reward/mean", "speed/of_light", "eval/x/height"]) == ["eval/x/height", "speed/of_light"]


def test_every_metric_has_a_meaning_and_an_expected_form_of_name():
    for name, metric in METRICS.items():
        assert metric.meaning
        assert not metric.meaning.endswith(".")
        assert "/" in name
        assert name == name.lower()
