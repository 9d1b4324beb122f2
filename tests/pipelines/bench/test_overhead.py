"""The overhead benchmark's arithmetic on records of made-up steps."""

from __future__ import annotations

import pytest

from pipelines.bench import overhead
from storage.errors import UserError


def record(step=1.0, generate=0.6, reward=0.02, learn=0.3, publish=0.01):
    other = max(0.0, step - generate - reward - learn)
    return {
        "time/step_s": step,
        "time/generate_s": generate,
        "time/reward_s": reward,
        "time/learn_s": learn,
        "time/publish_s": publish,
        "time/overhead_share": other / step,
    }


def test_the_first_step_is_left_out():
    slow = record(step=10.0)
    result = overhead.report([slow, record(), record(), record()])
    assert result.figures["overhead_share"] == pytest.approx(0.08)
    assert result.figures["step_s"] == pytest.approx(1.0)
    assert overhead.report([record(), slow, slow, slow]).figures["overhead_share"] > 0.9


def test_the_figure_is_the_median_and_the_tail_is_shown_beside_it():
    steps = [record(), *[record(step=1.0)] * 8, record(step=2.0)]
    figures = overhead.report(steps).figures
    assert figures["overhead_share"] == pytest.approx(0.08)
    assert figures["overhead_share_p90"] > 0.08


def test_waiting_for_rewards_is_told_apart_but_not_hidden():
    figures = overhead.report([record()] * 4).figures
    assert figures["overhead_with_reward_share"] == pytest.approx(figures["overhead_share"] + 0.02)


def test_parts_add_up_to_the_step():
    taken = overhead.parts(record(step=1.5))
    assert sum(taken.values()) == pytest.approx(1.5)
    assert taken["rest"] == pytest.approx(1.5 - 0.6 - 0.02 - 0.3 - 0.01)
    assert [row[0] for row in overhead.report([record()] * 3).rows] == [*taken, "step"]


def test_a_run_that_is_too_short_is_a_user_error():
    with pytest.raises(UserError, match="steps=2"):
        overhead.run({"steps": 2, "seed": 0, "keep": ""})
    with pytest.raises(UserError, match="ran out of data"):
        overhead.report([record(), record()])
