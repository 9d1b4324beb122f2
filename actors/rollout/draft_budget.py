"""How many draft tokens each row may spend in one pass.

A pass over n rows with drafts of k_1 ... k_n tokens emits sum(1 + P_i1 + ... + P_ik) tokens on average, where P_ij
is the probability that the first j draft tokens of row i are all accepted, and takes V(rows, tokens) seconds. Their
ratio is maximised by Dinkelbach's iteration (Management Science 13, 1967): for a rate r, a token is worth its place
while w_i * P_ij >= r * (cost of a token); r is then the ratio so reached, until it rises no more. Because V is linear
in tokens and P_ij falls in j, that threshold finds what a heap over the whole batch would, without sorting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.rollout.draft_cost import PassCost
from storage.history.index.compiled import compiled

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Budget:
    """Drafts of one pass.

    Attributes:
        source: int64[rows], candidate that each row takes; -1 for none.
        lengths: int64[rows], its draft tokens.
        gain: Expected tokens per second relative to a pass without drafts; 1 when there are none.
    """

    source: Int64Array
    lengths: Int64Array
    gain: float


def allocate(cumulative: Float32Array, lengths: Int64Array, weights: Float64Array, cost: PassCost) -> Budget:
    """Choose a candidate and a draft length for each row so that the pass emits most per second.

    Args:
        cumulative: float32[candidates, rows, width], P_ij of each candidate, falling along the last axis.
        lengths: int64[candidates, rows], tokens of each candidate.
        weights: float64[rows], at least 1: how much a token of the row is worth (rows that end a step late count more).
        cost: Time of a pass.

    Returns:
        The best budget; no drafts where none pays.
    """
    rows = lengths.shape[1]
    source = np.full(rows, -1, np.int64)
    chosen = np.zeros(rows, np.int64)
    plain = cost.plain(rows)
    gain = _allocate(cumulative, lengths, weights, plain, cost.token, cost.ragged, source, chosen)
    return Budget(source, chosen, float(gain))


@compiled
def _allocate(
    cumulative: Float32Array,
    lengths: Int64Array,
    weights: Float64Array,
    plain: float,
    token: float,
    ragged: float,
    source: Int64Array,
    chosen: Int64Array,
) -> float:
    candidates, rows, _ = cumulative.shape
    base = 0.0
    for row in range(rows):
        base += weights[row]
    if rows == 0 or plain <= 0.0:
        return 1.0
    rate = base / plain
    first = rate
    trial_source = np.empty(rows, np.int64)
    trial_chosen = np.empty(rows, np.int64)
    for _ in range(50):
        tokens, drafted = base, 0
        for row in range(rows):
            best = 0.0
            trial_source[row], trial_chosen[row] = -1, 0
            gained = 0.0
            for candidate in range(candidates):
                value, expected, taken = 0.0, 0.0, 0
                for j in range(lengths[candidate, row]):
                    worth = weights[row] * cumulative[candidate, row, j]
                    if worth <= rate * token:
                        break
                    value += worth - rate * token
                    expected += worth
                    taken = j + 1
                if value > best:
                    best, gained = value, expected
                    trial_source[row], trial_chosen[row] = candidate, taken
            tokens += gained
            drafted += trial_chosen[row]
        if drafted == 0:
            break
        reached = tokens / (plain + ragged + token * drafted)
        if reached <= rate * (1.0 + 1e-9):
            break
        rate = reached
        source[:] = trial_source
        chosen[:] = trial_chosen
    return rate / first
