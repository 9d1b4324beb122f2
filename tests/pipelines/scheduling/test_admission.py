"""Streaming admission (REQUIREMENTS: AReaL): who may begin, and whom a step trains so that nobody gets too old."""

import random

import pytest

from pipelines.scheduling.admission import ReadyGroup, StreamAdmission, choose
from pipelines.scheduling.policy import GroupProgress, RoundState
from storage.records import GroupKey


def key(number):
    return GroupKey("train", 0, number)


def groups(*versions):
    """Complete groups in order of completion, launched in the opposite order."""
    return [ReadyGroup(key(i), i, len(versions) - i, version) for i, version in enumerate(versions)]


def chosen(ready, unfinished=(), *, count=2, consumption="ready", version=2, max_staleness=2, waits=True):
    found = choose(
        ready, unfinished, count, consumption=consumption, version=version, max_staleness=max_staleness, waits=waits
    )
    return None if found is None else [group.key.prompt for group in found]


def test_answers_begin_under_the_newest_weights_or_under_the_snapshot_that_lags():
    assert StreamAdmission(max_staleness=4, samples_per_prompt=2).oldest_start(7) == 7
    assert StreamAdmission(max_staleness=4, samples_per_prompt=2, lag=1).oldest_start(7) == 6


@pytest.mark.parametrize(("consumption", "expected"), [("ready", [0, 1]), ("fifo", [3, 2]), ("freshest", [1, 3])])
def test_consumption_orders_the_groups_that_are_not_due(consumption, expected):
    assert chosen(groups(1, 2, 1, 2), consumption=consumption, max_staleness=9) == expected


@pytest.mark.parametrize("consumption", ["ready", "fifo", "freshest"])
def test_groups_with_a_last_chance_go_first_whatever_the_order(consumption):
    assert 2 in chosen(groups(2, 2, 0, 2), consumption=consumption)


def test_step_waits_for_an_unfinished_group_that_it_is_the_last_to_train():
    assert chosen(groups(2, 2, 2), [0]) is None
    assert chosen(groups(2, 2, 2), [0], waits=False) == [0, 1]
    assert chosen(groups(2, 2, 2), [1]) == [0, 1]


def test_step_trains_old_groups_while_later_steps_have_room_for_the_rest():
    # Five groups of version 1 may be trained by this step and the next one: two places each.
    assert chosen(groups(2, 2, 1, 1), [1, 1], max_staleness=2) == [2, 3]
    assert chosen(groups(2, 2, 1), [1, 1], max_staleness=2) == [2, 0]
    assert chosen(groups(2, 2), [1, 1, 1], max_staleness=2) is None


@pytest.mark.parametrize("bound", [1, 2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_no_group_gets_too_old_in_whatever_order_groups_finish(bound, seed):
    dice, count = random.Random(seed), 3
    admission = StreamAdmission(max_staleness=bound, samples_per_prompt=1)
    state = RoundState(step=0, prompts_per_step=count, available=None)
    running, ready, launched, completed, trained = {}, [], 0, 0, 0
    while state.version < 40:
        admission.free_rows = dice.randrange(6)
        for _ in range(admission.plan(state).fresh):
            running[key(launched)] = admission.oldest_start(state.version)
            state.groups[key(launched)] = GroupProgress(size=1)
            launched += 1
        for name in dice.sample(sorted(running), dice.randrange(len(running) + 1)):
            ready.append(ReadyGroup(name, completed, name.prompt, running.pop(name)))
            completed += 1
        assert all(state.version - group.oldest_version <= bound for group in ready)
        if admission.learning:
            if dice.random() < 0.5:
                state.version += 1
                admission.learning = False
            continue
        if len(ready) < count:
            continue
        found = choose(
            ready,
            running.values(),
            count,
            consumption=dice.choice(["ready", "fifo", "freshest"]),
            version=state.version,
            max_staleness=bound,
            waits=True,
        )
        if found is not None:
            assert len(found) == count
            for group in found:
                ready.remove(group)
                del state.groups[group.key]
            trained += count
            admission.learning = True
    assert trained == 40 * count
