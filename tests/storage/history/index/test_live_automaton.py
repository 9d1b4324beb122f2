from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import UserError
from storage.history.index.live_automaton import LiveAutomaton
from tests.storage.history.index.brute_force import occurrences

# Which document grows, and by what; texts so short that every context lies within the counted depth.
GROWTH = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), max_size=3)), max_size=14)
WIDTH = 5


def drafts(live, documents, limit=WIDTH):
    n = len(documents)
    tokens, matched = np.full((n, WIDTH), -7, np.int32), np.zeros((n, WIDTH), np.int32)
    count, ratio, length = np.zeros((n, WIDTH), np.float32), np.zeros((n, WIDTH), np.float32), np.zeros(n, np.int64)
    live.draft_rows(np.array(documents, np.int64), np.full(n, limit), tokens, count, ratio, matched, length)
    assert all(np.all(tokens[i, length[i] :] == -7) for i in range(n))
    columns = (tokens, count, ratio, matched)
    return [list(zip(*(column[i, : length[i]].tolist() for column in columns), strict=True)) for i in range(n)]


def continuations(texts, context):
    return [texts[d][end] for d, end in occurrences(texts, context) if end < len(texts[d])]


def check(texts, document, draft):
    """Each token is a most frequent continuation of the longest suffix that has one, wherever it was seen."""
    row, known = list(texts[document]), len(texts[document])
    for token, count, ratio, matched in draft:
        sizes = [size for size in range(len(row), 0, -1) if continuations(texts, row[len(row) - size :])]
        context = row[len(row) - matched :]
        followed = continuations(texts, context)
        if len(row) == known:
            assert matched == sizes[0]
            assert count == len(occurrences(texts, context)) - 1
        else:
            assert matched <= sizes[0]
            assert count == len(occurrences(texts, context))
        frequency = {other: followed.count(other) for other in followed}
        assert frequency[token] == max(frequency.values())
        assert ratio == pytest.approx(frequency[token] / count)
        row.append(token)
    if len(draft) < WIDTH:
        assert not draft or not continuations(texts, row[-1:])
        assert draft or not any(continuations(texts, row[i:]) for i in range(len(row)))


@settings(max_examples=200, deadline=None)
@given(GROWTH)
def test_drafts_are_those_of_brute_force_over_all_texts_however_they_grow(growth):
    live = LiveAutomaton(3)
    texts: list[list[int]] = [[], [], []]
    for document, tokens in growth:
        live.extend(document, np.array(tokens, np.int64))
        texts[document] += tokens
        for own, draft in enumerate(drafts(live, [0, 1, 2])):
            check(texts, own, draft)


@settings(max_examples=40, deadline=None)
@given(GROWTH, GROWTH)
def test_groups_in_one_arena_know_nothing_of_each_other(first, second):
    alone = [LiveAutomaton(3), LiveAutomaton(3)]
    shared = LiveAutomaton()
    numbers = [shared.add_group(3), shared.add_group(3)]
    for step in range(max(len(first), len(second))):
        for group, growth in enumerate((first, second)):
            if step < len(growth):
                document, tokens = growth[step]
                alone[group].extend(document, np.array(tokens, np.int32))
                shared.extend(int(numbers[group][document]), np.array(tokens, np.int32))
    for group in range(2):
        assert drafts(shared, numbers[group]) == drafts(alone[group], [0, 1, 2])


def test_rows_of_one_call_are_extended_in_order_and_absent_ones_left_out():
    live = LiveAutomaton(3)
    tokens = np.array([[1, 2, 3, 9], [9, 9, 1, 2]], np.int32)
    live.extend_rows(np.array([2, -1, 0]), tokens, np.array([0, 0, 1]), np.array([0, 0, 2]), np.array([4, 4, 4]))
    found = drafts(live, [0, -1, 1, 2])
    assert [[d[0] for d in draft] for draft in found] == [[3, 9], [], [], []]
    assert [d[3] for d in found[0]] == [2, 3]


def test_a_row_does_not_match_its_own_end_but_its_earlier_text():
    live = LiveAutomaton(1)
    live.extend(0, np.array([5, 6, 7]))
    assert live.draft(0, 4)[0].size == 0
    live.extend(0, np.array([5, 6]))
    tokens, matched = live.draft(0, 4)
    assert (tokens.tolist(), matched) == ([7, 5, 6, 7], 2)


def test_a_shared_prompt_takes_no_second_copy_and_leaders_draft_for_followers():
    live = LiveAutomaton(2)
    prompt = np.arange(100, dtype=np.int32)
    live.extend(0, prompt)
    states = int(live._counters[0])
    live.extend(1, prompt)
    assert int(live._counters[0]) == states
    live.extend(0, np.array([500, 501]))
    tokens, matched = live.draft(1, 8)
    assert (tokens.tolist(), matched) == ([500, 501], 100)
    assert live.draft(0, 8)[0].size == 0


def test_growth_past_the_first_arrays_and_removal_change_no_draft():
    rng = np.random.default_rng(5)
    live, twin = LiveAutomaton(), LiveAutomaton()
    kept, gone = live.add_group(4), live.add_group(4)
    same = twin.add_group(4)
    for _ in range(30):
        for document in range(4):
            tokens = rng.integers(0, 12, 40).astype(np.int32)
            live.extend(int(kept[document]), tokens)
            live.extend(int(gone[document]), tokens[::-1])
            twin.extend(int(same[document]), tokens)
    live.remove(gone)
    assert live.documents == 4
    again = live.add_group(6)
    assert set(again.tolist()) >= set(gone.tolist())
    for number in again:
        live.extend(int(number), rng.integers(0, 12, 2000).astype(np.int32))
    assert drafts(live, kept) == drafts(twin, same)


def test_memory_follows_what_is_alive():
    rng = np.random.default_rng(6)
    live = LiveAutomaton()
    sizes = []
    for _ in range(12):
        group = live.add_group(4)
        for number in group:
            live.extend(int(number), rng.integers(0, 50, 2000).astype(np.int32))
        live.remove(group)
        sizes.append(live.nbytes)
    assert max(sizes[3:]) <= 2 * sizes[0]


def test_texts_of_removed_siblings_stay_while_the_group_lives():
    live = LiveAutomaton(2)
    live.extend(0, np.array([1, 2, 3, 4]))
    live.remove([0])
    live.extend(1, np.array([2, 3]))
    for _ in range(3):  # Other groups fill the arrays, so that what is alive is moved.
        live.extend(int(live.add_group(1)[0]), np.arange(5000))
    assert live.draft(1, 3)[0].tolist() == [4]


def test_bad_rows_change_nothing():
    live = LiveAutomaton(1)
    one, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
    with pytest.raises(UserError, match=r"0 to 1048575.*speculation\.live"):
        live.extend(0, np.array([1, 1 << 20]))
    with pytest.raises(UserError, match=r"speculation\.live"):
        live.extend_rows(zero, np.array([[3, -1]], np.int32), zero, zero, 2 * one)
    with pytest.raises(IndexError, match="does not exist"):
        live.extend_rows(one, np.ones((1, 1), np.int32), zero, zero, one)
    with pytest.raises(IndexError, match="outside the array"):
        live.extend_rows(zero, np.ones((1, 1), np.int32), one, zero, one)
    with pytest.raises(IndexError, match="does not exist"):
        live.draft(4, 3)
    with pytest.raises(IndexError, match="no live document 4"):
        live.remove([4])
    with pytest.raises(ValueError, match="at least one document"):
        live.add_group(0)
    live.extend(0, np.array([3, 4, 3]))
    assert live.draft(0, 1)[0].tolist() == [4]
