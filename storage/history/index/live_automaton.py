"""Suffix automata that grow while rows are being written: drafts from siblings, and from a row's own text.

All groups of a worker share one arena, so that a step costs one call whatever the number of groups: a group is a root
of its own, and its documents (the siblings) grow in any order. A row's own end has no continuation yet, so the row
never matches itself there, only where its text, or a sibling's, has gone on.

Occurrences are counted for a token's longest contexts only, at most ``_DEPTH`` of them, since short ones are so common
that keeping them exact would cost a walk to the root for each token: counts of contexts that repeat often are low,
those of the long contexts that drafts come from are exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import UserError
from storage.history.index.compiled import Float32Array, Int, Int32Array, Int64Array, compiled
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
    add_edge,
    append,
    most_states,
    new_state,
    table_slots,
)

# What a state carries: occurrences (at a root: tokens of its group), the group's root, and, at a root, documents.
_VISITS, _OWNER, _DOCUMENTS = CARRIED, CARRIED + 1, CARRIED + 2

_DEPTH = 16

# Newest continuations of a context that are compared; only very short contexts have more.
_COMPARED = 64

_SMALLEST_ROOM = 4096

_RANGE = (
    f"a live index holds token ids from 0 to {VOCABULARY - 1}: for a vocabulary larger than that "
    "set speculation.live to false"
)

# What a document takes beside its tokens: two places in the table (see table_slots), and a state if it has a root.
_DOCUMENT_ROOM = 3


class LiveAutomaton:
    """Growing automata of groups of documents, numbered from 0.

    Not safe for threads that change it at the same time; the GIL is released while it works.

    Args:
        documents: Documents of the first group, numbered 0 to ``documents - 1``; 0 for none yet.
    """

    def __init__(self, documents: int = 0) -> None:
        self._last = np.zeros(0, np.int32)
        self._root = np.zeros(0, np.int32)
        self._free: list[int] = []
        self._counters = np.zeros(1, np.int64)
        self._used = 0
        self._allocate(_SMALLEST_ROOM)
        if documents:
            self.add_group(documents)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self._nodes.nbytes + self._table.nbytes + self._last.nbytes + self._root.nbytes

    @property
    def documents(self) -> int:
        """Number of documents that have not been removed."""
        return len(self._last) - len(self._free)

    def add_group(self, documents: int) -> Int64Array:
        """Add ``documents`` empty documents that draft from each other; return their numbers, int64[documents].

        Numbers of removed documents are given out again.

        Raises:
            ValueError: Fewer than one document.
        """
        if documents < 1:
            raise ValueError(f"a group has at least one document, not {documents}")
        self._reserve(documents * _DOCUMENT_ROOM)
        more = max(0, documents - len(self._free))
        self._free += range(len(self._last) + more - 1, len(self._last) - 1, -1)
        self._last = np.append(self._last, np.full(more, -1, np.int32))
        self._root = np.append(self._root, np.full(more, -1, np.int32))
        numbers = np.array([self._free.pop() for _ in range(documents)], np.int64)
        root = new_state(self._nodes, self._counters, 0, -1)
        self._nodes[root, _OWNER] = root
        self._nodes[root, _DOCUMENTS] = documents
        self._last[numbers] = self._root[numbers] = root
        return numbers

    def remove(self, documents: npt.NDArray[Any] | list[int]) -> None:
        """Let go of documents. Their texts stay for siblings until all documents of the group are removed.

        Raises:
            IndexError: One of them is not there.
        """
        for document in map(int, documents):
            if not 0 <= document < len(self._last) or self._last[document] < 0:
                raise IndexError(f"there is no live document {document}")
            self._last[document] = self._root[document] = -1
            self._free.append(document)

    def extend(self, document: int, tokens: npt.NDArray[Any]) -> None:
        """Append ``tokens``, one-dimensional integers, to a document. Raises as :meth:`extend_rows`."""
        line = np.asarray(tokens)
        if line.size and (line.min() < 0 or line.max() >= VOCABULARY):
            raise UserError(_RANGE)
        zero, stop = np.zeros(1, np.int64), np.array([line.size], np.int64)
        self.extend_rows(np.array([document]), line.astype(np.int32).reshape(1, -1), zero, zero, stop)

    def extend_rows(
        self, document: Int64Array, tokens: Int32Array, handle: Int64Array, start: Int64Array, stop: Int64Array
    ) -> None:
        """Append ``tokens[handle, start:stop]`` of each row to its document; constant time a token on average.

        Args:
            document: int64[n], document of each row, -1 for none.
            tokens: int32[handles, columns], the tokens of rows.
            handle: int64[n], which line of ``tokens`` a row lies in.
            start: int64[n], the first token to append.
            stop: int64[n], the end of what to append, exclusive.

        Raises:
            UserError: A token id outside the vocabulary of an index; nothing was appended.
            IndexError: A document or tokens that do not exist; nothing was appended.
        """
        self._reserve(int(np.maximum(stop - start, 0).sum()))
        _extend_rows(
            self._nodes, self._table, self._counters, self._last, self._root, document, tokens, handle, start, stop
        )

    def draft(self, document: int, limit: int) -> tuple[Int32Array, int]:
        """Return int32[k], up to ``limit`` likely next tokens, and how many last tokens of the document they follow.

        Raises:
            IndexError: There is no such document.
        """
        shape = (1, max(limit, 0))
        tokens, matched, length = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(1, np.int64)
        count, ratio = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.draft_rows(np.array([document]), np.array([limit]), tokens, count, ratio, matched, length)
        return tokens[0, : length[0]], int(matched[0, 0]) if length[0] else 0

    def draft_rows(
        self,
        document: Int64Array,
        limit: Int64Array,
        out_tokens: Int32Array,
        out_count: Float32Array,
        out_ratio: Float32Array,
        out_matched: Int32Array,
        out_length: Int64Array,
    ) -> None:
        """Write down how each document may go on: what followed its longest known context most often, and so on.

        The context is the longest suffix that went on somewhere; the latest continuation wins ties. Only the first
        ``out_length`` columns of a row are written.

        Args:
            document: int64[n], document of each row, -1 for none (drafts nothing).
            limit: int64[n], most tokens to draft for each row; the outputs' width is a limit as well.
            out_tokens: int32[n, width], drafted tokens.
            out_count: float32[n, width], occurrences of the context that each token was drafted from, the end of the
                document itself left out.
            out_ratio: float32[n, width], share of these that the token followed.
            out_matched: int32[n, width], length of that context.
            out_length: int64[n], tokens drafted.

        Raises:
            IndexError: There is no such document.
        """
        _draft_rows(
            self._nodes,
            self._table,
            self._last,
            document,
            limit,
            out_tokens,
            out_count,
            out_ratio,
            out_matched,
            out_length,
        )

    def _allocate(self, room: int) -> None:
        self._room = room
        self._nodes = np.empty((most_states(room), COLUMNS), np.int32)
        self._table = np.empty((table_slots(room, 0), TABLE_COLUMNS), np.int32)
        self._table[:, STATE] = -1

    def _reserve(self, more: int) -> None:
        """Make room for ``more`` tokens: where there is none, move what is alive to arrays twice as large as needed."""
        if self._used + more > self._room:
            states = int(self._counters[0])
            alive = np.zeros(states, np.bool_)
            roots = np.unique(self._root[self._root >= 0])
            alive[roots] = True
            self._used = int((self._nodes[roots, _VISITS] + _DOCUMENT_ROOM * self._nodes[roots, _DOCUMENTS]).sum())
            nodes, table = self._nodes, self._table
            self._allocate(max(_SMALLEST_ROOM, 2 * (self._used + more)))
            self._counters[0] = _move(nodes[:states], table, alive, self._nodes, self._table, self._last, self._root)
        self._used += more


@compiled
def _extend_rows(
    nodes: Int32Array,
    table: Int32Array,
    counters: Int64Array,
    last: Int32Array,
    root: Int32Array,
    document: Int64Array,
    tokens: Int32Array,
    handle: Int64Array,
    start: Int64Array,
    stop: Int64Array,
) -> None:
    for row in range(len(document)):
        if document[row] >= 0:
            _check_document(last, document[row])
            line = handle[row]
            if line < 0 or line >= tokens.shape[0] or start[row] < 0 or stop[row] > tokens.shape[1]:
                raise IndexError("a row's tokens lie outside the array of tokens")
            for column in range(start[row], stop[row]):
                if tokens[line, column] < 0 or tokens[line, column] >= VOCABULARY:
                    raise UserError(_RANGE)
    for row in range(len(document)):
        own = document[row]
        if own < 0:
            continue
        at, empty = last[own], root[own]
        for column in range(start[row], stop[row]):
            states = counters[0]
            at = append(nodes, table, counters, empty, at, tokens[handle[row], column])
            for state in range(states, counters[0]):
                nodes[state, _OWNER] = empty
            nodes[empty, _VISITS] += 1
            state = at
            for _ in range(_DEPTH):
                if state == empty:
                    break
                nodes[state, _VISITS] += 1
                state = nodes[state, LINK]
        last[own] = at


@compiled
def _draft_rows(
    nodes: Int32Array,
    table: Int32Array,
    last: Int32Array,
    document: Int64Array,
    limit: Int64Array,
    out_tokens: Int32Array,
    out_count: Float32Array,
    out_ratio: Float32Array,
    out_matched: Int32Array,
    out_length: Int64Array,
) -> None:
    width = out_tokens.shape[1]
    for row in range(len(document)):
        drafted = 0
        if document[row] >= 0:
            _check_document(last, document[row])
            at = last[document[row]]
            length = nodes[at, LENGTH]
            while drafted < min(limit[row], width):
                while nodes[at, TOKEN] < 0 and nodes[at, LINK] >= 0:
                    at = nodes[at, LINK]
                    length = nodes[at, LENGTH]
                if nodes[at, LINK] < 0:
                    break
                token, target = _most_visited(nodes, table, at)
                # The row's own end is an occurrence of the first context, and one that cannot have gone on.
                count = max(nodes[at, _VISITS] - (1 if drafted == 0 else 0), nodes[target, _VISITS])
                out_tokens[row, drafted] = token
                out_count[row, drafted] = count
                out_ratio[row, drafted] = nodes[target, _VISITS] / count
                out_matched[row, drafted] = length
                at = target
                length += 1
                drafted += 1
        out_length[row] = drafted


@compiled
def _most_visited(nodes: Int32Array, table: Int32Array, state: int) -> tuple[Int, Int]:
    """Return token and target of a state's most visited edge, the newest of equals; it has an edge."""
    token, target, visits = nodes[state, TOKEN], nodes[state, TARGET], nodes[nodes[state, TARGET], _VISITS]
    slot = nodes[state, SLOT]
    newer = np.int32(0)
    for _ in range(_COMPARED):
        if slot < 0:
            break
        other = table[slot, EDGE_TARGET]
        # The edge beside the state is the oldest, those in the table come newest first.
        if nodes[other, _VISITS] > visits or (nodes[other, _VISITS] == visits and newer == 0):
            token, target, visits = table[slot, EDGE_TOKEN], other, nodes[other, _VISITS]
            newer = np.int32(1)
        slot = table[slot, BEFORE]
    return token, target


