"""What a forward pass costs, learned while decoding: t = fixed * passes + row * rows + token * tokens + ragged.

``ragged`` is paid once by a pass in which some row feeds more than one token: an engine may have a quicker path for
plain decoding, and that difference must not be booked on the tokens.

Rows and tokens are equal while nothing is drafted or prefilled, so only their sum is known then. The fit says so: it
holds a weak prior, and it forgets only in directions that new steps excite (directional forgetting, Cao and Schwartz,
Automatica 36, 2000), so what drafting steps have taught survives a phase without drafts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.rollout.engine import StepStats
from storage.history.index.compiled import compiled

Float64Array = npt.NDArray[np.float64]

_WARM_UP = 8
"""Steps that are collected before the first fit, so that a slow first one is seen to be an exception."""
_OUTLIER = 3.0
"""A step that misses the prediction by more than this many typical deviations counts only in proportion."""
_PRIOR_SHAPE = (0.5, 0.4, 0.1, 0.0)
"""Prior of the shares of a plain pass: fixed, rows, tokens, ragged. Optimistic on tokens: one draft corrects it."""
_HOPE = 0.05
"""Price of a token, as a share of a row's part of a plain pass, at which drafts are tried out."""
_PRIOR_WEIGHT = 0.05
"""Weight of the prior, in steps."""

# What the fit remembers of times: that of a typical step in seconds, and the typical relative error.
_UNIT, _DEVIATION = 0, 1


@dataclass(frozen=True, slots=True)
class PassCost:
    """Coefficients of the time of a pass; not negative.

    Attributes:
        fixed: Per forward pass. Unit: seconds.
        row: Per row that emits tokens. Unit: seconds.
        token: Per token in the pass. Unit: seconds.
        ragged: Extra of a pass in which a row feeds several tokens. Unit: seconds.
    """

    fixed: float
    row: float
    token: float
    ragged: float = 0.0

    def seconds(self, rows: float, tokens: float, *, passes: int = 1, ragged: bool | None = None) -> float:
        """Return the time of a step; ``ragged`` defaults to whether there are more tokens than rows."""
        extra = self.ragged if (tokens > rows if ragged is None else ragged) else 0.0
        return self.fixed * passes + self.row * rows + self.token * tokens + extra

    def hopeful(self, rows: float) -> PassCost:
        """Return a cost with the same plain pass of ``rows`` rows and tokens that are cheap: to try drafts out with."""
        token = min(self.token / 2, _HOPE * self.plain(rows) / max(rows, 1.0))
        return PassCost(self.fixed, self.row + self.token - token, token)

    def plain(self, rows: float) -> float:
        """Return the time of a pass that decodes one token in each of ``rows``."""
        return self.seconds(rows, rows)


class CostFit:
    """Fits :class:`PassCost` to the steps of an engine, least squares of relative errors.

    Attributes:
        steps: Steps used so far.
        drafting_steps: Of those, steps with draft tokens; at 0 the price of a token is the prior's or that of prefill.
    """

    def __init__(self, forget: float = 0.99) -> None:
        """Start empty; ``forget`` is the weight that a step keeps when the next one excites the same direction."""
        self.steps = 0
        self.drafting_steps = 0
        self._forget = forget
        self._early: list[tuple[tuple[float, float, float, float], float]] = []
        self._information = np.zeros((4, 4))
        self._moment = np.zeros(4)
        self._scale = np.array([0.0, 0.1])
        self._coefficients: Float64Array | None = None
        self._cost: PassCost | None = None

    @property
    def cost(self) -> PassCost | None:
        """The fit; ``None`` before enough steps were seen."""
        if self._cost is None and self._coefficients is not None:
            self._cost = PassCost(*self._coefficients.tolist())
        return self._cost

    def observe(self, stats: StepStats) -> None:
        """Learn from one step; one without a token, or of a time that is none, is ignored."""
        seconds = stats.paced_seconds
        if not stats.tokens or not 0 < seconds < math.inf:
            return
        ragged = stats.prefill_tokens > 0 or stats.drafted > 0
        feature = (float(stats.passes), float(stats.rows), float(stats.tokens), float(ragged))
        self.drafting_steps += stats.drafted > 0
        if self._coefficients is not None:
            self._learn(feature, seconds)
            return
        self._early.append((feature, seconds))
        if len(self._early) >= _WARM_UP:
            self._begin()

    def _begin(self) -> None:
        times = np.array([seconds for _, seconds in self._early])
        unit = float(np.median(times))
        typical = np.median(np.array([feature for feature, _ in self._early]), axis=0)
        rows = max(float(typical[1]), 1.0)
        scale = np.array([1.0, rows, rows, 1.0])
        prior = np.array(_PRIOR_SHAPE) * unit / scale
        self._scale[_UNIT] = unit
        self._information = np.diag(_PRIOR_WEIGHT * (scale / unit) ** 2)
        self._moment = self._information @ prior
        self._coefficients = prior
        for feature, seconds in self._early:
            if seconds <= _OUTLIER * unit:
                self._learn(feature, seconds)
        self._early.clear()

    def _learn(self, feature: tuple[float, float, float, float], seconds: float) -> None:
        assert self._coefficients is not None
        _learn(self._information, self._moment, self._coefficients, self._scale, *feature, seconds, 1.0 - self._forget)
        self._cost = None
        self.steps += 1


