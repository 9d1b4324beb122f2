"""Many suffix automata in one set of flat arrays, searched for all rows of a step in one call.

A set is immutable and holds nothing but numpy arrays: pickled with protocol 5 its arrays travel out of band, and a
set from Ray's object store reads them where they lie. A row of a rollout is three numbers, kept by the caller: which
automaton it matches against, its state in there, and how many of its last tokens match.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.history.index.compiled import Float32Array, Int32Array, Int64Array, UInt64Array, compiled, read_only
from storage.history.index.suffix_automaton import Automaton, find_next


@dataclass(frozen=True, slots=True, eq=False)
class AutomatonSet:
    """Suffix automata of several prompts, ordered by key; states count from 0 within each automaton.

    Attributes:
        keys: uint64[automata], ascending.
        state_start: int64[automata + 1], where the states of each automaton lie in the arrays of states.
        edge_offset: int64[automata + 1], the same for the arrays of edges.
        links: int32[states], as in :class:`Automaton`, and so are the following.
        lengths: int32[states].
        counts: float32[states].
        next_token: int32[states].
        next_count: float32[states].
        next_state: int32[states].
        edge_start: int32[states + automata], one more than states for each automaton.
        edge_token: int32[edges].
        edge_state: int32[edges].
    """

    keys: UInt64Array
    state_start: Int64Array
    edge_offset: Int64Array
    links: Int32Array
    lengths: Int32Array
    counts: Float32Array
    next_token: Int32Array
    next_count: Float32Array
    next_state: Int32Array
    edge_start: Int32Array
    edge_token: Int32Array
    edge_state: Int32Array

    @classmethod
    def pack(cls, items: Mapping[int, Automaton]) -> AutomatonSet:
        """Copy automata into one set.

        Args:
            items: Automata by the 64-bit key of their prompt (0 to 2**64 - 1); may be empty.
        """
        keys = sorted(items)
        automata = [items[key] for key in keys]
        arrays: dict[str, npt.NDArray[Any]] = {
            "keys": np.array(keys, np.uint64),
            "state_start": _starts([automaton.states for automaton in automata]),
            "edge_offset": _starts([len(automaton.edge_token) for automaton in automata]),
        }
        for field in fields(Automaton):
            dtype = np.float32 if field.name in ("counts", "next_count") else np.int32
            parts = [getattr(automaton, field.name) for automaton in automata]
            arrays[field.name] = np.concatenate(parts) if parts else np.zeros(0, dtype)
        return cls(**{name: read_only(array) for name, array in arrays.items()})

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays().values())

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays by attribute name, without copies."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def automaton(self, index: int) -> Automaton:
        """Return automaton ``index`` (in order of keys) as views of this set's arrays."""
        states = slice(self.state_start[index], self.state_start[index + 1])
        edges = slice(self.edge_offset[index], self.edge_offset[index + 1])
        starts = slice(self.state_start[index] + index, self.state_start[index + 1] + index + 1)
        lies = {"edge_start": starts, "edge_token": edges, "edge_state": edges}
        return Automaton(**{f.name: getattr(self, f.name)[lies.get(f.name, states)] for f in fields(Automaton)})

    def find(self, keys: npt.NDArray[Any] | list[int]) -> Int64Array:
        """Return int64[n], the automaton of each key, -1 where there is none."""
        wanted = np.asarray(keys, np.uint64)
        if not len(self.keys):
            return np.full(wanted.shape, -1, np.int64)
        places = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where(self.keys[places] == wanted, places, -1)

    def advance_rows(
        self,
        which: Int64Array,
        state: Int32Array,
        matched: Int32Array,
        tokens: Int32Array,
        handle: Int64Array,
        start: Int64Array,
        stop: Int64Array,
    ) -> None:
        """Feed each row its new tokens; amortised constant time a token, match lengths without a limit.

        Args:
            which: int64[n], automaton of each row, -1 for none (such a row ends with state and match 0).
            state: int32[n], in and out: state of each row, 0 at first.
            matched: int32[n], in and out: tokens of the longest suffix of the row that the automaton knows, 0 at first.
            tokens: int32[handles, columns], the tokens of rows.
            handle: int64[n], which line of ``tokens`` a row lies in.
            start: int64[n], the first token to feed.
            stop: int64[n], the end of what to feed, exclusive.

        Raises:
            IndexError: A row names an automaton, a state or tokens that do not exist (states are those of one set:
                start again at 0 with a new one).
        """
        _advance_rows(
            self.state_start,
            self.edge_offset,
            self.links,
            self.lengths,
            self.next_token,
            self.next_state,
            self.edge_start,
            self.edge_token,
            self.edge_state,
            which,
            state,
            matched,
            tokens,
            handle,
            start,
            stop,
        )

    def draft_rows(
        self,
        which: Int64Array,
        state: Int32Array,
        matched: Int32Array,
        limit: Int64Array,
        out_tokens: Int32Array,
        out_count: Float32Array,
        out_ratio: Float32Array,
        out_matched: Int32Array,
        out_length: Int64Array,
    ) -> None:
        """Write down how each row may go on: the best continuation, and the best one after that.

        A context that nothing ever followed gives way to its longest suffix that has a continuation; the empty context
        drafts nothing. Only the first ``out_length`` columns of a row are written.

        Args:
            which: int64[n], automaton of each row, -1 for none (drafts nothing).
            state: int32[n], from :meth:`advance_rows`; left as it is.
            matched: int32[n], likewise.
            limit: int64[n], most tokens to draft for each row; the outputs' width is a limit as well.
            out_tokens: int32[n, width], drafted tokens.
            out_count: float32[n, width], weighted occurrences of the context that each token was drafted from.
            out_ratio: float32[n, width], share of these that the token followed.
            out_matched: int32[n, width], length of that context; grows by 1 a token unless it gave way to a suffix.
            out_length: int64[n], tokens drafted.

        Raises:
            IndexError: As :meth:`advance_rows`.
        """
        _draft_rows(
            self.state_start,
            self.links,
            self.lengths,
            self.next_token,
            self.next_state,
            self.counts,
            self.next_count,
            which,
            state,
            matched,
            limit,
            out_tokens,
            out_count,
            out_ratio,
            out_matched,
            out_length,
        )


