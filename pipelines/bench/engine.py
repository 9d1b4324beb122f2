"""Tokens per second of the rollout engine over ``transformers.generate``: same model, prompts, sampling and threads.

Both write the same number of answers at once. Tokens count up to and including the one that ends an answer; what
``generate`` computes for rows that have ended already is its own loss. Rounds alternate, and the ratio is the median of
the rounds' ratios.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.bench.harness import BenchResult, OptionValue
from storage.errors import UserError
from storage.options import ModelOptions

Int32Array = npt.NDArray[np.int32]

OPTIONS: dict[str, OptionValue] = {
    "models": "tiny,smollm2",
    "prompts": 8,
    "samples": 64,
    "rounds": 3,
    "max_tokens": 192,
    "threads": 0,
}

# The tiny model is quick, and its ratio hangs on the luck of the longest answer: it gets so many times the rounds.
_TINY_ROUNDS = 3

_QUESTIONS = (
    "What is the capital of France? Answer with one word.",
    "Write a short story about a lighthouse keeper.",
    "Is 17 a prime number? Answer yes or no.",
    "Explain how a bicycle stays upright.",
    "Translate 'good morning' into Spanish.",
    "List five uses of a paper clip.",
    "What is 12 plus 30?",
    "Give me a recipe for tomato soup.",
)


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one side: useful tokens of each answer, and wall-clock seconds."""

    lengths: tuple[int, ...]
    seconds: float

    @property
    def rate(self) -> float:
        """Useful tokens per second."""
        return sum(self.lengths) / self.seconds


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rounds of both sides, in the order they were taken."""

    engine: tuple[Round, ...]
    generate: tuple[Round, ...]

    @property
    def ratio(self) -> float:
        """Median over rounds of the engine's rate over that of ``generate``."""
        return median(e.rate / g.rate for e, g in zip(self.engine, self.generate, strict=True))

    @property
    def tail(self) -> float:
        """P90 over P50 of all answer lengths."""
        lengths = [n for r in (*self.engine, *self.generate) for n in r.lengths]
        return float(np.percentile(lengths, 90) / np.percentile(lengths, 50))


def run(options: Mapping[str, OptionValue]) -> BenchResult:
    """Measure each model; one that is not to be had is skipped with a note."""
    import torch

    threads = int(options["threads"]) or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    rows, figures = [], {}
    notes = [f"{threads} torch threads, {options['samples']} answers at once, temperature 1, float32"]
    for name in str(options["models"]).split(","):
        try:
            path, prompts, eos = _setting(name, int(options["prompts"]), int(options["max_tokens"]))
        except UserError as error:
            notes.append(f"{name} skipped: {error}")
            continue
        result = compare(
            path,
            prompts,
            eos,
            samples=int(options["samples"]),
            rounds=int(options["rounds"]) * (_TINY_ROUNDS if name == "tiny" else 1),
            max_tokens=int(options["max_tokens"]),
        )
        figures[f"ratio_{name}"] = result.ratio
        rows.append(
            (
                name,
                f"{median(r.rate for r in result.engine):.0f}",
                f"{median(r.rate for r in result.generate):.0f}",
                f"{result.ratio:.2f}",
                f"{result.tail:.1f}",
                f"{np.mean([n for r in result.engine for n in r.lengths]):.0f}",
            )
        )
    columns = ("model", "engine tok/s", "generate tok/s", "ratio", "length P90/P50", "mean length")
    return BenchResult(name="engine", columns=columns, rows=tuple(rows), figures=figures, notes=tuple(notes))


def compare(
    path: Path, prompts: Sequence[Int32Array], eos: tuple[int, ...], *, samples: int, rounds: int, max_tokens: int
) -> Comparison:
    """Let both sides write ``samples`` answers, ``rounds`` times in turns, after one unmeasured round of each.

    Args:
        path: Local model directory.
        prompts: int32[n] each; every prompt gets ``samples // len(prompts)`` answers.
        eos: Ids that end an answer.
        samples: Answers per round.
        rounds: Measured rounds of each side.
        max_tokens: Longest answer.

    Raises:
        UserError: ``samples`` is not a multiple of the number of prompts.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from actors.rollout.torch_engine import TorchEngine

    if samples % len(prompts):
        raise UserError(f"option samples={samples} must be a multiple of the {len(prompts)} prompts")
    longest = max(len(p) for p in prompts)
    engine = TorchEngine(path, max_rows=samples, max_length=longest + max_tokens, dtype="float32", device="cpu")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    sides: tuple[list[Round], list[Round]] = ([], [])
    for number in range(rounds + 1):
        ours = _engine_round(engine, prompts, eos, samples, max_tokens, number)
        theirs = _generate_round(model, prompts, eos, samples, max_tokens, number)
        if number:
            sides[0].append(ours)
            sides[1].append(theirs)
    return Comparison(engine=tuple(sides[0]), generate=tuple(sides[1]))


def _engine_round(
    engine: Any, prompts: Sequence[Int32Array], eos: tuple[int, ...], samples: int, max_tokens: int, number: int
) -> Round:
    from actors.rollout.engine import Request
    from storage.records import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=eos)
    each = samples // len(prompts)
    requests = [
        Request(request_id=number * samples + i, prompt_ids=prompts[i // each], sampling=sampling, group=i // each)
        for i in range(samples)
    ]
    begin = time.perf_counter()
    engine.submit(requests)
    lengths: list[int] = []
    while engine.running or engine.waiting:
        lengths += [sum(len(s.token_ids) for s in done.segments) for done in engine.step()]
    return Round(tuple(lengths), time.perf_counter() - begin)


def _generate_round(
    model: Any, prompts: Sequence[Int32Array], eos: tuple[int, ...], samples: int, max_tokens: int, number: int
) -> Round:
    import torch

    each = samples // len(prompts)
    width = max(len(p) for p in prompts)
    ids = torch.zeros(samples, width, dtype=torch.int64)
    mask = torch.zeros(samples, width, dtype=torch.int64)
    for i in range(samples):
        prompt = prompts[i // each]
        ids[i, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[i, width - len(prompt) :] = 1
    torch.manual_seed(number)
    begin = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_tokens,
            eos_token_id=list(eos),
            pad_token_id=eos[0],
        )
    seconds = time.perf_counter() - begin
    answers = output[:, width:].numpy()
    ended = np.isin(answers, eos)
    lengths = np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, answers.shape[1])
    return Round(tuple(int(n) for n in lengths), seconds)


def _setting(name: str, prompts: int, max_tokens: int) -> tuple[Path, list[Int32Array], tuple[int, ...]]:
    """Model directory, prompts and EOS ids of a model; raises ``UserError`` when it is not to be had."""
    from storage.datasets import build_prompts, load_rows
    from storage.models import check_model, context_length, eos_token_ids, load_tokenizer, resolve_model
    from storage.rendering import Renderer

    options = ModelOptions(path=name)
    check_model(options)
    path = resolve_model(options)
    renderer = Renderer(load_tokenizer(path), chat_template=None)
    if name == "tiny":
        rows = load_rows("builtin:running_sums", count=prompts, seed=3, prompt_column="prompt")
        room = {"max_prompt_tokens": 1024, "context_length": context_length(path), "max_tokens": max_tokens}
        texts = [p.token_ids for p in build_prompts(rows, renderer, prompt_column="prompt", **room)]
    else:
        chats = [[{"role": "user", "content": _QUESTIONS[i % len(_QUESTIONS)]}] for i in range(prompts)]
        texts = [renderer.render(chat)[1] for chat in chats]
    return path, texts, eos_token_ids(path)
