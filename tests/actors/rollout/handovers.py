"""What tests of handovers share: a tokenizer with marks, and the laws that an answer of several versions obeys."""

from __future__ import annotations

import numpy as np

from actors.rollout.engine import Handover
from storage.tiny_model import character_tokenizer

from .conftest import VOCABULARY, logprobs_of, recomputed_logprobs, request, tokens_of

MARKS = ".!?。؟।\n;"
LETTERS = "".join(chr(ord("a") + i) for i in range(26)) + "".join(chr(ord("A") + i) for i in range(24))
TOKENIZER = character_tokenizer(LETTERS + MARKS)
FIRST_MARK = 3 + len(LETTERS)
assert FIRST_MARK + len(MARKS) == VOCABULARY

PROMPTS = [(5, 6, 7 + i) for i in range(4)]


def is_mark(token):
    return token >= FIRST_MARK


def boundary(grace):
    return Handover(kind="boundary", grace_tokens=grace)


def split(k_min):
    return Handover(kind="split", k_min=k_min)


def swap(engine, snapshots, version, handover, mode="reprefill"):
    engine.load_weights(*snapshots[version])
    engine.activate_weights(version, mode, handover)


def steps(engine, n):
    return [c for _ in range(n) for c in engine.step()]


def versions_of(completion):
    """The version of each token."""
    return [s.version for s in completion.segments for _ in s.token_ids]


def largest_error(completion, prompt, model_of, *, shift=0):
    """Largest difference of a logprob from what the stamped version (plus ``shift``) says."""
    answer, versions = tokens_of(completion), versions_of(completion)
    expected = {v: recomputed_logprobs(model_of((v + shift) % 4), prompt, answer) for v in set(versions)}
    return max(abs(p - expected[v][i]) for i, (p, v) in enumerate(zip(logprobs_of(completion), versions, strict=True)))


def turning_point(answer, written, grace):
    """Index of the first token under new weights, by the law of ``boundary``; they came behind ``written`` tokens."""
    if is_mark(answer[written - 1]):
        return written
    marks = [i + 1 for i in range(written, len(answer)) if is_mark(answer[i])]
    return min([*marks, written + grace])


def splitting_point(answer, k_min):
    """Index of the first token under the current weights, by the law of ``split``."""
    return min([i + 1 for i in range(k_min - 1, len(answer)) if is_mark(answer[i])], default=len(answer))


def ascending(completion):
    return bool((np.diff(versions_of(completion)) >= 0).all())


def requests(first=0, **more):
    return [request(first + i, prompt, **({"max_tokens": 40} | more)) for i, prompt in enumerate(PROMPTS)]