@compiled
def _learn(
    information: Float64Array,
    moment: Float64Array,
    coefficients: Float64Array,
    scale: Float64Array,
    passes: float,
    rows: float,
    tokens: float,
    ragged: float,
    seconds: float,
    lost: float,
) -> None:
    """Take in one step; in place. Compiled as a whole, since it stands between any two passes."""
    feature = np.array([passes, rows, tokens, ragged])
    # Relative errors: a long prefill must not outweigh a hundred decoding steps.
    predicted = max((coefficients * feature).sum(), 0.1 * scale[_UNIT])
    error = abs(seconds - predicted) / predicted
    limit = _OUTLIER * scale[_DEVIATION]
    weight = 1.0 if error <= limit else limit / error
    # Clipped, so one outlier moves it little and a lasting change of pace is accepted after some steps.
    scale[_DEVIATION] = max(0.9 * scale[_DEVIATION] + 0.1 * 1.25 * min(error, limit), 0.01)
    root = np.sqrt(weight) / predicted
    _update(information, moment, feature * root, seconds * root, lost * weight)
    coefficients[:] = _solve(information, moment)


@compiled
def _update(information: Float64Array, moment: Float64Array, feature: Float64Array, target: float, lost: float) -> None:
    """Forget the share ``lost`` of what is known along ``feature``, then add the observation; in place."""
    size = len(feature)
    seen = np.zeros(size)
    for i in range(size):
        for j in range(size):
            seen[i] += information[i, j] * feature[j]
    power = 0.0
    along = 0.0
    for i in range(size):
        power += seen[i] * feature[i]
        along += moment[i] * feature[i]
    for i in range(size):
        if power > 0.0:
            moment[i] -= lost * seen[i] * along / power
        for j in range(size):
            if power > 0.0:
                information[i, j] -= lost * seen[i] * seen[j] / power
            information[i, j] += feature[i] * feature[j]
        moment[i] += feature[i] * target


@compiled
def _solve(information: Float64Array, moment: Float64Array) -> Float64Array:
    """Minimise x'Ax/2 - b'x over x >= 0: tries each set of positive coefficients, there are 15 of 4."""
    size = len(moment)
    best = np.zeros(size)
    least = 0.0
    for chosen in range(1, 1 << size):
        members = np.zeros(size, np.int64)
        count = 0
        for i in range(size):
            if chosen >> i & 1:
                members[count] = i
                count += 1
        system = np.zeros((count, count + 1))
        for i in range(count):
            for j in range(count):
                system[i, j] = information[members[i], members[j]]
            system[i, count] = moment[members[i]]
        feasible = True
        for i in range(count):  # positive definite: no pivoting needed
            if system[i, i] <= 0.0:
                feasible = False
                break
            for k in range(i + 1, count):
                ratio = system[k, i] / system[i, i]
                for j in range(i, count + 1):
                    system[k, j] -= ratio * system[i, j]
        if not feasible:
            continue
        solution = np.zeros(size)
        for i in range(count - 1, -1, -1):
            value = system[i, count]
            for j in range(i + 1, count):
                value -= system[i, j] * solution[members[j]]
            solution[members[i]] = value / system[i, i]
            if solution[members[i]] < 0.0:
                feasible = False
                break
        if not feasible:
            continue
        height = 0.0
        for i in range(size):
            height -= 0.5 * moment[i] * solution[i]
        if height < least:
            least = height
            best = solution
    return best
