"""Invented prompts whose lengths follow a known law, and a way to show them to a predictor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.length_predictor.predictor import LengthPredictor
from actors.length_predictor.records import Observation, Prediction, Query

GROUP_SIZE = 8


@dataclass(frozen=True)
class World:
    """Prompts with a median length each; answers are lognormal around it."""

    texts: tuple[str, ...]
    medians: npt.NDArray[np.float64]
    sigma: float

    def lengths(self, chosen: npt.NDArray[np.int64], rng: np.random.Generator) -> npt.NDArray[np.int64]:
        noise = rng.standard_normal((len(chosen), GROUP_SIZE))
        return np.maximum(1, np.rint(self.medians[chosen, None] * np.exp(self.sigma * noise))).astype(np.int64)


def telling_world(count: int, seed: int = 0) -> World:
    """The number in the prompt sets the length: prompts tell something, answers vary by a third."""
    rng = np.random.default_rng(seed)
    numbers = np.clip(np.rint(rng.lognormal(4.5, 1.0, count)), 2, 5000).astype(np.int64)
    texts = tuple(f"{_name(i)}: count to {n} please" for i, n in enumerate(numbers))
    return World(texts, 3.0 * numbers.astype(np.float64), sigma=0.3)


def _name(number: int) -> str:
    return "".join("abcdefghij"[int(digit)] for digit in str(number))


def mute_world(count: int, seed: int = 0) -> World:
    """The same prompts, but every answer has the same law: there is nothing to predict."""
    world = telling_world(count, seed)
    return World(world.texts, np.full(count, 300.0), sigma=0.6)


def hidden_world(count: int, seed: int = 0) -> World:
    """Prompts differ in length by an effect that no text shows: only history can know it."""
    world = telling_world(count, seed)
    rng = np.random.default_rng(seed + 1)
    return World(world.texts, 300.0 * np.exp(0.8 * rng.standard_normal(count)), sigma=0.3)


@dataclass(frozen=True)
class Visit:
    """What was predicted in one pass over all prompts, and what came true, in the same order."""

    predictions: list[Prediction]
    lengths: npt.NDArray[np.int64]

    @property
    def longest(self) -> npt.NDArray[np.float64]:
        return self.lengths.max(axis=1).astype(np.float64)


def visit(predictor: LengthPredictor, world: World, epoch: int, *, batch: int = 64, seed: int = 0) -> Visit:
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(world.texts))
    predictions: list[Prediction] = []
    lengths = []
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        drawn = world.lengths(chosen, rng)
        predictions += predictor.predict([Query(text=world.texts[i], group=f"e{epoch}/p{i}") for i in chosen])
        predictor.observe(observations([world.texts[i] for i in chosen], drawn, [f"e{epoch}/p{i}" for i in chosen]))
        lengths.append(drawn)
    return Visit(predictions, np.concatenate(lengths))


def observations(texts: Sequence[str], lengths: npt.NDArray[np.int64], groups: Sequence[str]) -> list[Observation]:
    return [
        Observation(text=text, group=group, group_size=len(row), length=int(length))
        for text, group, row in zip(texts, groups, lengths, strict=True)
        for length in row
    ]
