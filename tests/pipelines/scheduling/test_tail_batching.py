"""Tail batching alone: which round comes when, who is kept, and what becomes of the others."""

from __future__ import annotations

import pytest

from pipelines.scheduling.long_queue import QueueRules
from pipelines.scheduling.policy import GroupProgress, RoundState, WaitingGroup
from pipelines.scheduling.tail_batching import TailBatching
from storage.records import TRAIN_SPLIT, GroupKey
from tests.pipelines.scheduling.play import Conductor


def key(prompt, epoch=0):
    return GroupKey(TRAIN_SPLIT, epoch, prompt)


def slowness(key):
    return (key.prompt * 37 % 101, key)


def test_one_long_round_follows_four_short_ones_at_the_usual_overlaunch():
    conductor = Conductor(TailBatching(QueueRules()), data=400, prompts_per_step=40).play(order=slowness)
    assert conductor.classes == (["short"] * 4 + ["long"]) * 2
    assert [len(batch) for batch in conductor.batches] == [40] * 10
    assert conductor.wasted == []


def test_a_short_round_keeps_the_first_to_finish_and_defers_the_slowest():
    conductor = Conductor(TailBatching(QueueRules()), data=400, prompts_per_step=40)
    conductor.begin()
    launched = list(conductor.state.groups)
    assert len(launched) == 50
    while conductor.state is not None:
        conductor.finish_sample(min(conductor.state.running(), key=slowness))
    slowest = sorted(launched, key=slowness)[-10:]
    assert set(conductor.waiting) == set(slowest)
    assert all(group.deferrals == 1 for group in conductor.waiting.values())


def test_deferred_groups_keep_their_tokens_only_when_they_resume():
    def waiting_after_one_round(resume):
        conductor = Conductor(TailBatching(QueueRules(resume=resume)), data=20, prompts_per_step=4)
        conductor.begin()
        for group in conductor.state.running():
            conductor.write_sample(group)
        while conductor.state is not None:
            conductor.finish_sample(conductor.state.running()[0])
        return list(conductor.waiting.values())

    assert {(group.oldest_version, group.missing) for group in waiting_after_one_round(True)} == {(0, 1)}
    assert {(group.oldest_version, group.missing) for group in waiting_after_one_round(False)} == {(None, 2)}


def test_a_group_that_only_lacks_scores_is_parked_and_trained_next():
    conductor = Conductor(TailBatching(QueueRules()), data=40, prompts_per_step=4)
    conductor.begin()
    last = conductor.state.running()[-1]
    for _ in range(2):
        conductor.write_sample(last)
    while conductor.state is not None:
        conductor.finish_sample(conductor.state.running()[0])
    assert conductor.waiting[last].missing == 0
    conductor.begin()
    assert last in conductor.state.kept()
    assert conductor.state.round_class == "short"


def test_tokens_are_never_trained_older_than_allowed():
    for staleness in (1, 2, 4):
        policy = TailBatching(QueueRules(max_staleness=staleness))
        conductor = Conductor(policy, data=400, prompts_per_step=40, samples=3)
        conductor.play(order=slowness, begun=True)
        assert max(conductor.staleness) == staleness
        assert conductor.wasted == [], "a long round comes before anything is too old"


def test_tokens_that_are_too_old_after_all_are_dropped_not_trained():
    state = RoundState(step=9, version=9, prompts_per_step=2, available=None)
    state.waiting = {key(i): WaitingGroup(deferrals=1, oldest_version=2, missing=1) for i in range(2)}
    launch = TailBatching(QueueRules(max_staleness=4)).plan(state)
    assert launch.round_class == "long"
    assert launch.restart == {key(0), key(1)}


def test_a_group_may_lose_several_races_before_it_waits_for_a_long_round():
    policy = TailBatching(QueueRules(max_deferrals=3, max_staleness=9))
    conductor = Conductor(policy, data=400, prompts_per_step=40)
    for _ in range(2):
        conductor.begin()
        while conductor.state is not None:
            conductor.finish_sample(min(conductor.state.running(), key=slowness))
    assert max(group.deferrals for group in conductor.waiting.values()) == 2
    assert set(conductor.classes) == {"short"}


