"""Where groups go: evenly, or by predicted length; and how workers are split."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.scheduling.allocation import Workload, dynamic_allocation, pool_seconds
from pipelines.scheduling.dispatch import LeastLoaded, SkewAware, Work, WorkerLoad
from pipelines.scheduling.latency_table import LatencyTable
from storage.records import TRAIN_SPLIT, GroupKey

FLAT = LatencyTable.affine(0.008, 0.00001, 64)
STEEP = LatencyTable.affine(0.002, 0.004, 64)


def work(prompt, tokens=None, rows=4, pool=None):
    percentile = None if tokens is None else min(0.999, tokens / 10_000)
    return Work(key=GroupKey(TRAIN_SPLIT, 0, prompt), rows=rows, tokens=tokens, percentile=percentile, pool=pool)


def workers(count, slots=8, pool="regular", **fields):
    return [WorkerLoad(index=i, pool=pool, slots=slots, **fields) for i in range(count)]


def test_equal_groups_are_dealt_out_in_turn_whatever_runs():
    loads = [WorkerLoad(index=i, pool="regular", slots=8, running=running) for i, running in enumerate((7, 0, 3))]
    placed = LeastLoaded().place([work(i) for i in range(7)], loads)
    assert [placement.worker for placement in placed] == [0, 1, 2, 0, 1, 2, 0]


def test_unequal_groups_even_the_load_out():
    placed = LeastLoaded().place([work(0, rows=9), work(1, rows=1), work(2, rows=1), work(3, rows=7)], workers(2))
    loads = Counter()
    for placement in placed:
        loads[placement.worker] += placement.work.rows
    assert loads == {0: 9, 1: 9}


def test_a_silent_predictor_falls_back_to_even_dealing():
    items = [work(i) for i in range(6)]
    assert SkewAware(FLAT).place(items, workers(3)) == LeastLoaded().place(items, workers(3))


def test_longest_groups_are_placed_first_and_apart():
    items = [work(0, 100), work(1, 4000), work(2, 200), work(3, 4100), work(4, 300), work(5, 3900)]
    placed = SkewAware(FLAT).place(items, workers(3))
    assert [placement.work.key.prompt for placement in placed[:3]] == [3, 1, 5]
    assert len({placement.worker for placement in placed[:3]}) == 3
    priorities = [placement.priority for placement in placed]
    assert priorities == sorted(priorities, reverse=True)


def test_the_tail_takes_the_workers_of_its_pool_and_nobody_else_does():
    loads = [*workers(3), WorkerLoad(index=3, pool="long", slots=2)]
    items = [work(i, 100 + i) for i in range(8)] + [work(8, 9000), work(9, 8000)]
    placed = SkewAware(FLAT).place(items, loads)
    assert {placement.work.key.prompt for placement in placed if placement.worker == 3} == {8, 9}
    assert all(placement.batch_limit == 2 for placement in placed if placement.worker == 3)


def test_work_that_used_up_its_budget_goes_to_the_long_pool_whatever_is_predicted():
    loads = [*workers(2), WorkerLoad(index=2, pool="long", slots=2)]
    placed = SkewAware(FLAT, tail_share=0.01).place([work(0, 10, pool="long"), work(1, 9000)], loads)
    assert {p.work.key.prompt: p.worker == 2 for p in placed} == {0: True, 1: False}


def test_small_batches_pay_only_where_a_pass_with_fewer_rows_is_faster():
    tail, regular = Workload(16, 4000.0, 9000.0), Workload(200, 400.0, 900.0)
    steep = dynamic_allocation(tail, regular, 8, 32, STEEP)
    flat = dynamic_allocation(tail, regular, 8, 32, FLAT)
    assert steep.long_workers >= 2
    assert 16 / steep.long_workers < steep.regular_batch, "the tail runs in smaller batches"
    assert flat.long_workers == 0


def test_the_allocation_is_the_best_of_all_splits():
    tail, regular = Workload(40, 3000.0, 8000.0), Workload(300, 500.0, 1500.0)
    found = dynamic_allocation(tail, regular, 6, 16, STEEP)
    best = min(
        max(pool_seconds(tail, n, b, STEEP), pool_seconds(regular, 6 - n, c, STEEP))
        for n in range(1, 6)
        for b in (1, 2, 4, 8, 16)
        for c in (1, 2, 4, 8, 16)
    )
    assert found.makespan == pytest.approx(best)


def test_two_pools_need_two_workers():
    with pytest.raises(ValueError, match="two pools need two workers"):
        dynamic_allocation(Workload(1, 1.0, 1.0), Workload(1, 1.0, 1.0), 1, 4, FLAT)


def test_a_worker_with_free_slots_takes_from_the_fullest_queue():
    loads = [
        WorkerLoad(index=0, pool="regular", slots=4, running=4, queued=(work(0), work(1))),
        WorkerLoad(index=1, pool="regular", slots=4, running=4, queued=(work(2), work(3), work(4))),
        WorkerLoad(index=2, pool="regular", slots=4, running=0),
    ]
    moves = SkewAware(FLAT).rebalance(loads)
    assert [(move.work.key.prompt, move.source, move.target) for move in moves] == [(2, 1, 2)]
    assert LeastLoaded().rebalance(loads) == []


def test_work_bound_to_the_long_pool_is_not_moved_out_of_it():
    loads = [
        WorkerLoad(index=0, pool="long", slots=4, running=4, queued=(work(0, pool="long"),)),
        WorkerLoad(index=1, pool="regular", slots=4, running=0),
    ]
    assert SkewAware(FLAT).rebalance(loads) == []


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.one_of(st.none(), st.floats(1, 9000)), max_size=40),
    count=st.integers(1, 6),
    slots=st.integers(1, 16),
    dedicated=st.integers(0, 2),
)
def test_every_piece_of_work_is_placed_once_on_a_worker_that_exists(tokens, count, slots, dedicated):
    loads = workers(count, slots)
    loads += [WorkerLoad(index=count + i, pool="long", slots=slots) for i in range(dedicated)]
    items = [work(i, length) for i, length in enumerate(tokens)]
    for dispatcher in (LeastLoaded(), SkewAware(STEEP)):
        placed = dispatcher.place(items, loads)
        assert sorted(p.work.key for p in placed) == sorted(item.key for item in items)
        assert {p.worker for p in placed} <= {load.index for load in loads}
        assert all(1 <= p.batch_limit <= slots for p in placed)


def test_without_workers_there_is_an_error():
    with pytest.raises(ValueError, match="no worker"):
        LeastLoaded().place([work(0)], [])


def test_a_latency_table_interpolates_and_never_turns_down():
    table = LatencyTable({1: 0.010, 8: 0.012, 32: 0.024})
    assert table(1) == 0.010
    assert table(20) == pytest.approx(0.018)
    assert table(56) == pytest.approx(0.036)
    assert LatencyTable({4: 0.02})(100) == 0.02
    assert LatencyTable({1: 0.02, 4: 0.01})(64) == 0.01


def test_a_latency_table_learns_from_measured_passes():
    table = LatencyTable.affine(0.01, 0.001, 8)
    table.observe(4, 0.05)
    assert table(4) == 0.05
    table.observe(4, 0.03, weight=0.5)
    assert table(4) == pytest.approx(0.04)
    table.observe(0, 1.0)
    assert LatencyTable({int(rows): seconds for rows, seconds in table.state().items()})(4) == pytest.approx(0.04)


def test_a_latency_table_needs_a_positive_point():
    with pytest.raises(ValueError, match="positive seconds"):
        LatencyTable({})
    with pytest.raises(ValueError, match="positive seconds"):
        LatencyTable({1: 0.0})
