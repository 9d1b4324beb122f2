from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from storage.errors import UserError
from storage.history.index.nearest import NearestPrompts

PROMPTS = {
    11: np.array([1, 2, 3, 40, 41, 42], np.int32),
    12: np.array([1, 2, 3, 40, 41, 50], np.int32),
    13: np.array([1, 2, 3, 60, 61, 62], np.int32),
    2**64 - 1: np.array([90, 91], np.int32),
}


def grams(prompt):
    tokens = prompt.tolist()
    return {(t,) for t in tokens} | set(pairwise(tokens))


def similarity(a, b):
    def weight(gram):
        return math.log((1 + len(PROMPTS)) / (1 + sum(gram in grams(p) for p in PROMPTS.values()))) + 1e-6

    return sum(map(weight, grams(a) & grams(b))) / sum(map(weight, grams(a) | grams(b)))


def test_similarities_are_those_of_the_definition_best_first():
    index = NearestPrompts.build(PROMPTS)
    query = np.array([1, 2, 3, 40, 41, 77, 78], np.int32)
    keys, similarities = index.nearest(query, 5)
    expected = {key: similarity(query, prompt) for key, prompt in PROMPTS.items()}
    assert keys.tolist()[-1] == 13
    assert set(keys.tolist()) == {11, 12, 13}
    np.testing.assert_allclose(similarities, [expected[key] for key in keys.tolist()], rtol=1e-5)
    assert np.all(np.diff(similarities) <= 0)


def test_a_prompt_is_most_like_itself_and_what_shares_nothing_is_left_out():
    index = NearestPrompts.build(PROMPTS)
    keys, similarities = index.nearest(PROMPTS[12], 2)
    assert keys.tolist() == [12, 11]
    assert similarities[0] == pytest.approx(1.0)
    assert index.nearest(np.array([90, 91]), 3)[0].tolist() == [2**64 - 1]
    assert index.nearest(np.array([700]), 3)[0].size == 0


def test_what_all_prompts_share_decides_nothing():
    template = list(range(20))
    index = NearestPrompts.build({n: np.array([*template, 100 + n, 200 + n], np.int32) for n in range(4)})
    keys, similarities = index.nearest(np.array([*template, 102, 202]), 4)
    assert keys[0] == 2
    assert similarities[1] < 0.01


def test_the_later_of_equals_comes_first_and_k_bounds_the_answer():
    index = NearestPrompts.build({5: np.array([1, 2]), 6: np.array([1, 2]), 7: np.array([1, 2])})
    assert index.nearest(np.array([1, 2]), 2)[0].tolist() == [7, 6]
    assert index.nearest(np.array([1, 2]), 0)[0].size == 0


def test_no_prompts_and_empty_prompts_have_no_neighbours():
    for prompts in ({}, {1: np.zeros(0, np.int32)}):
        assert NearestPrompts.build(prompts).nearest(np.array([1, 2]), 3)[0].size == 0
    assert NearestPrompts.build(PROMPTS).nearest(np.zeros(0, np.int32), 3)[0].size == 0


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(UserError, match="document 0, token 1"):
        NearestPrompts.build({1: np.array([1, 1 << 20])})
