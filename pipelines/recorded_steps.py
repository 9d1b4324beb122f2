"""The steps of a recorded run, each with what was known of its prompts before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from actors.drafts.options import SpeculationOptions
from actors.drafts.pack import PastAnswer, PastPrompt
from actors.rollout.engine import Request
from pipelines.replay import Recorded
from storage.history.archive import RolloutArchive
from storage.history.schema import prompt_hash, to_groups
from storage.records import Group, Int32Array, Sample, SamplingParams, request_id

_NGRAM = 4


@dataclass(slots=True)
class Visits:
    """Earlier answers of one prompt.

    Attributes:
        prompt_ids: int32[n], the prompt.
        answers: A list a visit, the latest last.
        grams: uint64[m], hashes of the 4-grams in them, ascending.
    """

    prompt_ids: Int32Array
    answers: deque[list[PastAnswer]]
    grams: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Answers of one step, and what was known of their prompts before it.

    Attributes:
        number: The step; epoch: the latest epoch in it.
        answers: Its answers that have a token; slots: hash of the prompt and sample slot of each.
        history: Each of its prompts once.
        samples: The samples of ``answers``; visits: the history of the prompt of each.
    """

    number: int
    epoch: int
    answers: list[Recorded]
    slots: list[tuple[int, int]]
    history: list[PastPrompt]
    samples: list[Sample]
    visits: list[Visits]


def recorded_steps(archive: RolloutArchive, options: SpeculationOptions, split: str) -> Iterator[RecordedStep]:
    """Yield the steps in order, each with what was known of its prompts before it."""
    known: dict[int, Visits] = {}
    for number, table in archive.iterate(split):
        sampling = [
            SamplingParams(max_tokens=limit, temperature=temperature, top_p=top_p, top_k=top_k)
            for limit, temperature, top_p, top_k in zip(
                *(table.column(name).to_pylist() for name in ("max_tokens", "temperature", "top_p", "top_k")),
                strict=True,
            )
        ][:1]
        groups = to_groups(table)
        keys = [prompt_hash(group.prompt.token_ids) for group in groups]
        for key, group in zip(keys, groups, strict=True):
            known.setdefault(key, Visits(group.prompt.token_ids, deque(maxlen=options.window)))
        yield _step(number, groups, keys, known, sampling[0])
        for key, group in zip(keys, groups, strict=True):
            answers = [_past(sample, sampling[0]) for sample in group.samples]
            known[key].answers.append([answer for answer in answers if len(answer.token_ids)])
            known[key].grams = np.unique(
                np.concatenate(
                    [four_grams(a.token_ids) for visit in known[key].answers for a in visit] or [known[key].grams]
                )
            )


def _step(
    number: int, groups: list[Group], keys: list[int], known: dict[int, Visits], sampling: SamplingParams
) -> RecordedStep:
    history = [
        PastPrompt(
            prompt_ids=known[key].prompt_ids,
            answers=[
                _aged(answer, len(known[key].answers) - 1 - visit)
                for visit, answers in enumerate(known[key].answers)
                for answer in answers
            ],
        )
        for key in dict.fromkeys(keys)
    ]
    rows = [(key, group, sample) for key, group in zip(keys, groups, strict=True) for sample in group.samples]
    rows = [row for row in rows if row[2].length]
    return RecordedStep(
        number=number,
        epoch=max((group.key.epoch for group in groups), default=0),
        answers=[
            Recorded(
                Request(
                    request_id=request_id(0, sample.key, sample.index),
                    prompt_ids=group.prompt.token_ids,
                    sampling=sampling,
                    group=request_id(0, sample.key, -1),
                ),
                sample.token_ids(),
            )
            for _, group, sample in rows
        ],
        slots=[(key, sample.index) for key, _, sample in rows],
        history=history,
        samples=[sample for _, _, sample in rows],
        visits=[known[key] for key, _, _ in rows],
    )


def _past(sample: Sample, sampling: SamplingParams) -> PastAnswer:
    """A sample as history: what the policy wrote before anything came from outside."""
    outside = np.flatnonzero(~sample.policy_mask())
    end = int(outside[0]) if len(outside) else sample.length
    return PastAnswer(
        token_ids=sample.token_ids()[:end],
        logprobs=sample.logprobs()[:end],
        sample=sample.index,
        oldest_version=sample.oldest_version,
        finish_reason=sample.finish_reason,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )


def _aged(answer: PastAnswer, visit: int) -> PastAnswer:
    return replace(answer, visit=visit)


def four_grams(tokens: Int32Array) -> npt.NDArray[np.uint64]:
    """uint64[n - 3], a hash of each run of four tokens."""
    if len(tokens) < _NGRAM:
        return np.zeros(0, np.uint64)
    value = np.zeros(len(tokens) - _NGRAM + 1, np.uint64)
    for offset in range(_NGRAM):
        part = tokens[offset : offset + len(value)].astype(np.uint64)
        value = value * np.uint64(0x9E3779B97F4A7C15) + part + np.uint64(1)
        value ^= value >> np.uint64(29)
    return value
