"""Deadlines of scores: the conductor learns what correct answers cost, and shortens what wrong ones may."""

import json
from types import SimpleNamespace

import pytest

from pipelines.config_loader import load
from pipelines.score_deadlines import ScoreDeadlines
from storage.history.archive import RolloutArchive
from storage.records import GroupKey
from tests.pipelines.test_step_metrics import header
from tests.runs import small_run, steps_of

ADAPTIVE = (
    "schedule.reward_deadlines.adaptive=true",
    "schedule.reward_deadlines.floor_s=0.5",
    "schedule.reward_deadlines.factor=2",
)


def deadlines(*overrides):
    config = load(["model=tiny", "data.train=builtin:running_sums", "reward.timeout_s=20", *overrides]).config
    flow = SimpleNamespace(deadline=lambda key: None, on_scored=lambda header: None)
    return flow, ScoreDeadlines(flow, config)


@pytest.fixture
def adaptive():
    return deadlines(*ADAPTIVE)


def test_unknown_prompt_has_every_chance_and_a_known_one_a_multiple_of_its_slowest_correct_answer(adaptive):
    flow, _ = adaptive
    key = GroupKey("train", 0, 7)
    assert flow.deadline(key) == 20
    flow.on_scored(header(7, 0, exact=0.0, score_s=9.0))
    assert flow.deadline(key) == 20, "a wrong answer is no anchor"
    flow.on_scored(header(7, 1, exact=1.0, score_s=2.0))
    flow.on_scored(header(7, 2, exact=1.0, score_s=1.0))
    assert flow.deadline(key) == 4.0
    assert flow.deadline(GroupKey("train", 3, 7, 1)) == 4.0, "the prompt counts, not epoch or duplicate"
    assert flow.deadline(GroupKey("train", 0, 8)) == 20


def test_answer_that_no_function_judged_teaches_nothing(adaptive):
    flow, _ = adaptive
    flow.on_scored(header(7, 0, exact=None, reward=None, score_s=0.1))
    assert flow.deadline(GroupKey("train", 0, 7)) == 20


def test_held_out_answers_neither_teach_nor_are_cut_short(adaptive):
    flow, rule = adaptive
    held_out = GroupKey("heldout", 5, 7)
    flow.on_scored(header(7, 0, key=held_out, exact=1.0, score_s=0.1))
    assert flow.deadline(GroupKey("train", 0, 7)) == 20
    flow.on_scored(header(7, 0, exact=1.0, score_s=0.1))
    rule.metrics()
    assert flow.deadline(held_out) is None
    assert rule.metrics() == {}


def test_metrics_tell_the_deadlines_given_since_the_last_step(adaptive):
    flow, rule = adaptive
    flow.on_scored(header(7, 0, exact=1.0, score_s=2.0))
    flow.deadline(GroupKey("train", 0, 7))
    flow.deadline(GroupKey("train", 0, 8))
    assert rule.metrics() == {"reward/deadline_s": 12.0, "reward/deadline_short_share": 0.5}
    assert rule.metrics() == {}


def test_what_was_learned_survives_a_checkpoint(adaptive):
    flow, rule = adaptive
    flow.on_scored(header(7, 0, exact=1.0, score_s=2.0))
    again_flow, again = deadlines(*ADAPTIVE)
    again.load_state(json.loads(json.dumps(rule.state())))
    assert again_flow.deadline(GroupKey("train", 1, 7)) == 4.0


def test_without_the_switch_the_configured_deadline_applies_and_nothing_is_kept():
    flow, rule = deadlines()
    flow.on_scored(header(7, 0, exact=1.0, score_s=2.0))
    assert flow.deadline(GroupKey("train", 0, 7)) is None
    assert rule.state() == {}
    _, other = deadlines(*ADAPTIVE)
    other.load_state(rule.state())  # switched on between two parts of a run


def test_run_cuts_hanging_answers_short_once_the_prompt_was_answered(ray_session, random_llama, tmp_path):
    run = small_run(
        random_llama,
        tmp_path,
        "deadlines",
        *ADAPTIVE,
        "reward.functions=[{function: tests.reward_functions.right_or_endless}]",
        "reward.timeout_s=3",
        "reward.processes=4",
        "reward.error_alarm=1",
        "data.prompts=4",
        "run.steps=3",
        "evaluation.before=false",
        "evaluation.after=false",
    )
    records = steps_of(run)
    assert records[0]["reward/deadline_s"] <= 3
    assert records[-1]["reward/deadline_short_share"] > 0.5
    assert records[-1]["reward/deadline_s"] < records[0]["reward/deadline_s"]
    archive = RolloutArchive(run / "rollouts")
    rows = [row for step in archive.steps() for row in archive.read(step).to_pylist()]
    assert {row["reward_status"] for row in rows} == {"ok", "timeout"}
    assert all(row["reward"] is None for row in rows if row["reward_status"] == "timeout")
