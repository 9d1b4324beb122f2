"""The thread that drives an engine: commands run between steps, and nobody waits for ever."""

import queue
import threading
import time

import numpy as np
import pytest

from actors.rollout.engine import Completion, Request, StepStats, Swap
from actors.rollout.engine_loop import EngineLoop
from storage.records import SamplingParams, WeightsManifest


class CountingEngine:
    """Finishes each request after as many steps as it may have tokens."""

    def __init__(self, fail_at=None, step_s=0.0):
        self.version = self.opening_version = self.draining = 0
        self.asleep = False
        self.left = {}
        self.observer = None
        self.fail_at = fail_at
        self.step_s = step_s
        self.steps = 0
        self.in_step = False
        self.batches = []

    @property
    def running(self):
        return len(self.left)

    @property
    def waiting(self):
        return 0

    def add_observer(self, observer):
        self.observer = observer

    def submit(self, requests):
        assert not self.in_step
        for request in requests:
            if request.sampling.max_tokens > 1000:
                raise ValueError(f"request {request.request_id} can never run")
        self.left.update({r.request_id: r.sampling.max_tokens for r in requests})

    def sleep(self):
        assert not self.in_step
        assert not self.left
        self.asleep = True
        return 1000

    def step(self):
        assert not self.asleep
        self.in_step = True
        time.sleep(self.step_s)
        self.steps += 1
        if self.steps == self.fail_at:
            raise FloatingPointError("the engine broke")
        self.batches.append(tuple(sorted(self.left)))
        done = [i for i in self.left if self.left[i] == 1]
        self.left = {i: n - 1 for i, n in self.left.items() if n > 1}
        if self.observer and self.batches[-1]:
            self.observer(
                StepStats(
                    rows=len(self.batches[-1]),
                    tokens=2,
                    prefill_tokens=0,
                    emitted=1,
                    drafted=0,
                    accepted=0,
                    waiting=0,
                    seconds=0.1,
                    paced_seconds=0.1,
                )
            )
        self.in_step = False
        return [Completion(request_id=i, segments=(), finish_reason="length") for i in done]

    def abort(self, request_ids=None, *, keep_state=False):
        assert not self.in_step
        doomed = list(self.left) if request_ids is None else [i for i in request_ids if i in self.left]
        for i in doomed:
            del self.left[i]
        return [Completion(request_id=i, segments=(), finish_reason="abort") for i in doomed]

    def load_weights(self, manifest, buffer):
        if manifest.hash == "bad":
            raise ValueError("the hash does not match")

    def activate_weights(self, version, mode="reprefill", handover=None):
        assert not self.in_step
        self.version = version
        self.asleep = False


def request(identity, tokens=3):
    return Request(request_id=identity, prompt_ids=np.ones(1, np.int32), sampling=SamplingParams(max_tokens=tokens))


def manifest(version, digest="good"):
    return WeightsManifest(version=version, tensors=(), nbytes=0, hash=digest)


BUFFER = np.zeros(0, np.uint8)


@pytest.fixture
def make_loop():
    loops = []

    def make(engine):
        loops.append(EngineLoop(engine))
        return loops[-1]

    yield make
    for loop in loops:
        loop.close()


def test_each_request_reaches_its_own_sink_once(make_loop):
    loop = make_loop(CountingEngine())
    sinks = [queue.SimpleQueue() for _ in range(5)]
    for i, sink in enumerate(sinks):
        loop.submit([request(10 * i + j, tokens=1 + j) for j in range(4)], sink.put)
    for i, sink in enumerate(sinks):
        got = sorted(sink.get(timeout=5).request_id for _ in range(4))
        assert got == [10 * i + j for j in range(4)]
        assert sink.empty()


def test_requests_of_one_call_enter_between_the_same_two_steps(make_loop):
    engine = CountingEngine(step_s=0.001)
    loop = make_loop(engine)
    sink = queue.SimpleQueue()
    for start in range(0, 40, 4):
        loop.submit([request(start + j, tokens=2) for j in range(4)], sink.put)
    for _ in range(40):
        sink.get(timeout=5)
    for start in range(0, 40, 4):
        mine = set(range(start, start + 4))
        assert all(mine <= set(batch) or not mine & set(batch) for batch in engine.batches)


def test_a_request_that_can_never_run_is_refused_and_the_others_go_on(make_loop):
    loop = make_loop(CountingEngine())
    sink = queue.SimpleQueue()
    with pytest.raises(ValueError, match="request 7"):
        loop.submit([request(7, tokens=5000)], sink.put)
    loop.submit([request(8)], sink.put)
    assert sink.get(timeout=5).request_id == 8


def test_abort_returns_after_the_partial_answers_were_delivered(make_loop):
    loop = make_loop(CountingEngine(step_s=0.001))
    sink = queue.SimpleQueue()
    loop.submit([request(1, tokens=900), request(2, tokens=900)], sink.put)
    loop.abort([1])
    assert sink.get_nowait().finish_reason == "abort"
    assert loop.stats().running == 1
    loop.abort()
    assert sink.get_nowait().request_id == 2


