"""The likeliest tokens at each place of the answers of an engine's rows, while they are being written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from storage.records import Segment, TopTokens

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


class TopTable:
    """Likeliest tokens by row and place in the answer; grows with the longest answer.

    Memory: 8 bytes for each of ``width`` tokens at each place of the longest answer so far, in every row; with 64 rows,
    answers of 4,096 tokens and a width of 32 that is 67 MB.
    """

    def __init__(self, rows: int, width: int) -> None:
        """Make a table of ``rows`` rows that holds ``width`` tokens at each place."""
        self._ids = np.full((rows, 0, width), -1, np.int32)
        self._logprobs = np.full((rows, 0, width), -np.inf, np.float32)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self._ids.nbytes + self._logprobs.nbytes

    def open(self, row: int, prefix: Sequence[Segment]) -> None:
        """Fill a row with what the segments of a prefix bring; of a wider record only the likeliest are kept."""
        at, width = 0, self._ids.shape[2]
        self._reserve(sum(len(segment.token_ids) for segment in prefix))
        for segment in prefix:
            end, top = at + len(segment.token_ids), segment.top
            self._ids[row, at:end], self._logprobs[row, at:end] = -1, -np.inf
            if top is not None:
                have = min(width, top.ids.shape[1])
                self._ids[row, at:end, :have] = top.ids[:, :have]
                self._logprobs[row, at:end, :have] = top.logprobs[:, :have]
            at = end

    def put(self, rows: Int64Array, places: Int64Array, ids: Int64Array, logprobs: Float32Array) -> None:
        """Note the likeliest tokens at some places.

        Args:
            rows, places: int64[n]: whose answer, and where in it.
            ids: int64[n, width]; logprobs: float32[n, width], as in :class:`storage.records.TopTokens`.
        """
        if len(places):
            self._reserve(int(places.max()) + 1)
        # Of a vocabulary that is smaller than the table the sampler returns fewer.
        have = ids.shape[1]
        self._ids[rows, places, :have], self._logprobs[rows, places, :have] = ids, logprobs
        self._ids[rows, places, have:], self._logprobs[rows, places, have:] = -1, -np.inf

    def part(self, row: int, begin: int, end: int) -> TopTokens | None:
        """Return those of a part of an answer, without columns that nobody needs; ``None`` where there are none."""
        ids = self._ids[row, begin:end]
        used = np.flatnonzero((ids >= 0).any(axis=0))
        if not len(used):
            return None
        width = int(used[-1]) + 1
        return TopTokens(ids=ids[:, :width].copy(), logprobs=self._logprobs[row, begin:end, :width].copy())

    def _reserve(self, places: int) -> None:
        have = self._ids.shape[1]
        if places > have:
            more = ((0, 0), (0, max(places, 2 * have) - have), (0, 0))
            self._ids = np.pad(self._ids, more, constant_values=-1)
            self._logprobs = np.pad(self._logprobs, more, constant_values=-np.inf)
