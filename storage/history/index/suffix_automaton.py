"""Suffix automaton over a set of token sequences: which contexts occurred, how often, and what followed them.

A suffix automaton has one state for each set of contexts that end at the same places, so one structure finds matches
of every length. Once built it needs no hash table: a state holds its best continuation, and its other edges lie sorted
by token. There are at most two states a token and one edge beyond the best ones, hence at most 64 bytes a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import UserError
from storage.history.index.compiled import Float32Array, Float64Array, Int, Int32Array, Int64Array, compiled
from storage.history.index.construction import (
    BEFORE,
    CARRIED,
    COLUMNS,
    EDGE_TARGET,
    EDGE_TOKEN,
    LENGTH,
    LINK,
    SLOT,
    STATE,
    TABLE_COLUMNS,
    TARGET,
    TOKEN,
    VOCABULARY,
    append,
    most_states,
    new_state,
    table_slots,
)

# States are int32, and there are up to two of them a token.
_MOST_TOKENS = (1 << 30) - 1

# What a state under construction carries: the latest position, and, as one float64, its weighted occurrences.
_LATEST = CARRIED
_MASS = 3

# Most states have a few edges; the root may have thousands.
_INSERTION_SORT = 24


@dataclass(frozen=True, slots=True, eq=False)
class Automaton:
    """A finished suffix automaton. State 0 is the root, the empty context.

    Attributes:
        links: int32[states], the state of the longest suffix of a context that occurs at more places; root: -1.
        lengths: int32[states], tokens of the longest context of a state.
        counts: float32[states], weighted occurrences of its contexts (of all tokens, for the root).
        next_token: int32[states], the continuation of the highest weighted count, -1 where a context was only seen at
            the end of documents. Ties go to the one seen in the later document, then to the later one within it.
        next_count: float32[states], weighted occurrences of a context with ``next_token`` behind it.
        next_state: int32[states], where ``next_token`` leads, -1 without one.
        edge_start: int32[states + 1], where a state's other continuations lie in the two arrays below.
        edge_token: int32[edges], continuations other than ``next_token``, ascending within a state.
        edge_state: int32[edges], where they lead.
    """

    links: Int32Array
    lengths: Int32Array
    counts: Float32Array
    next_token: Int32Array
    next_count: Float32Array
    next_state: Int32Array
    edge_start: Int32Array
    edge_token: Int32Array
    edge_state: Int32Array

    @property
    def states(self) -> int:
        """Number of states, the root included."""
        return len(self.links)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays().values())

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays by attribute name, without copies."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Automaton:
        """Take what :meth:`arrays` returned, read-only arrays as well. Raises ``ValueError`` if one is missing."""
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in arrays]
        if missing:
            raise ValueError(f"an automaton consists of {', '.join(names)}; missing: {', '.join(missing)}")
        return cls(**{name: arrays[name] for name in names})


def build(documents: Sequence[npt.NDArray[Any]], weights: Sequence[float] | None = None) -> Automaton:
    """Build the automaton of ``documents``, oldest first. Time is linear in their tokens; the GIL is released.

    Args:
        documents: One-dimensional integer arrays of token ids, each id below ``VOCABULARY`` (2**20); may be empty.
        weights: What an occurrence in each document counts, above 0 (for recency, say); default: 1 each.

    Raises:
        UserError: An id out of range (names document and position), arrays of another kind, weights that do not fit,
            or 2**30 tokens and more.
    """
    text, starts = join(documents)
    mass = np.ones(len(documents)) if weights is None else np.asarray(weights, np.float64)
    if mass.shape != (len(documents),):
        raise UserError(f"an index of {len(documents)} documents got {mass.size} weights: give one for each document")
    if not bool(np.all(np.isfinite(mass) & (mass > 0))):
        raise UserError(
            f"weights of documents must be finite and above 0; these reach from {mass.min()} to {mass.max()}"
        )
    slots = table_slots(len(text), len(documents))
    return Automaton(*_build(text, starts, mass, most_states(len(text)), slots))


def join(documents: Sequence[npt.NDArray[Any]]) -> tuple[Int32Array, Int64Array]:
    """Check ``documents``; return their tokens in one int32 array, and int64[documents + 1] where each one starts.

    Raises:
        UserError: As :func:`build`.
    """
    arrays = [np.asarray(document) for document in documents]
    for number, array in enumerate(arrays):
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise UserError(
                f"document {number} of an index must be a one-dimensional array of integer token ids, "
                f"not {array.dtype} of shape {array.shape}"
            )
    starts = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([array.size for array in arrays], out=starts[1:])
    if starts[-1] > _MOST_TOKENS:
        raise UserError(
            f"{starts[-1]} tokens are too many for one index (limit {_MOST_TOKENS}): keep fewer visits "
            "(speculation.window) or spread the documents over several indexes"
        )
    arrays = [array for array in arrays if array.size]
    if not arrays:
        return np.zeros(0, np.int32), starts
    text = np.concatenate(arrays)
    if text.min() < 0 or text.max() >= VOCABULARY:
        at = int(np.flatnonzero((text < 0) | (text >= VOCABULARY))[0])
        number = int(np.searchsorted(starts, at, "right")) - 1
        raise UserError(
            f"document {number}, token {at - int(starts[number])}: id {text[at]} is outside what an index holds "
            f"(0 to {VOCABULARY - 1}); for a vocabulary larger than that set speculation.source to off"
        )
    return text.astype(np.int32, copy=False), starts


@compiled
def find_next(
    next_token: Int32Array,
    next_state: Int32Array,
    edge_start: Int32Array,
    edge_token: Int32Array,
    edge_state: Int32Array,
    state: int,
    token: int,
) -> Int:
    """Return where ``token`` leads from ``state`` in a finished automaton, or -1."""
    if next_token[state] == token:
        return next_state[state]
    low, high = edge_start[state], edge_start[state + 1]
    while low < high:
        middle = (low + high) >> 1
        if edge_token[middle] < token:
            low = middle + 1
        else:
            high = middle
    if low < edge_start[state + 1] and edge_token[low] == token:
        return edge_state[low]
    return -1


@compiled
def _build(text: Int32Array, starts: Int64Array, weights: Float64Array, most: int, slots: int) -> Any:
    nodes = np.empty((most, COLUMNS), np.int32)
    mass = nodes.view(np.float64)[:, _MASS]
    table = np.empty((slots, TABLE_COLUMNS), np.int32)
    table[:, STATE] = -1
    counters = np.zeros(1, np.int64)
    root = new_state(nodes, counters, 0, -1)
    for document in range(len(weights)):
        last = root
        weight = weights[document]
        for position in range(starts[document], starts[document + 1]):
            last = append(nodes, table, counters, root, last, text[position])
            nodes[last, _LATEST] = position
            mass[last] += weight
    states = counters[0]
    _spread(nodes[:states], mass)
    return _finish(nodes[:states], mass, table)


@compiled
def _spread(nodes: Int32Array, mass: Float64Array) -> None:
    """Add up occurrences, and take the latest position, from the longest contexts to their suffixes."""
    states = len(nodes)
    lengths = nodes[:, LENGTH].copy()  # by itself it stays in the cache
    place = np.zeros(lengths.max() + 2, np.int64)
    for state in range(states):
        place[lengths[state] + 1] += 1
    for length in range(1, len(place)):
        place[length] += place[length - 1]
    order = np.empty(states, np.int32)
    for state in range(states):
        order[place[lengths[state]]] = state
        place[lengths[state]] += 1
    for rank in range(states - 1, 0, -1):
        state = order[rank]
        link = nodes[state, LINK]
        mass[link] += mass[state]
        nodes[link, _LATEST] = max(nodes[link, _LATEST], nodes[state, _LATEST])


@compiled
def _finish(nodes: Int32Array, mass: Float64Array, table: Int32Array) -> Any:
    states = len(nodes)
    next_token = np.empty(states, np.int32)
    next_count = np.empty(states, np.float32)
    next_state = np.empty(states, np.int32)
    edge_start = np.empty(states + 1, np.int32)
    edge_token = np.empty(len(table), np.int32)
    edge_state = np.empty(len(table), np.int32)
    edge = 0
    for state in range(states):
        edge_start[state] = edge
        best, target = nodes[state, TOKEN], nodes[state, TARGET]
        slot = nodes[state, SLOT]
        while slot >= 0:
            token, other = table[slot, EDGE_TOKEN], table[slot, EDGE_TARGET]
            gain = mass[other] - mass[target]
            if gain > 0 or (gain == 0 and nodes[other, _LATEST] > nodes[target, _LATEST]):
                best, token = token, best
                target, other = other, target
            edge_token[edge], edge_state[edge] = token, other
            edge += 1
            slot = table[slot, BEFORE]
        next_token[state] = best
        next_state[state] = target
        next_count[state] = mass[target] if target >= 0 else 0.0
        if edge - edge_start[state] > 1:  # few states have more than one: views of the others would cost more than all
            _sort(edge_token[edge_start[state] : edge], edge_state[edge_start[state] : edge])
    edge_start[states] = edge
    return (
        nodes[:, LINK].copy(),
        nodes[:, LENGTH].copy(),
        mass[:states].astype(np.float32),
        next_token,
        next_count,
        next_state,
        edge_start,
        edge_token[:edge].copy(),
        edge_state[:edge].copy(),
    )


@compiled
def _sort(tokens: Int32Array, states: Int32Array) -> None:
    if len(tokens) > _INSERTION_SORT:
        # Not quicksort: tokens that were numbered as they came arrive in an order that makes it quadratic.
        order = np.argsort(tokens, kind="mergesort")
        tokens[:] = tokens[order]
        states[:] = states[order]
        return
    for i in range(1, len(tokens)):
        token, state = tokens[i], states[i]
        j = i
        while j > 0 and tokens[j - 1] > token:
            tokens[j], states[j] = tokens[j - 1], states[j - 1]
            j -= 1
        tokens[j], states[j] = token, state
