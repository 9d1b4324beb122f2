"""The laws that a run must keep whatever dies, checked on what it left on the disk.

Counted on the weights that survive: the newest checkpoint says how many steps those are made of. The archive says which
answers they were trained on, the ledger's journal which groups the run meant to train, metrics which steps it reported;
the three were written by different processes and must agree. What lies behind the checkpoint is no part of the weights:
a resumed run cuts it off.
"""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from storage.checkpoints import Checkpoint, CheckpointStore
from storage.errors import UserError
from storage.history.archive import RolloutArchive
from storage.journal import JsonLines, read_journal
from storage.prompt_source import PromptSource
from storage.records import TRAIN_SPLIT, GroupKey, Prompt
from storage.run_directory import RunDirectory

_ENDED = 2
_NAMED = 3
_COLUMNS = ("split", "epoch", "prompt", "duplicate", "sample_idx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of every group that the surviving weights should know.

    Attributes:
        steps: Steps that the weights are made of.
        trained: Different groups that they were trained on.
        ended: Groups that ended without training, each with a reason.
        waiting: Groups that were begun and wait to go on.
        lost: Groups that were drawn and are nowhere.
        trained_twice: Groups that were trained more than once.
        problems: What else contradicts, a sentence each.
    """

    steps: int = 0
    trained: int = 0
    ended: int = 0
    waiting: int = 0
    lost: tuple[GroupKey, ...] = ()
    trained_twice: tuple[GroupKey, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """True when no law is broken."""
        return not (self.lost or self.trained_twice or self.problems)


@dataclass(slots=True)
class _Ledger:
    """What the journal says.

    Attributes:
        trained: Times that each group was trained, for those whose lines are still there.
        steps: Groups of each training line, by the number of steps finished with it.
        ended: Groups that ended without training.
        nameless: Groups of compacted epochs that ended without training, of which only the number is known.
    """

    trained: Counter[GroupKey] = field(default_factory=Counter)
    steps: dict[int, set[GroupKey]] = field(default_factory=dict)
    ended: set[GroupKey] = field(default_factory=set)
    nameless: int = 0


def check_run(directory: RunDirectory) -> Verdict:
    """Check a run that nobody writes to any more.

    Raises:
        UserError: A file that the check needs is missing or damaged.
    """
    checkpoint = CheckpointStore(directory.checkpoints).latest()
    if checkpoint is None:
        return Verdict(problems=("there is no complete checkpoint: no weights have survived",))
    checkpoint.verify()
    saved = checkpoint.meta
    ledger = _read_ledger(directory, int(saved["ledger_offset"]))
    archived, problems = _read_archive(directory, checkpoint.step)
    problems += _compare(archived, ledger)
    problems += _check_metrics(directory, checkpoint)
    places = Counter(key for keys in archived.values() for key in keys)
    trained = set(places) | set(ledger.trained)
    twice = {key for count in (places, ledger.trained) for key, times in count.items() if times > 1}
    waiting = {GroupKey.parse(str(text)) for text, *_ in saved["rounds"]["backlog"]}
    missing = [key for key in _drawn(saved["source"]) if key not in trained | ledger.ended | waiting]
    # Of epochs whose lines were compacted away, the journal only knows how many groups ended.
    excused = ledger.nameless
    lost = missing if len(missing) > excused else []
    return Verdict(
        steps=checkpoint.step,
        trained=len(trained),
        ended=len(ledger.ended) + ledger.nameless,
        waiting=len(waiting),
        lost=tuple(lost),
        trained_twice=tuple(sorted(twice)),
        problems=tuple(problems),
    )


def _read_ledger(directory: RunDirectory, offset: int) -> _Ledger:
    found = _Ledger()
    for line in read_journal(directory.ledger, offset):
        record = line.record
        match record["op"]:
            case "train":
                keys = [GroupKey.parse(text) for text in record["keys"]]
                found.trained.update(keys)
                found.steps.setdefault(record["step"] + 1, set()).update(keys)
            case "end":
                found.ended.add(GroupKey.parse(record["key"]))
            case "snapshot":
                found.ended.update(_ended_before(record))
                found.nameless = int(record["forgotten"][1])
    return found


def _ended_before(snapshot: Mapping[str, Any]) -> Iterator[GroupKey]:
    for split, epoch, duplicate, packed in snapshot["done"]:
        codes = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8)
        for prompt in np.flatnonzero(codes == _ENDED):
            yield GroupKey(split, epoch, int(prompt), duplicate)


def _read_archive(directory: RunDirectory, steps: int) -> tuple[dict[int, list[GroupKey]], list[str]]:
    """Groups by step, and what is wrong inside of a step; a group with repeated answers is there twice."""
    archive = RolloutArchive(directory.rollouts)
    found: dict[int, list[GroupKey]] = {}
    problems = []
    for step in range(1, steps + 1):
        try:
            table = archive.read(step)
        except UserError as error:
            problems.append(f"step {step} is not in the archive: {error}")
            continue
        rows = Counter(zip(*(table.column(name).to_pylist() for name in _COLUMNS), strict=True))
        keys: Counter[GroupKey] = Counter()
        for (split, epoch, prompt, duplicate, _), times in rows.items():
            key = GroupKey(split, epoch, prompt, duplicate)
            keys[key] = max(keys[key], times)
        found[step] = list(keys.elements())
    return found, problems


def _compare(archived: Mapping[int, list[GroupKey]], ledger: _Ledger) -> list[str]:
    """Contradictions between what was written down and what the ledger says was trained."""
    problems = []
    for step, keys in sorted(ledger.steps.items()):
        if step in archived and set(archived[step]) != keys:
            odd = sorted(set(archived[step]) ^ keys)
            problems.append(f"step {step}: archive and ledger differ in {len(odd)} groups ({_names(odd)})")
    return problems


def _check_metrics(directory: RunDirectory, checkpoint: Checkpoint) -> list[str]:
    """Whether each step was reported exactly once, in order."""
    size = int(checkpoint.meta["metrics_offset"])
    present = directory.metrics.stat().st_size if directory.metrics.exists() else 0
    if present < size:
        return [f"{directory.metrics} has {present} bytes where the checkpoint knows of {size}"]
    records = [record for record in JsonLines.read(directory.metrics) if "time/step_s" in record]
    steps = [int(record["step"]) for record in records if int(record["step"]) <= checkpoint.step]
    if steps == list(range(1, checkpoint.step + 1)):
        return []
    counts = Counter(steps)
    repeated = [step for step, times in counts.items() if times > 1]
    missing = [step for step in range(1, checkpoint.step + 1) if step not in counts]
    return [f"metrics.jsonl: steps {missing or 'none'} are missing, {repeated or 'none'} are there more than once"]


def _drawn(source: Mapping[str, Any]) -> Iterator[GroupKey]:
    """Every group that the prompt source has handed out."""
    count = int(source["prompts"])
    blanks = [Prompt(index=index, token_ids=np.zeros(0, np.int32), text="") for index in range(count)]
    order = PromptSource(blanks, shuffle=source["shuffle"], seed=source["seed"], epochs=None)
    epochs, rest = divmod(int(source["drawn"]), count)
    for epoch in range(epochs + (rest > 0)):
        drawn = order.order(epoch)[: rest if epoch == epochs else count]
        yield from (GroupKey(TRAIN_SPLIT, epoch, int(position)) for position in drawn)


def _names(keys: list[GroupKey]) -> str:
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return ", ".join(str(key) for key in keys[:_NAMED]) + more
