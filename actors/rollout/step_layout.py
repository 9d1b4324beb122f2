"""Lays the tokens of one pass out for the model: which token of which row goes where."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from actors.rollout.attention import QueryBlock, StepPlan

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]

# Cached positions that a block reads are rounded up to this, which keeps kernels on aligned shapes.
_REACH = 8
# Rows are split into blocks of at least so many when that reads a quarter fewer cached positions.
_SPLIT_ROWS = 16
# Prefilled rows share a block while padding stays below this share of their queries.
_PADDING = 0.25
# Decoding rows go into blocks by tokens fed (up to each of these) when one block for all would have so many
# times the queries (measured: a draft of 33 among 31 plain rows costs a third of the time this way).
_WIDTHS = (2, 8, 32, 128, 512, 2048)
_RAGGED = 3


@dataclass(slots=True)
class Feed:
    """Tokens that one pass takes of some rows.

    Attributes:
        slots: int64[rows].
        starts: int64[rows], position of the first token fed.
        counts: int64[rows], tokens fed, at least 1.
        tokens: int64[sum of counts].
        decoding: First so many rows continue an answer (their slots ascend); the others are prefill.
    """

    slots: Int64Array
    starts: Int64Array
    counts: Int64Array
    tokens: Int64Array
    decoding: int


def plan_pass(
    feed: Feed, capacity: int, windows: tuple[int | None, ...], device: torch.device
) -> tuple[StepPlan, torch.Tensor]:
    """Return the plan of a pass and its token ids int64[n] on ``device``."""
    single = feed.decoding == len(feed.slots) and bool((feed.counts == 1).all())
    if single:
        positions, slots = feed.starts, feed.slots
    else:
        offsets = np.cumsum(feed.counts) - feed.counts
        positions = np.arange(len(feed.tokens)) - np.repeat(offsets - feed.starts, feed.counts)
        slots = np.repeat(feed.slots, feed.counts)
    position_tensor = _to(positions, device)
    blocks: list[QueryBlock] = []
    put: torch.Tensor | None = None
    parts = _split_decoding(feed) if feed.decoding else []
    if single and len(parts) == 1 and (rows := _neighbours(feed.slots)) is not None:
        blocks.append(QueryBlock(rows, position_tensor[:, None], _reach(feed.starts + 1, capacity)))
    else:
        offsets = np.cumsum(feed.counts) - feed.counts
        parts += _group_prefill(feed)
        order: list[Int64Array] = []
        done = 0
        for part in parts:
            counts = feed.counts[part]
            width = int(counts.max())
            local = np.minimum(np.arange(width), counts[:, None] - 1)
            take = offsets[part][:, None] + local
            at = feed.starts[part][:, None] + local
            blocks.append(
                QueryBlock(
                    rows=_rows(feed.slots[part], device),
                    positions=_to(at, device),
                    reach=_reach(at.max() + 1, capacity),
                    take=_to(take.reshape(-1), device),
                    fresh=width > 1 and not feed.starts[part].any(),
                )
            )
            # The place of each real query among the padded ones, put where the packed step has it.
            place = np.empty((2, int(counts.sum())), np.int64)
            real = np.arange(width) < counts[:, None]
            place[0] = take[real]
            place[1] = done + np.flatnonzero(real.reshape(-1))
            order.append(place)
            done += take.size
        merged = np.concatenate(order, axis=1)
        places = np.empty(len(feed.tokens), np.int64)
        places[merged[0]] = merged[1]
        put = _to(places, device)
    plan = StepPlan(slots=_to(slots, device), positions=position_tensor, blocks=blocks, put=put, windows=windows)
    return plan, _to(feed.tokens, device)


def _split_decoding(feed: Feed) -> list[Int64Array]:
    """Split decoding rows into blocks: by the length of their drafts where padding would dominate, then by reach."""
    counts = feed.counts[: feed.decoding]
    everything = np.arange(feed.decoding)
    if feed.decoding * int(counts.max()) < _RAGGED * int(counts.sum()):
        return _split_by_reach(feed, everything)
    kinds = np.searchsorted(_WIDTHS, counts)
    return [part for kind in np.unique(kinds) for part in _split_by_reach(feed, np.flatnonzero(kinds == kind))]


def _split_by_reach(feed: Feed, rows: Int64Array) -> list[Int64Array]:
    """Split rows into neighbouring blocks when their lengths differ enough to pay for more kernel calls."""
    n = len(rows)
    if n < 2 * _SPLIT_ROWS:
        return [rows]
    reach = feed.starts + feed.counts
    parts = np.array_split(rows, n // _SPLIT_ROWS)
    whole = n * int(reach[rows].max())
    split = sum(len(p) * int(reach[p].max()) for p in parts)
    return parts if split < 0.75 * whole else [rows]


def _group_prefill(feed: Feed) -> list[Int64Array]:
    """Group prefilled rows of like length, so that queries are padded little."""
    rows = np.arange(feed.decoding, len(feed.slots))
    groups: list[list[int]] = []
    widest = total = 0
    fresh = False
    for i in sorted(rows.tolist(), key=lambda r: (feed.starts[r] == 0, feed.counts[r]), reverse=True):
        count = int(feed.counts[i])
        starts_fresh = bool(feed.starts[i] == 0)
        if groups and fresh == starts_fresh and (len(groups[-1]) + 1) * widest * (1 - _PADDING) <= total + count:
            groups[-1].append(i)
            total += count
        else:
            groups.append([i])
            widest, total, fresh = count, count, starts_fresh
    return [np.array(g) for g in groups]


def _reach(length: int | Int64Array, capacity: int) -> int:
    return min(capacity, -(-int(np.max(length)) // _REACH) * _REACH)


def _neighbours(slots: Int64Array) -> slice | None:
    """The slots as a slice, when they ascend without a gap."""
    first, n = int(slots[0]), len(slots)
    if int(slots[-1]) - first + 1 == n and bool((np.diff(slots) == 1).all()):
        return slice(first, first + n)
    return None


def _rows(slots: Int64Array, device: torch.device) -> slice | torch.Tensor:
    return _neighbours(slots) or _to(slots, device)


def _to(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
