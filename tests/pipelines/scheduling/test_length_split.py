"""Length split: rounds of one class, chosen by prediction alone."""

from __future__ import annotations

from pipelines.scheduling.length_split import LengthSplit
from pipelines.scheduling.long_queue import QueueRules
from tests.pipelines.scheduling.play import Conductor

RULES = QueueRules(long_rule="quantile", long_share=0.2)


def length(key):
    return 100.0 + key.prompt * 61 % 400


def test_four_of_five_rounds_hold_the_short_prompts_at_a_long_share_of_a_fifth():
    conductor = Conductor(LengthSplit(RULES), data=400, prompts_per_step=40, predict=length).play()
    assert conductor.classes.count("long") == 2
    long = [
        key for batch, kind in zip(conductor.batches, conductor.classes, strict=True) if kind == "long" for key in batch
    ]
    short = [
        key
        for batch, kind in zip(conductor.batches, conductor.classes, strict=True)
        if kind == "short"
        for key in batch
    ]
    assert sum(map(length, long)) / len(long) > 1.6 * sum(map(length, short)) / len(short)


def test_nobody_races_so_nothing_is_deferred_or_stale():
    conductor = Conductor(LengthSplit(RULES), data=200, prompts_per_step=20, predict=length).play()
    assert set(conductor.staleness) == {0}
    assert conductor.wasted == []


def test_a_silent_predictor_means_arrival_order():
    conductor = Conductor(LengthSplit(RULES), data=200, prompts_per_step=20).play()
    expected = Conductor(LengthSplit(RULES), data=200, prompts_per_step=20)
    order = [expected.source.next()[0] for _ in range(200)]
    assert [sorted(order[i : i + 20]) for i in range(0, 200, 20)] == conductor.batches


def test_repeats_are_keys_of_their_own_and_fill_the_short_batch():
    policy = LengthSplit(RULES, oversample="repeat", ratio=1.25)
    conductor = Conductor(policy, data=400, prompts_per_step=40, predict=length).play()
    for batch, kind in zip(conductor.batches, conductor.classes, strict=True):
        repeats = [key for key in batch if key.duplicate]
        assert len(repeats) == (8 if kind == "short" and len(batch) == 40 else len(repeats))
        assert kind == "short" or not repeats
        assert all(key._replace(duplicate=0) in batch for key in repeats)
    assert max(conductor.trained.values()) == 1
    assert sum(key.duplicate == 0 for key in conductor.trained) == 400


def test_a_batch_waits_for_every_group():
    conductor = Conductor(LengthSplit(RULES), data=100, prompts_per_step=10, predict=length)
    conductor.begin()
    assert len(conductor.state.groups) == 10
    while len(conductor.state.running()) > 1:
        conductor.finish_sample(conductor.state.running()[0])
    assert not conductor.policy.should_stop(conductor.state)
