from __future__ import annotations

import itertools

import numpy as np
import pytest

from storage.errors import UserError
from storage.tasks import TASKS, RunningSums

TASK = RunningSums()


def rows_of(count=600, seed=0, task=TASK, **options):
    return list(task.generate(count=count, seed=seed, **options))


def demonstrations(rows, seed=0):
    rng = np.random.default_rng(seed)
    return [TASK.demonstrate(row, rng) for row in rows]


def walked(prompt):
    """The final sum, worked out from the text of the prompt alone."""
    laps, ring = ord(prompt[0]) - ord("A") + 1, prompt[1:-1]
    return sum(int(term) for term in ring[1::2]) * laps % 10


def lengths(answers):
    return np.array([len(answer) + 1 for answer in answers])  # with EOS


def test_rows_depend_on_seed_and_index_alone():
    assert rows_of(40) == rows_of(80)[:40]
    assert rows_of(40, seed=1) != rows_of(40, seed=2)


def test_prompts_differ_and_keep_clear_of_the_excluded_ones():
    train = {row["prompt"] for row in rows_of(96, seed=1)}
    overlapping = {row["prompt"] for row in rows_of(128, seed=2)} & train
    held_out = {row["prompt"] for row in rows_of(128, seed=2, exclude=frozenset(train))}
    assert overlapping, "without exclusion the sets overlap, so the next line can fail"
    assert not held_out & train
    assert (len(train), len(held_out)) == (96, 128)


def test_solution_ends_with_the_sum_of_all_laps():
    for row in rows_of():
        assert row["answer"] == str(walked(row["prompt"])) == row["solution"][-1]
        assert len(row["solution"]) == row["laps"] * (2 * row["stations"] + 1)


def test_every_character_has_a_token():
    rows = rows_of()
    used = set("".join([*(row["prompt"] for row in rows), *demonstrations(rows)]))
    assert used <= set(TASK.alphabet)
    assert len(set(TASK.alphabet)) == len(TASK.alphabet)


def test_lengths_have_a_long_tail_between_prompts_and_between_answers_to_one_prompt():
    rows = rows_of(2000)
    sampled = lengths(demonstrations(rows))
    single = np.array([len(row["solution"]) + 3 for row in rows])
    assert np.percentile(sampled, 90) >= 3 * np.median(sampled)
    assert np.percentile(single, 90) >= 3 * np.median(single)
    assert sampled.max() <= 256
    row = rows[0]
    assert len(set(lengths(demonstrations([row] * 64)))) > 1


def test_longer_answers_are_wrong_more_often():
    rows = rows_of(2000)
    answers = demonstrations(rows)
    right = np.array([answer.endswith("=" + row["answer"]) for row, answer in zip(rows, answers, strict=True)])
    order = np.argsort([len(row["solution"]) for row in rows], kind="stable")
    assert right[order[:500]].mean() > right[order[-500:]].mean() + 0.15


def test_demonstrations_are_flawless_where_the_hard_term_is_absent():
    rows = rows_of()
    for row, answer in zip(rows, demonstrations(rows), strict=True):
        if not TASK.has_hard_term(row):
            walks, _, final = answer.rpartition("=")
            assert set(walks.split("?")) == {row["solution"]}
            assert final == row["answer"]
    hard = [row for row in rows if TASK.has_hard_term(row)]
    slips = sum(
        answer.split("?")[0].split("=")[0] != row["solution"]
        for row, answer in zip(hard, demonstrations(hard), strict=True)
    )
    assert slips > 0.6 * len(hard)


def test_too_many_prompts_is_an_error_that_says_what_to_lower():
    small = RunningSums(max_stations=2, max_laps=1, max_term=1, labels="ab")
    possible = 2**2
    assert len(rows_of(possible, task=small)) == possible
    with pytest.raises(UserError, match=r"different prompts.*data\.prompts"):
        rows_of(possible + 1, task=small)


def test_tasks_are_found_by_name():
    first = next(itertools.islice(TASKS["running_sums"].generate(count=1, seed=0), 1))
    assert {"prompt", "answer", "solution"} <= set(first)
