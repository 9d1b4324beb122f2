"""Verifies drafts: exactly, against tokens that the policy drew itself, or leniently, against the law of the drafter.

Exactly: a draft is a point mass, so speculative sampling's rule (accept token d with probability p(d), else draw from p
without d) has the same law as: draw y from p, keep y, go on to the next draft token while y equals it. With noise that
is keyed by position the drawn tokens are moreover those of plain decoding, one for one (DESIGN 8b).

Leniently: SPEC-RL (arXiv 2509.23232, algorithm 1) keeps draft token x with probability min(1, lenience * p(x) / q(x)),
where q is the law that drew x, and goes on at the first rejected position with a plain draw from p. Were x a draw from
q, the token at a position would have the law min(q, lenience * p) + (1 - sum of that) * p, which is p only where q = p:
what lost probability since is written too often. (The residual draw of exact speculative sampling needs the whole of q;
and after training on x, x is no independent draw of q any more.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
FloatArray = npt.NDArray[np.float32] | npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LenientDrafts:
    """Drafts of a batch that are verified leniently.

    Attributes:
        rows: int64[m], their places in the batch, ascending.
        lenience: float64[m], natural logarithm.
        logprobs: float32[m, longest], log q of the draft tokens.
        cut: bool[m], True where the draft goes on behind what this pass verifies: no token is drawn behind it when all
            of it is kept.
    """

    rows: Int64Array
    lenience: Float64Array
    logprobs: npt.NDArray[np.float32]
    cut: npt.NDArray[np.bool_]


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


def leniently_kept_counts(
    policy: FloatArray, drafter: FloatArray, lenience: Float64Array, uniforms: Float64Array, lengths: Int64Array
) -> Int64Array:
    """Return how many draft tokens each row keeps under the lenient rule.

    Args:
        policy: float[rows, width], log p of the draft tokens under what the row is sampled from; -inf (a token that is
            cut, or has underflown) is never kept, nor is NaN.
        drafter: float[rows, width], log q of the draft tokens; -inf keeps a token that p can draw, NaN keeps none.
        lenience: float64[rows], natural logarithm.
        uniforms: float64[rows, width] in (0, 1), independent of the noise that tokens are drawn with.
        lengths: int64[rows], draft tokens of each row, at most width; columns at and beyond are ignored.

    Returns:
        int64[rows]; row i keeps its first ``result[i]`` draft tokens.
    """
    with np.errstate(invalid="ignore"):
        ratio = lenience[:, None] + (policy.astype(np.float64) - drafter)
    kept = (np.log(uniforms) <= ratio) & (policy > -np.inf)
    kept &= np.arange(kept.shape[1]) < lengths[:, None]
    counts: Int64Array = np.logical_and.accumulate(kept, axis=1).sum(axis=1, dtype=np.int64)
    return counts
