"""Speed and size of the draft indexes: build, memory, and what a step costs a row.

Answers are synthetic, made of phrases as text is: siblings share most of them, prompts some. The last sibling of each
prompt is held out and walked through in steps of a few accepted tokens, each followed by a draft, many rows at once as
in a rollout. How many drafted tokens agree with that answer says that the indexes do their work, not what real text
would give.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pipelines.bench import arctic
from pipelines.bench.harness import BenchResult, OptionValue
from storage.errors import UserError
from storage.history.index.automaton_set import AutomatonSet
from storage.history.index.fuzzy import FuzzyIndex
from storage.history.index.levels import LevelIndex
from storage.history.index.live_automaton import LiveAutomaton
from storage.history.index.suffix_automaton import build

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Result = TypeVar("Result")

# One step of all rows: takes in their tokens from start to stop, int64[rows] each, and fills in drafts.
Step = Callable[[Int64Array, Int64Array], None]

OPTIONS: dict[str, OptionValue] = {"prompts": 400, "samples": 8, "length": 400, "rounds": 3, "seed": 0}

ROWS = 64
ACCEPTED = 5
"""Tokens that a row takes in before each draft."""
WIDTH = 16

_VOCABULARY = 32_000
_PHRASES = 20_000
_REPHRASED = 0.15
_PHRASE_LENGTHS = (3, 9)


@dataclass(frozen=True, slots=True)
class IndexFigures:
    """What one index takes.

    Attributes:
        name: Which index.
        build_rate: Million tokens per second.
        bytes_per_token: Of all arrays.
        step_us: Microseconds a row a step: taking in :data:`ACCEPTED` tokens, and a draft.
        drafted: Tokens a draft.
        agreed: Leading tokens of a draft that the held-out answer goes on with.
    """

    name: str
    build_rate: float
    bytes_per_token: float
    step_us: float
    drafted: float
    agreed: float


def run(options: Mapping[str, OptionValue]) -> BenchResult:
    """Measure every index on the same synthetic answers."""
    sizes = {name: int(options[name]) for name in ("prompts", "samples", "length", "rounds")}
    for name, least in {"prompts": 1, "samples": 2, "length": 4 * ACCEPTED, "rounds": 1}.items():
        if sizes[name] < least:
            raise UserError(f"option {name}={sizes[name]}: must be at least {least}")
    groups = synthetic_groups(sizes["prompts"], sizes["samples"], sizes["length"], int(options["seed"]))
    measured = measure_index(groups, rounds=sizes["rounds"])
    figures: dict[str, float] = {}
    keys = ("prompt", "global", "live", "levels", "fuzzy", "arctic")
    for key, result in zip(keys, measured, strict=False):
        figures[f"index_build_mtok_s_{key}"] = result.build_rate
        figures[f"index_bytes_per_token_{key}"] = result.bytes_per_token
        figures[f"index_row_us_{key}"] = result.step_us
    columns = ("index", "build Mtok/s", "bytes/token", "us/row/step", "tokens/draft", "agreed")
    rows = tuple(
        (
            result.name,
            f"{result.build_rate:.2f}",
            f"{result.bytes_per_token:.0f}",
            f"{result.step_us:.2f}",
            f"{result.drafted:.1f}",
            f"{result.agreed:.1f}",
        )
        for result in measured
    )
    tokens = sum(len(answer) for group in groups for answer in group[:-1])
    notes = (
        f"{tokens} synthetic tokens, {sizes['prompts']} prompts, {sizes['samples'] - 1} answers each and one held out",
        f"{ROWS} rows a step, {ACCEPTED} tokens taken in and up to {WIDTH} drafted; medians of CPU time on one thread",
        "live automaton: siblings are written before, and its bytes include room to grow; "
        "levels, fuzzy and arctic are called row by row from Python",
        "arctic-inference: one suffix tree of all, and one a row; memory is its own estimate"
        if len(measured) == len(keys)
        else "arctic-inference is not installed here; where it is, it is measured beside ours",
    )
    return BenchResult(name="index", columns=columns, rows=rows, figures=figures, notes=notes)


def synthetic_groups(prompts: int, samples: int, length: int, seed: int) -> list[list[Int32Array]]:
    """Return ``samples`` answers of about ``length`` tokens to each of ``prompts`` prompts."""
    rng = np.random.default_rng(seed)
    popularity = 1.0 / np.arange(1, _VOCABULARY + 1)
    words = rng.choice(_VOCABULARY, size=(_PHRASES, _PHRASE_LENGTHS[1]), p=popularity / popularity.sum())
    phrases = [words[i, :size].astype(np.int32) for i, size in enumerate(rng.integers(*_PHRASE_LENGTHS, size=_PHRASES))]
    rank = 1.0 / np.arange(1, _PHRASES + 1) ** 0.8
    rank /= rank.sum()
    count = 1 + length * 2 // (sum(_PHRASE_LENGTHS) - 1)
    groups = []
    for _ in range(prompts):
        base = rng.choice(_PHRASES, size=count, p=rank)
        answers = []
        for _ in range(samples):
            own = np.where(rng.random(count) < _REPHRASED, rng.choice(_PHRASES, size=count, p=rank), base)
            answers.append(np.concatenate([phrases[number] for number in own]))
        groups.append(answers)
    return groups


def measure_index(groups: Sequence[Sequence[Int32Array]], *, rounds: int) -> list[IndexFigures]:
    """Measure all indexes.

    Args:
        groups: int32 answers to each prompt, at least two; the last one is held out and walked through.
        rounds: Times that builds and walks are repeated; the median counts.

    Returns:
        Automata per prompt, one automaton of all prompts, live automaton, levels, fuzzy, and the suffix trees of
        arctic-inference where it is installed.
    """
    histories = [list(group[:-1]) for group in groups]
    everything = [answer for history in histories for answer in history]
    tokens = sum(map(len, everything))
    walked = [groups[row % len(groups)] for row in range(ROWS)]
    walk = _Walk([group[-1] for group in walked])
    prompts = np.arange(ROWS, dtype=np.uint64) % len(groups)
    LevelIndex.build(everything[:1], [0.0])
    FuzzyIndex.build(everything[:1])
    build(everything[:1])

    seconds, packed = _timed(lambda: AutomatonSet.pack(dict(enumerate(map(build, histories)))), rounds)
    steps = walk.measure(lambda: walk.searching(packed, prompts), rounds)
    results = [IndexFigures("automaton per prompt", tokens / seconds / 1e6, packed.nbytes / tokens, *steps)]

    seconds, automaton = _timed(lambda: build(everything), rounds)
    one = AutomatonSet.pack({0: automaton})
    steps = walk.measure(lambda: walk.searching(one, np.zeros(ROWS, np.uint64)), rounds)
    results.append(IndexFigures("one automaton of all", tokens / seconds / 1e6, one.nbytes / tokens, *steps))

    siblings = sum(len(answer) for group in walked for answer in group[:-1])
    seconds, (live, _) = _timed(lambda: _siblings_written(walked), rounds)
    size = live.nbytes / siblings
    steps = walk.measure(lambda: walk.growing(*_siblings_written(walked)), rounds)
    results.append(IndexFigures("live automaton", siblings / seconds / 1e6, size, *steps))

    seconds, levels = _timed(lambda: LevelIndex.build(everything, [0.0] * len(everything)), rounds)
    steps = walk.measure(lambda: walk.calling(levels.draft), rounds)
    results.append(IndexFigures("levels", tokens / seconds / 1e6, levels.nbytes / tokens, *steps))

    seconds, fuzzy = _timed(lambda: FuzzyIndex.build(everything), rounds)
    steps = walk.measure(lambda: walk.calling(fuzzy.draft), rounds)
    results.append(IndexFigures("fuzzy", tokens / seconds / 1e6, fuzzy.nbytes / tokens, *steps))

    if arctic.installed():
        seconds, trees = _timed(lambda: arctic.ArcticTrees(everything), rounds)
        size = trees.nbytes / tokens
        steps = walk.measure(lambda: walk.requesting(trees), rounds)
        results.append(IndexFigures("arctic-inference", tokens / seconds / 1e6, size, *steps))
    return results


class _Walk:
    """Rows that walk through held-out answers, with the buffers that their drafts are written to."""

    def __init__(self, answers: Sequence[Int32Array]) -> None:
        self.steps = min(map(len, answers)) // ACCEPTED
        self.text = np.full((len(answers), self.steps * ACCEPTED + WIDTH), -1, np.int32)
        for row, answer in enumerate(answers):
            part = answer[: self.text.shape[1]]
            self.text[row, : len(part)] = part
        shape = (len(answers), WIDTH)
        self.rows = np.arange(len(answers))
        self.limit = np.full(len(answers), WIDTH)
        self.tokens, self.matched = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        self.count, self.ratio = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.length = np.zeros(len(answers), np.int64)
        self.requests: list[int] = []

    def searching(self, automata: AutomatonSet, keys: npt.NDArray[np.uint64]) -> Step:
        """Return the step of rows that search a set, each the automaton of its key."""
        which = automata.find(keys)
        state, matched = np.zeros(len(keys), np.int32), np.zeros(len(keys), np.int32)

        def step(start: Int64Array, stop: Int64Array) -> None:
            automata.advance_rows(which, state, matched, self.text, self.rows, start, stop)
            automata.draft_rows(
                which, state, matched, self.limit, self.tokens, self.count, self.ratio, self.matched, self.length
            )

        return step

    def growing(self, live: LiveAutomaton, documents: Int64Array) -> Step:
        """Return the step of rows that are documents of a live automaton."""

        def step(start: Int64Array, stop: Int64Array) -> None:
            live.extend_rows(documents, self.text, self.rows, start, stop)
            live.draft_rows(documents, self.limit, self.tokens, self.count, self.ratio, self.matched, self.length)

        return step

    def calling(self, draft: Callable[[Int32Array, int], tuple[Int32Array, int]]) -> Step:
        """Return the step of rows that call ``draft`` one by one."""

        def step(start: Int64Array, stop: Int64Array) -> None:
            for row in range(len(self.text)):
                found, _ = draft(self.text[row, : stop[row]], WIDTH)
                self.tokens[row, : len(found)] = found
                self.length[row] = len(found)

        return step

    def requesting(self, trees: arctic.ArcticTrees) -> Step:
        """Return the step of rows that are fresh requests of arctic-inference; those of the round before are gone."""
        for request in self.requests:
            trees.forget(request)
        self.requests = requests = [trees.begin() for _ in self.rows]

        def step(start: Int64Array, stop: Int64Array) -> None:
            for row, request in enumerate(requests):
                found = trees.step(request, self.text[row, : stop[row]], int(stop[row] - start[row]), WIDTH)
                self.tokens[row, : len(found)] = found
                self.length[row] = len(found)

        return step

    def measure(self, begin: Callable[[], Step], rounds: int) -> tuple[float, float, float]:
        """Return microseconds a row a step, tokens a draft and how many agree; a round's first step is not timed."""
        times: list[float] = []
        drafted = agreed = 0
        for _ in range(rounds):
            step = begin()
            for number in range(self.steps):
                start = np.full(len(self.text), number * ACCEPTED)
                stop = start + ACCEPTED
                before = time.thread_time()
                step(start, stop)
                if number:
                    times.append(time.thread_time() - before)
                ahead = self.text[:, stop[0] : stop[0] + WIDTH]
                equal = (self.tokens == ahead) & (np.arange(WIDTH) < self.length[:, None])
                drafted += int(self.length.sum())
                agreed += int(np.cumprod(equal, axis=1).sum())
        drafts = rounds * self.steps * len(self.text)
        return median(times) / len(self.text) * 1e6, drafted / drafts, agreed / drafts


def _siblings_written(groups: Sequence[Sequence[Int32Array]]) -> tuple[LiveAutomaton, Int64Array]:
    """Return a live automaton with all answers but each group's last, which is an empty document: int64[groups]."""
    live = LiveAutomaton()
    last = []
    for group in groups:
        documents = live.add_group(len(group))
        for document, answer in zip(documents[:-1], group[:-1], strict=True):
            live.extend(int(document), answer)
        last.append(documents[-1])
    return live, np.array(last, np.int64)


def _timed(work: Callable[[], Result], rounds: int) -> tuple[float, Result]:
    """Return the median of the CPU seconds that ``work`` takes on this thread, and its last result.

    A first time is not counted: a run builds its indexes in memory that earlier ones have used.
    """
    times = []
    work()
    for _ in range(rounds):
        before = time.thread_time()
        result = work()
        times.append(time.thread_time() - before)
    return median(times), result