@compiled
def _move(
    nodes: Int32Array,
    table: Int32Array,
    alive: npt.NDArray[np.bool_],
    to_nodes: Int32Array,
    to_table: Int32Array,
    last: Int32Array,
    root: Int32Array,
) -> Int:
    """Copy the states whose root is ``alive`` to empty arrays, renumbered in order; return how many there are."""
    place = np.full(len(nodes), -1, np.int32)
    states = 0
    for state in range(len(nodes)):
        if alive[nodes[state, _OWNER]]:
            place[state] = states
            states += 1
    edges = np.empty(len(table), np.int32)
    for state in range(len(nodes)):
        new = place[state]
        if new < 0:
            continue
        to_nodes[new] = nodes[state]
        to_nodes[new, _OWNER] = place[nodes[state, _OWNER]]
        if nodes[state, LINK] >= 0:
            to_nodes[new, LINK] = place[nodes[state, LINK]]
        if nodes[state, TOKEN] >= 0:
            to_nodes[new, TARGET] = place[nodes[state, TARGET]]
        to_nodes[new, SLOT] = -1
        count = 0
        slot = nodes[state, SLOT]
        while slot >= 0:
            edges[count] = slot
            count += 1
            slot = table[slot, BEFORE]
        # Oldest first, so that the newest comes first again.
        for i in range(count - 1, -1, -1):
            add_edge(to_nodes, to_table, new, table[edges[i], EDGE_TOKEN], place[table[edges[i], EDGE_TARGET]])
    for document in range(len(last)):
        if last[document] >= 0:
            last[document] = place[last[document]]
            root[document] = place[root[document]]
    return states


@compiled
def _check_document(last: Int32Array, document: int) -> None:
    if document >= len(last) or last[document] < 0:
        raise IndexError("a row names a live document that does not exist")
