from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import UserError
from storage.history.index.suffix_automaton import Automaton, build, find_next
from tests.storage.history.index import brute_force

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=4)
# Sums of these are exact, so equal counts are equal numbers.
WEIGHTS = st.lists(st.sampled_from((0.25, 0.5, 1.0)), min_size=4, max_size=4)


def state_of(automaton: Automaton, context: list[int]) -> int:
    edges = (getattr(automaton, n) for n in ("next_token", "next_state", "edge_start", "edge_token", "edge_state"))
    arrays, state = tuple(edges), 0
    for token in context:
        state = find_next(*arrays, state, token)
        if state < 0:
            return -1
    return state


def contexts(texts: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(t[i:j]) for t in texts for i in range(len(t)) for j in range(i + 1, len(t) + 1)}


@settings(max_examples=150, deadline=None)
@given(TEXTS, WEIGHTS)
def test_each_context_has_the_counts_and_the_best_continuation_of_brute_force(texts, weights):
    weights = weights[: len(texts)]
    automaton = build(brute_force.arrays(texts), weights)
    for context in contexts(texts):
        state = state_of(automaton, list(context))
        assert state > 0
        assert automaton.counts[state] == brute_force.weighted(texts, weights, context)
        assert automaton.lengths[automaton.links[state]] < len(context) <= automaton.lengths[state]
        best = brute_force.best_continuation(texts, weights, context)
        found = (automaton.next_token[state], automaton.next_count[state])
        assert found == (best or (-1, 0.0))


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_it_knows_no_context_that_lies_in_no_single_document(texts, context):
    automaton = build(brute_force.arrays(texts))
    assert (state_of(automaton, context) >= 0) == (tuple(context) in contexts(texts))


def test_documents_do_not_run_into_each_other():
    automaton = build(brute_force.arrays([[1, 2], [3, 4]]))
    assert state_of(automaton, [1, 2]) > 0
    assert state_of(automaton, [2, 3]) == -1


def test_recent_documents_win_ties_and_heavier_ones_win_against_them():
    texts = brute_force.arrays([[7, 1], [7, 2]])
    tied, weighted = build(texts), build(texts, [1.0, 0.5])
    assert tied.next_token[state_of(tied, [7])] == 2
    assert weighted.next_token[state_of(weighted, [7])] == 1


def test_counts_stay_exact_beyond_what_float32_can_count_to():
    automaton = build([np.zeros(3, np.int32), np.zeros(3, np.int32)], [2.0**24, 1.0])
    assert automaton.counts[0] == np.float32(3 * (2.0**24 + 1))


def test_size_and_edges_stay_within_the_bounds_of_the_structure():
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 2, 500).astype(np.int32) for _ in range(4)] + [np.arange(3000, dtype=np.int32)]
    automaton = build(documents)
    tokens = sum(map(len, documents))
    assert automaton.states <= 2 * tokens
    assert automaton.nbytes <= 120 * tokens
    edges = np.diff(automaton.edge_start)
    assert edges.min() >= 0
    assert edges.sum() == len(automaton.edge_token)
    root = automaton.edge_token[: edges[0]]
    assert np.all(np.diff(root) > 0)


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled"])
def test_a_state_with_very_many_continuations_finds_each_of_them(order):
    tokens = np.arange(3000, dtype=np.int32)
    if order != "ascending":
        tokens = tokens[::-1] if order == "descending" else np.random.default_rng(1).permutation(tokens)
    automaton = build([tokens])
    assert all(state_of(automaton, [int(token)]) > 0 for token in tokens[::7])
    assert state_of(automaton, [int(tokens[0]), int(tokens[1])]) > 0
    assert state_of(automaton, [3000]) == -1


def test_nothing_and_empty_documents_make_an_automaton_that_knows_nothing():
    for documents in ([], brute_force.arrays([[], []])):
        automaton = build(documents)
        assert automaton.states == 1
        assert automaton.next_token.tolist() == [-1]


def test_read_only_and_wider_arrays_are_accepted():
    narrow = np.array([1, 2, 1, 3], np.int32)
    narrow.flags.writeable = False
    wide = narrow.astype(np.int64)
    expected = build([wide]).arrays()
    for name, array in build([narrow]).arrays().items():
        np.testing.assert_array_equal(array, expected[name])


def test_it_is_rebuilt_from_its_arrays():
    automaton = build(brute_force.arrays([[1, 2, 1, 2, 3]]))
    arrays = automaton.arrays()
    assert Automaton.from_arrays(arrays).next_token is automaton.next_token
    assert automaton.nbytes == sum(array.nbytes for array in arrays.values())
    del arrays["links"]
    with pytest.raises(ValueError, match="missing: links"):
        Automaton.from_arrays(arrays)


@pytest.mark.parametrize(
    ("documents", "weights", "message"),
    [
        (
            [np.array([1]), np.array([2, 1 << 20])],
            None,
            r"document 1, token 1: id 1048576 .* speculation.source to off",
        ),
        ([np.array([1, -1])], None, "document 0, token 1: id -1"),
        ([np.array([2**40])], None, "id 1099511627776"),
        ([np.array([1.5])], None, "document 0 .* float64"),
        ([np.zeros((2, 2), np.int32)], None, r"shape \(2, 2\)"),
        ([np.array([1])], [1.0, 2.0], "1 documents got 2 weights"),
        ([np.array([1])], [0.0], "above 0"),
        ([np.array([1])], [float("nan")], "finite"),
    ],
)
def test_bad_input_is_named(documents, weights, message):
    with pytest.raises(UserError, match=message):
        build(documents, weights)
