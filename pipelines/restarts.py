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

_PREDECESSOR_S = 30.0
"""Killed processes live on for a moment."""


@dataclass(slots=True)
class Restarts:
    """Counts the deaths of a run since its newest checkpoint.

    Attributes:
        path: Where the account lies.
        limit: Restarts without a new checkpoint that are allowed.
        step: Step of the checkpoint that the run last went on from; -1 before that.
        fruitless: Deaths since then.
    """

    path: Path
    limit: int
    step: int = -1
    fruitless: int = 0

    @classmethod
    def of(cls, directory: RunDirectory, limit: int) -> Restarts:
        """Return the account of a run; one that cannot be read begins anew."""
        restarts = cls(directory.restarts, limit)
        try:
            kept = json.loads(directory.restarts.read_text(encoding="utf-8"))
            restarts.step, restarts.fruitless = int(kept["step"]), int(kept["fruitless"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be read (%s): restarts are counted anew", directory.restarts, error)
        return restarts

    def allow(self, step: int) -> bool:
        """Take note of a death; False when there were too many without a checkpoint in between.

        Args:
            step: Step of the newest intact checkpoint; 0 without any.

        Raises:
            StorageError: The disk refused the account.
        """
        self.fruitless = 1 if step > self.step else self.fruitless + 1
        self.step = max(step, self.step)
        atomic_write(self.path, json.dumps({"step": self.step, "fruitless": self.fruitless}).encode() + b"\n")
        return self.fruitless <= self.limit

    def refusal(self) -> str:
        """Say why :meth:`allow` said no."""
        if not self.limit:
            return "run.restarts=0"
        deaths = "death" if self.fruitless == 1 else "deaths"
        return f"{self.fruitless} {deaths} without a new checkpoint in between, run.restarts={self.limit} are allowed"

    def forget(self) -> None:
        """Begin anew: somebody has looked after the run."""
        self.path.unlink(missing_ok=True)


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
