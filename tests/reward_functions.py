"""Reward functions that behave and misbehave, for tests of whole runs."""

import os
import time
import zlib


def constant(prompts, completions, **columns):
    return [0.5] * len(completions)


def raises(prompts, completions, **columns):
    raise RuntimeError("no verdict today")


def raises_for_odd(prompts, completions, **columns):
    """Fails for a share of the answers that depends on the answer alone."""
    if sum(map(ord, completions[0])) % 2:
        raise RuntimeError("odd answer")
    return [float(len(c)) for c in completions]


def hangs(prompts, completions, **columns):
    time.sleep(3600)


def dies(prompts, completions, **columns):
    os._exit(7)


def length(prompts, completions, **columns):
    return [float(len(c)) for c in completions]


def varied(prompts, completions, **columns):
    """Differs between siblings, so that every step moves the weights."""
    return [sum(map(ord, c)) % 7 / 6 for c in completions]


def slow(prompts, completions, **columns):
    time.sleep(0.05)
    return [float(len(c)) for c in completions]


def patient(prompts, completions, pause=(0.0,), **columns):
    """Takes as many seconds as the column ``pause`` says."""
    time.sleep(pause[0])
    return varied(prompts, completions)


KINDS = ("fine", "fine", "fine", "raises", "too_many", "nan", "hangs", "dies")


def kind_of(completion):
    """How ``misbehaves`` treats an answer: a function of its text alone."""
    return KINDS[zlib.crc32(completion.encode()) % len(KINDS)]


def misbehaves(prompts, completions, **columns):
    """Scores some answers, never with less than 1, and fails in every way there is for others."""
    match kind_of(completions[0]):
        case "raises":
            raise RuntimeError("no verdict today")
        case "too_many":
            return [1.0, 2.0]
        case "nan":
            return [float("nan")]
        case "hangs":
            time.sleep(3600)
        case "dies":
            os._exit(7)
    return [1.0 + len(completions[0])]


def right_or_endless(prompts, completions, **columns):
    """Calls most answers correct at once, and never comes back from the others."""
    if zlib.crc32(completions[0].encode()) % 8 == 0:
        time.sleep(3600)
    return [1.0 + len(completions[0])]
