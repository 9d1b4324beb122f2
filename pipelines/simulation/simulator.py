"""Runs a schedule on a modelled cluster: the conductor's policy objects, source and ledger, and a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.scheduling.dispatch import Dispatcher
from pipelines.scheduling.forecasts import ForecastBook
from pipelines.scheduling.policy import SchedulePolicy, WaitingGroup
from pipelines.simulation.cluster import ClusterModel
from pipelines.simulation.groups import SimulatedGroup
from pipelines.simulation.lengths import Int64Array, LengthModel
from pipelines.simulation.measures import RoundRecord, RunSummary, summarise
from pipelines.simulation.round import SimulatedRound
from storage.ledger import Ledger
from storage.prompt_source import PromptSource
from storage.records import GroupKey, Prompt

_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained.

    Attributes:
        prompts_per_step: Groups that a step trains.
        samples: Answers in a group.
        prompts: Prompts in the data; an epoch gives each once. With a multiple of ``prompts_per_step`` every schedule
            trains the same prompts in the same number of steps, and nothing is left over at the end.
        epochs: Passes over the data.
        long_rows: Rows that a replica decodes at once in a long round; 0 means all its slots.
        second_batching: Regroup rows of resumed groups by predicted remaining length.
        seed: Seed of the order of prompts and of grading times.
    """

    prompts_per_step: int = 512
    samples: int = 8
    prompts: int = 5120
    epochs: int = 1
    long_rows: int = 0
    second_batching: bool = False
    seed: int = 0


class Simulation:
    """One run; the state of a run that outlives its rounds lies here, as it does in the conductor."""

    def __init__(
        self,
        cluster: ClusterModel,
        lengths: LengthModel,
        policy: SchedulePolicy,
        dispatcher: Dispatcher,
        workload: Workload,
    ) -> None:
        """Begin before the first step.

        Args:
            cluster: What passes, scores, training and weight updates take.
            lengths: How long answers are, and what a predictor says about them.
            policy: Which groups run together.
            dispatcher: On which replica.
            workload: What is trained.
        """
        self.cluster = cluster
        self.lengths = lengths
        self.policy = policy
        self.dispatcher = dispatcher
        self.workload = workload
        prompts = [Prompt(index=i, token_ids=_NO_TOKENS, text="") for i in range(workload.prompts)]
        self.source = PromptSource(prompts, shuffle=True, seed=workload.seed, epochs=workload.epochs)
        self.ledger = Ledger(None)
        self.groups: dict[GroupKey, SimulatedGroup] = {}
        self.waiting: dict[GroupKey, WaitingGroup] = {}
        self.book: ForecastBook | None = None
        self._repeats: dict[tuple[int, int], int] = {}
        self.step = 0
        self.launched: list[Int64Array] = []
        self._trained: list[Int64Array] = []
        self.rounds: list[RoundRecord] = []

    def run(self, steps: int | None = None, *, record: bool = False) -> RunSummary:
        """Simulate ``steps`` more steps, or all that the data give, and sum up all rounds so far.

        With ``record`` the new rounds keep spans for charts. Raises ``ValueError`` when not a single step can be made.
        """
        while (steps is None or steps > 0) and (self.source.remaining or self.waiting):
            self.rounds.append(SimulatedRound(self, record).play())
            self.step += 1
            steps = None if steps is None else steps - 1
        if not self.rounds:
            raise ValueError("there is nothing to simulate: no steps, or no prompts")
        launched = np.concatenate(self.launched) if self.launched else np.zeros(0, np.int64)
        trained = np.concatenate(self._trained) if self._trained else np.zeros(0, np.int64)
        return summarise(self.cluster, self.rounds, launched, trained)

    def draw(self, count: int) -> list[GroupKey]:
        """Draw prompts into the waiting groups and have their lengths predicted."""
        drawn = []
        for _ in range(count):
            found = self.source.next()
            if found is None:
                break
            drawn.append(self._open(found[0]))
        return drawn

    def _open(self, key: GroupKey) -> GroupKey:
        samples = self.workload.samples
        self.ledger.open(key)
        self.groups[key] = SimulatedGroup(key, samples)
        self.waiting[key] = WaitingGroup(missing=samples)
        forecast = self.lengths.forecast(key, samples)
        if forecast is not None:
            self.book = self.book or ForecastBook()
            self.book.add({key: forecast})
        return key

    def repeat(self, key: GroupKey) -> GroupKey:
        """Open the next duplicate of a group."""
        place = (key.epoch, key.prompt)
        self._repeats[place] = self._repeats.get(place, 0) + 1
        return self._open(key._replace(duplicate=self._repeats[place]))

    def settle(self, keys: Sequence[GroupKey]) -> tuple[int, int]:
        """Train groups; returns their tokens and the stale ones among these."""
        tokens = stale = 0
        self.ledger.train(keys, self.step, self.step)
        for key in keys:
            group = self.groups.pop(key)
            kept = group.trained_samples()
            self._trained.append(group.lengths[kept])
            for index in kept:
                for version, count in group.segments[index]:
                    tokens += count
                    stale += count if version < self.step else 0
        if self.book is not None:
            self.book.forget(keys)
        return tokens, stale