def _starts(sizes: list[int]) -> Int64Array:
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


@compiled
def _advance_rows(
    state_start: Int64Array,
    edge_offset: Int64Array,
    links: Int32Array,
    lengths: Int32Array,
    next_token: Int32Array,
    next_state: Int32Array,
    edge_start: Int32Array,
    edge_token: Int32Array,
    edge_state: Int32Array,
    which: Int64Array,
    state: Int32Array,
    matched: Int32Array,
    tokens: Int32Array,
    handle: Int64Array,
    start: Int64Array,
    stop: Int64Array,
) -> None:
    for row in range(len(which)):
        own = which[row]
        if own < 0:
            state[row] = 0
            matched[row] = 0
            continue
        _check_state(state_start, own, state[row])
        line = handle[row]
        if line < 0 or line >= tokens.shape[0] or start[row] < 0 or stop[row] > tokens.shape[1]:
            raise IndexError("a row's tokens lie outside the array of tokens")
        low, high = state_start[own], state_start[own + 1]
        first, end = edge_offset[own], edge_offset[own + 1]
        own_links, own_lengths = links[low:high], lengths[low:high]
        own_next, own_states = next_token[low:high], next_state[low:high]
        own_starts = edge_start[low + own : high + own + 1]
        own_tokens, own_targets = edge_token[first:end], edge_state[first:end]
        at, length = state[row], matched[row]
        for column in range(start[row], stop[row]):
            token = tokens[line, column]
            target = find_next(own_next, own_states, own_starts, own_tokens, own_targets, at, token)
            while target < 0 and at > 0:
                at = own_links[at]
                length = own_lengths[at]
                target = find_next(own_next, own_states, own_starts, own_tokens, own_targets, at, token)
            if target >= 0:
                at = target
                length += 1
        state[row] = at
        matched[row] = length


@compiled
def _draft_rows(
    state_start: Int64Array,
    links: Int32Array,
    lengths: Int32Array,
    next_token: Int32Array,
    next_state: Int32Array,
    counts: Float32Array,
    next_count: Float32Array,
    which: Int64Array,
    state: Int32Array,
    matched: Int32Array,
    limit: Int64Array,
    out_tokens: Int32Array,
    out_count: Float32Array,
    out_ratio: Float32Array,
    out_matched: Int32Array,
    out_length: Int64Array,
) -> None:
    width = out_tokens.shape[1]
    for row in range(len(which)):
        own = which[row]
        drafted = 0
        if own >= 0:
            _check_state(state_start, own, state[row])
            low = state_start[own]
            at, length = state[row], matched[row]
            while drafted < min(limit[row], width):
                while at > 0 and next_token[low + at] < 0:
                    at = links[low + at]
                    length = lengths[low + at]
                if at == 0:
                    break
                out_tokens[row, drafted] = next_token[low + at]
                out_count[row, drafted] = counts[low + at]
                out_ratio[row, drafted] = next_count[low + at] / counts[low + at]
                out_matched[row, drafted] = length
                at = next_state[low + at]
                length += 1
                drafted += 1
        out_length[row] = drafted


@compiled
def _check_state(state_start: Int64Array, which: int, state: int) -> None:
    if which >= len(state_start) - 1:
        raise IndexError("a row names an automaton that the set does not have")
    if state < 0 or state >= state_start[which + 1] - state_start[which]:
        raise IndexError("a row's state is not one of its automaton: states of one set do not fit another")
