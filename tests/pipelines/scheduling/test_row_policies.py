"""Forecasts, second batching, timeouts and reward deadlines: the small policies, alone."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.scheduling.forecasts import ForecastBook
from pipelines.scheduling.reward_deadlines import PROMPTS_KEPT, RewardDeadlines
from pipelines.scheduling.second_batching import UnfinishedRow, regroup
from pipelines.scheduling.timeouts import RowBudget, Timeouts
from storage.records import TRAIN_SPLIT, GroupKey
from tests.pipelines.scheduling.play import prediction


def key(prompt):
    return GroupKey(TRAIN_SPLIT, 0, prompt)


def book_of(lengths, window=4096):
    book = ForecastBook(window)
    book.add({key(i): prediction(length) for i, length in enumerate(lengths)})
    return book


def test_a_percentile_compares_with_everything_drawn_not_with_what_waits():
    book = book_of(float(i) for i in range(100))
    book.forget(key(i) for i in range(90))
    assert book.percentile(key(95)) == 0.95
    assert book.get(key(5)) is None
    assert book.percentile(key(5)) is None
    assert book.median() == 50.0
    assert book.share_above(75.0) == pytest.approx(0.24)


def test_the_window_of_forecasts_is_bounded_and_slides():
    book = book_of([1.0] * 10 + [5.0] * 10, window=10)
    assert book.median() == 5.0
    assert book.share_above(2.0) == 1.0


def test_the_book_survives_a_checkpoint():
    book = book_of([3.0, 1.0, 2.0])
    book.forget([key(1)])
    again = ForecastBook()
    again.load_state(json.loads(json.dumps(book.state())))
    assert again.get(key(0)) == book.get(key(0))
    assert again.get(key(1)) is None
    assert again.percentile(key(0)) == book.percentile(key(0))
    assert again.median() == book.median()


def test_the_rest_of_a_group_shrinks_as_it_is_written_and_never_vanishes():
    book = book_of([1000.0])
    rests = [book.remaining(key(0), written) for written in (0, 500, 900, 5000)]
    assert rests[0] == 1000.0
    assert rests[1] <= rests[0]
    assert min(rests) >= 1.0
    assert book.remaining(key(9), 0) is None


def rows(remaining):
    return [UnfinishedRow(key(i // 2), i % 2, float(rest)) for i, rest in enumerate(remaining)]


def test_rows_of_similar_length_run_together():
    batches = regroup(rows([10, 900, 20, 800, 30, 700, 40, 600]), {0: 4, 1: 4})
    assert [sorted(row.remaining for row in batch.rows) for batch in batches] == [
        [600, 700, 800, 900],
        [10, 20, 30, 40],
    ]


def test_siblings_may_part():
    batches = regroup(rows([10, 900]), {0: 4, 1: 4})
    assert [batch.by_group() for batch in batches] == [{key(0): (1,)}, {key(0): (0,)}]


@given(
    remaining=st.lists(st.floats(1, 1e4), max_size=40),
    slots=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_every_row_is_in_one_batch_that_fits_its_worker(remaining, slots):
    made = rows(remaining)
    batches = regroup(made, dict(enumerate(slots)))
    assert sorted((row.key, row.index) for batch in batches for row in batch.rows) == sorted(
        (row.key, row.index) for row in made
    )
    assert all(len(batch.rows) <= slots[batch.worker] for batch in batches)
    lowest = float("inf")
    for batch in batches:
        assert max(row.remaining for row in batch.rows) <= lowest
        lowest = min(row.remaining for row in batch.rows)


def test_second_batching_needs_slots():
    with pytest.raises(ValueError, match="at least one slot"):
        regroup(rows([1]), {})


def test_tokens_are_the_primary_limit_and_wall_time_the_safety_net():
    timeouts = Timeouts(RowBudget(tokens=100, wall_s=60.0), RowBudget(wall_s=600.0), max_resumes=2)
    assert timeouts.overdue("regular", 99, 59.0) is None
    assert timeouts.overdue("regular", 100, 999.0) == "tokens"
    assert timeouts.overdue("regular", 5, 60.0) == "wall"
    assert timeouts.overdue("long", 10**6, 599.0) is None
    assert timeouts.overdue("long", 0, 600.0) == "wall"


def test_an_overdue_row_goes_on_until_its_resumes_are_used_up():
    timeouts = Timeouts(RowBudget(), RowBudget(), max_resumes=2)
    assert [timeouts.action(resumes) for resumes in range(4)] == ["requeue", "requeue", "truncate", "truncate"]


def test_a_reward_deadline_follows_the_slowest_correct_answer():
    deadlines = RewardDeadlines(floor_s=2.0, ceiling_s=30.0, factor=1.5)
    assert deadlines.deadline(7) == 30.0
    deadlines.observe(7, 25.0, correct=False)
    assert deadlines.deadline(7) == 30.0, "a wrong answer is no anchor"
    deadlines.observe(7, 0.03, correct=True)
    assert deadlines.deadline(7) == 2.0
    deadlines.observe(7, 4.0, correct=True)
    deadlines.observe(7, 1.0, correct=True)
    assert deadlines.deadline(7) == 6.0
    deadlines.observe(7, 29.0, correct=True)
    assert deadlines.deadline(7) == 30.0
    assert deadlines.deadline(8) == 30.0


def test_reward_deadlines_survive_a_checkpoint_and_forget_the_oldest_prompts():
    deadlines = RewardDeadlines()
    for prompt in range(PROMPTS_KEPT + 10):
        deadlines.observe(prompt, 4.0, correct=True)
    again = RewardDeadlines()
    again.load_state(json.loads(json.dumps(deadlines.state())))
    assert again.deadline(5) == 30.0
    assert again.deadline(PROMPTS_KEPT) == 6.0


def test_reward_deadlines_reject_a_floor_above_the_ceiling():
    with pytest.raises(ValueError, match="floor <= ceiling"):
        RewardDeadlines(floor_s=5.0, ceiling_s=2.0)
