"""Groups of answers for tests of the history store, and a way to compare what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from storage.history.rows import Answer
from storage.history.store import HistoryStore
from storage.records import Group, GroupKey, Prompt, Sample, SamplingParams, Segment

SAMPLING = SamplingParams(max_tokens=64, temperature=0.5, top_p=0.75, top_k=20)
FINGERPRINT = 0x0123456789ABCDEF


def prompt_tokens(prompt: int) -> np.ndarray:
    return np.array([prompt, 7, 7 + prompt % 3], np.int32)[: 1 + prompt % 3]


def make_group(
    prompt: int,
    *,
    epoch: int = 0,
    samples: int = 2,
    tokens: int = 5,
    duplicate: int = 0,
    prompt_ids: Sequence[int] | None = None,
    seed: int = 0,
) -> Group:
    """A group whose tokens differ by all arguments; the first sample has tokens of a tool in its middle."""
    rng = np.random.default_rng([prompt, epoch, duplicate, seed])
    key = GroupKey("train", epoch, prompt, duplicate)
    ids = prompt_tokens(prompt) if prompt_ids is None else np.array(prompt_ids, np.int32)
    made = []
    for index in range(samples):
        count = tokens + index
        segments = [policy(rng, epoch, count)]
        if index == 0 and tokens:
            zeros = np.zeros(2, np.float32)
            segments += [
                Segment(source="environment", version=-1, token_ids=np.array([1, 2], np.int32), logprobs=zeros),
                policy(rng, epoch + 1, 3),
            ]
        made.append(
            Sample(
                key=key,
                index=index,
                segments=tuple(segments),
                text="not in the store",
                finish_reason="length" if index else "stop",
                reward=None if index else float(rng.random()),
                drafted=9,
                accepted=index,
            )
        )
    return Group(key=key, prompt=Prompt(index=prompt, token_ids=ids, text=""), samples=tuple(made))


def policy(rng: np.random.Generator, version: int, count: int) -> Segment:
    return Segment(
        source="policy",
        version=version,
        token_ids=rng.integers(0, 50_000, count, dtype=np.int32),
        logprobs=-rng.random(count, dtype=np.float32),
    )


def is_answer(answer: Answer, sample: Sample, step: int) -> bool:
    """Whether an answer of the store is ``sample`` in all that the store keeps."""
    return (
        np.array_equal(answer.tokens, sample.token_ids())
        and answer.tokens.dtype == np.int32
        and np.array_equal(answer.logprobs, sample.logprobs())
        and answer.logprobs.dtype == np.float32
        and np.array_equal(answer.versions(), sample.versions())
        and np.array_equal(answer.policy_mask(), sample.policy_mask())
        and answer.oldest_version == sample.oldest_version
        and (answer.epoch, answer.prompt, answer.duplicate) == sample.key[1:]
        and (answer.sample_idx, answer.step, answer.reward) == (sample.index, step, sample.reward)
        and (answer.finish_reason, answer.n_drafted, answer.n_accepted)
        == (sample.finish_reason, sample.drafted, sample.accepted)
        and (answer.temperature, answer.top_p, answer.top_k) == (SAMPLING.temperature, SAMPLING.top_p, SAMPLING.top_k)
    )


def contents(store: HistoryStore) -> dict[tuple[int, ...], tuple[int, bytes]]:
    """What a store serves: (epoch, prompt, duplicate, sample) to (step, tokens). No answer may come twice."""
    found: dict[tuple[int, ...], tuple[int, bytes]] = {}
    for _, token_ids in store.prompts():
        for answer in (answer for visit in store.visits(token_ids, 10**6) for answer in visit):
            key = (*answer.visit, answer.sample_idx)
            assert key not in found
            found[key] = (answer.step, answer.tokens.tobytes())
    return found


def expected(groups_by_step: dict[int, list[Group]]) -> dict[tuple[int, ...], tuple[int, bytes]]:
    """What :func:`contents` must be after these groups were appended."""
    return {
        (*sample.key[1:], sample.index): (step, sample.token_ids().tobytes())
        for step, groups in groups_by_step.items()
        for group in groups
        for sample in group.samples
    }


def fill(store: HistoryStore, steps: Sequence[int], prompts: int = 3, **arguments: int) -> dict[int, list[Group]]:
    """Append a step for each of ``steps`` (which are also the epochs); returns what was appended."""
    appended = {}
    for step in steps:
        appended[step] = [make_group(prompt, epoch=step, **arguments) for prompt in range(prompts)]
        store.append(step, appended[step], SAMPLING)
    return appended


def flip(path: Path, place: int) -> None:
    """Change one bit of a byte in a file, where it is; doing it twice changes it back."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << place % 8]))
