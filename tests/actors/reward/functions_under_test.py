"""Reward functions as users write them, good and bad; scoring processes import this module by its dotted path."""

import asyncio
import contextlib
import ctypes
import os
import re
import subprocess
import sys
import time


def length(completions, **columns):
    return [float(len(completion)) for completion in completions]


def constant(completions, value=1.0):
    return [value]


async def asynchronous(prompts, completions, answer):
    await asyncio.sleep(0.001)
    return [float(prompts[0] == "p" and completions[0] == answer[0])]


def abstain(completions):
    return [None]


def abstain_on_empty(completions):
    return [None if completion == "" else 10.0 for completion in completions]


def boolean(completions):
    return [completions[0] == "yes"]


def only_prompt(prompts, completions):
    return [float(len(prompts[0]))]


def raises(completions):
    raise ValueError("the unit tests did not compile")


def sometimes_raises(completions):
    if completions[0] == "bad":
        raise KeyError("bad")
    return [1.0]


def returns(completions, value):
    special = {"nan": [float("nan")], "inf": [float("inf")], "set": {1.0}, "object": [object()], "big": [10**400]}
    return special.get(value, value) if isinstance(value, str) else value


def exits(completions):
    sys.exit(3)


def dies(completions):
    if completions[0] == "die":
        os._exit(7)
    return [1.0]


def crashes(completions):
    ctypes.string_at(0)


def hangs(completions):
    if completions[0] == "hang":
        time.sleep(30)
    return [1.0]


def hangs_without_releasing_the_lock(completions):
    return [float(re.match(r"(a+)+$", "a" * 60 + "b") is None)]


def sleeps(completions, seconds):
    time.sleep(seconds[0] if isinstance(seconds, list) else seconds)
    return [1.0]


def starts_a_process(completions):
    child = subprocess.Popen(["sleep", "60"])
    with open(completions[0], "w") as file:
        file.write(str(child.pid))
    time.sleep(60)


def forks_and_dies(completions):
    if os.fork() == 0:
        time.sleep(20)
    os._exit(9)


def prints(completions):
    sys.stdout.write("x" * 100 + "\n")
    os.write(1, b"\x00\x00\x00\x02{}")
    sys.stdout.write("half a line")
    return [1.0]


def floods(completions):
    for _ in range(2000):
        sys.stdout.write("y" * 1000 + "\n")
    raise RuntimeError("z" * 1_000_000)


def reads_input(completions):
    input()


def writes_to_every_descriptor(completions):
    for descriptor in range(3, 20):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"garbage that is no frame")
    return [1.0]


def closes_every_descriptor(completions):
    os.closerange(0, 20)
    return [1.0]


def environment(completions):
    return [float(completions[0] in os.environ)]


def pid(completions):
    time.sleep(0.02)
    return [os.getpid()]


def columns_kept(completions, text, array, scalar, raw, nothing, nested):
    kept = (text, array, scalar, raw, nothing, nested) == (
        ["naïve ∑ 🚲 \ud800"],
        [[1, 2, 3]],
        [2.5],
        [b"\x00\xff"],
        [None],
        [{"a": [1, {"b": None}]}],
    )
    return [float(kept)]


def echo_length(completions):
    return [len(completions[0])]


def recursion(completions):
    return recursion(completions)


def no_completions(prompts):
    return [1.0]


def positional(prompts, completions, /):
    return [1.0]


not_a_function = 3
