"""The measurements of ``slipstream bench speculation``: the same training steps, written with and without drafts.

Lanes that verify exactly write the same tokens, so one learner serves all of them: at each step every lane answers the
same prompts under the same weights, in short turns and each time another one first. Lenient reuse changes the
tokens. It gets a learner of its own, and a plain lane beside it answers the same prompts under its weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np

from actors.drafts.options import SpeculationOptions
from actors.rollout.draft_cost import CostFit, PassCost
from pipelines.bench.rollout_loop import Batch, Lane, Rollout, Trainer, World, written_in_turns
from pipelines.speculation_metrics import bias_metrics
from storage.history.archive import RolloutArchive
from storage.prompt_source import PromptSource
from storage.records import TRAIN_SPLIT, Group, GroupKey, Int32Array, Prompt, SampleHeader

OFF = "off"


@dataclass(slots=True)
class Step:
    """One step of a trial.

    Attributes:
        epoch: Its epoch.
        rollouts: What each lane did, without the answers.
        differing: Answers of each lane whose tokens are not those of plain decoding.
        answers: Answers of one lane; tokens: their tokens.
        surprise: Sum of -log p over these tokens. Unit: nats.
        reward: Mean reward.
        headers: Of the answers that were trained, by group; lenient trials only.
    """

    epoch: int
    rollouts: Mapping[str, Rollout]
    differing: Mapping[str, int]
    answers: int
    tokens: int
    surprise: float
    reward: float
    headers: list[list[SampleHeader]] = field(default_factory=list)


@dataclass(slots=True)
class Trial:
    """All steps of a training run.

    Attributes:
        steps: In order.
        index_mb: Largest memory of each lane's indexes, those of running rows included. Unit: megabytes.
        model_mb: Size of a snapshot of the weights. Unit: megabytes.
    """

    steps: list[Step] = field(default_factory=list)
    index_mb: dict[str, float] = field(default_factory=dict)
    model_mb: float = math.nan

    def of(self, epochs: Iterable[int]) -> list[Step]:
        """Return the steps of some epochs."""
        wanted = set(epochs)
        return [step for step in self.steps if step.epoch in wanted]

    def speedup(self, lane: str, epochs: Iterable[int], *, over: str = OFF) -> float:
        """Return the rollout time of ``over`` in some epochs divided by that of ``lane``; NaN without such steps."""
        steps = self.of(epochs)
        spent = sum(step.rollouts[lane].seconds for step in steps)
        return sum(step.rollouts[over].seconds for step in steps) / spent if steps else math.nan

    def cold_ratios(self, lane: str) -> list[float]:
        """Return the same ratio for each step of the first epoch."""
        return [step.rollouts[OFF].seconds / step.rollouts[lane].seconds for step in self.of([0])]

    def acceptance(self, lane: str, epochs: Iterable[int]) -> float:
        """Return the share of draft tokens that were accepted; NaN without drafts."""
        done = [step.rollouts[lane] for step in self.of(epochs)]
        drafted = sum(rollout.drafted for rollout in done)
        return sum(rollout.accepted for rollout in done) / drafted if drafted else math.nan

    def acceptance_length(self, lane: str, epochs: Iterable[int]) -> float:
        """Return the tokens that a row writes in a pass on average."""
        done = [step.rollouts[lane] for step in self.of(epochs)]
        passes = sum(rollout.row_passes for rollout in done)
        return sum(rollout.emitted for rollout in done) / passes if passes else math.nan

    def differing_share(self, lane: str) -> float:
        """Return the share of answers whose tokens are not those of plain decoding."""
        return sum(s.differing.get(lane, 0) for s in self.steps) / sum(s.answers for s in self.steps)

    def entropy(self, epoch: int) -> float:
        """Return the mean of -log p over the tokens of an epoch, which estimates a token's entropy. Unit: nats."""
        steps = self.of([epoch])
        return sum(s.surprise for s in steps) / max(1, sum(s.tokens for s in steps))

    def cost(self, lanes: Iterable[str], epochs: Iterable[int]) -> PassCost | None:
        """Fit what a pass costs to the steps of some lanes; ``None`` when there are too few."""
        fit = CostFit(forget=1.0)
        chosen = list(lanes)
        for step in self.of(epochs):
            for lane in chosen:
                for stats in step.rollouts[lane].steps:
                    fit.observe(stats)
        return fit.cost

    def bias(self, epochs: Iterable[int]) -> dict[str, float]:
        """Return how leniently reused answers differ from fresh ones, see :func:`bias_metrics`."""
        return bias_metrics(group for step in self.of(epochs) for group in step.headers)


def exact_trial(
    world: World, modes: Sequence[str], plan: Sequence[Batch], folder: Path, archive: RolloutArchive | None = None
) -> Trial:
    """Play ``plan`` with plain decoding and with each exact mode.

    Args:
        world: The setting.
        modes: Values of ``speculation.source``; ``off`` comes first.
        plan: Prompts of each step.
        folder: For the histories.
        archive: Gets the answers of plain decoding.
    """
    lanes = {mode: Lane(world, SpeculationOptions.model_validate({"source": mode}), folder / mode) for mode in modes}
    trial = Trial()
    with Trainer(world, len(plan)) as trainer:
        for number, batch in enumerate(plan):
            rollouts = _in_turns(lanes, number, batch)
            groups = trainer.score(rollouts[OFF].groups)
            trial.steps.append(_step(batch, rollouts, groups))
            _note_memory(trial, lanes)
            advantages, snapshot = trainer.train(number, groups)
            if archive is not None:
                archive.append(number, groups, advantages, sampling=world.sampling)
            for lane in lanes.values():
                lane.observe(number, groups)
                if snapshot is not None:
                    lane.take(snapshot)
                    trial.model_mb = snapshot[0].nbytes / 1e6
    for lane in lanes.values():
        lane.close()
    return trial


