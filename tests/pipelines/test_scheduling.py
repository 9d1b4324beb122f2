"""The synchronous schedule, alone: no Ray, no clock. Requirement: the policies are pure from the start."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.scheduling.all_at_once import AllAtOnce
from pipelines.scheduling.policy import GroupProgress, RoundState, zero_variance
from storage.records import TRAIN_SPLIT, GroupKey


def drive(policy, *, prompts_per_step, available, rewards_of, size=4):
    """Play a round to its end; returns the state. ``rewards_of(n)`` gives the rewards of the n-th launched group."""
    state = RoundState(step=0, prompts_per_step=prompts_per_step, available=available)
    drawn = 0
    for _ in range(1000):
        launch = policy.plan(state)
        if not launch.empty:
            for _ in range(launch.fresh):
                state.groups[GroupKey(TRAIN_SPLIT, 0, drawn)] = GroupProgress(size=size)
                drawn += 1
            if state.available is not None:
                state.available -= launch.fresh
            state.waves += 1
        if policy.should_stop(state):
            return state
        key = state.running()[0]
        group = state.groups[key]
        group.finished = group.size
        group.verdict = policy.on_finish(state, key, rewards_of(key.prompt))
    raise AssertionError("the round never stopped")


def test_every_launched_group_is_waited_for_and_kept():
    state = drive(AllAtOnce(), prompts_per_step=5, available=None, rewards_of=lambda n: [0.0, 0.0])
    assert len(state.kept()) == 5
    assert state.waves == 1


def test_the_last_round_of_finite_data_is_smaller():
    state = drive(AllAtOnce(), prompts_per_step=8, available=3, rewards_of=lambda n: [0.0, 1.0])
    assert len(state.kept()) == 3


def test_dynamic_sampling_replaces_zero_variance_groups():
    policy = AllAtOnce(dynamic_sampling=True, max_refills=5)
    state = drive(policy, prompts_per_step=6, available=None, rewards_of=lambda n: [0, 1] if n % 2 else [1, 1])
    assert len(state.kept()) == 6
    assert all(key.prompt % 2 for key in state.kept())


def test_a_stream_of_zero_variance_groups_ends_after_the_allowed_refills():
    policy = AllAtOnce(dynamic_sampling=True, max_refills=3)
    state = drive(policy, prompts_per_step=4, available=None, rewards_of=lambda n: [1.0, 1.0])
    assert state.kept() == []
    assert state.waves == 4
    assert len(state.groups) == 16


@settings(max_examples=200, deadline=None)
@given(
    prompts_per_step=st.integers(1, 12),
    available=st.one_of(st.none(), st.integers(0, 40)),
    refills=st.integers(0, 6),
    dynamic=st.booleans(),
    flat=st.sets(st.integers(0, 100)),
)
def test_a_round_never_trains_too_much_and_never_hangs(prompts_per_step, available, refills, dynamic, flat):
    policy = AllAtOnce(dynamic_sampling=dynamic, max_refills=refills)
    state = drive(
        policy,
        prompts_per_step=prompts_per_step,
        available=available,
        rewards_of=lambda n: [1.0, 1.0] if n in flat else [0.0, 1.0],
    )
    assert len(state.kept()) <= prompts_per_step
    assert not state.running()
    if available is not None:
        assert len(state.groups) <= available
    if not dynamic:
        assert len(state.kept()) == (prompts_per_step if available is None else min(prompts_per_step, available))


@pytest.mark.parametrize(
    ("rewards", "flat"),
    [
        ([1, 1, 1], True),
        ([0, 1], False),
        ([None, 1], True),
        ([None, 0, 1], False),
        ([], True),
        ([0.5, 0.5 + 1e-12], True),
    ],
)
def test_zero_variance_ignores_missing_rewards(rewards, flat):
    assert zero_variance(rewards) is flat
