"""Reward functions that behave and misbehave, for tests of whole runs."""

import os
import time


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


def slow(prompts, completions, **columns):
    time.sleep(0.05)
    return [float(len(c)) for c in completions]
