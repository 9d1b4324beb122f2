"""Verifies drafts: exactly, against tokens that the policy drew itself, or leniently, against the law of the drafter.

Exactly: a draft is a point mass, so speculative sampling's rule (accept token d with probability p(d), else draw from p
without d) has the same law as: draw y from p, keep y, go on to the next draft token while y equals it. With noise that
is keyed by position the drawn tokens are moreover those of plain decoding, one for one (DESIGN 8b).

Leniently: SPEC-RL (arXiv 2509.23232, algorithm 1) keeps draft token x with probability min(1, lenience * p(x) / q(x)),
where q is the law that drew x, and goes on at the first rejected position with a plain draw from p. Were x a draw from
q, the token at a position would have the law min(q, lenience * p) + (1 - sum of that) * p, which is p only where q = p:
what lost probability since is written too often.

With the residual, the token at the first rejected position is drawn from norm(max(0, p - q)) instead. At lenience 1,
and where all of q is known, the law is then exactly p if x is a draw from q that is independent of p (arXiv 2211.17192,
2302.01318). In reinforcement learning it is not: p was trained on x, so given p, x is no draw from q any more, and
answers that were rewarded are kept more often than p would write them. So this, too, is biased, if less.

Of q the likeliest tokens are known, and the draft's own. What is beyond counts as 0, an error of at most the mass of q
there (:func:`actors.rollout.sampling.residual_weights`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from storage.records import TopTokens

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
        tops: For each of them the likeliest tokens of q, a row for each draft token; ``None`` where a draw from p
            stands in for the first rejected token.
    """

    rows: Int64Array
    lenience: Float64Array
    logprobs: npt.NDArray[np.float32]
    cut: npt.NDArray[np.bool_]
    tops: Sequence[TopTokens | None] = ()

    def residual_at(self, kept: Int64Array, lengths: Int64Array, drafts: Int64Array) -> Residuals:
        """Return what is known of q where drafts were rejected, for those that go on from the residual.

        Args:
            kept: int64[m], draft tokens kept; lengths: int64[m], draft tokens verified.
            drafts: int64[m, longest], the draft tokens.
        """
        places: list[int] = []
        known: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] = []
        for i in np.flatnonzero(kept < lengths).tolist():
            top, at = self.tops[i] if self.tops else None, int(kept[i])
            # Without the draft token's own probability nothing says why it was rejected.
            if top is not None and top.ids[at].max(initial=-1) >= 0 and not np.isnan(self.logprobs[i, at]):
                places.append(i)
                known.append((top.ids[at], top.logprobs[at]))
        width = max((len(ids) for ids, _ in known), default=0)
        ids = np.full((len(places), width + 1), -1, np.int64)
        logprobs = np.full(ids.shape, -np.inf, np.float32)
        for row, (i, (some, values)) in enumerate(zip(places, known, strict=True)):
            ids[row, : len(some)], logprobs[row, : len(some)] = some, values
            if drafts[i, kept[i]] not in some:
                ids[row, -1], logprobs[row, -1] = drafts[i, kept[i]], self.logprobs[i, kept[i]]
        return Residuals(np.array(places, np.int64), ids, logprobs)


@dataclass(frozen=True, slots=True)
class Residuals:
    """What is known of q at the first rejected positions of some leniently verified drafts.

    Attributes:
        places: int64[r], their places among the leniently verified ones.
        ids: int64[r, K + 1], tokens of which q is known, each once; -1 for none.
        logprobs: float32[r, K + 1], log q of them.
    """

    places: Int64Array
    ids: Int64Array
    logprobs: npt.NDArray[np.float32]

    @property
    def tail_mass(self) -> Float64Array:
        """float64[r], mass of q on tokens of which it is not known; bounds the error of each draw's law."""
        known = np.where(self.ids >= 0, np.exp(self.logprobs.astype(np.float64)), 0.0)
        tail: Float64Array = np.maximum(0.0, 1.0 - known.sum(axis=1))
        return tail


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
