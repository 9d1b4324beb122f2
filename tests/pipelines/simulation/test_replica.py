"""The virtual engine against closed forms and against a pass-by-pass count."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.simulation.cluster import ClusterModel, batch_seconds
from pipelines.simulation.lengths import LogNormalLengths
from pipelines.simulation.replica import IDLE, Replica, Row
from storage.errors import UserError
from storage.records import TRAIN_SPLIT, GroupKey

BARE = ClusterModel(gpus=1, prefill_s=0.0, prompt_tokens=0, context_s=0.0)


def rows(lengths):
    return [Row(GroupKey(TRAIN_SPLIT, 0, i), 0, length) for i, length in enumerate(lengths)]


def run_out(replica):
    ended = []
    while replica.next_event() < IDLE:
        due = replica.next_event()
        for row in replica.complete_event():
            ended.append((row.key.prompt, replica.clock))
        assert replica.clock == pytest.approx(due)
    return ended


@pytest.mark.parametrize("context_s", [0.0, 2e-8, 1e-6])
def test_a_batch_takes_what_the_closed_form_says(context_s):
    cluster = ClusterModel(gpus=1, prefill_s=0.0, context_s=context_s)
    lengths = [int(n) for n in LogNormalLengths().draw(GroupKey(TRAIN_SPLIT, 0, 3), 0, 64)]
    replica = Replica(0, cluster, 64)
    replica.submit(0.0, rows(lengths))
    run_out(replica)
    exact = batch_seconds(cluster, lengths, cluster.prompt_tokens)
    assert replica.clock == pytest.approx(exact, rel=0.005)


def test_the_closed_form_itself_is_the_sum_over_passes():
    cluster = ClusterModel(gpus=1)
    lengths = [3, 5, 5, 9]
    total = 0.0
    for done in range(9):
        alive = [length for length in lengths if length > done]
        total += cluster.pass_seconds(len(alive), len(alive) * (200 + done))
    assert batch_seconds(cluster, lengths, 200) == pytest.approx(total)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    slots=st.integers(1, 6),
    kv_tokens=st.integers(70, 400),
    cut=st.floats(0.0, 0.5),
)
def test_tokens_are_neither_lost_nor_invented(lengths, slots, kv_tokens, cut):
    cluster = ClusterModel(gpus=1, slots=slots, kv_tokens=kv_tokens, prompt_tokens=3)
    replica = Replica(0, cluster, slots)
    waiting = rows(lengths)
    replica.submit(0.0, waiting)
    now = 0.0
    while replica.next_event() <= cut:
        now = replica.next_event()
        replica.complete_event()
    stopped = replica.stop(max(now, cut))
    assert all(0 <= row.written < row.length for row in stopped)
    assert replica.use.tokens == sum(row.written for row in waiting)
    assert replica.running == replica.queued == 0
    replica.submit(max(now, cut), stopped)
    run_out(replica)
    assert [row.written for row in waiting] == lengths
    assert replica.use.tokens == sum(lengths)
    assert replica.use.most_rows <= slots


def test_stopping_counts_whole_passes_only():
    replica = Replica(0, BARE, 4)
    replica.submit(0.0, rows([100, 100]))
    tau = BARE.pass_seconds(2, 0)
    stopped = replica.stop(10.5 * tau)
    assert [row.written for row in stopped] == [10, 10]
    assert replica.use.busy_s == pytest.approx(10 * tau)


def test_rows_wait_for_a_slot_by_priority():
    replica = Replica(0, BARE, 1)
    low, high, middle = rows([5, 5, 5])
    low.priority, high.priority, middle.priority = 0.0, 9.0, 4.0
    replica.submit(0.0, [low])
    replica.submit(0.0, [middle, high])
    assert [prompt for prompt, _ in run_out(replica)] == [0, 1, 2]


def test_a_full_cache_preempts_the_youngest_and_computes_it_again():
    cluster = ClusterModel(gpus=1, slots=4, kv_tokens=100, prompt_tokens=0, prefill_s=1e-3)
    replica = Replica(0, cluster, 4)
    first, second = rows([60, 60])
    replica.submit(0.0, [first])
    replica.advance(0.1)
    replica.submit(0.1, [second])
    ended = run_out(replica)
    assert replica.use.preemptions == 1
    assert [prompt for prompt, _ in ended] == [0, 1]
    roomy = Replica(0, ClusterModel(gpus=1, slots=4, prompt_tokens=0, prefill_s=1e-3), 4)
    roomy.submit(0.0, rows([60, 60]))
    run_out(roomy)
    assert roomy.use.preemptions == 0
    assert replica.clock > roomy.clock


def test_siblings_share_the_prefill_of_their_prompt_and_resumed_rows_pay_for_their_tokens():
    cluster = ClusterModel(gpus=1, prefill_s=0.01, prompt_tokens=100, context_s=0.0)
    one, sibling = rows([10, 10])
    sibling.shared = True
    resumed = Row(GroupKey(TRAIN_SPLIT, 0, 7), 0, 60, written=50)
    for made, stall in (([one, sibling], 1.0), ([resumed], 1.5)):
        replica = Replica(0, cluster, 4)
        replica.submit(0.0, made)
        passes = 10 * cluster.pass_seconds(len(made), 0)
        assert replica.next_event() == pytest.approx(stall + passes)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 64),
    context=st.integers(0, 10**6),
    seconds=st.floats(0, 200),
    context_s=st.sampled_from([0.0, 2.1e-8, 1e-6]),
)
def test_passes_within_a_time_are_the_inverse_of_their_seconds(rows, context, seconds, context_s):
    cluster = ClusterModel(context_s=context_s)
    passes = cluster.passes_within(seconds, rows, context)
    assert cluster.passes_seconds(passes, rows, context) <= seconds * (1 + 1e-9)
    assert cluster.passes_seconds(passes + 1, rows, context) > seconds


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gpus": 0}, "1 to 1024 GPUs, not 0"),
        ({"gpus": 2048}, "1 to 1024 GPUs"),
        ({"gpus": 10, "gpus_per_replica": 4}, "divides --gpus"),
        ({"slots": 0}, "at least one slot"),
        ({"train_gpu_s": -1.0}, "must not be negative"),
    ],
)
def test_a_cluster_that_cannot_exist_is_a_user_error(fields, words):
    with pytest.raises(UserError, match=words):
        ClusterModel(**fields)
