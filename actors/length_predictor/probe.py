"""The group probe: siblings that have finished already tell about those that have not.

Seer (arXiv 2511.14617) runs one probe of a group ahead and ranks the rest by it. Here any sibling that finishes is the
probe, and the more of them have finished, the tighter the bound: the longest of a group is never below the longest
so far. How far it usually ends above that is learnt for each number of finished siblings. When siblings start together,
the first to finish is the shortest, and the same offset corrects for that.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.length_predictor.rankers import Float64Array, Ranker, State
from actors.length_predictor.records import FinishedGroup, Observation, Query

_MOST_SIBLINGS = 1024
_MOST_GROUPS = 65_536
_LEARNT_SHARE = 0.5


@dataclass(slots=True)
class OpenGroup:
    """A group of which some siblings have finished: its prompt, its size in all, and the lengths so far."""

    text: str
    size: int
    lengths: list[int] = field(default_factory=list)

    def finished(self) -> FinishedGroup:
        """Return it as a group that is over."""
        return FinishedGroup(text=self.text, lengths=tuple(self.lengths))


class OpenGroups:
    """Groups that are under way, bounded: beyond the bound the one that was heard of longest ago is closed."""

    def __init__(self, most: int = _MOST_GROUPS) -> None:
        self._most = most
        self._open: OrderedDict[str, OpenGroup] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, group: str) -> OpenGroup | None:
        """Return a group that is under way; None for one that is not known."""
        return self._open.get(group) if group else None

    def add(self, observation: Observation) -> list[tuple[str, FinishedGroup]]:
        """Take in a finished answer; returns the groups, with their names, that are over because of it.

        A group that had to make room counts when at least half of it had finished: what is missing has failed or was
        given up, and its longest answer is known well enough.
        """
        if not observation.group:
            return [("", FinishedGroup(text=observation.text, lengths=(observation.length,)))]
        found = self._open.setdefault(observation.group, OpenGroup(observation.text, observation.group_size))
        self._open.move_to_end(observation.group)
        found.lengths.append(observation.length)
        if len(found.lengths) >= found.size:
            del self._open[observation.group]
            return [(observation.group, found.finished())]
        if len(self._open) > self._most:
            name, oldest = self._open.popitem(last=False)
            return [(name, oldest.finished())] if len(oldest.lengths) >= _LEARNT_SHARE * oldest.size else []
        return []


class GroupProbe(Ranker):
    """Ranks groups by their siblings that have finished; no opinion before the first has."""

    name = "group_probe"
    prior = 0.7  # a single random sibling correlates 0.74 with the group's longest (derived from published variances)
    _RATE = 0.02

    def __init__(self, groups: OpenGroups) -> None:
        """Read from ``groups``, which the predictor fills."""
        super().__init__()
        self._groups = groups
        self._above = np.zeros(_MOST_SIBLINGS)  # log(longest of all / longest of the first k), by k
        self._counts = np.zeros(_MOST_SIBLINGS, np.int64)

    def rank(self, queries: Sequence[Query]) -> Float64Array:
        """See :meth:`Ranker.rank`."""
        found = [self._groups.get(query.group) for query in queries]
        return np.array([np.nan if group is None else self.score(group.lengths) for group in found])

    def score(self, lengths: Sequence[int]) -> float:
        """Return what the siblings that have finished, at least one, let expect of the longest."""
        return math.log(max(1, *lengths)) + float(self._above[min(len(lengths), _MOST_SIBLINGS - 1)])

    def observe(self, groups: Sequence[FinishedGroup]) -> None:
        """See :meth:`Ranker.observe`."""
        for group in groups:
            longest = group.log_longest
            for count, so_far in enumerate(accumulate(group.lengths[: _MOST_SIBLINGS - 1], max), start=1):
                if count == len(group.lengths):
                    break
                self._counts[count] += 1
                rate = max(self._RATE, 1 / self._counts[count])
                self._above[count] += rate * (longest - math.log(max(1, so_far)) - self._above[count])

    def state(self) -> State:
        """See :meth:`Ranker.state`; groups under way are not part of it, their answers start anew on resume."""
        return {"above": self._above, "counts": self._counts}

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """See :meth:`Ranker.load_state`."""
        if state["above"].shape != self._above.shape or state["counts"].shape != self._counts.shape:
            raise ValueError(f"the group probe keeps {_MOST_SIBLINGS} offsets, not {state['above'].shape}")
        self._above, self._counts = state["above"].astype(np.float64), state["counts"].astype(np.int64)
