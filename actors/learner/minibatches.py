"""The answers behind each optimiser update of one global batch, and the counts that their loss is divided by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.learner.advantages import GroupAdvantages
from actors.learner.asynchrony_options import AsynchronyOptions
from actors.learner.packing import Answer
from actors.learner.staleness import batch_weights, newest_tokens
from storage.records import Group, GroupKey, Sample


@dataclass(slots=True)
class Minibatch:
    """Answers behind one optimiser update.

    Attributes:
        answers: Those that have a gradient.
        tokens: Policy tokens of every answer in the loss, with a gradient or without.
        count: Every answer in the loss.
    """

    answers: list[Answer] = field(default_factory=list)
    tokens: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """A global batch, divided.

    Attributes:
        minibatches: One per update; some may be empty.
        rejected: Answers that left the loss because a behaviour logprob is not finite.
        decay: Smallest and largest decay weight among the tokens in the loss; (1, 1) without decay.
    """

    minibatches: list[Minibatch]
    rejected: int
    decay: tuple[float, float]


def deal(
    groups: Sequence[Group],
    advantages: Sequence[GroupAdvantages],
    *,
    version: int,
    minibatches: int,
    seed: tuple[int, int],
    asynchrony: AsynchronyOptions,
    every_answer: bool,
) -> Deal:
    """Deal groups to minibatches and turn their samples into answers.

    Args:
        groups: Sorted by key.
        advantages: One per group.
        version: Last published version; ages count from it.
        minibatches: How many; with one the order is kept.
        seed: Seed of the run and number of the step: neighbouring prompts may be alike, so groups are dealt at random.
        asynchrony: Which tokens have a gradient and what age makes them count for.
        every_answer: True when answers of advantage 0 have a gradient too (of a KL term).
    """
    rejected = 0
    order = np.arange(len(groups))
    if minibatches > 1:
        order = np.random.default_rng(seed).permutation(order)
    weights = batch_weights(groups, [a.in_loss for a in advantages], version, asynchrony)
    dealt, extremes = [], [np.inf, -np.inf]
    for part in np.array_split(order, minibatches):
        minibatch = Minibatch()
        for position in sorted(part.tolist()):
            group, values = groups[position], advantages[position]
            for i, sample in enumerate(group.samples):
                mask = sample.policy_mask()
                if not values.in_loss[i] or not mask.any():
                    continue
                minibatch.tokens += int(mask.sum())
                minibatch.count += 1
                decay = None if weights is None else weights[position][i]
                if decay is not None:
                    extremes = [min(extremes[0], decay[mask].min()), max(extremes[1], decay[mask].max())]
                behaviour = sample.logprobs()
                if not np.isfinite(behaviour[mask]).all():
                    rejected += 1
                elif values.values[i] != 0 or every_answer:
                    minibatch.answers.append(
                        Answer(
                            key=group.key,
                            index=sample.index,
                            token_ids=np.concatenate([group.prompt.token_ids, sample.token_ids()]),
                            prompt_tokens=len(group.prompt.token_ids),
                            policy=mask,
                            behaviour=behaviour,
                            advantage=float(values.values[i]),
                            trained=newest_tokens(sample) if asynchrony.grad_tokens == "current_only" else None,
                            weights=decay,
                        )
                    )
        dealt.append(minibatch)
    low, high = (float(x) for x in extremes) if extremes[0] <= extremes[1] else (1.0, 1.0)
    return Deal(minibatches=dealt, rejected=rejected, decay=(low, high))


def check_records(groups: Sequence[Group], version: int) -> None:
    """Raise ``ValueError`` that names the first record that cannot be right."""
    seen: set[GroupKey] = set()
    for group in groups:
        if group.key in seen:
            raise ValueError(f"group {group.key} occurs twice in one batch")
        seen.add(group.key)
        if len({sample.index for sample in group.samples}) != len(group.samples):
            raise ValueError(f"group {group.key} holds the same sibling twice")
        if not len(group.prompt.token_ids):
            raise ValueError(f"group {group.key} has an empty prompt")
        for sample in group.samples:
            _check_sample(sample, group.key, version)


def _check_sample(sample: Sample, key: GroupKey, version: int) -> None:
    name = f"sample {sample.index} of group {key}"
    if sample.key != key:
        raise ValueError(f"{name} says that it belongs to group {sample.key}")
    for segment in sample.segments:
        if len(segment.token_ids) != len(segment.logprobs):
            raise ValueError(f"{name} has {len(segment.token_ids)} tokens and {len(segment.logprobs)} logprobs")
        if segment.source == "policy" and not 0 <= segment.version <= version:
            raise ValueError(f"{name} has tokens of version {segment.version}; the learner is on version {version}")
