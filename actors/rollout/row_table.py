"""State of the rows of an engine, as arrays: one element a row, so that a step loops over no rows in Python."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.rollout.engine import Request
from actors.rollout.stopping import StopStrings
from actors.rollout.top_table import TopTable
from storage.records import Int32Array, Segment, SegmentSource

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

NEVER = np.iinfo(np.int64).max
"""A length that no row reaches."""

# Values of Row.prompt_version beside real versions: no state yet, and state that several versions computed.
NOT_COMPUTED = -1
MIXED = -2


@dataclass(slots=True)
class Row:
    """What a row has besides its arrays.

    Attributes:
        request: The request it serves.
        marks: (index in the answer, source, version) where each segment begins.
        stops: Finds its stop strings, if it has any.
        stops_from: Index in the answer from which tokens count for stop strings.
        prompt_version: Weights version that computed its prompt's key/value state; or ``NOT_COMPUTED`` or ``MIXED``.
        first_token: Wall-clock second of its first new token.
    """

    request: Request
    marks: list[tuple[int, SegmentSource, int]]
    stops: StopStrings | None
    stops_from: int
    prompt_version: int = NOT_COMPUTED
    first_token: float = 0.0


class RowTable:
    """Rows by index, 0 to ``rows - 1``; arrays hold garbage for rows that are not in use.

    Attributes:
        tokens: int32[rows, columns], prompt and answer.
        logprobs: float32[rows, columns], at the places of the answer's tokens.
        prompt: int64[rows], prompt tokens.
        length: int64[rows], prompt and answer tokens.
        cached: int64[rows], tokens whose key/value state is in the row's slot; a row decodes when it lacks one at most.
        limit: int64[rows], length at which the row ends.
        slot: int64[rows], its slot in the cache.
        held: bool[rows], True for a row that must be asked for a draft before it draws.
        old: bool[rows], True for a row that is written under the weights before the active ones.
        turn_from: int64[rows], length from which a boundary hands an ``old`` row over to the active weights.
        turn_by: int64[rows], length that hands it over in any case.
        boundaries: bool[vocabulary], tokens that are a boundary; ``None`` until there is a handover.
        version: int64[rows], version of the segment that is being written; -1 when none is open.
        key: uint64[rows], noise key.
        temperature, top_p: float32[rows]; top_k: int64[rows].
        stop_ids: int64[rows, ids], ids that end the answer, padded with -1.
        watched: bool[rows], True for rows with stop strings.
        drafted, accepted, passes: int64[rows], counters.
        top: The likeliest tokens at each place of the answers; ``None`` where they are not recorded.
    """

    def __init__(self, rows: int, top_tokens: int = 0) -> None:
        self.rows: list[Row | None] = [None] * rows
        self.tokens = np.zeros((rows, 64), np.int32)
        self.logprobs = np.zeros((rows, 64), np.float32)
        self.prompt = np.zeros(rows, np.int64)
        self.length = np.zeros(rows, np.int64)
        self.cached = np.zeros(rows, np.int64)
        self.limit = np.zeros(rows, np.int64)
        self.slot = np.zeros(rows, np.int64)
        self.held = np.zeros(rows, np.bool_)
        self.old = np.zeros(rows, np.bool_)
        self.turn_from = np.full(rows, NEVER, np.int64)
        self.turn_by = np.full(rows, NEVER, np.int64)
        self.boundaries: BoolArray | None = None
        self.version = np.zeros(rows, np.int64)
        self.key = np.zeros(rows, np.uint64)
        self.temperature = np.ones(rows, np.float32)
        self.top_p = np.ones(rows, np.float32)
        self.top_k = np.zeros(rows, np.int64)
        self.stop_ids = np.full((rows, 1), -1, np.int64)
        self.watched = np.zeros(rows, np.bool_)
        self.drafted = np.zeros(rows, np.int64)
        self.accepted = np.zeros(rows, np.int64)
        self.passes = np.zeros(rows, np.int64)
        self.top = TopTable(rows, top_tokens) if top_tokens else None

    def open(self, index: int, request: Request, *, key: int, limit: int, slot: int, stops: StopStrings | None) -> None:
        """Fill row ``index`` for ``request``; nothing of it is cached yet."""
        sampling, prompt = request.sampling, request.prompt_ids
        parts = [prompt, *(s.token_ids for s in request.prefix)]
        length = sum(len(p) for p in parts)
        self.reserve(length + 1)
        self.tokens[index, :length] = np.concatenate(parts)
        marks: list[tuple[int, SegmentSource, int]] = []
        at, stops_from = len(prompt), 0
        for segment in request.prefix:
            self.logprobs[index, at : at + len(segment.logprobs)] = segment.logprobs
            if len(segment.token_ids) and (not marks or marks[-1][1:] != (segment.source, segment.version)):
                marks.append((at - len(prompt), segment.source, segment.version))
            at += len(segment.token_ids)
            if segment.source == "environment":
                stops_from = at - len(prompt)
        self.rows[index] = Row(request=request, marks=marks, stops=stops, stops_from=stops_from)
        self.prompt[index], self.length[index], self.cached[index] = len(prompt), length, 0
        self.limit[index], self.slot[index], self.old[index] = limit, slot, False
        self.held[index] = False
        self.version[index] = marks[-1][2] if marks and marks[-1][1] == "policy" else -1
        self.key[index] = key
        self.temperature[index], self.top_p[index] = sampling.temperature, sampling.top_p
        self.top_k[index] = sampling.top_k
        ids = sampling.stop_token_ids
        if len(ids) > self.stop_ids.shape[1]:
            wider = np.full((len(self.rows), len(ids)), -1, np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[index] = -1
        self.stop_ids[index, : len(ids)] = ids
        self.watched[index] = stops is not None
        self.drafted[index] = self.accepted[index] = self.passes[index] = 0
        if self.top is not None:
            self.top.open(index, request.prefix)

    def reserve(self, columns: int) -> None:
        """Make room for rows of ``columns`` tokens."""
        have = self.tokens.shape[1]
        if columns > have:
            extra = max(columns, 2 * have) - have
            self.tokens = np.pad(self.tokens, ((0, 0), (0, extra)))
            self.logprobs = np.pad(self.logprobs, ((0, 0), (0, extra)))

    def __getitem__(self, index: int) -> Row:
        """Return the open row ``index``."""
        row = self.rows[index]
        assert row is not None, f"row {index} is not open"
        return row

    def free_index(self) -> int:
        """Return the index of a row that is not in use."""
        return self.rows.index(None)

    def answer(self, index: int) -> Int32Array:
        """int32[m], a view of the answer so far."""
        return self.tokens[index, self.prompt[index] : self.length[index]]

    def turning(self, rows: Int64Array, tokens: Int32Array | Int64Array) -> BoolArray:
        """Tell behind which tokens rows go over to the active weights.

        Args:
            rows: int64[n].
            tokens: int64[n, width], what comes behind the tokens that the rows have; ids that are not in the vocabulary
                count as no boundary.

        Returns:
            bool[n, width], at every place where the row may go over; it does so at the first.
        """
        behind = self.length[rows][:, None] + np.arange(1, tokens.shape[1] + 1)
        turns = behind >= self.turn_by[rows][:, None]
        if self.boundaries is not None:
            inside = (tokens >= 0) & (tokens < len(self.boundaries))
            turns |= inside & self.boundaries[np.where(inside, tokens, 0)] & (behind >= self.turn_from[rows][:, None])
        return np.asarray(turns & self.old[rows][:, None])

    def mark(self, indices: Int64Array, version: int) -> None:
        """Begin a segment of ``version`` in each of the rows, behind the tokens they have."""
        for i in indices.tolist():
            self[i].marks.append((int(self.length[i] - self.prompt[i]), "policy", version))
        self.version[indices] = version

    def segments(self, index: int) -> tuple[Segment, ...]:
        """The answer of a row as segments that own their arrays."""
        marks = self[index].marks
        first = int(self.prompt[index])
        ends = [*(mark[0] for mark in marks), int(self.length[index]) - first][1:]
        return tuple(
            Segment(
                source=source,
                version=version,
                token_ids=self.tokens[index, first + begin : first + end].copy(),
                logprobs=self.logprobs[index, first + begin : first + end].copy(),
                top=None if self.top is None else self.top.part(index, begin, end),
            )
            for (begin, source, version), end in zip(marks, ends, strict=True)
            if end > begin
        )
