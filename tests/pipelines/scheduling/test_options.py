"""Section `schedule`: what it rejects, what it doubts, and which objects it makes."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from pipelines.scheduling.all_at_once import AllAtOnce
from pipelines.scheduling.build import build_dispatcher, build_policy, build_timeouts
from pipelines.scheduling.dispatch import LeastLoaded, SkewAware
from pipelines.scheduling.latency_table import LatencyTable
from pipelines.scheduling.length_split import LengthSplit
from pipelines.scheduling.options import ScheduleOptions
from pipelines.scheduling.tail_batching import TailBatching

SURROUNDINGS = {"workers": 4, "max_tokens": 256, "max_staleness": 4, "reward_timeout_s": 10.0}


def conflicts(max_staleness=4, lag=0, **fields):
    options = ScheduleOptions.model_validate(fields)
    return options.conflicts(**{**SURROUNDINGS, "max_staleness": max_staleness}, lag=lag)


@pytest.mark.parametrize(
    ("fields", "staleness", "words"),
    [
        ({"batching": "tail", "deferred": "resume"}, 0, "schedule.deferred=resume .*max_staleness is 0: allow 4"),
        ({"dispatch": "skew_aware", "pools": {"long": {"workers": 4}}}, 4, r"pools.long.workers \(4\) must be smaller"),
        ({"pools": {"long": {"workers": 1}}}, 4, "needs schedule.dispatch=skew_aware"),
        ({"oversample": "repeat"}, 4, "belongs to schedule.batching=length_split"),
        ({"overlaunch_samples": 1.2}, 4, "needs schedule.batching=tail"),
        ({"second_batching": True, "batching": "tail"}, 0, "second_batching .*asynchrony.max_staleness of 4"),
        ({"batching": "length_split", "long_rule": "off"}, 4, "nothing to split by"),
        ({"timeouts": {"tokens": 300}}, 4, r"timeouts.tokens \(300\) exceeds rollout.max_tokens \(256\)"),
        ({"batching": "tail", "timeouts": {"tokens": 100}}, 0, "max_staleness is 0: raise it"),
        ({"reward_deadlines": {"adaptive": True, "floor_s": 20}}, 4, "exceeds reward.timeout_s"),
    ],
)
def test_settings_that_cannot_work_together_are_named(fields, staleness, words):
    problems = conflicts(staleness, **fields)
    assert len(problems) == 1
    assert re.search(words, problems[0])


@pytest.mark.parametrize("batching", ["all", "length_split", "tail"])
@pytest.mark.parametrize("dispatch", ["least_loaded", "skew_aware"])
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_the_defaults_of_every_combination_work(batching, dispatch, staleness):
    assert conflicts(staleness, batching=batching, dispatch=dispatch) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("overlaunch_prompts", 0.9),
        ("overlaunch_samples", 0.5),
        ("max_deferrals", 0),
        ("long_share", 0),
        ("batching", "tale"),
    ],
)
def test_values_out_of_range_are_rejected(field, value):
    with pytest.raises(ValidationError, match=field):
        ScheduleOptions.model_validate({field: value})


def test_deferred_groups_resume_only_where_the_allowed_staleness_covers_their_wait():
    options = ScheduleOptions(batching="tail")
    assert options.deferral_span == 4
    assert [options.resumes(staleness) for staleness in (0, 3, 4)] == [False, False, True]
    assert ScheduleOptions(batching="tail", overlaunch_prompts=1.5).resumes(2)
    assert ScheduleOptions(batching="tail", deferred="resume").resumes(1)
    assert not ScheduleOptions(batching="tail", deferred="restart").resumes(9)


def test_answers_that_begin_a_version_late_have_that_much_less_time_to_wait():
    options = ScheduleOptions(batching="tail")
    assert [options.resumes(staleness, lag=1) for staleness in (4, 5)] == [False, True]
    assert not ScheduleOptions().resumes(1, lag=1)
    assert conflicts(4, batching="tail", deferred="resume") == []
    assert len(conflicts(4, lag=1, batching="tail", deferred="resume")) == 1
    assert conflicts(5, lag=1, batching="tail", deferred="resume") == []
    assert "max_staleness of 5 or more" in conflicts(4, lag=1, batching="tail", second_batching=True)[0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batching": "tail", "overlaunch_prompts": 1.0}, "there is no race"),
        ({"batching": "tail", "overlaunch_prompts": 3.0}, "smaller than one over-launched round"),
        ({"batching": "tail", "overlaunch_samples": 1.25}, "20 % shorter"),
        (
            {"batching": "tail", "deferred": "resume", "overlaunch_prompts": 1.1},
            "dropped as too old|shorter than the wait",
        ),
        ({"batching": "length_split", "oversample": "repeat"}, "trains short prompts 1.2 times"),
        ({"batching": "length_split", "oversample": "repeat", "oversample_ratio": 1.5}, "above 1.3"),
    ],
)
def test_what_is_probably_not_meant_is_said(fields, words):
    doubts = ScheduleOptions.model_validate(fields).doubts(prompts=100, prompts_per_step=40, max_staleness=4)
    assert any(re.search(words, doubt) for doubt in doubts)


def test_the_defaults_raise_no_doubt():
    for batching in ("all", "length_split", "tail"):
        options = ScheduleOptions.model_validate({"batching": batching})
        assert options.doubts(prompts=1000, prompts_per_step=40, max_staleness=4) == []


def test_a_configuration_makes_its_policies():
    table = LatencyTable.affine(0.01, 0.0, 4)
    assert isinstance(build_policy(ScheduleOptions()), AllAtOnce)
    assert isinstance(build_policy(ScheduleOptions(batching="tail")), TailBatching)
    assert isinstance(build_policy(ScheduleOptions(batching="length_split")), LengthSplit)
    assert isinstance(build_dispatcher(ScheduleOptions(), table), LeastLoaded)
    assert isinstance(build_dispatcher(ScheduleOptions(dispatch="skew_aware"), table), SkewAware)
    limits = build_timeouts(
        ScheduleOptions.model_validate({"timeouts": {"tokens": 5}, "pools": {"long": {"wall_s": 9}}})
    )
    assert limits.overdue("regular", 5, 0.0) == "tokens"
    assert limits.overdue("long", 5, 9.0) == "wall"


def test_every_field_is_documented():
    def walk(model):
        for name, info in model.model_fields.items():
            assert info.description, name
            if hasattr(info.annotation, "model_fields"):
                walk(info.annotation)

    walk(ScheduleOptions)
