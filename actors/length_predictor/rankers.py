"""What every ranker has, and the two that remember or regress: per-prompt history and the output-length ranker.

All rankers predict the same number, the logarithm of the longest answer of a prompt's group in tokens, because a step
waits for that one. What they say is turned into tokens by their own recent residuals, so that a ranker that is always
20 % low, or that lags behind a policy whose answers grow, is corrected without being retrained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.length_predictor.features import FEATURES, UNPENALISED, feature_matrix
from actors.length_predictor.records import FinishedGroup, Query, identity

Float64Array = npt.NDArray[np.float64]
State = dict[str, npt.NDArray[Any]]

QUANTILES = 3
"""Columns of quantiles, in tokens: P50 and P90 of one answer, P50 of the group's longest."""

_PRIOR_SIGMA = 1.0  # lognormal spread of answers before any is seen; 0.99 fits the published P50 and P90 (TailSieve)
_PRIOR_P90 = 1.2816 * _PRIOR_SIGMA
_FEWEST_RESIDUALS = 8


class Residuals:
    """The last residuals of a ranker, in log tokens: of single answers and of the longest of a group."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._answers = np.zeros(0)
        self._longest = np.zeros(0)
        self._offsets: Float64Array | None = None

    def add(self, scores: Float64Array, groups: Sequence[FinishedGroup]) -> None:
        """Take in what was predicted, float64[n] with nan for no opinion, and what came true."""
        known = [(s, g) for s, g in zip(scores, groups, strict=True) if np.isfinite(s)]
        if not known:
            return
        answers = [np.log(np.maximum(1, group.lengths)) - score for score, group in known]
        longest = [group.log_longest - score for score, group in known]
        self._answers = np.concatenate([self._answers, *answers])[-self._size :]
        self._longest = np.concatenate([self._longest, longest])[-self._size :]
        self._offsets = None

    def offsets(self) -> Float64Array:
        """Return float64[QUANTILES]: what to add to a score for the log of each quantile."""
        if self._offsets is None:
            if len(self._longest) < _FEWEST_RESIDUALS:
                self._offsets = np.array([-_PRIOR_SIGMA, _PRIOR_P90 - _PRIOR_SIGMA, 0.0])
            else:
                p50, p90 = np.quantile(self._answers, (0.5, 0.9))
                self._offsets = np.array([p50, p90, np.median(self._longest)])
        return self._offsets

    def state(self) -> State:
        """Return arrays from which :meth:`load_state` restores this."""
        return {"answers": self._answers, "longest": self._longest}

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over what :meth:`state` returned."""
        self._answers = np.asarray(state["answers"], np.float64)[-self._size :]
        self._longest = np.asarray(state["longest"], np.float64)[-self._size :]
        self._offsets = None


