from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.history.index.automaton_set import AutomatonSet
from storage.history.index.suffix_automaton import build
from tests.storage.history.index import brute_force

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=10), max_size=3)
ROWS = st.lists(
    st.tuples(st.sampled_from((2, 5, 9, 1 << 63)), st.lists(st.integers(0, 3), max_size=12), st.integers(0, 12)),
    max_size=6,
)
WIDTH = 6


def search(automata, keys, rows, cuts=None, limit=WIDTH):
    """Feed rows (in two parts if ``cuts`` are given) and draft; returns matches, and drafts as lists of tuples."""
    n = len(rows)
    which, state, matched = automata.find(np.array(keys, np.uint64)), np.zeros(n, np.int32), np.zeros(n, np.int32)
    tokens = np.zeros((n, 1 + max(map(len, rows), default=0)), np.int32)
    for i, row in enumerate(rows):
        tokens[n - 1 - i, : len(row)] = row
    handle = np.arange(n)[::-1].copy()
    ends = np.array([len(row) for row in rows], np.int64)
    middle = np.minimum(np.array(cuts, np.int64), ends) if cuts else np.zeros(n, np.int64)
    automata.advance_rows(which, state, matched, tokens, handle, np.zeros(n, np.int64), middle)
    automata.advance_rows(which, state, matched, tokens, handle, middle, ends)
    drafted, of = np.full((n, WIDTH), -7, np.int32), np.zeros((n, WIDTH), np.int32)
    count, ratio, length = np.zeros((n, WIDTH), np.float32), np.zeros((n, WIDTH), np.float32), np.zeros(n, np.int64)
    automata.draft_rows(which, state, matched, np.full(n, limit), drafted, count, ratio, of, length)
    drafts = [
        list(zip(*(a[i, : length[i]].tolist() for a in (drafted, count, ratio, of)), strict=True)) for i in range(n)
    ]
    assert all(np.all(drafted[i, length[i] :] == -7) for i in range(n))
    return matched.tolist(), drafts


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from((2, 9, 1 << 63)), TEXTS, max_size=3), ROWS)
def test_rows_match_and_draft_as_brute_force_says_and_absent_automata_do_nothing(texts, rows):
    automata = AutomatonSet.pack({key: build(brute_force.arrays(value)) for key, value in texts.items()})
    matched, drafts = search(automata, [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows])
    for (key, row, _), length, draft in zip(rows, matched, drafts, strict=True):
        known = texts.get(key, [])
        ones = [1.0] * len(known)
        assert length == brute_force.longest_suffix(known, row)
        expected = brute_force.draft(known, ones, row, length, WIDTH)
        assert [d[0] for d in draft] == [e[0] for e in expected]
        assert [d[3] for d in draft] == [e[3] for e in expected]
        np.testing.assert_allclose([d[1:3] for d in draft], [e[1:3] for e in expected], rtol=1e-6)


def test_a_context_without_continuation_gives_way_to_its_longest_suffix_that_has_one():
    automata = AutomatonSet.pack({1: build(brute_force.arrays([[4, 5, 6, 7, 5, 6, 8], [3, 5, 6]]))})
    matched, drafts = search(automata, [1], [[3, 5, 6]], limit=2)
    assert matched == [3]
    assert drafts == [[(8, 3.0, pytest.approx(1 / 3), 2)]]


def test_limits_bound_each_row():
    automata = AutomatonSet.pack({1: build(brute_force.arrays([list(range(20))]))})
    for limit, expected in ((0, 0), (3, 3), (100, WIDTH)):
        assert len(search(automata, [1], [[4]], limit=limit)[1][0]) == expected


def test_negative_and_unknown_tokens_only_end_a_match():
    automata = AutomatonSet.pack({1: build(brute_force.arrays([[1, 2, 3]]))})
    assert search(automata, [1, 1, 1], [[1, 2, 3, -1], [1, 2, 1 << 21], [-1, 1]])[0] == [0, 0, 1]


def test_keys_are_found_over_all_64_bits():
    automata = AutomatonSet.pack({key: build([]) for key in (2**64 - 1, 5, 0)})
    assert automata.find(np.array([5, 6, 0, 2**64 - 1, 1], np.uint64)).tolist() == [1, -1, 0, 2, -1]
    assert AutomatonSet.pack({}).find(np.array([5], np.uint64)).tolist() == [-1]


def test_automata_come_out_as_they_went_in():
    items = {8: build(brute_force.arrays([[1, 2, 1, 3]])), 3: build([]), 4: build(brute_force.arrays([[5, 5, 6, 5]]))}
    automata = AutomatonSet.pack(items)
    for index, key in enumerate((3, 4, 8)):
        for name, array in items[key].arrays().items():
            np.testing.assert_array_equal(getattr(automata.automaton(index), name), array)


def test_a_pickled_set_works_on_buffers_of_another_process_without_copies():
    automata = AutomatonSet.pack({n: build([np.arange(n, n + 500, dtype=np.int32)]) for n in range(1, 9)})
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(automata, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 4000
    stored = [bytes(buffer.raw()) for buffer in buffers]
    loaded = pickle.loads(head, buffers=stored)
    assert not loaded.links.flags.writeable
    views = [np.frombuffer(buffer, np.uint8) for buffer in stored if buffer]
    for array in loaded.arrays().values():
        assert any(np.shares_memory(array, view) for view in views)
    rows = ([3, 8], [[10, 11], [100, 101, 5]])
    assert search(loaded, *rows) == search(automata, *rows)


def test_rows_of_another_set_are_refused():
    automata = AutomatonSet.pack({1: build(brute_force.arrays([[1, 2]]))})
    one, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
    tokens = np.ones((1, 1), np.int32)
    with pytest.raises(IndexError, match="does not have"):
        automata.advance_rows(one, np.zeros(1, np.int32), np.zeros(1, np.int32), tokens, zero, zero, one)
    with pytest.raises(IndexError, match="do not fit another"):
        automata.advance_rows(zero, np.full(1, 99, np.int32), np.zeros(1, np.int32), tokens, zero, zero, one)
    with pytest.raises(IndexError, match="outside the array"):
        automata.advance_rows(zero, np.zeros(1, np.int32), np.zeros(1, np.int32), tokens, zero, zero, 2 * one)
