"""Small answers that another process held last are freed, which Ray itself does not do."""

from __future__ import annotations

import math
import time
import tracemalloc
from itertools import pairwise

import pytest
import ray

from pipelines.forgotten_answers import LATER_S, SOON_S, ForgottenAnswers
from tests.pipelines.borrowing import Source, answers_kept

ANSWERS = 40


@ray.remote(num_cpus=0)
class Borrower:
    def __init__(self):
        self.held = []

    def take(self, refs):
        self.held += refs

    def value(self, at):
        return int(ray.get(self.held[at])[0])

    def drop(self):
        self.held.clear()


def test_an_answer_that_another_process_held_last_is_freed_and_one_in_use_is_not(ray_session):
    now = 0.0
    forgotten = ForgottenAnswers(clock=lambda: now)
    source, borrower = Source.remote(), Borrower.remote()
    before = answers_kept()
    for ref in source.answers.options(num_returns="streaming").remote(ANSWERS):
        forgotten.note(ref)
        ray.get(borrower.take.remote([ref]))
    del ref
    extra = ray.put(0)
    for age in (SOON_S, SOON_S + LATER_S, SOON_S + 2 * LATER_S):
        now = age
        forgotten.note(extra)  # all are old enough to be let go of, and the borrower still holds them
        assert ray.get([borrower.value.remote(i) for i in range(ANSWERS)]) == list(range(ANSWERS))

    ray.get(borrower.drop.remote())
    time.sleep(1.0)
    assert answers_kept() > before + ANSWERS // 2, "Ray has learnt to free them: this module has had its day"
    now += LATER_S
    forgotten.note(extra)
    deadline = time.monotonic() + 10
    while answers_kept() > before + ANSWERS // 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert answers_kept() <= before + ANSWERS // 4


class Ref:
    """Of an answer that has a number."""

    def __init__(self, number):
        self._number = number

    def binary(self):
        return self._number.to_bytes(28)


def test_an_answer_is_let_go_of_until_nobody_refers_to_it():
    now, gone = 0.0, []
    held = {Ref(number).binary().hex().encode(): until for number, until in ((1, 0), (2, 2000), (3, math.inf))}
    forgotten = ForgottenAnswers(
        lambda answer: gone.append((int.from_bytes(answer), now)),
        lambda: {answer for answer, until in held.items() if now < until},
        lambda: now,
    )
    for number in (1, 2, 3):
        forgotten.note(Ref(number))
    for second in range(1, 4001):
        now = float(second)
        forgotten.note(Ref(0))
    times = {number: [at for n, at in gone if n == number] for number in (1, 2, 3)}
    assert times[1] == pytest.approx([SOON_S, SOON_S + LATER_S], rel=0.05)
    assert times[2] == times[3][: len(times[2])], "as long as it is held"
    for found, last in ((times[2], 2000), (times[3], 4000)):
        assert all(LATER_S <= later - early <= LATER_S * 1.05 for early, later in pairwise(found[1:]))
        assert abs(found[-1] - last) < LATER_S * 1.05
    assert times[2][-1] >= 2000, "and once more after that"


def test_ids_take_little_memory_and_none_is_let_go_of_early():
    now, gone = 0.0, []
    forgotten = ForgottenAnswers(
        lambda answer: gone.append((int.from_bytes(answer), now)), set[bytes], clock=lambda: now
    )
    tracemalloc.start()
    for number in range(20_000):
        now = number / 1000  # a thousand a second
        forgotten.note(Ref(number))
    assert tracemalloc.get_traced_memory()[0] < 20_000 * 40
    tracemalloc.stop()
    assert not gone
    for number in range(20_000, 60_000):
        now = number / 1000
        forgotten.note(Ref(number))
    assert [number for number, _ in gone] == list(range(len(gone)))
    assert len(gone) >= 28_000
    assert all(SOON_S <= at - number / 1000 <= SOON_S + 1.1 for number, at in gone)