def test_weights_change_between_steps_and_bad_ones_are_refused(make_loop):
    engine = CountingEngine(step_s=0.001)
    loop = make_loop(engine)
    loop.submit([request(1, tokens=1000)], queue.SimpleQueue().put)
    assert loop.swap_weights(manifest(3), BUFFER, Swap()) >= 0
    assert loop.stats().version == 3
    with pytest.raises(ValueError, match="hash"):
        loop.swap_weights(manifest(4, "bad"), BUFFER, Swap())
    assert loop.stats().version == 3
    assert loop.stats().running == 1


def test_a_broken_engine_tells_every_waiting_caller_and_refuses_new_work(make_loop):
    loop = make_loop(CountingEngine(fail_at=3))
    first, second = queue.SimpleQueue(), queue.SimpleQueue()
    loop.submit([request(1, tokens=50)], first.put)
    loop.submit([request(2, tokens=50)], second.put)
    assert isinstance(first.get(timeout=5), FloatingPointError)
    assert isinstance(second.get(timeout=5), FloatingPointError)
    with pytest.raises(RuntimeError, match="the engine broke"):
        loop.submit([request(3)], first.put)


def test_callers_on_many_threads_all_get_their_answers(make_loop):
    loop = make_loop(CountingEngine())
    answers = queue.SimpleQueue()

    def call(base):
        sink = queue.SimpleQueue()
        loop.submit([request(base + j) for j in range(10)], sink.put)
        answers.put([sink.get(timeout=10).request_id // 1000 for _ in range(10)])

    threads = [threading.Thread(target=call, args=(1000 * t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(answers.get_nowait() for _ in range(8)) == [[t] * 10 for t in range(8)]


def test_an_idle_loop_closes_at_once():
    loop = EngineLoop(CountingEngine())
    started = time.monotonic()
    loop.close()
    assert time.monotonic() - started < 2
    with pytest.raises(RuntimeError, match="ended"):
        loop.submit([request(1)], queue.SimpleQueue().put)


def test_a_sleeping_engine_does_not_step_and_what_comes_meanwhile_waits(make_loop):
    engine = CountingEngine()
    loop, sink = make_loop(engine), queue.SimpleQueue()
    assert loop.sleep() == 1000
    assert loop.stats().asleep
    loop.submit([request(1)], sink.put)
    steps = engine.steps
    with pytest.raises(queue.Empty):
        sink.get(timeout=0.2)
    assert engine.steps == steps
    loop.swap_weights(manifest(1), BUFFER, Swap())
    assert sink.get(timeout=5).finish_reason == "length"
    assert not loop.stats().asleep


def test_going_to_sleep_ends_what_is_given_up_and_begins_the_rest_anew_afterwards(make_loop):
    engine = CountingEngine(step_s=0.001)
    loop, given_up, kept = make_loop(engine), queue.SimpleQueue(), queue.SimpleQueue()
    loop.submit([request(1, tokens=900), request(2, tokens=900)], given_up.put)
    loop.submit([request(3, tokens=900)], kept.put)
    loop.submit([request(4, tokens=900)], kept.put)
    loop.abort([4])
    assert kept.get_nowait().request_id == 4
    loop.sleep([1, 2, 77])
    assert sorted((c.request_id, c.finish_reason) for c in (given_up.get_nowait(), given_up.get_nowait())) == [
        (1, "abort"),
        (2, "abort"),
    ]
    assert engine.left == {3: 900}, "from its first token"
    assert kept.empty()
    loop.sleep()
    assert engine.left == {3: 900}
    loop.swap_weights(manifest(1), BUFFER, Swap())
    loop.abort([3])
    assert kept.get_nowait().request_id == 3


def test_an_idle_sleeping_loop_closes_at_once():
    loop = EngineLoop(CountingEngine())
    loop.submit([request(1, tokens=900)], queue.SimpleQueue().put)
    loop.sleep()
    started = time.monotonic()
    loop.close()
    assert time.monotonic() - started < 2


def test_what_is_inside_when_the_loop_ends_is_aborted_and_what_comes_behind_is_refused(make_loop):
    engine = CountingEngine(step_s=0.3)
    loop = make_loop(engine)
    sink = queue.SimpleQueue()
    loop.submit([request(1, tokens=100)], sink.put)
    while not engine.in_step:
        time.sleep(0.001)
    ended = loop._call(loop._stop)  # both wait for the step to end
    late = loop._call(lambda: loop._inside.update({2: (None, sink.put)}))
    ended.result(timeout=10)
    assert (sink.get(timeout=10).request_id, sink.empty()) == (1, True)
    with pytest.raises(RuntimeError, match="the engine loop has ended"):
        late.result(timeout=10)
    assert not loop._inside
