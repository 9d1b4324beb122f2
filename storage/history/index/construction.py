"""States and edges of a suffix automaton that grows: what the finished and the live automaton are built with.

Blumer et al.'s online construction, "The smallest automaton recognizing the subwords of a text" (1985), generalised to
several texts: each text keeps the state of all it has so far, and texts may grow in any order, since the construction
reads nothing of a text but that state (Takagi et al., "Fully-online suffix tree and directed acyclic word graph
construction for multiple texts", 2016). Texts start at a root, so no context spans two of them.

A state is a row of ``nodes``, int32[states, 8]. Its first edge lies in that row, further edges in one open-addressed
``table`` of all states, int32[slots, 4]: state (-1: free), token, target, and the slot of the state's edge before it.
Most states have one edge, which costs no probe, and each step then reads one cache line.
"""

from __future__ import annotations

import numpy as np

from storage.history.index.compiled import Int, Int32Array, Int64Array, compiled

VOCABULARY_BITS = 20
VOCABULARY = 1 << VOCABULARY_BITS
"""Token ids of an index lie below this: an id and a state are hashed as one 64-bit number."""

LENGTH, LINK, TOKEN, TARGET, SLOT, CARRIED = range(6)
COLUMNS = 8
"""Columns of nodes. The last three are for those who use the states; a state that splits off starts with the same
CARRIED, the other two start at 0."""

STATE, EDGE_TOKEN, EDGE_TARGET, BEFORE = range(4)
TABLE_COLUMNS = 4

_BITS = np.int64(VOCABULARY_BITS)
_SHIFT = np.int64(24)
_MULTIPLIER = np.int64(-7046029254386353131)


def most_states(tokens: int) -> int:
    """Return how many states texts of ``tokens`` in all can need, with one root."""
    return 2 * tokens + 1


def table_slots(tokens: int, documents: int) -> int:
    """Return a size of the table, a power of two, that never fills above two thirds.

    Edges beyond a spanning tree are at most one for each suffix of a text. Each state's first edge is not in the table,
    and states without an edge, which spare none, are at most two for each text.
    """
    return 1 << max(4, (3 * (tokens + 2 * documents) // 2).bit_length())


@compiled
def new_state(nodes: Int32Array, counters: Int64Array, length: int, link: int) -> Int:
    """Take the next row of ``nodes``; ``counters[0]`` counts the states."""
    state = counters[0]
    counters[0] += 1
    nodes[state, LENGTH] = length
    nodes[state, LINK] = link
    nodes[state, TOKEN] = -1
    nodes[state, TARGET] = -1
    nodes[state, SLOT] = -1
    for column in range(CARRIED, COLUMNS):
        nodes[state, column] = 0
    return state


@compiled
def find_slot(table: Int32Array, state: int, token: int) -> Int:
    """Return the slot of an edge, or the free slot where it belongs (Fibonacci hashing, linear probing)."""
    mask = len(table) - 1
    slot = ((((np.int64(state) << _BITS) | np.int64(token)) * _MULTIPLIER) >> _SHIFT) & mask
    while table[slot, STATE] >= 0 and (table[slot, STATE] != state or table[slot, EDGE_TOKEN] != token):
        slot = (slot + 1) & mask
    return slot


@compiled
def find_target(nodes: Int32Array, table: Int32Array, state: int, token: int) -> Int:
    """Return where ``token`` (0 or more) leads from ``state``, or -1."""
    if nodes[state, TOKEN] == token:
        return nodes[state, TARGET]
    if nodes[state, SLOT] < 0:
        return -1
    slot = find_slot(table, state, token)
    if table[slot, STATE] < 0:
        return -1
    return table[slot, EDGE_TARGET]


@compiled
def add_edge(nodes: Int32Array, table: Int32Array, state: int, token: int, target: int) -> None:
    """Add an edge that is not there yet."""
    if nodes[state, TOKEN] < 0:
        nodes[state, TOKEN] = token
        nodes[state, TARGET] = target
        return
    slot = find_slot(table, state, token)
    table[slot, STATE] = state
    table[slot, EDGE_TOKEN] = token
    table[slot, EDGE_TARGET] = target
    table[slot, BEFORE] = nodes[state, SLOT]
    nodes[state, SLOT] = slot


@compiled
def split(nodes: Int32Array, table: Int32Array, counters: Int64Array, parent: int, token: int, child: int) -> Int:
    """Give the contexts of ``child`` up to ``parent`` and ``token`` a state of their own; return it."""
    clone = new_state(nodes, counters, nodes[parent, LENGTH] + 1, nodes[child, LINK])
    nodes[clone, CARRIED] = nodes[child, CARRIED]
    nodes[clone, TOKEN] = nodes[child, TOKEN]
    nodes[clone, TARGET] = nodes[child, TARGET]
    slot = nodes[child, SLOT]
    while slot >= 0:
        add_edge(nodes, table, clone, table[slot, EDGE_TOKEN], table[slot, EDGE_TARGET])
        slot = table[slot, BEFORE]
    nodes[child, LINK] = clone
    state = parent
    while state >= 0:
        if nodes[state, TOKEN] == token:
            if nodes[state, TARGET] != child:
                break
            nodes[state, TARGET] = clone
        else:
            if nodes[state, SLOT] < 0:
                break
            slot = find_slot(table, state, token)
            if table[slot, STATE] < 0 or table[slot, EDGE_TARGET] != child:
                break
            table[slot, EDGE_TARGET] = clone
        state = nodes[state, LINK]
    return clone


@compiled
def append(nodes: Int32Array, table: Int32Array, counters: Int64Array, root: int, last: int, token: int) -> Int:
    """Append ``token`` to a text whose state is ``last`` and return its new state. ``nodes`` has two rows to spare."""
    target = find_target(nodes, table, last, token)
    length = nodes[last, LENGTH] + 1
    if target >= 0:
        # Other texts have this one as a part. It needs a state that it is the longest context of.
        if nodes[target, LENGTH] == length:
            return target
        return split(nodes, table, counters, last, token, target)
    state = new_state(nodes, counters, length, root)
    suffix = last
    while suffix >= 0:
        target = find_target(nodes, table, suffix, token)
        if target >= 0:
            if nodes[target, LENGTH] != nodes[suffix, LENGTH] + 1:
                target = split(nodes, table, counters, suffix, token, target)
            nodes[state, LINK] = target
            break
        add_edge(nodes, table, suffix, token, state)
        suffix = nodes[suffix, LINK]
    return state
