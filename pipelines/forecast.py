"""What drafting would bring, read off a run's own rollouts: the core of ``slipstream history forecast RUN``.

Recorded answers are walked in the order in which they were written. Each is drafted from what was known before it
(earlier visits of its prompt, and siblings as far as they had got) and verified against what it says. Acceptance is
learned on the way from the positions that were drafted, as in a rollout. No model is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.drafts.options import SpeculationOptions
from actors.drafts.pack import DraftPack, build_pack
from actors.rollout.draft_cost import PassCost
from actors.rollout.history_drafts import HistoryDrafts
from pipelines.recorded_steps import RecordedStep, four_grams, recorded_steps
from pipelines.replay import OracleLengths, Totals, replay
from storage.errors import UserError
from storage.history.archive import RolloutArchive
from storage.records import TRAIN_SPLIT

COST_RATIOS = (0.01, 0.03, 0.1, 0.3)
"""Cost of one more draft token relative to a row's share of a plain decoding pass."""


@dataclass(frozen=True, slots=True)
class DrafterForecast:
    """One line of the table; answers without history are left out.

    Attributes:
        drafter: Its name.
        ratio: Cost ratio that it was tuned for; NaN for rules that do not depend on it.
        acceptance_length: Tokens that a row writes in a pass on average.
        acceptance: Share of draft tokens that are accepted.
        speedups: Speed-up by cost ratio (only its own for one that was tuned).
    """

    drafter: str
    ratio: float
    acceptance_length: float
    acceptance: float
    speedups: dict[float, float]


@dataclass(frozen=True, slots=True)
class EpochForecast:
    """How predictable an epoch was.

    Attributes:
        epoch: Number of the epoch.
        answers: Answers in it; tokens: their tokens.
        entropy: Mean of -log p over the sampled tokens, which estimates the entropy of a token. Unit: nats.
        repeated: Share of 4-grams that an earlier visit's answers to the same prompt hold; NaN without earlier visits.
        distinct: Share of 4-grams of the epoch that are the first of their kind in it.
        acceptance_length: Of the calibrated rule at the middle cost ratio, answers without history included.
    """

    epoch: int
    answers: int
    tokens: int
    entropy: float
    repeated: float
    distinct: float
    acceptance_length: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a walk found.

    Attributes:
        drafters: One entry a drafter and, where it is tuned, cost ratio.
        epochs: One entry an epoch.
        ratios: Cost ratios of the table; the last one is the measured one where it was given.
    """

    drafters: tuple[DrafterForecast, ...]
    epochs: tuple[EpochForecast, ...]
    ratios: tuple[float, ...]

    def best(self, ratio: float) -> DrafterForecast:
        """Return the drafter with the highest speed-up at ``ratio``, the oracle left out."""
        able = [d for d in self.drafters if ratio in d.speedups and not d.drafter.startswith("oracle")]
        return max(able, key=lambda drafter: drafter.speedups[ratio])

    def oracle_share(self, ratio: float) -> float:
        """Return the acceptance length of the calibrated rule at ``ratio`` relative to the oracle's."""
        oracle = next(d for d in self.drafters if d.drafter == "oracle")
        calibrated = next(d for d in self.drafters if d.drafter == "calibrated" and d.ratio == ratio)
        return calibrated.acceptance_length / oracle.acceptance_length

    def rows(self) -> list[list[str]]:
        """Return the table of drafters as text, header first; tuned drafters share a line."""
        header = ["drafter", "acceptance length", "acceptance", *(f"c = {ratio:.3g}" for ratio in self.ratios)]
        lines = [header]
        for name in dict.fromkeys(d.drafter for d in self.drafters):
            entries = [d for d in self.drafters if d.drafter == name]
            speedups = {ratio: value for entry in entries for ratio, value in entry.speedups.items()}
            lines.append(
                [
                    name,
                    _span([entry.acceptance_length for entry in entries], "{:.2f}"),
                    _span([entry.acceptance for entry in entries], "{:.0%}"),
                    *(f"{speedups[ratio]:.2f}" if ratio in speedups else "" for ratio in self.ratios),
                ]
            )
        return lines

    def epoch_rows(self) -> list[list[str]]:
        """Return the table of epochs as text, header first."""
        header = [
            "epoch",
            "answers",
            "tokens",
            "entropy (nats)",
            "repeated 4-grams",
            "distinct 4-grams",
            "acceptance length",
        ]
        return [
            header,
            *(
                [
                    str(e.epoch),
                    str(e.answers),
                    str(e.tokens),
                    f"{e.entropy:.2f}",
                    "" if math.isnan(e.repeated) else f"{e.repeated:.0%}",
                    f"{e.distinct:.0%}",
                    f"{e.acceptance_length:.2f}",
                ]
                for e in self.epochs
            ),
        ]


