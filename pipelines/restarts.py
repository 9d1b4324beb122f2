"""Going on after a death: from which checkpoint, and how often without getting any further.

The account lies in the run directory, since conductors die as well: the driver of an attached run, a conductor that
lost its learner, and the successor of a detached conductor all write to the same one.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from storage.checkpoints import Checkpoint, CheckpointError, CheckpointStore
from storage.errors import UserError
from storage.files import StorageError, atomic_write, describe_failure
from storage.history.archive import RolloutArchive
from storage.history.store import HistoryStore
from storage.run_directory import RunDirectory

log = logging.getLogger(__name__)

_KEPT = ("step", "fruitless", "times", "steps_lost")
_PREDECESSOR_S = 30.0
"""Killed processes live on for a moment."""


@dataclass(slots=True)
class Restarts:
    """Counts the deaths of a run since its newest checkpoint, and how often it went back since it began.

    Attributes:
        path: Where the account lies.
        limit: Restarts without a new checkpoint that are allowed.
        step: Step of the checkpoint that the run last went on from; -1 before that.
        fruitless: Deaths since then.
        times: Times that the run went back to a checkpoint by itself, over all of its processes.
        steps_lost: Finished steps that it had to train once more because of that.
    """

    path: Path
    limit: int
    step: int = -1
    fruitless: int = 0
    times: int = 0
    steps_lost: int = 0

    @classmethod
    def of(cls, directory: RunDirectory, limit: int) -> Restarts:
        """Return the account of a run; one that cannot be read begins anew."""
        try:
            kept = json.loads(directory.restarts.read_text(encoding="utf-8"))
            return cls(directory.restarts, limit, *(int(kept[name]) for name in _KEPT))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be read (%s): restarts are counted anew", directory.restarts, error)
        return cls(directory.restarts, limit)

    def allow(self, step: int, reached: int) -> bool:
        """Take note of a death; False when there were too many without a checkpoint in between.

        Args:
            step: Step of the newest intact checkpoint; 0 without any.
            reached: Newest step that was finished before the death.

        Raises:
            StorageError: The disk refused the account.
        """
        self.fruitless = 1 if step > self.step else self.fruitless + 1
        self.step = max(step, self.step)
        allowed = self.fruitless <= self.limit
        if allowed:
            self.times += 1
            self.steps_lost += max(0, reached - step)
        self._write()
        return allowed

    def refusal(self) -> str:
        """Say why :meth:`allow` said no."""
        if not self.limit:
            return "run.restarts=0"
        deaths = "death" if self.fruitless == 1 else "deaths"
        return f"{self.fruitless} {deaths} without a new checkpoint in between, run.restarts={self.limit} are allowed"

    def forgive(self) -> None:
        """Count deaths anew, as somebody has looked after the run; what it lost so far stays known.

        Raises:
            StorageError: The disk refused the account.
        """
        if self.fruitless:
            self.step, self.fruitless = -1, 0
            self._write()

    def metrics(self) -> dict[str, float]:
        """What a step reports of it."""
        return {"run/restarts": float(self.times), "run/steps_lost": float(self.steps_lost)}

    def _write(self) -> None:
        atomic_write(self.path, json.dumps({name: getattr(self, name) for name in _KEPT}).encode() + b"\n")


def newest_intact(store: CheckpointStore, report: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint whose files are as they were written; later, damaged ones are reported and removed.

    None when there is none; nothing is removed then.
    """
    for checkpoint in reversed(store.checkpoints()):
        try:
            checkpoint.verify()
        except CheckpointError as error:
            report(f"skipping {error}")
            continue
        store.truncate_after(checkpoint.step)
        return checkpoint
    return None


def restart_point(directory: RunDirectory, keep_last: int) -> Checkpoint | None:
    """Return the checkpoint that a run goes on from after a death.

    None for a run that died before its first checkpoint: what it had done so far is then cleared away, and it begins
    anew.

    Raises:
        UserError: There are checkpoints, but not an intact one; or the disk refused to remove something.
    """
    checkpoint = newest_intact(CheckpointStore(directory.checkpoints, keep_last), log.warning)
    if checkpoint is not None:
        return checkpoint
    if any(directory.checkpoints.glob("step_*")):
        raise UserError(
            f"{directory.checkpoints} holds no intact checkpoint to go on from: restore one, or start a new run"
        )
    try:
        for file in (directory.ledger, directory.metrics):
            file.unlink(missing_ok=True)
        for folder in (directory.tensorboard, directory.rollouts, directory.history):
            if folder.exists():
                shutil.rmtree(folder)
    except OSError as error:
        raise StorageError(describe_failure("cannot begin anew in", directory.path, error)) from error
    return None


def cut_back(directory: RunDirectory, tokenizer_fingerprint: int, step: int) -> None:
    """Remove what archive and history hold of the steps after ``step``, which come once more.

    Raises:
        UserError: The disk refused it, or another process writes the history.
    """
    RolloutArchive(directory.rollouts, tokenizer_fingerprint).truncate_after(step)
    if directory.history.exists():
        with HistoryStore(directory.history, tokenizer_fingerprint, patience_s=_PREDECESSOR_S) as history:
            history.truncate_to(step)
