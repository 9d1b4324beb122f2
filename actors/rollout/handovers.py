"""Which rows the weights before the active ones write, and how long: the rules of a handover over a table of rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from actors.rollout.engine import Handover, Swap
from actors.rollout.row_table import NEVER, RowTable

Int64Array = npt.NDArray[np.int64]


def opening_version(active: int, coming: int, swap: Swap) -> int:
    """Return the version that new rows begin under once ``coming`` takes over from ``active``."""
    lags = swap.handover is not None and swap.handover.kind == "split" and coming == active + 1
    return active if lags else coming


def staying(table: RowTable, running: Int64Array, active: int, swap: Swap) -> Int64Array:
    """Return the running rows that the active weights go on writing when others take over; set how long.

    Rows of still older weights are not among them. With ``boundary`` a row stays only for the sake of what it is in the
    middle of: tokens of the active weights with no boundary behind them.

    Args:
        table: The rows; what is returned has its ``turn_from`` and ``turn_by`` set, ``old`` is left to the caller.
        running: int64[n], indices of the running rows.
        active: Version of the active weights.
        swap: How others take over; a handover needs ``table.boundaries``.

    Returns:
        int64[m], indices.
    """
    handover = swap.handover
    rows = running[~table.old[running]]
    if swap.mode == "drain":
        table.turn_from[rows] = table.turn_by[rows] = NEVER
        return rows
    if handover is None or table.boundaries is None:
        return rows[:0]
    rows = np.array([i for i in rows.tolist() if table[i].request.may_lag], np.int64)
    length, prompt = table.length[rows], table.prompt[rows]
    rests = table.boundaries[table.tokens[rows, length - 1]]
    if handover.kind == "boundary":
        stays = (table.version[rows] == active) & ~rests & (handover.grace_tokens > 0)
        table.turn_from[rows], table.turn_by[rows] = 0, length + handover.grace_tokens
    else:
        stays = ~rests | (length - prompt < handover.k_min)
        table.turn_from[rows], table.turn_by[rows] = prompt + handover.k_min, NEVER
    return rows[np.flatnonzero(stays)]


def begins_old(table: RowTable, index: int, opening: int, handover: Handover) -> bool:
    """Decide whether a row that opens begins under the version ``opening`` before the active one; set how long.

    What newer weights have begun already, or what has its length, those before do not go on with.
    """
    if not table[index].request.may_lag:
        return False
    end = int(table.prompt[index]) + handover.k_min
    table.turn_from[index], table.turn_by[index] = end, NEVER
    return bool((table.length[index] < end) & (table.version[index] <= opening))