def forecast(
    archive: RolloutArchive,
    options: SpeculationOptions | None = None,
    *,
    split: str = TRAIN_SPLIT,
    ratios: Sequence[float] = COST_RATIOS,
    measured_ratio: float | None = None,
    max_rows: int = 64,
) -> Forecast:
    """Walk the rollouts of a run once with every drafter.

    Args:
        archive: The run's rollouts.
        options: Window, recency, index and longest draft are read from here.
        split: Whose rollouts.
        ratios: Cost ratios of the table.
        measured_ratio: Ratio that was measured in the run, if it was.
        max_rows: Rows side by side.

    Raises:
        UserError: There are no rollouts, or no prompt was visited twice.
    """
    options = options or SpeculationOptions()
    ratios = (*ratios, measured_ratio) if measured_ratio is not None else tuple(ratios)
    drafters = list(_drafters(options, ratios))
    watched = next(d for d in drafters if d.name == "calibrated" and d.ratio == ratios[len(ratios) // 2])
    epochs: dict[int, _Epoch] = {}
    for number, step in enumerate(recorded_steps(archive, options, split)):
        pack = _pack(step, number, options)
        warm = any(prompt.answers for prompt in step.history)
        for drafter in drafters:
            drafter.source.add_pack(pack)
            totals = _play(step, drafter.source, PassCost(0.0, 1 - drafter.tuned, drafter.tuned), max_rows)
            if warm:
                drafter.totals.add(totals)
            if drafter is watched:
                epochs.setdefault(step.epoch, _Epoch()).note(step, totals)
    if not epochs:
        raise UserError(f"{archive.directory} has no rollouts of split {split!r}: run with tracking.rollouts on first")
    if not drafters[0].totals.passes:
        raise UserError(
            f"no prompt of {archive.directory} was visited twice, so nothing can be said: train for two epochs first"
        )
    return Forecast(
        tuple(drafter.result(ratios) for drafter in drafters),
        tuple(epochs[epoch].result(epoch) for epoch in sorted(epochs)),
        ratios,
    )


def predicted_speedup(
    archive: RolloutArchive,
    options: SpeculationOptions,
    cost: PassCost,
    *,
    max_rows: int,
    steps: Iterable[int] | None = None,
    split: str = TRAIN_SPLIT,
) -> float:
    """Predict how much faster rollouts are with ``options`` than without, from recorded answers and a cost of a pass.

    Args:
        archive: Rollouts of a run, drafted or not: exact drafts do not change them.
        options: Any ``source`` but off; ``verify`` must be exact.
        cost: What a pass costs, measured (see :class:`actors.rollout.draft_cost.CostFit`) or paced.
        max_rows: Slots of the engine.
        steps: Steps to predict; all by default. Earlier steps are walked too, they are the history.
        split: Whose rollouts.

    Raises:
        UserError: The options say lenient, which only a model can predict, or none of the steps has rollouts.
    """
    if options.source == "off" or options.verify == "lenient":
        raise UserError(
            "a forecast needs speculation.source history, previous_epoch or hybrid and speculation.verify exact: "
            "lenient reuse depends on the new weights"
        )
    wanted = None if steps is None else set(steps)
    source = HistoryDrafts(options, cost=cost)
    plain = drafted = 0.0
    for number, step in enumerate(recorded_steps(archive, options, split)):
        source.add_pack(_pack(step, number, options))
        totals = _play(step, source, cost, max_rows)
        if wanted is None or step.number in wanted:
            drafted += totals.seconds
            plain += replay(step.answers, None, cost, max_rows).seconds
    if not drafted:
        raise UserError(f"{archive.directory} has no rollouts of split {split!r} in the steps asked for")
    return plain / drafted


@dataclass(slots=True)
class _Drafter:
    """A draft source that is walked along, and what it came to so far."""

    name: str
    ratio: float
    source: HistoryDrafts
    totals: Totals = field(default_factory=Totals)

    @property
    def tuned(self) -> float:
        """Cost ratio that its rule is told; any will do for a rule that does not ask."""
        return self.ratio if not math.isnan(self.ratio) else COST_RATIOS[1]

    def result(self, ratios: Sequence[float]) -> DrafterForecast:
        """Return its line of the table."""
        valid = ratios if math.isnan(self.ratio) else (self.ratio,)
        return DrafterForecast(
            self.name,
            self.ratio,
            self.totals.acceptance_length,
            self.totals.acceptance,
            {ratio: self.totals.speedup(ratio) for ratio in valid},
        )


class _Epoch:
    """Figures of one epoch, added up."""

    def __init__(self) -> None:
        self._answers = self._tokens = 0
        self._surprise = 0.0
        self._grams = self._repeated = 0
        self._kinds: list[npt.NDArray[np.uint64]] = []
        self._count = 0
        self._totals = Totals()

    def note(self, step: RecordedStep, totals: Totals) -> None:
        """Add a step."""
        self._totals.add(totals)
        for sample, visits in zip(step.samples, step.visits, strict=True):
            written = sample.policy_mask()
            self._answers += 1
            self._tokens += int(written.sum())
            self._surprise -= float(sample.logprobs()[written].sum(dtype=np.float64))
            grams = four_grams(sample.token_ids())
            self._count += len(grams)
            self._kinds.append(np.unique(grams))
            if len(visits.grams):
                self._grams += len(grams)
                self._repeated += int(np.isin(grams, visits.grams).sum())

    def result(self, epoch: int) -> EpochForecast:
        """Return the figures."""
        kinds = len(np.unique(np.concatenate(self._kinds)))
        return EpochForecast(
            epoch,
            self._answers,
            self._tokens,
            self._surprise / self._tokens if self._tokens else math.nan,
            self._repeated / self._grams if self._grams else math.nan,
            kinds / self._count if self._count else math.nan,
            self._totals.acceptance_length,
        )


def _drafters(options: SpeculationOptions, ratios: Sequence[float]) -> Iterator[_Drafter]:
    def made(**changes: Any) -> SpeculationOptions:
        fields = {"gate": "always", "verify": "exact", "draft_length": "calibrated", "source": "history", **changes}
        return options.model_copy(update=fields)

    for name, source in (("calibrated", "history"), ("hybrid", "hybrid"), ("previous_epoch", "previous_epoch")):
        for ratio in ratios:
            drafts = HistoryDrafts(made(source=source), cost=PassCost(0.0, 1 - ratio, ratio))
            yield _Drafter(name, ratio, drafts)
    anything = PassCost(0.0, 1.0, 0.0)
    for match in (3, 4, 5):
        for length in (5, 10):
            fixed = made(draft_length="fixed", match_length=match, draft_tokens=length)
            yield _Drafter(f"fixed k={match} m={length}", math.nan, HistoryDrafts(fixed, cost=anything))
    yield _Drafter("aimd", math.nan, HistoryDrafts(made(draft_length="aimd", match_length=3), cost=anything))
    oracle = HistoryDrafts(made(), cost=anything, rule=OracleLengths(options.max_draft))
    yield _Drafter("oracle", math.nan, oracle)


def _pack(step: RecordedStep, generation: int, options: SpeculationOptions) -> DraftPack:
    return build_pack(
        step.history,
        generation=generation,
        recency=options.recency,
        index=options.index,
        order=options.order,
        heat_half_life=options.heat_half_life,
    )


def _play(step: RecordedStep, source: HistoryDrafts, cost: PassCost, max_rows: int) -> Totals:
    for recorded, (key, sample) in zip(step.answers, step.slots, strict=True):
        source.register(recorded.request.request_id, key, sample)
    totals = replay(step.answers, source, cost, max_rows)
    for recorded in step.answers:
        source.release(recorded.request.request_id)
    return totals


def _span(values: Sequence[float], pattern: str) -> str:
    """One number, or the two ends of several."""
    texts = [pattern.format(value) for value in values]
    return texts[0] if texts[0] == texts[-1] else f"{texts[-1]} to {texts[0]}"
