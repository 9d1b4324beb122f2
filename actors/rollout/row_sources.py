"""Where drafts come from: each source follows the open rows and offers a candidate for each in a pass.

A source keeps one entry a handle in flat arrays and reads a row's tokens only when it is asked, from where it stopped:
while drafting is off it costs nothing. Everything in the steady state is one compiled call for all rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from actors.drafts.pack import PreviousAnswers
from actors.rollout.draft_calibration import SOURCES
from actors.rollout.engine import RunningRows
from storage.history.index.automaton_set import AutomatonSet
from storage.history.index.compiled import compiled

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

Outputs = tuple[Int32Array, Float32Array, Float32Array, Int32Array, Int64Array]

PREVIOUS, PROMPT, LIVE, SHARED = range(len(SOURCES))

_ALIGN_WINDOW = 256
"""Tokens on each side in which a row that left its previous answer is found again."""
_ALIGN_CONTEXT = 16
"""Longest match that counts in that search."""
_ALIGN_LEAST = 2
"""Shortest match for which the place in the previous answer is moved; a single token is too common."""
_MOST_SEARCHED = 8192
"""Tokens of the other slots' answers that are searched, so that very long ones cost a row no noticeable time."""


class Candidates:
    """What the sources offer in one pass.

    Attributes:
        tokens: int32[sources, rows, width], draft tokens.
        counts: float32[sources, rows, width], weighted occurrences of the context in front of each token.
        ratios: float32[sources, rows, width], share of them that went on with the token.
        matched: int32[sources, rows, width], length of that context.
        lengths: int64[sources, rows], tokens offered; columns at and beyond are garbage.
        cumulative: float32[sources, rows, width], probability that a token and all before it are accepted.
        cells: int32[sources, rows, width], cells of the calibration.
    """

    def __init__(self, rows: int, width: int) -> None:
        shape = (len(SOURCES), rows, width)
        self.tokens = np.empty(shape, np.int32)
        self.counts = np.empty(shape, np.float32)
        self.ratios = np.empty(shape, np.float32)
        self.matched = np.empty(shape, np.int32)
        self.lengths = np.zeros((len(SOURCES), rows), np.int64)
        self.cumulative = np.zeros(shape, np.float32)
        self.cells = np.zeros(shape, np.int32)

    def of(self, kind: int) -> Outputs:
        """Return the arrays that a source of ``kind`` fills: tokens, counts, ratios, matched, lengths."""
        return self.tokens[kind], self.counts[kind], self.ratios[kind], self.matched[kind], self.lengths[kind]


def grown(array: npt.NDArray[Any], size: int, fill: float) -> npt.NDArray[Any]:
    """Return ``array``, longer if it has fewer than ``size`` entries; new ones are ``fill``."""
    if size <= len(array):
        return array
    longer = np.full(max(size, 2 * len(array)), fill, array.dtype)
    longer[: len(array)] = array
    return longer


class IndexedRows:
    """Rows that follow the automaton of their prompt (or one that they share) in some pack."""

    def __init__(self, kind: int) -> None:
        """Make an empty source that offers its candidates as ``kind``."""
        self._kind = kind
        self._sets: dict[int, tuple[AutomatonSet, set[int]]] = {}
        self._set = np.full(8, -1, np.int64)
        self._which = np.zeros(8, np.int64)
        self._state = np.zeros(8, np.int32)
        self._matched = np.zeros(8, np.int32)
        self._read = np.zeros(8, np.int64)

    def __bool__(self) -> bool:
        """Whether it follows any row."""
        return bool(self._sets)

    def open(self, handle: int, automata: AutomatonSet, which: int, start: int) -> None:
        """Let a row follow automaton ``which``, from token ``start`` of its prompt on."""
        if handle >= len(self._read):
            self._set = grown(self._set, handle + 1, -1)
            for name in ("_which", "_state", "_matched", "_read"):
                setattr(self, name, grown(getattr(self, name), len(self._set), 0))
        self._sets.setdefault(id(automata), (automata, set()))[1].add(handle)
        self._set[handle], self._which[handle] = id(automata), which
        self._state[handle] = self._matched[handle] = 0
        self._read[handle] = start

    def close(self, handle: int) -> None:
        """Let go of a row; a set that no row follows is dropped."""
        if handle >= len(self._set) or self._set[handle] < 0:
            return
        number = int(self._set[handle])
        followers = self._sets[number][1]
        followers.discard(handle)
        if not followers:
            del self._sets[number]
        self._set[handle] = -1

    def offer(self, rows: RunningRows, limit: Int64Array, candidates: Candidates) -> None:
        """Read the new tokens of ``rows`` and write a candidate of at most ``limit`` (int64[rows]) tokens for each."""
        if not self._sets:
            return
        self._set = grown(self._set, len(rows.tokens), -1)
        owner = self._set[rows.handles]
        outputs = candidates.of(self._kind)
        for number, (automata, _) in self._sets.items():
            at = np.flatnonzero(owner == number)
            if not len(at):
                continue
            handles = rows.handles[at]
            which, state, matched = self._which[handles], self._state[handles], self._matched[handles]
            stop = rows.length[at]
            automata.advance_rows(which, state, matched, rows.tokens, handles, self._read[handles], stop)
            self._state[handles], self._matched[handles], self._read[handles] = state, matched, stop
            if len(at) == len(owner):
                automata.draft_rows(which, state, matched, limit, *outputs)
                continue
            part = Candidates(len(at), outputs[0].shape[1]).of(self._kind)
            automata.draft_rows(which, state, matched, limit[at], *part)
            targets: list[npt.NDArray[Any]] = [*outputs]
            values: list[npt.NDArray[Any]] = [*part]
            for target, value in zip(targets, values, strict=True):
                target[at] = value