def test_predicted_long_prompts_wait_for_the_long_round_without_being_launched():
    policy = TailBatching(QueueRules(long_rule="quantile", long_share=0.1))
    conductor = Conductor(policy, data=400, prompts_per_step=40, predict=lambda k: 100.0 + k.prompt)
    conductor.begin()
    launched = conductor.state.groups
    held = set(conductor.waiting)
    assert len(launched) == 45, "the surplus of ten holds the five that are predicted to be long"
    assert held
    assert min(k.prompt for k in held) > sorted(k.prompt for k in launched)[len(launched) // 2]


def test_the_median_rule_holds_back_what_exceeds_its_multiple():
    policy = TailBatching(QueueRules(long_rule="median", median_factor=1.5))
    lengths = {True: 400.0, False: 100.0}
    conductor = Conductor(policy, data=400, prompts_per_step=40, predict=lambda k: lengths[k.prompt % 8 == 0])
    conductor.begin()
    assert all(k.prompt % 8 for k in conductor.state.groups)
    assert sum(k.prompt % 8 == 0 for k in conductor.waiting) >= 4


def test_a_silent_predictor_leaves_the_race_alone():
    policy = TailBatching(QueueRules(long_rule="quantile"))
    conductor = Conductor(policy, data=400, prompts_per_step=40)
    conductor.begin()
    assert len(conductor.state.groups) == 50
    assert not conductor.waiting


def test_a_prompt_set_smaller_than_an_overlaunched_round_is_trained_without_a_race():
    conductor = Conductor(TailBatching(QueueRules()), data=9, prompts_per_step=8).play(order=slowness)
    assert [len(batch) for batch in conductor.batches] == [8, 1]
    assert conductor.classes == ["long", "long"]


def test_a_half_filled_long_queue_is_flushed_at_the_end_of_the_epoch():
    conductor = Conductor(TailBatching(QueueRules()), data=70, prompts_per_step=20, epochs=2)
    while conductor.source.epoch == 0 or conductor.state is not None:
        if conductor.state is None:
            conductor.begin()
        else:
            conductor.finish_sample(min(conductor.state.running(), key=slowness))
    first_epoch = [k for k in conductor.trained if k.epoch == 0]
    assert len(first_epoch) + sum(k.epoch == 0 for k in conductor.waiting) == 70
    while any(k.epoch == 0 for k in conductor.waiting):
        conductor.begin()
        assert conductor.state.round_class == "long"
        while conductor.state is not None:
            conductor.finish_sample(min(conductor.state.running(), key=slowness))
    assert sum(k.epoch == 0 for k in conductor.trained) == 70


def test_only_short_rounds_race_samples():
    policy = TailBatching(QueueRules(resume=False), overlaunch_samples=1.5)
    conductor = Conductor(policy, data=25, prompts_per_step=4, samples=4)
    sizes = {"short": set(), "long": set()}
    while not conductor.over:
        if conductor.state is None:
            conductor.begin()
        sizes[conductor.state.round_class] |= {group.size for group in conductor.state.groups.values()}
        conductor.finish_sample(min(conductor.state.running(), key=slowness))
    assert sizes == {"short": {6}, "long": {4}}


def test_groups_that_teach_nothing_are_replaced_and_never_deferred():
    policy = TailBatching(QueueRules(), dynamic_sampling=True, max_refills=4)
    conductor = Conductor(policy, data=200, prompts_per_step=10)
    conductor.begin()
    while conductor.state is not None:
        flat = conductor.state.running()[0].prompt % 2
        conductor.finish_sample(conductor.state.running()[0], (1.0, 1.0) if flat else (0.0, 1.0))
    assert len(conductor.batches[0]) == 10
    assert all(k.prompt % 2 == 0 for k in conductor.batches[0])
    assert not set(conductor.ended) & set(conductor.waiting)


@pytest.mark.parametrize(
    ("resume", "written", "action"), [(True, 1, "resume"), (True, 2, "park"), (False, 2, "restart")]
)
def test_what_becomes_of_a_running_group_depends_on_what_is_left_to_write(resume, written, action):
    state = RoundState(step=0, prompts_per_step=1, available=None)
    state.groups[key(0)] = GroupProgress(size=2, written=written)
    assert TailBatching(QueueRules(resume=resume)).on_stop(state, key(0)) == action
