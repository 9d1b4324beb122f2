"""Speed and memory of the history store: append, open, look up, seal, compact, on answers made up at random.

Appending is timed from records to a synced log, seals included. Opening is timed in a fresh object over everything
that was sealed. Memory is what the process itself holds (anonymous pages): mapped files are the kernel's to take back.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from pipelines.bench.harness import BenchResult, OptionValue
from storage.errors import UserError
from storage.files import require_free_space
from storage.history.store import HistoryStore
from storage.records import Group, GroupKey, Int32Array, Prompt, Sample, SamplingParams, Segment

OPTIONS: dict[str, OptionValue] = {
    "answers": 200_000,
    "tokens": 64,
    "group": 8,
    "steps": 25,
    "lookups": 2000,
    "keep": "",
}

_PROMPT_TOKENS = 24
_BYTES_PER_TOKEN = 8
_BYTES_PER_ANSWER = 200
_SAMPLING = SamplingParams(max_tokens=4096)
_FINGERPRINT = 0x5117
_LOOK_S = 0.005

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFigures:
    """What was measured.

    Attributes:
        answers: Answers appended.
        tokens: Their tokens.
        append_tokens_per_s: Records to synced log, seals included.
        seal_s: Sealing what is left in the log.
        open_s: Opening the sealed store.
        first_lookup_us: Median time to the answers of a prompt whose block was never touched, checksum included.
        lookup_us: The same for a block that was touched before.
        compact_s: Merging everything into one segment.
        bytes_per_token: Size on disk over tokens.
        peak_growth_mb: Largest anonymous memory in any operation above that at the start, the records of one step
            included. Unit: megabytes.
        late_growth_mb: By how much that is more in the second half of the steps, in lookups and in compaction than in
            the first half: what grows with the store. Unit: megabytes.
    """

    answers: int
    tokens: int
    append_tokens_per_s: float
    seal_s: float
    open_s: float
    first_lookup_us: float
    lookup_us: float
    compact_s: float
    bytes_per_token: float
    peak_growth_mb: float
    late_growth_mb: float


def run(options: Mapping[str, OptionValue]) -> BenchResult:
    """Fill a store in a temporary folder, or in ``keep``, and measure it."""
    answers, tokens, group = int(options["answers"]), int(options["tokens"]), int(options["group"])
    steps, lookups = int(options["steps"]), int(options["lookups"])
    if min(tokens, group, steps, lookups) < 1 or answers < group * steps:
        raise UserError(f"options answers={answers} group={group} steps={steps}: at least one group a step is needed")
    keep = str(options["keep"])
    parent = Path(keep or tempfile.mkdtemp(prefix="slipstream-history-"))
    parent.mkdir(parents=True, exist_ok=True)
    try:
        figures = measure_store(
            parent / "history", answers=answers, tokens=tokens, group=group, steps=steps, lookups=lookups
        )
    finally:
        if not keep:
            shutil.rmtree(parent, ignore_errors=True)
    return report(figures)


def measure_store(directory: Path, *, answers: int, tokens: int, group: int, steps: int, lookups: int) -> StoreFigures:
    """Append, open, look up and compact.

    Args:
        directory: Where the store goes; must be empty.
        answers: Answers to append, rounded down to whole groups in equal steps.
        tokens: Tokens of each answer.
        group: Answers of a group; the prompts of the first half of the steps come again in the second.
        steps: Steps; a group of answers is made anew in each.
        lookups: Prompts to look up.

    Raises:
        UserError: There is too little disk space.
    """
    prompts = answers // group // steps
    total = prompts * group * steps
    size = total * (tokens * _BYTES_PER_TOKEN + _BYTES_PER_ANSWER)
    require_free_space(directory, int(2.2 * size), f"a history of {total} answers and its compaction")
    rng = np.random.default_rng(0)
    appending, peaks, base = 0.0, [], anonymous_bytes()
    again = max(1, steps // 2)
    with HistoryStore(directory, _FINGERPRINT) as store:
        if store.generation:
            raise UserError(f"{directory} holds a history already: choose another folder for option keep")
        for step in range(steps):
            groups = _groups(step, prompts, group, tokens, rng, first=step % again * prompts)
            with _PeakMemory() as memory:
                begin = time.perf_counter()
                store.append(step, groups, _SAMPLING)
                store.sync()
                appending += time.perf_counter() - begin
            peaks.append(memory.peak)
        del groups
        with _PeakMemory() as memory:
            begin = time.perf_counter()
            store.seal()
            seal_s = time.perf_counter() - begin
        peaks.append(memory.peak)
    with _PeakMemory() as memory:
        begin = time.perf_counter()
        reader = HistoryStore(directory, _FINGERPRINT)
        open_s = time.perf_counter() - begin
        picks = rng.permutation(again * prompts)[:lookups]
        first, later = (_look_up(reader, picks) for _ in range(2))
    peaks.append(memory.peak)
    nbytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    reader.close()
    with HistoryStore(directory, _FINGERPRINT) as store, _PeakMemory() as memory:
        begin = time.perf_counter()
        store.compact(steps)
        compact_s = time.perf_counter() - begin
    peaks.append(memory.peak)
    early = max(peaks[: (steps + 1) // 2])
    return StoreFigures(
        answers=total,
        tokens=total * tokens,
        append_tokens_per_s=total * tokens / appending,
        seal_s=seal_s,
        open_s=open_s,
        first_lookup_us=first,
        lookup_us=later,
        compact_s=compact_s,
        bytes_per_token=nbytes / (total * tokens),
        peak_growth_mb=(max(peaks) - base) / 2**20,
        late_growth_mb=(max(peaks) - early) / 2**20,
    )


def report(figures: StoreFigures) -> BenchResult:
    """Make the table of a measurement."""
    rows = (
        ("append, synced", f"{figures.append_tokens_per_s / 1e6:.1f} Mtok/s", "at least 2"),
        ("open", f"{1000 * figures.open_s:.1f} ms", "under 1000 for 1 M answers"),
        ("look up, first touch of a block", f"{figures.first_lookup_us:.0f} us a prompt", ""),
        ("look up again", f"{figures.lookup_us:.0f} us a prompt", ""),
        ("seal the rest of the log", f"{figures.seal_s:.2f} s", ""),
        ("compact into one segment", f"{figures.compact_s:.2f} s", ""),
        ("on disk", f"{figures.bytes_per_token:.2f} bytes a token", "8 are ids and logprobs"),
        ("memory, all operations", f"{figures.peak_growth_mb:.0f} MB above the start", ""),
        ("memory, later above first half", f"{figures.late_growth_mb:.0f} MB", "0: it does not grow with the store"),
    )
    return BenchResult(
        name="history",
        columns=("store", "measured", "wanted"),
        rows=rows,
        figures={
            "store_append_mtok_s": figures.append_tokens_per_s / 1e6,
            "store_open_s": figures.open_s,
            "store_lookup_us": figures.lookup_us,
            "store_first_lookup_us": figures.first_lookup_us,
            "store_compact_s": figures.compact_s,
            "store_bytes_per_token": figures.bytes_per_token,
            "store_peak_growth_mb": figures.peak_growth_mb,
            "store_late_growth_mb": figures.late_growth_mb,
        },
        notes=(
            f"{figures.answers:,} answers, {figures.tokens / 1e6:.1f} M tokens, made up at random; "
            "making them is not timed",
            "memory is the process's own pages, the records of one step included; mapped files are not part of it",
        ),
    )


def _groups(step: int, prompts: int, group: int, tokens: int, rng: np.random.Generator, *, first: int) -> list[Group]:
    """One group for each of ``prompts`` prompts from number ``first`` on, with tokens at random."""
    ids = rng.integers(0, 32_000, (prompts, group, tokens), dtype=np.int32)
    logprobs = -rng.random((prompts, group, tokens), dtype=np.float32)
    made = []
    for row in range(prompts):
        key = GroupKey("train", step, first + row)
        samples = tuple(
            Sample(
                key=key,
                index=index,
                segments=(
                    Segment(source="policy", version=step, token_ids=ids[row, index], logprobs=logprobs[row, index]),
                ),
                text="",
                finish_reason="stop",
                reward=1.0,
            )
            for index in range(group)
        )
        prompt = Prompt(index=key.prompt, token_ids=_prompt(key.prompt), text="")
        made.append(Group(key=key, prompt=prompt, samples=samples))
    return made


def _prompt(number: int) -> Int32Array:
    """Tokens of a prompt, int32[24]; different for each number."""
    return np.arange(number, number + _PROMPT_TOKENS, dtype=np.int32)


def _look_up(store: HistoryStore, picks: Int64Array) -> float:
    """Median microseconds to get the last two visits of the prompts with these numbers."""
    taken = []
    for number in picks.tolist():
        token_ids = _prompt(number)
        begin = time.perf_counter()
        visits = store.visits(token_ids, 2)
        taken.append(time.perf_counter() - begin)
        assert visits
    return 1e6 * float(np.median(taken))


class _PeakMemory:
    """Largest anonymous memory of this process while the block lasts, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.peak = 0
        """Bytes."""
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _PeakMemory:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, anonymous_bytes())
            if self._over.wait(_LOOK_S):
                return


def anonymous_bytes() -> int:
    """Bytes of the process's own pages; of all its pages where the system does not tell them apart."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)
