import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.learner.packing import Answer, collate, plan_microbatches
from storage.records import GroupKey


def padded(lengths, plan):
    return sum(len(rows) * max(lengths[i] for i in rows) for rows in plan)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 300), max_size=60), st.integers(16, 2000))
def test_plan_holds_each_sequence_once_and_respects_the_budget(lengths, budget):
    plan = plan_microbatches(lengths, budget)
    assert sorted(i for rows in plan for i in rows) == list(range(len(lengths)))
    for rows in plan:
        assert len(rows) == 1 or len(rows) * max(lengths[i] for i in rows) <= budget


def test_sequence_longer_than_the_budget_is_alone():
    plan = plan_microbatches([5, 100, 6], 20)
    assert [1] in plan
    assert sorted(map(sorted, plan)) == [[0, 2], [1]]


def test_plan_is_deterministic_under_ties():
    assert plan_microbatches([7] * 9, 21) == plan_microbatches([7] * 9, 21)
    assert [i for rows in plan_microbatches([7] * 9, 21) for i in rows] == list(range(9))


def test_long_tail_wastes_little():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.7, 0.8, 512), 5, 270).astype(int).tolist()
    plan = plan_microbatches(lengths, 4096)
    assert padded(lengths, plan) < 1.2 * sum(lengths)
    # control: cuts of equal row count, unsorted, waste far more
    naive = [list(range(i, i + 15)) for i in range(0, 510, 15)]
    assert padded(lengths, naive) > 2 * sum(lengths[:510])


def answer(tokens, prompt_tokens, policy, behaviour, advantage=0.5, index=0):
    return Answer(
        key=GroupKey("train", 0, 0),
        index=index,
        token_ids=np.array(tokens, np.int32),
        prompt_tokens=prompt_tokens,
        policy=np.array(policy),
        behaviour=np.array(behaviour, np.float32),
        advantage=advantage,
    )


def test_collate_scores_policy_tokens_at_the_position_before_them():
    answers = [
        answer([9, 8, 4, 5, 6], 2, [True, False, True], [-1, 0, -3], 0.5),
        answer([9, 0, 0], 1, [True, True], [-4, -5], -1.0),
    ]
    batch = collate(answers, [0, 1])
    assert batch.input_ids.tolist() == [[9, 8, 4, 5], [9, 0, 0, 0]]
    assert batch.places.tolist() == [1, 3, 4, 5]
    assert batch.targets.tolist() == [4, 6, 0, 0]
    assert batch.behaviour.tolist() == [-1, -3, -4, -5]
    assert batch.advantages.tolist() == [0.5, 0.5, -1.0, -1.0]
    assert batch.answer_tokens.tolist() == [2, 2, 2, 2]
    assert batch.answers.tolist() == [0, 0, 1, 1]
    assert batch.padding == 2


@pytest.mark.parametrize("rows", [[1], [1, 0]])
def test_collate_names_answers_by_their_place_in_the_batch(rows):
    answers = [answer([9, 1], 1, [True], [-1]), answer([9, 2], 1, [True], [-2])]
    batch = collate(answers, rows)
    assert batch.answers.tolist() == rows
    assert batch.targets.tolist() == [i + 1 for i in rows]
