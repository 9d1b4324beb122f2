"""Answers that went through a queue leave no copies behind in its actor."""

from __future__ import annotations

import math
import time

import ray
from ray.util.queue import Queue

from actors.bundles import (
    BundleHeader,
    GroupEnvelope,
    RecordEnvelope,
    RewardEnvelope,
    SaveEnvelope,
    StepEnvelope,
    StopEnvelope,
    refs_in,
)
from pipelines.queues import BoundedQueue
from storage.records import GroupKey
from tests.pipelines.borrowing import Source, answers_kept

ANSWERS = 200


@ray.remote(num_cpus=0)
class Consumer:
    def __init__(self):
        self.held = []

    def take(self, queue):
        self.held.append(queue.get())

    def drop(self):
        self.held.clear()


def envelope(refs):
    return RewardEnvelope(header=BundleHeader(items=(), worker="w", busy_s=0.0, version=0), refs=refs)


def kept(queue):
    def count(actor):
        if hasattr(actor, "_passed"):
            # What left a while ago is let go of as other items leave; here none follow.
            for together in actor._passed._fresh.ripe(math.inf):
                for answer in together:
                    actor._passed._let_go(answer)
        return answers_kept()

    return ray.get(queue.actor.__ray_call__.remote(count))


def pass_through(queue, source, consumer):
    for _ in range(ANSWERS // 2):
        taken = consumer.take.remote(queue)  # waits, as consumers do: what is put leaves again at once
        refs = list(source.answers.options(num_returns="streaming").remote(2))
        queue.put(envelope(refs))
        del refs
        ray.get(taken)
        ray.get(consumer.drop.remote())
    time.sleep(1.0)
    return kept(queue)


def test_answers_that_went_through_a_queue_leave_no_copies_in_it(ray_session):
    source, consumer = Source.remote(), Consumer.remote()
    ours, plain = BoundedQueue(8, {"num_cpus": 0}), Queue(8, actor_options={"num_cpus": 0})
    try:
        assert pass_through(plain, source, consumer) > ANSWERS // 4, "Ray has learnt to free them: this has had its day"
        assert pass_through(ours, source, consumer) == 0
    finally:
        ours.shutdown()
        plain.shutdown()


def test_references_are_found_in_every_item_that_a_queue_carries():
    key = GroupKey(split="train", epoch=0, prompt=0)
    groups = tuple(GroupEnvelope(key=key, places=((0, 0),), refs=refs) for refs in (["a", "b"], ["b"], []))
    record = RecordEnvelope(split="train", step=0, groups=groups, advantages={})
    assert refs_in(StepEnvelope(step=0, groups=groups)) == refs_in(record) == ["a", "b", "b"]
    assert refs_in(envelope(["c"])) == ["c"]
    assert refs_in(StopEnvelope()) == refs_in(SaveEnvelope(directory="d")) == []
