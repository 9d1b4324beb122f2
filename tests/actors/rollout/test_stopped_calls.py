"""Calls of the rollout worker that are stopped at any moment of their beginning."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from actors.bundles import Call
from actors.rollout.engine import Completion
from actors.rollout.options import RolloutOptions
from actors.rollout.under_way import UnderWay
from actors.rollout.worker import RolloutWorker
from storage.records import Assignment, GroupKey, Prompt, SamplingParams, Segment

KEY = GroupKey("train", 0, 3)


class Loop:
    """An engine loop without an engine: requests run for ever; ``before`` and ``after`` happen around their entry."""

    def __init__(self, before=lambda: None, after=lambda: None):
        self.running = {}
        self._before, self._after = before, after

    def submit(self, requests, sink):
        self._before()
        for request in requests:
            self.running[request.request_id] = sink
        self._after()

    def abort(self, ids=None):
        for request in list(self.running) if ids is None else ids:
            if request in self.running:  # as the engine: others are unknown, and that is no error
                item = Completion(request_id=request, segments=(), finish_reason="abort")
                self.running.pop(request)(item)

    def limit_rows(self, rows):
        pass

    def stats(self):
        return SimpleNamespace(busy_s=0.0, version=0, steps=0, row_passes=0)


def worker_with(loop):
    worker = object.__new__(RolloutWorker)  # its constructor loads a model
    worker._name, worker._options, worker._loop, worker._drafts = "rollout-0", RolloutOptions(), loop, None
    worker._tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: "")
    worker._term, worker._under_way = 0, UnderWay()
    worker._calls_lock, worker._calls, worker._revoked, worker._row_limit = threading.Lock(), {}, {}, 0
    return worker


def call_of(samples, **extra):
    prompt = Prompt(index=3, token_ids=np.zeros(2, np.int32), text="p")
    assignment = Assignment(
        key=KEY,
        prompt=prompt,
        samples=tuple(range(samples)),
        group_size=samples,
        sampling=SamplingParams(max_tokens=9),
        run_seed=1,
        **extra,
    )
    return Call(number=7, assignments=(assignment,))


def answers(stream, within_s=10.0):
    """Finish reasons by sample; fails when the stream does not end."""
    found = {}

    def read():
        for header in stream:
            next(stream)
            found.update({item.index: item.finish_reason for item in header.items})

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(within_s)
    assert not thread.is_alive(), "the call does not end"
    return found


@pytest.mark.parametrize("moment", ["before", "entering", "entered"])
def test_samples_that_are_stopped_while_their_call_begins_come_back_at_once(moment):
    worker = worker_with(None)

    def stop():
        worker.stop({7: [(KEY, 0), (KEY, 1)]})

    hooks = {"entering": {"before": stop}, "entered": {"after": stop}}.get(moment, {})
    worker._loop = Loop(**hooks)
    if moment == "before":
        stop()
    assert answers(worker.generate(call_of(2))) == {0: "abort", 1: "abort"}
    assert worker._calls == {}
    assert worker._revoked == {}


def test_siblings_of_a_stopped_sample_go_on():
    loop = Loop()
    worker = worker_with(loop)
    worker.stop({7: [(KEY, 0)]})
    stream = worker.generate(call_of(2))
    header = next(stream)
    assert [(item.index, item.finish_reason) for item in header.items] == [(0, "abort")]
    assert len(loop.running) == 1
    next(stream)
    loop.abort()
    assert answers(stream) == {1: "abort"}


def test_stopped_sample_keeps_the_tokens_that_it_came_with():
    worker = worker_with(Loop())
    worker.stop({7: [(KEY, 0)]})
    tokens = Segment(
        source="policy", version=2, token_ids=np.arange(4, dtype=np.int32), logprobs=np.zeros(4, np.float32)
    )
    stream = worker.generate(call_of(1, resume={0: (tokens,)}))
    (item,) = next(stream).items
    assert (item.tokens, item.oldest_version) == (4, 2)


def test_time_of_a_stay_ends_a_call_whose_engine_says_nothing():
    worker = worker_with(Loop())
    assert answers(worker.generate(call_of(2, stay_s=0.1, last_stay=False))) == {0: "abort", 1: "abort"}
    assert answers(worker.generate(call_of(2, stay_s=0.1, last_stay=True))) == {0: "length", 1: "length"}