def lenient_trial(world: World, plan: Sequence[Batch], folder: Path) -> Trial:
    """Play ``plan`` with lenient reuse of the previous epoch's answers; lanes are ``lenient`` and ``off``."""
    options = SpeculationOptions(source="previous_epoch", verify="lenient", log_lenience=0.5)
    lanes = {OFF: Lane(world, SpeculationOptions(), folder), "lenient": Lane(world, options, folder / "lenient")}
    trial = Trial()
    with Trainer(world, len(plan)) as trainer:
        for number, batch in enumerate(plan):
            rollouts = _in_turns(lanes, number, batch)
            groups = trainer.score(rollouts["lenient"].groups)
            step = _step(batch, rollouts, groups)
            step.headers = [[SampleHeader.of(sample, 0) for sample in group.samples] for group in groups]
            trial.steps.append(step)
            _note_memory(trial, lanes)
            _, snapshot = trainer.train(number, groups)
            for lane in lanes.values():
                lane.observe(number, groups)
                if snapshot is not None:
                    lane.take(snapshot)
    for lane in lanes.values():
        lane.close()
    return trial


def epochs_of(world: World, epochs: int) -> list[Batch]:
    """Return the prompts of each step as a run draws them: every prompt once an epoch, each time in a new order."""
    config = world.config
    source = PromptSource(world.data.train, shuffle=config.data.shuffle, seed=config.run.seed, epochs=epochs)
    drawn: list[tuple[GroupKey, Prompt]] = []
    while (item := source.next()) is not None:
        drawn.append(item)
    size = config.rollout.prompts_per_step
    return [drawn[at : at + size] for at in range(0, len(drawn), size)]


def repeating(world: World, shares: Sequence[float], rounds: int) -> tuple[list[Batch], list[int]]:
    """Plan an epoch of prompts that are new, then steps that repeat some of them.

    The shares take turns, so that the weights are equally far from the first visit for each of them.

    Args:
        world: Its data must hold :func:`prompts_for_repeats` prompts.
        shares: Share of repeated prompts in a step, rounded to whole prompts.
        rounds: Steps of each share.

    Returns:
        The plan, and the index in ``shares`` of each step behind the first epoch.
    """
    size = world.config.rollout.prompts_per_step
    counts = [round(share * size) for share in shares]
    repeated = rounds * sum(counts)
    known = -(-repeated // size) * size
    plan: list[Batch] = [
        [(GroupKey(TRAIN_SPLIT, 0, prompt.index), prompt) for prompt in world.data.train[at : at + size]]
        for at in range(0, known, size)
    ]
    order = np.random.default_rng(world.config.run.seed).permutation(known)
    old = iter([world.data.train[int(at)] for at in order])
    new = iter(world.data.train[known:])
    turns: list[int] = []
    for _ in range(rounds):
        for which, count in enumerate(counts):
            prompts = [next(old) for _ in range(count)] + [next(new) for _ in range(size - count)]
            plan.append([(GroupKey(TRAIN_SPLIT, 1, prompt.index), prompt) for prompt in prompts])
            turns.append(which)
    return plan, turns


def prompts_for_repeats(shares: Sequence[float], rounds: int, size: int) -> int:
    """Return how many different prompts :func:`repeating` needs with ``size`` prompts in a step."""
    counts = [round(share * size) for share in shares]
    known = -(-rounds * sum(counts) // size) * size
    return known + rounds * sum(size - count for count in counts)


def median_ratio(ratios: Sequence[float]) -> float:
    """Return the median of ratios of pairs; NaN of none."""
    return median(ratios) if ratios else math.nan


def _in_turns(lanes: Mapping[str, Lane], number: int, batch: Batch) -> dict[str, Rollout]:
    names = list(lanes)
    first = number % len(names)
    return written_in_turns({name: lanes[name] for name in (*names[first:], *names[:first])}, batch)


def _step(batch: Batch, rollouts: Mapping[str, Rollout], groups: Sequence[Group]) -> Step:
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    plain = _tokens(rollouts[OFF])
    return Step(
        epoch=batch[0][0].epoch,
        rollouts={name: replace(rollout, groups=()) for name, rollout in rollouts.items()},
        differing={
            name: sum(not np.array_equal(a, b) for a, b in zip(plain, _tokens(rollout), strict=True))
            for name, rollout in rollouts.items()
        },
        answers=len(samples),
        tokens=sum(sample.length for sample in samples),
        surprise=-sum(float(sample.logprobs().sum(dtype=np.float64)) for sample in samples),
        reward=float(np.mean(rewards)) if rewards else math.nan,
    )


def _tokens(rollout: Rollout) -> list[Int32Array]:
    return [sample.token_ids() for group in rollout.groups for sample in group.samples]


def _note_memory(trial: Trial, lanes: Mapping[str, Lane]) -> None:
    for name, lane in lanes.items():
        if lane.drafts is not None:
            trial.index_mb[name] = max(trial.index_mb.get(name, 0.0), lane.index_mb)
