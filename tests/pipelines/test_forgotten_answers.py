"""Small answers that another process held last are freed, which Ray itself does not do."""

from __future__ import annotations

import time
import tracemalloc

import ray

from pipelines.forgotten_answers import AGES_S, ForgottenAnswers
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
    now = AGES_S[0]
    extra = ray.put(0)
    forgotten.note(extra)  # all are old enough to be let go of, and the borrower still holds them
    assert ray.get([borrower.value.remote(i) for i in range(ANSWERS)]) == list(range(ANSWERS))

    ray.get(borrower.drop.remote())
    time.sleep(1.0)
    assert answers_kept() > before + ANSWERS // 2, "Ray has learnt to free them: this module has had its day"
    now = AGES_S[1]
    forgotten.note(extra)
    deadline = time.monotonic() + 10
    while answers_kept() > before + ANSWERS // 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert answers_kept() <= before + ANSWERS // 4


def test_each_answer_is_let_go_of_at_each_age_and_then_forgotten():
    class Ref:
        def __init__(self, number):
            self.number = number

        def binary(self):
            return bytes([self.number] * 28)

    now, gone = 0.0, []
    forgotten = ForgottenAnswers(gone.append, clock=lambda: now)
    forgotten.note(Ref(1))
    times = []
    for now in (AGES_S[0] - 1, AGES_S[0], AGES_S[0] + 1, AGES_S[1], AGES_S[2], AGES_S[2] + 1, 2 * AGES_S[2]):
        known = gone.count(Ref(1).binary())
        forgotten.note(Ref(2))
        times += [now] * (gone.count(Ref(1).binary()) - known)
    assert times == list(AGES_S)


def test_ids_take_little_memory_and_none_is_let_go_of_early():
    class Ref:
        def __init__(self, number):
            self.id = number.to_bytes(28)

        def binary(self):
            return self.id

    now, gone = 0.0, []
    forgotten = ForgottenAnswers(lambda answer: gone.append((int.from_bytes(answer), now)), clock=lambda: now)
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
    assert all(AGES_S[0] <= at - number / 1000 <= AGES_S[0] + 1.1 for number, at in gone)
