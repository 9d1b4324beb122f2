"""How long answers are: a log-normal law with prompt, sampling and drift effects, or the lengths of a recorded run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np
import numpy.typing as npt

from actors.length_predictor.records import Prediction
from storage.errors import UserError
from storage.history.archive import ArchiveError, RolloutArchive
from storage.records import GroupKey

Int64Array = npt.NDArray[np.int64]

_NORMAL = NormalDist()
_Z90 = _NORMAL.inv_cdf(0.9)


class LengthModel(Protocol):
    """Gives the lengths of answers, always the same for the same question."""

    def draw(self, key: GroupKey, attempt: int, samples: int) -> Int64Array:
        """Lengths of the answers of a group in tokens, int64[samples], at least 1; another attempt draws afresh."""

    def forecast(self, key: GroupKey, samples: int) -> Prediction | None:
        """What a predictor would say before the group runs; None when it is silent."""

    def describe(self) -> str:
        """One line about the law, for tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalLengths:
    """log L = log p50 + a(prompt) + c(prompt, epoch) + b(sample), all normal, cut off at ``cap``.

    Defaults: TailSieve's P50, P90 and cap; its split of the variance of L into prompt .65, sampling .28 and drift .07
    is applied to log L, an approximation.

    Attributes:
        p50: Median length in tokens.
        p90: 90th percentile in tokens.
        cap: Longest answer in tokens; longer ones are truncated there.
        prompt_share: Share of the variance that belongs to the prompt.
        drift_share: Share that changes with the epoch; the rest is sampling.
        runaway_share: Share of answers that never stop and run into the cap.
        runaway_prompts: Share of prompts that such answers are confined to.
        correlation: Correlation of the predictor with the prompt effect: 1 is an oracle of it, 0 a silent predictor.
        seed: Seed of everything.
    """

    p50: float = 1160.0
    p90: float = 4115.0
    cap: int = 16_384
    prompt_share: float = 0.65
    drift_share: float = 0.07
    runaway_share: float = 0.0
    runaway_prompts: float = 1.0
    correlation: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ``UserError`` for a law that does not exist."""
        if not 0 < self.p50 <= self.p90 or self.cap < 1:
            raise UserError(
                f"lengths need 0 < P50 <= P90 and a cap of at least 1, got {self.p50:g}, {self.p90:g}, {self.cap}"
            )
        if self.prompt_share < 0 or self.drift_share < 0 or self.prompt_share + self.drift_share > 1:
            raise UserError(
                "the shares of prompts and drift in the variance of lengths must lie in [0, 1], and their sum too"
            )
        if not 0 <= self.runaway_share <= self.runaway_prompts <= 1:
            raise UserError(
                f"the share of runaway answers ({self.runaway_share:g}) must lie between 0 and the share of prompts "
                f"that have any ({self.runaway_prompts:g}), which is at most 1"
            )
        if not 0 <= self.correlation <= 1:
            raise UserError(f"the correlation of the predictor must lie in [0, 1], not {self.correlation:g}")

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm of the length."""
        return math.log(self.p90 / self.p50) / _Z90

    @classmethod
    def with_long_share(cls, share: float, *, multiple: float = 4.0, base: LogNormalLengths) -> LogNormalLengths:
        """The law with the median of ``base`` in which ``share`` of the answers exceed ``multiple`` medians."""
        sigma = math.log(multiple) / _NORMAL.inv_cdf(1.0 - share)
        return replace(base, p90=base.p50 * math.exp(_Z90 * sigma))

    def draw(self, key: GroupKey, attempt: int, samples: int) -> Int64Array:
        """As in the protocol."""
        sigma = self.sigma
        sampling = math.sqrt(1.0 - self.prompt_share - self.drift_share)
        rng = np.random.default_rng((self.seed, 1, key.prompt, key.epoch, key.duplicate, attempt))
        log_length = (
            math.log(self.p50)
            + sigma * math.sqrt(self.prompt_share) * self._prompt_effect(key.prompt)[0]
            + sigma * math.sqrt(self.drift_share) * self._drift(key)
            + sigma * sampling * rng.standard_normal(samples)
        )
        lengths = np.clip(np.ceil(np.exp(log_length)), 1, self.cap).astype(np.int64)
        if self.runaway_share and self._runs_away(key.prompt):
            lengths[rng.random(samples) < self.runaway_share / self.runaway_prompts] = self.cap
        return lengths

    def forecast(self, key: GroupKey, samples: int) -> Prediction | None:
        """As in the protocol; from the law itself, given what the predictor sees of the prompt."""
        if self.correlation == 0:
            return None
        effect, noise = self._prompt_effect(key.prompt)
        seen = self.correlation * effect + math.sqrt(1 - self.correlation**2) * noise
        centre = math.log(self.p50) + self.sigma * math.sqrt(self.prompt_share) * self.correlation * seen
        sampling = self.sigma * math.sqrt(1.0 - self.prompt_share - self.drift_share)
        unknown = self.sigma * math.sqrt(self.prompt_share * (1 - self.correlation**2) + self.drift_share)
        return _prediction(seen, centre, sampling, unknown, samples, float(self.cap), self.correlation)

    def describe(self) -> str:
        """As in the protocol."""
        predictor = f"predictor correlation {self.correlation:g}" if self.correlation else "predictor silent"
        runaways = f"{self.runaway_share:.1%} runaways, " if self.runaway_share else ""
        return (
            f"log-normal lengths, P50 {self.p50:,.0f}, P90 {self.p90:,.0f}, cap {self.cap:,}, prompt share "
            f"{self.prompt_share:g}, {runaways}{predictor}"
        )

    def _prompt_effect(self, prompt: int) -> tuple[float, float]:
        effect, noise = np.random.default_rng((self.seed, 0, prompt)).standard_normal(2)
        return float(effect), float(noise)

    def _runs_away(self, prompt: int) -> bool:
        return bool(np.random.default_rng((self.seed, 4, prompt)).random() < self.runaway_prompts)

    def _drift(self, key: GroupKey) -> float:
        return float(np.random.default_rng((self.seed, 2, key.prompt, key.epoch)).standard_normal())