class PreviousRows:
    """Rows that follow the previous answer of their sample slot, position by position.

    Where a row leaves the answer, it is taken to have replaced a token; once its last tokens match elsewhere in the
    answer (something was put in or left out), it goes on from there, and once they match further in the previous answer
    of another slot of the same prompt, it goes on from there. The share that a draft token is judged by is the
    probability that it was drawn with: for weights that changed little that is its chance to be drawn again.
    """

    def __init__(self) -> None:
        self._answers: dict[int, tuple[PreviousAnswers, set[int]]] = {}
        self._set = np.full(8, -1, np.int64)
        self._place = np.zeros((8, 6), np.int64)

    def __bool__(self) -> bool:
        """Whether it follows any row."""
        return bool(self._answers)

    def open(self, handle: int, answers: PreviousAnswers, index: int, prompt: int) -> None:
        """Let a row with ``prompt`` prompt tokens follow answer ``index``."""
        self._set = grown(self._set, handle + 1, -1)
        if handle >= len(self._place):
            self._place = np.pad(self._place, ((0, len(self._set) - len(self._place)), (0, 0)))
        self._answers.setdefault(id(answers), (answers, set()))[1].add(handle)
        self._set[handle] = id(answers)
        first, last = answers.slots(int(answers.keys[index]))
        self._place[handle] = (index, int(answers.starts[index]), _ALIGN_CONTEXT, prompt, first, last)

    def close(self, handle: int) -> None:
        """Let go of a row; answers that no row follows are dropped."""
        if handle >= len(self._set) or self._set[handle] < 0:
            return
        number = int(self._set[handle])
        followers = self._answers[number][1]
        followers.discard(handle)
        if not followers:
            del self._answers[number]
        self._set[handle] = -1

    def offer(self, rows: RunningRows, limit: Int64Array, candidates: Candidates) -> None:
        """As :meth:`IndexedRows.offer`."""
        if not self._answers:
            return
        self._set = grown(self._set, len(rows.tokens), -1)
        owner = self._set[rows.handles]
        for number, (answers, _) in self._answers.items():
            at = np.flatnonzero(owner == number)
            if len(at):
                _follow(
                    at,
                    rows.handles,
                    rows.tokens,
                    rows.prompt,
                    rows.length,
                    answers.tokens,
                    answers.logprobs,
                    answers.starts,
                    self._place,
                    limit,
                    *candidates.of(PREVIOUS),
                )


@compiled
def _follow(
    at: Int64Array,
    handles: Int64Array,
    tokens: Int32Array,
    prompt: Int64Array,
    length: Int64Array,
    answer: Int32Array,
    logprobs: Float32Array,
    starts: Int64Array,
    place: Int64Array,
    limit: Int64Array,
    out_tokens: Int32Array,
    out_counts: Float32Array,
    out_ratios: Float32Array,
    out_matched: Int32Array,
    out_lengths: Int64Array,
) -> None:
    width = out_tokens.shape[1]
    for row in at:
        handle = handles[row]
        index, here, run, read, first, last = place[handle]
        for column in range(read, length[row]):
            start, end = starts[index], starts[index + 1]
            if here < end and answer[here] == tokens[handle, column]:
                here += 1
                run += 1
                continue
            # As if one token was replaced, unless the last tokens are found together elsewhere, the nearest first.
            aligned = here + 1
            here, run = aligned, 0
            longest = _ALIGN_LEAST - 1
            written = tokens[handle, prompt[row] : column + 1]
            for distance in range(_ALIGN_WINDOW):
                for side in range(2):
                    if distance == 0 and side == 1:
                        continue
                    spot = aligned - 1 + (distance if side == 0 else -distance)
                    if spot < start or spot >= end:
                        continue
                    match = _matching(answer[start : spot + 1], written)
                    if match > longest:
                        longest = match
                        here, run = spot + 1, match
            searched = 0
            for other in range(first, last):
                if other == index:
                    continue
                start, end = starts[other], starts[other + 1]
                searched += end - start
                if searched > _MOST_SEARCHED:
                    break
                # The end of an answer has nothing to draft behind it.
                for spot in range(start, end - 1):
                    match = _matching(answer[start : spot + 1], written)
                    if match > longest:
                        longest = match
                        here, run = spot + 1, match
                        index = other
        place[handle, 0], place[handle, 1], place[handle, 2], place[handle, 3] = index, here, run, length[row]
        drafted = max(0, min(starts[index + 1] - here, min(limit[row], width)))
        for j in range(drafted):
            out_tokens[row, j] = answer[here + j]
            out_counts[row, j] = 1.0
            out_ratios[row, j] = np.exp(logprobs[here + j])
            out_matched[row, j] = run + j
        out_lengths[row] = drafted


@compiled
def _matching(left: Int32Array, right: Int32Array) -> int:
    """Return how many last tokens the two have in common, at most ``_ALIGN_CONTEXT``."""
    most = min(_ALIGN_CONTEXT, len(left), len(right))
    match = 0
    while match < most and left[len(left) - 1 - match] == right[len(right) - 1 - match]:
        match += 1
    return match
