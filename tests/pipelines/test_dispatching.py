"""The hand that gives work out: what starts, what is held back, and on whom."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from pipelines.config_loader import load
from pipelines.dispatching import Dispatching, assumed_latency
from pipelines.scheduling.build import build_dispatcher
from pipelines.scheduling.dispatch import Work
from storage.records import Assignment, GroupKey, Prompt, SamplingParams

BASE = ("model=tiny", "data.train=builtin:running_sums", "rollout.workers=2", "rollout.max_rows=4")


class Flow:
    """Rows in the hands of workers; nothing runs."""

    def __init__(self):
        self.given = Counter()
        self.calls = []
        self.fleet = SimpleNamespace(opening_versions={0: 0, 1: 0})
        self.on_written = None

    def rows(self, worker):
        return self.given[worker]

    def leases(self, key):
        return {}

    def dispatch(self, worker, assignments, *, row_limit=0):
        self.calls.append((worker, [a.key.prompt for a in assignments]))
        self.given[worker] += sum(len(a.samples) for a in assignments)

    def written(self, worker, rows=1):
        for _ in range(rows):
            self.given[worker] -= 1
            self.on_written(worker, GroupKey("train", 0, 0))


def hand(*overrides, live=False):
    config = load([*BASE, *overrides]).config
    flow = Flow()
    return flow, Dispatching(flow, build_dispatcher(config.schedule, assumed_latency(config)), config, live=live)


def group(prompt, rows=2, pool=None):
    key = GroupKey("train", 0, prompt)
    assignment = Assignment(
        key=key,
        prompt=Prompt(index=prompt, token_ids=np.zeros(1, np.int32), text=""),
        samples=tuple(range(rows)),
        group_size=rows,
        sampling=SamplingParams(max_tokens=8),
        run_seed=0,
    )
    return Work(key=key, rows=rows, pool=pool), assignment


def test_even_dispatch_starts_everything_at_once():
    flow, dispatching = hand()
    dispatching.give([group(i) for i in range(6)])
    assert flow.calls == [(0, [0, 2, 4]), (1, [1, 3, 5])]


def test_skew_aware_dispatch_holds_back_what_finds_no_slot_and_starts_it_when_rows_leave():
    flow, dispatching = hand("schedule.dispatch=skew_aware")
    dispatching.give([group(i) for i in range(6)])
    assert flow.given == {0: 4, 1: 4}
    assert len(dispatching.unstarted()) == 2
    flow.written(0)
    assert flow.given[0] == 5, "one slot is free, and a group starts whole"
    flow.written(1)
    assert dispatching.unstarted() == set()


def test_rows_of_an_evaluation_take_slots_and_give_them_back():
    flow, dispatching = hand("schedule.dispatch=skew_aware")
    flow.given.update({0: 4, 1: 4})  # given out by nobody here
    dispatching.give([group(0)])
    assert len(dispatching.unstarted()) == 1
    flow.written(1)
    assert dispatching.unstarted() == set()


def test_revoked_work_never_starts():
    flow, dispatching = hand("schedule.dispatch=skew_aware")
    dispatching.give([group(i) for i in range(6)])
    dispatching.revoke(dispatching.unstarted())
    flow.written(0, 4)
    assert flow.given[0] == 0


@pytest.fixture
def stream():
    flow, dispatching = hand("asynchrony.pipeline=stream", live=True)
    flow.fleet.opening_versions = {0: 4, 1: 1}
    return flow, dispatching


def test_worker_that_lags_behind_the_bound_gets_nothing(stream):
    flow, dispatching = stream
    assert dispatching.free_rows(oldest_version=3) == 4
    dispatching.give([group(i) for i in range(4)])
    assert flow.given == {0: 4}
    assert dispatching.free_rows(oldest_version=3) == 0


def test_work_that_was_placed_before_its_worker_lagged_waits_until_it_has_caught_up(stream):
    flow, dispatching = stream
    dispatching.free_rows(oldest_version=1)
    dispatching.give([group(i) for i in range(6)])
    waiting = dispatching.unstarted()
    assert flow.given == {0: 4, 1: 4}
    assert len(waiting) == 2
    dispatching.free_rows(oldest_version=3)
    flow.written(1, 4)
    assert flow.given[1] == 0
    flow.fleet.opening_versions[1] = 3
    dispatching.free_rows(oldest_version=3)
    assert flow.given[1] == 2


def test_interrupted_answer_finds_a_place_though_all_workers_lag(stream):
    flow, dispatching = stream
    dispatching.free_rows(oldest_version=9)
    dispatching.give([group(0, rows=1)])
    assert flow.given == {}
    assert len(dispatching.unstarted()) == 1
    flow.fleet.opening_versions.update({0: 9, 1: 9})
    dispatching.free_rows(oldest_version=9)
    assert sum(flow.given.values()) == 1


def test_load_of_a_stream_is_what_is_not_written_yet(stream):
    flow, dispatching = stream
    flow.fleet.opening_versions.update({0: 4, 1: 4})
    dispatching.free_rows(oldest_version=3)
    dispatching.give([group(0), group(1)])
    flow.written(0, 2)
    dispatching.give([group(2)])
    assert flow.calls[-1] == (0, [2])
