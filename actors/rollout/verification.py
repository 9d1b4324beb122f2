"""Verifies drafts against tokens that the policy drew itself.

A draft is a point mass, so speculative sampling's rule (accept token d with probability p(d), else draw from p without
d) has the same law as: draw y from p, keep y, go on to the next draft token while y equals it. With noise that is keyed
by position the drawn tokens are moreover those of plain decoding, one for one (see research in DESIGN 8b).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def accepted_counts(drawn: Int64Array, drafts: Int64Array, lengths: Int64Array) -> Int64Array:
    """Return how many draft tokens each row accepts.

    Args:
        drawn: int64[rows, width]; ``drawn[i, t]`` was drawn behind the row's last token and its first t draft tokens.
        drafts: int64[rows, width - 1 or more]; columns at and beyond ``lengths`` are ignored.
        lengths: int64[rows], draft tokens of each row, at most width - 1.

    Returns:
        int64[rows]; row i emits its first ``result[i] + 1`` drawn tokens: the accepted ones and one more.
    """
    width = drawn.shape[1] - 1
    matches = (drawn[:, :width] == drafts[:, :width]) & (np.arange(width) < lengths[:, None])
    accepted: Int64Array = np.logical_and.accumulate(matches, axis=1).sum(axis=1, dtype=np.int64)
    return accepted
