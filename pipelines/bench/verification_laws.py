"""What draft verification does to the law of the tokens: enumerated over every outcome, and as formulas.

Laws are tables over the tokens of a small vocabulary V: ``first`` float64[V] of the first token, ``next`` float64[V, V]
of a token behind each other token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.rollout.verification import accepted_counts, leniently_kept_counts

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

Redraw = Callable[[Float64Array, Float64Array, Int64Array], Float64Array]
"""Maps p and q float64[n, V] of some places and the draft tokens int64[n] rejected there to the law of the token that
stands there instead, float64[n, V]."""

# How far to either side of its threshold, relatively, a uniform number stands in for all that lie there.
_SIDE = 1e-9
# Cells of a chi-square test that expect fewer counts are merged.
_FEWEST = 5.0


@dataclass(frozen=True, slots=True)
class TokenLaw:
    """Law of two tokens in a row.

    Attributes:
        first: float64[V], law of the first.
        next: float64[V, V], row a: law of the second behind first token a.
    """

    first: Float64Array
    next: Float64Array

    @property
    def joint(self) -> Float64Array:
        """float64[V, V], law of the pair."""
        return self.first[:, None] * self.next


def random_law(vocabulary: int, seed: int, *, cut: int = 0) -> TokenLaw:
    """Draw a law that is far from uniform; ``cut`` tokens have no probability in each row, as top-k leaves them."""
    rng = np.random.default_rng(seed)
    table = np.exp(2 * rng.standard_normal((vocabulary + 1, vocabulary)))
    for row in table:
        row[rng.permutation(vocabulary)[:cut]] = 0
    table /= table.sum(axis=1, keepdims=True)
    return TokenLaw(table[0], table[1:])


def exact_rule_error(
    law: TokenLaw, draft: tuple[int, int], verify: Callable[..., Int64Array] = accepted_counts
) -> float:
    """Return how far the law of three tokens moves when a draft of two is verified: the largest difference of a cell.

    All V ** 3 outcomes of the draws behind the draft are run through ``verify``; where it leaves fewer than three
    tokens, the others follow from the law. The third token's law behind the second is ``law.next``, as the second's.
    """
    size = len(law.first)
    drawn = np.indices((size,) * 3).reshape(3, -1).T
    mass = law.first[drawn[:, 0]] * law.next[draft[0], drawn[:, 1]] * law.next[draft[1], drawn[:, 2]]
    accepted = verify(drawn, np.tile(draft, (len(drawn), 1)), np.full(len(drawn), 2))
    masses = [np.zeros((size,) * 3) for _ in range(3)]
    for count, table in enumerate(masses):
        some = accepted == count
        np.add.at(table, tuple(drawn[some].T), mass[some])
    behind_one = masses[0].sum(axis=(1, 2))[:, None] * law.next
    behind_two = (masses[1].sum(axis=2) + behind_one)[:, :, None] * law.next
    target = law.joint[:, :, None] * law.next
    return float(np.abs(masses[2] + behind_two - target).max())


def lenient_law(policy: TokenLaw, drafter: TokenLaw, log_lenience: float) -> TokenLaw:
    """Return the law of two tokens when a draft from ``drafter`` is verified leniently, as a pair has it.

    A token kept has mass min(q, lenience * p); what is missing to 1 is drawn from p, and the next token, too, is drawn
    from p (its ``next`` row mixes both ways to get there).
    """
    kept = np.minimum(drafter.first, np.exp(log_lenience) * policy.first)
    kept_next = np.minimum(drafter.next, np.exp(log_lenience) * policy.next)
    redrawn = (1 - kept.sum()) * policy.first
    behind_kept = kept_next + (1 - kept_next.sum(axis=1, keepdims=True)) * policy.next
    first = kept + redrawn
    joint = kept[:, None] * behind_kept + redrawn[:, None] * policy.next
    return TokenLaw(first, np.divide(joint, first[:, None], out=policy.next.copy(), where=first[:, None] > 0))


def lenient_rule_error(
    policy: TokenLaw,
    drafter: TokenLaw,
    log_lenience: float,
    verify: Callable[..., Int64Array] = leniently_kept_counts,
) -> float:
    """Return how far the enumerated law of the lenient rule is from :func:`lenient_law`: the largest difference."""
    law = enumerated_law(policy, drafter, log_lenience, verify)
    return float(np.abs(law - lenient_law(policy, drafter, log_lenience).joint).max())


def residual_rule_error(policy: TokenLaw, drafter: TokenLaw, known: int) -> float:
    """Return how far the policy's law of two tokens moves when the lenient rule at lenience 1 goes on from residuals.

    Args:
        policy, drafter: Laws of the policy and of the drafts, which do not depend on each other.
        known: Likeliest tokens of the drafter's law that the residual knows; with all of them nothing may move.

    Returns:
        The largest difference of a cell.
    """
    law = enumerated_law(policy, drafter, 0.0, redraw=residual_redraw(known))
    return float(np.abs(law - policy.joint).max())


def residual_redraw(known: int) -> Redraw:
    """Return the residual rule that knows the ``known`` likeliest tokens of q, and the rejected one."""
    import torch

    from actors.rollout.sampling import residual_weights

    def redraw(p: Float64Array, q: Float64Array, rejected: Int64Array) -> Float64Array:
        ids = np.concatenate([np.argsort(-q, axis=1)[:, :known], rejected[:, None]], axis=1)
        with np.errstate(divide="ignore"):
            scores = np.log(np.take_along_axis(q, ids, axis=1))
        weights: Float64Array = residual_weights(*(torch.from_numpy(part) for part in (p, ids, scores))).numpy()
        weights /= weights.sum(axis=1, keepdims=True)
        return weights

    return redraw


def enumerated_law(
    policy: TokenLaw,
    drafter: TokenLaw,
    log_lenience: float,
    verify: Callable[..., Int64Array] = leniently_kept_counts,
    redraw: Redraw | None = None,
) -> Float64Array:
    """Return the law of two tokens float64[V, V] under the lenient rule, by running through all that may happen.

    All drafts of two tokens and, for each token, uniform numbers on both sides of its threshold are run through
    ``verify``; the token behind what is kept is drawn as ``redraw`` says, by default from the policy.
    """
    size = len(policy.first)
    drafts = np.indices((size, size)).reshape(2, -1).T
    p = np.stack([policy.first[drafts[:, 0]], policy.next[drafts[:, 0], drafts[:, 1]]], axis=1)
    q = np.stack([drafter.first[drafts[:, 0]], drafter.next[drafts[:, 0], drafts[:, 1]]], axis=1)
    threshold = np.minimum(1, np.exp(log_lenience) * np.divide(p, q, out=np.zeros_like(p), where=q > 0))
    law = np.zeros((size, size))
    for sides in np.ndindex(2, 2):
        below = np.array(sides) == 0
        uniforms = np.where(below, threshold * (1 - _SIDE), threshold + (1 - threshold) * _SIDE)
        mass = (q * np.where(below, threshold, 1 - threshold)).prod(axis=1)
        with np.errstate(divide="ignore"):
            scores = np.log(p), np.log(q)
        lenience = np.full(len(drafts), log_lenience)
        kept = verify(*scores, lenience, np.clip(uniforms, 1e-300, 1), np.full(len(drafts), 2))
        masses = []
        for count in range(3):
            table = np.zeros((size, size))
            np.add.at(table, tuple(drafts[kept == count].T), mass[kept == count])
            masses.append(table)
        # Mass by the rejected token, and the law of what stands there instead.
        first = masses[0].sum(axis=1) @ _instead(policy.first[None], drafter.first[None], redraw)[0]
        second = np.einsum("ax,axy->ay", masses[1], _instead(policy.next, drafter.next, redraw))
        law += first[:, None] * policy.next + second + masses[2]
    return law


def _instead(p: Float64Array, q: Float64Array, redraw: Redraw | None) -> Float64Array:
    """Laws float64[n, V, V] of the token that stands for each rejected token x (second axis) of each context."""
    contexts, size = p.shape
    rejected = np.tile(np.arange(size), contexts)
    p, q = np.repeat(p, size, axis=0), np.repeat(q, size, axis=0)
    return (p if redraw is None else redraw(p, q, rejected)).reshape(contexts, size, size)


def total_variation(one: Float64Array, other: Float64Array) -> float:
    """Half the sum of absolute differences of two laws."""
    return float(np.abs(one - other).sum() / 2)


def chi_square_p(counts: npt.ArrayLike, law: npt.ArrayLike) -> float:
    """Return the p value of Pearson's test; cells that expect fewer than 5 are one, an impossible outcome gives 0.

    Args:
        counts: Outcomes seen, any shape.
        law: Their probabilities, the same shape; scaled to sum to 1.
    """
    import torch

    seen, hoped = np.ravel(np.asarray(counts, np.float64)), np.ravel(np.asarray(law, np.float64))
    if seen[hoped == 0].any():
        return 0.0
    hoped = seen.sum() * hoped / hoped.sum()
    order = np.argsort(-hoped)
    seen, hoped = seen[order], hoped[order]
    # The rare ones, and of the others as many as it takes to expect enough of all together, are one cell.
    tail = hoped[::-1].cumsum()[::-1]
    single = int(np.count_nonzero((hoped >= _FEWEST) & (np.append(tail[1:], np.inf) >= _FEWEST)))
    if single < len(hoped):
        seen, hoped = np.append(seen[:single], seen[single:].sum()), np.append(hoped[:single], hoped[single:].sum())
    statistic = float(((seen - hoped) ** 2 / hoped).sum())
    half = torch.tensor([(len(hoped) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted for their number (Holm, Scandinavian Journal of Statistics, 1979), in the same order."""
    adjusted, worst = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = worst
    return adjusted
