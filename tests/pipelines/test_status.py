"""Status snapshots, curves and the estimate of the remaining time."""

from __future__ import annotations

import json

import pytest

from pipelines.status import (
    CURVE_POINTS,
    MAX_ALARMS,
    RECENT_STEPS,
    Curve,
    RunStatus,
    StatusBoard,
    Wait,
    estimate_eta,
    evaluations_left,
    robust_mean,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def board(clock: Clock, **changes) -> StatusBoard:
    return StatusBoard("demo", "runs/demo", **({"steps": 10, "clock": clock} | changes))


def test_json_round_trip_keeps_every_field(tmp_path):
    status = RunStatus(
        name="demo",
        directory="runs/demo",
        state="generating",
        step=3,
        steps=10,
        epoch=0.5,
        latest={"reward/mean": 0.5},
        curves={"reward/mean": Curve((1, 2), (0.25, 0.5))},
        recent=({"step": 3.0, "time/step_s": 1.5},),
        samples_done=7,
        samples_launched=64,
        waits=(Wait(label="generate", who="rollout-0", seconds=4.0, deadline_s=300.0),),
        queues={"reward": 2},
        versions={"learner": 3},
        eta_seconds=12.5,
        started=1.0,
        updated=2.0,
        alarms=("careful",),
        restarts=2,
        steps_lost=3,
        dashboard_url="http://127.0.0.1:8265",
        host="here",
        pid=42,
        message="why",
    )
    status.save(tmp_path / "status.json")
    assert RunStatus.load(tmp_path / "status.json") == status
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_a_status_from_a_later_version_still_loads_and_rubbish_does_not():
    raw = json.loads(RunStatus(name="a", directory="b").to_json())
    assert RunStatus.from_json(json.dumps(raw | {"colour": "red"})).name == "a"
    for text in ("[]", json.dumps(raw | {"state": "dancing"}), '{"name": "a"'):
        with pytest.raises(ValueError, match=r".+"):
            RunStatus.from_json(text)


def test_curve_is_bounded_and_keeps_first_and_last_points():
    curve = Curve()
    for step in range(5000):
        curve = curve.add(step, step / 10)
    assert len(curve.steps) <= CURVE_POINTS
    assert curve.steps[0] == 0
    assert curve.steps[-1] == 4999
    assert list(curve.steps) == sorted(set(curve.steps))
    assert all(v == s / 10 for s, v in zip(curve.steps, curve.values, strict=True))


def test_a_repeated_step_replaces_its_point():
    assert Curve().add(1, 0.1).add(2, 0.2).add(2, 0.3) == Curve((1, 2), (0.1, 0.3))


def test_steps_and_evaluations_fill_the_snapshot(clock):
    b = board(clock)
    b.enter("generating", samples=64)
    b.progress(10, 64)
    clock.now += 4
    b.finish_step(1, {"reward/mean": 0.5, "accuracy/train": 0.4, "learner/loss": 9.0, "time/step_s": 3.5}, epoch=0.17)
    b.finish_evaluation(1, {"eval/heldout/accuracy": 0.45, "eval/heldout/prompts": 128.0}, 2.0)
    status = b.snapshot()
    assert (status.step, status.epoch, status.state) == (1, 0.17, "generating")
    assert status.latest["reward/mean"] == 0.5
    assert status.latest["eval/heldout/accuracy"] == 0.45
    assert "learner/loss" not in status.latest
    assert status.curves["eval/heldout/accuracy"] == Curve((1,), (0.45,))
    assert status.evaluation_sets() == ("heldout",)
    assert status.recent[-1]["time/step_s"] == 3.5


def test_a_metric_that_is_not_finite_does_not_reach_the_headlines(clock):
    b = board(clock)
    b.finish_step(1, {"reward/mean": float("nan"), "time/step_s": 1.0})
    assert "reward/mean" not in b.snapshot().latest
    assert "reward/mean" not in b.snapshot().curves


def test_history_and_alarms_are_bounded(clock):
    b = board(clock, steps=1000)
    for step in range(1, 200):
        b.finish_step(step, {"time/step_s": 1.0})
        b.alarm(f"alarm {step}")
    b.alarm("alarm 198")
    status = b.snapshot()
    assert len(status.recent) == RECENT_STEPS
    assert len(status.alarms) == MAX_ALARMS
    assert status.alarms[-1] == "alarm 198"
    assert status.alarms.count("alarm 198") == 1


def test_waits_are_timed_sorted_and_removed(clock):
    b = board(clock)
    b.wait("generate", "rollout-0: 5 of 16 groups", 300)
    clock.now += 5
    b.wait("reward", "reward-0")
    b.wait("generate", "rollout-0: 4 of 16 groups", 300)  # progress does not restart the clock
    clock.now += 2
    waits = b.snapshot().waits
    assert [(w.label, w.seconds) for w in waits] == [("generate", 7.0), ("reward", 2.0)]
    assert waits[0].who == "rollout-0: 4 of 16 groups"
    b.arrived("generate")
    assert [w.label for w in b.snapshot().waits] == ["reward"]
    b.enter("finished")
    assert b.snapshot().waits == ()


def test_eta_is_unknown_before_the_first_step_and_counts_down_within_one(clock):
    b = board(clock, evaluate_every=5)
    assert b.snapshot().eta_seconds is None
    b.finish_evaluation(0, {"eval/heldout/accuracy": 0.4}, 3.0)
    b.start_step()
    clock.now += 4
    b.finish_step(1, {})
    assert b.snapshot().eta_seconds == pytest.approx(9 * 4 + 2 * 3)  # evaluations at 5 and at 10
    clock.now += 1
    assert b.snapshot().eta_seconds == pytest.approx(9 * 4 + 2 * 3 - 1)
    clock.now += 100  # a stalled step counts as nearly done, never as less than nothing
    assert b.snapshot().eta_seconds == pytest.approx(8 * 4 + 2 * 3)


def test_eta_still_counts_the_last_evaluation_after_the_last_step(clock):
    b = board(clock, steps=1)
    b.finish_evaluation(0, {}, 3.0)
    b.finish_step(1, {"time/step_s": 4.0})
    b.enter("evaluating", samples=128)
    assert b.snapshot().eta_seconds == pytest.approx(3.0)
    b.finish_evaluation(1, {}, 3.0)
    assert b.snapshot().eta_seconds == 0
    b.enter("finished")
    assert b.snapshot().eta_seconds is None


def test_one_stalled_step_does_not_wreck_the_estimate_but_an_ordinary_tail_counts():
    stalled = [4.0, 4.2, 3.9, 4.1, 4.0, 300.0]
    assert robust_mean(stalled) < 4.5
    assert sum(stalled) / 6 > 50  # the control
    tailed = [4.0, 5.0, 4.0, 6.0, 3.0, 8.0]
    assert robust_mean(tailed) == pytest.approx(5.0)
    assert robust_mean([2.0]) == 2.0


def test_eta_of_a_simulated_run_is_close_to_the_truth():
    steps = [3.0 + (i % 4) for i in range(40)]
    eta = estimate_eta(
        steps_left=24, step_seconds=steps[:16], elapsed_s=0, evaluations_left=3, evaluation_seconds=[10.0, 12.0]
    )
    truth = sum(steps[16:]) + 3 * 11
    assert eta == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize(
    ("step", "every", "after", "last", "expected"),
    [
        (0, 0, True, 0, 1),
        (0, 0, False, 0, 0),
        (0, 5, True, 0, 2),
        (0, 4, True, 0, 3),
        (4, 4, True, 0, 3),
        (4, 4, True, 4, 2),
        (10, 5, True, 5, 1),
        (10, 5, True, 10, 0),
    ],
)
def test_evaluations_left_over_ten_steps(step, every, after, last, expected):
    assert evaluations_left(step, 10, every, after, last) == expected


def test_a_resumed_run_keeps_its_curves_only_up_to_the_checkpoint(clock):
    first = board(clock)
    for step in range(1, 8):
        first.finish_step(step, {"reward/mean": step / 10, "time/step_s": 2.0})
    second = board(clock, step=5, previous=first.snapshot()).snapshot()
    assert second.curves["reward/mean"].steps == (1, 2, 3, 4, 5)
    assert second.recent[-1]["step"] == 5
    assert second.latest["reward/mean"] == 0.5
    assert second.eta_seconds == pytest.approx(5 * 2.0)