class RecordedLengths:
    """The lengths that a run recorded, prompt by prompt.

    The n-th visit of a simulated prompt takes the lengths of the n-th recorded visit (in turn); a group that restarts,
    or needs more samples than were recorded, draws from all recorded answers to that prompt.
    """

    def __init__(self, groups: Mapping[int, Sequence[Int64Array]], *, correlation: float = 0.0, seed: int = 0) -> None:
        """Take recorded lengths.

        Args:
            groups: For each recorded prompt its visits, int64[samples] tokens each.
            correlation: As in :class:`LogNormalLengths`, with the mean log-length of the prompt as its effect.
            seed: Seed of the draws.

        Raises:
            UserError: There are no lengths, or the correlation is out of range.
        """
        self._prompts = [list(visits) for _, visits in sorted(groups.items()) if visits]
        if not self._prompts:
            raise UserError("the recorded run holds no answers (see tracking.rollouts): simulate with --p50 and --p90")
        if not 0 <= correlation <= 1:
            raise UserError(f"the correlation of the predictor must lie in [0, 1], not {correlation:g}")
        self._all = [np.concatenate(visits) for visits in self._prompts]
        self._correlation = correlation
        self._seed = seed
        logs = [np.log(np.maximum(lengths, 1)) for lengths in self._all]
        self._effects = np.array([log.mean() for log in logs])
        self._centre, self._spread = float(self._effects.mean()), float(self._effects.std())
        self._longest = float(max(lengths.max() for lengths in self._all))
        self._within = float(np.sqrt(np.mean([log.var() for log in logs])))

    @classmethod
    def read(cls, directory: Path, *, correlation: float = 0.0, seed: int = 0) -> RecordedLengths:
        """Read the training rollouts of a run (``RUN/rollouts``); raises ``UserError`` when none can be read."""
        groups: dict[int, dict[tuple[int, int], list[int]]] = {}
        try:
            for _, table in RolloutArchive(directory).iterate():
                rows = table.select(["prompt", "epoch", "duplicate", "length"]).to_pydict().values()
                for prompt, epoch, duplicate, length in zip(*rows, strict=True):
                    groups.setdefault(prompt, {}).setdefault((epoch, duplicate), []).append(length)
        except ArchiveError as error:
            raise UserError(str(error)) from error
        visits = {
            prompt: [np.array(lengths, np.int64) for _, lengths in sorted(found.items())]
            for prompt, found in groups.items()
        }
        return cls(visits, correlation=correlation, seed=seed)

    def draw(self, key: GroupKey, attempt: int, samples: int) -> Int64Array:
        """As in the protocol."""
        place = key.prompt % len(self._prompts)
        visits = self._prompts[place]
        # Prompts beyond the recorded ones are further visits of those.
        visit = visits[(key.epoch + key.duplicate + key.prompt // len(self._prompts)) % len(visits)]
        if attempt == 0 and len(visit) >= samples:
            return np.maximum(visit[:samples], 1)
        rng = np.random.default_rng((self._seed, 1, key.prompt, key.epoch, key.duplicate, attempt))
        drawn: Int64Array = np.maximum(rng.choice(self._all[place], samples), 1)
        return drawn

    def forecast(self, key: GroupKey, samples: int) -> Prediction | None:
        """As in the protocol."""
        if self._correlation == 0:
            return None
        place = key.prompt % len(self._prompts)
        noise = float(np.random.default_rng((self._seed, 0, place)).standard_normal())
        effect = (float(self._effects[place]) - self._centre) / max(self._spread, 1e-9)
        seen = self._correlation * effect + math.sqrt(1 - self._correlation**2) * noise
        centre = self._centre + self._spread * self._correlation * seen
        unknown = self._spread * math.sqrt(1 - self._correlation**2)
        return _prediction(seen, centre, self._within, unknown, samples, self._longest, self._correlation)

    def describe(self) -> str:
        """As in the protocol."""
        lengths = np.concatenate(self._all)
        p50, p90 = np.percentile(lengths, [50, 90])
        return (
            f"recorded lengths of {len(lengths):,} answers to {len(self._prompts):,} prompts, P50 {p50:,.0f}, "
            f"P90 {p90:,.0f}, longest {lengths.max():,}"
        )


def _prediction(
    score: float, centre: float, sampling: float, unknown: float, samples: int, cap: float, correlation: float
) -> Prediction:
    """Quantiles of a log-normal length: ``centre`` is the mean of its logarithm, spread by samples and the unknown."""
    p50 = min(math.exp(centre), cap)
    p90 = min(math.exp(centre + _Z90 * math.hypot(sampling, unknown)), cap)
    longest = min(math.exp(centre + sampling * _NORMAL.inv_cdf(0.5 ** (1 / samples))), cap)
    return Prediction(rank=_NORMAL.cdf(score), p50=p50, p90=max(p50, p90), longest=longest, confidence=correlation)