class Ranker(ABC):
    """Orders prompts by the length to expect."""

    name: str
    """Its name in figures and weights."""
    prior: float
    """Its Spearman correlation before one was measured."""

    def __init__(self) -> None:
        self.residuals = Residuals()

    @abstractmethod
    def rank(self, queries: Sequence[Query]) -> Float64Array:
        """Return float64[n]: log tokens of the longest answer to expect; nan where there is no opinion."""

    @abstractmethod
    def observe(self, groups: Sequence[FinishedGroup]) -> None:
        """Learn from finished groups."""

    def quantiles(self, scores: Float64Array) -> Float64Array:
        """Return float64[n, QUANTILES] in tokens for scores of :meth:`rank`; nan stays nan."""
        return np.asarray(np.exp(scores[:, None] + self.residuals.offsets()), np.float64)

    @abstractmethod
    def state(self) -> State:
        """Return arrays, of bounded size, from which :meth:`load_state` restores what was learnt."""

    @abstractmethod
    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over what :meth:`state` returned; raises ``KeyError`` or ``ValueError`` for anything else."""


class HistoryRanker(Ranker):
    """What the prompt's own groups were like: moving means of the mean length and of the longest.

    Both estimate the same thing. The mean of a group is steadier, the longest is what is asked for: the score is their
    average, after the mean was shifted by the usual distance between the two.
    """

    name = "history"
    prior = 0.7  # a perfect prompt effect correlates 0.91 with a group's longest, one noisy visit less
    _RATE = 0.5  # weight of the latest visit, once there were two: policies change between epochs
    _SPREAD_RATE = 0.02

    def __init__(self, max_prompts: int) -> None:
        """Start empty; beyond ``max_prompts`` the prompt that was finished longest ago is forgotten."""
        super().__init__()
        self._max_prompts = max_prompts
        self._seen: OrderedDict[int, tuple[float, float]] = OrderedDict()  # log mean, log longest
        self._spread = 0.0
        self._groups = 0

    def __len__(self) -> int:
        return len(self._seen)

    def rank(self, queries: Sequence[Query]) -> Float64Array:
        """See :meth:`Ranker.rank`."""
        nothing = (np.nan, np.nan)
        known = np.array([self._seen.get(identity(query.text), nothing) for query in queries]).reshape(-1, 2)
        return np.asarray((known[:, 0] + self._spread + known[:, 1]) / 2, np.float64)

    def observe(self, groups: Sequence[FinishedGroup]) -> None:
        """See :meth:`Ranker.observe`."""
        for group in groups:
            name = identity(group.text)
            mean, longest = group.log_mean, group.log_longest
            self._groups += 1
            rate = max(self._SPREAD_RATE, 1 / self._groups)
            self._spread += rate * (longest - mean - self._spread)
            before = self._seen.pop(name, None)
            if before is not None:
                mean = before[0] + self._RATE * (mean - before[0])
                longest = before[1] + self._RATE * (longest - before[1])
            self._seen[name] = (mean, longest)
            if len(self._seen) > self._max_prompts:
                self._seen.popitem(last=False)

    def state(self) -> State:
        """See :meth:`Ranker.state`."""
        return {
            "prompts": np.array(list(self._seen), np.uint64),
            "values": np.array(list(self._seen.values()), np.float64).reshape(-1, 2),
            "spread": np.array([self._spread, self._groups]),
        }

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """See :meth:`Ranker.load_state`."""
        rows = zip(state["prompts"].tolist(), state["values"].tolist(), strict=True)
        kept = list(rows)[-self._max_prompts :]
        self._seen = OrderedDict((int(name), (mean, longest)) for name, (mean, longest) in kept)
        self._spread, self._groups = float(state["spread"][0]), int(state["spread"][1])


class OutputLengthRanker(Ranker):
    """Ridge regression of the log length on features of the prompt, updated with every finished group.

    Recursive least squares in information form with exponential forgetting: sums of outer products decay and grow, and
    the coefficients are solved for when a prediction is due. That costs the same for one group and for a hundred, has
    no step size, and does not lose definiteness over millions of updates.
    """

    name = "output_length"
    prior = 0.2  # prompt features correlate below 0.3 with output length in published measurements
    _FEWEST_GROUPS = 8
    _RIDGE, _DENSE_RIDGE = 1.0, 0.01

    def __init__(self, half_life: float) -> None:
        """Start empty; an observation counts half after ``half_life`` further groups."""
        super().__init__()
        self._decay = 0.5 ** (1 / half_life)
        self._penalty = np.full(FEATURES, self._RIDGE)
        self._penalty[:UNPENALISED] = self._DENSE_RIDGE
        self._penalty[0] = 1e-6
        self._gram = np.zeros((FEATURES, FEATURES))
        self._moment = np.zeros(FEATURES)
        self._groups = 0
        self._coefficients: Float64Array | None = None

    def rank(self, queries: Sequence[Query]) -> Float64Array:
        """See :meth:`Ranker.rank`."""
        if self._groups < self._FEWEST_GROUPS:
            return np.full(len(queries), np.nan)
        coefficients = self._solve()
        return np.asarray(feature_matrix([query.text for query in queries]) @ coefficients, np.float64)

    def _solve(self) -> Float64Array:
        if self._coefficients is None:
            solved = np.linalg.solve(self._gram + np.diag(self._penalty), self._moment)
            self._coefficients = np.asarray(solved, np.float64)
        return self._coefficients

    def observe(self, groups: Sequence[FinishedGroup]) -> None:
        """See :meth:`Ranker.observe`."""
        if not groups:
            return
        features = feature_matrix([group.text for group in groups])
        targets = np.array([group.log_longest for group in groups])
        # The last group of the batch counts 1, the one before it one decay less, and so on.
        weights = self._decay ** np.arange(len(groups))[::-1]
        decay = self._decay ** len(groups)
        self._gram = decay * self._gram + (features * weights[:, None]).T @ features
        self._moment = decay * self._moment + features.T @ (weights * targets)
        self._groups += len(groups)
        self._coefficients = None

    def state(self) -> State:
        """See :meth:`Ranker.state`."""
        return {
            "gram": self._gram[np.triu_indices(FEATURES)],
            "moment": self._moment,
            "groups": np.array([self._groups], np.int64),
        }

    def load_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """See :meth:`Ranker.load_state`."""
        gram = np.zeros((FEATURES, FEATURES))
        gram[np.triu_indices(FEATURES)] = state["gram"]
        gram += np.triu(gram, 1).T
        if state["moment"].shape != (FEATURES,):
            raise ValueError(f"{len(state['moment'])} features instead of {FEATURES}")
        self._gram, self._moment = gram, np.array(state["moment"], np.float64)
        self._groups = int(state["groups"][0])
        self._coefficients = None
