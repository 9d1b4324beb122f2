"""What an evaluation has written: every held-out prompt, greedily and, where asked for, sampled."""

from __future__ import annotations

from pipelines.config import Config
from pipelines.run_data import SAMPLED_SUFFIX, RunData
from storage.records import Assignment, GroupKey, SamplingParams


def held_out_work(config: Config, data: RunData, step: int) -> list[Assignment]:
    """Return one assignment for each held-out group of the evaluation after ``step``, set by set."""
    samples = config.evaluation.samples
    splits: list[tuple[str, str, int, SamplingParams]] = []
    for name in data.evaluation:
        splits.append((name, name, 1, data.greedy_sampling(config)))
        if samples:
            splits.append((name + SAMPLED_SUFFIX, name, samples, data.training_sampling(config)))
    return [
        Assignment(
            key=GroupKey(split, step, prompt.index),
            prompt=prompt,
            samples=tuple(range(size)),
            group_size=size,
            sampling=sampling,
            run_seed=config.run.seed,
        )
        for split, name, size, sampling in splits
        for prompt in data.evaluation[name]
    ]
