"""The files of a run as it trains, without a model: steps, checkpoints, history, pruning, compaction."""

from __future__ import annotations

import json
from pathlib import Path

from storage.checkpoints import Checkpoint, CheckpointStore
from storage.history.store import HistoryStore
from storage.journal import JsonLines
from storage.ledger import Ledger
from storage.records import GroupKey
from storage.run_directory import RunDirectory
from tests.storage.history.answers import SAMPLING, make_group

FINGERPRINT = 7
PROMPTS = 3


class Life:
    """One process's part of a run in a directory."""

    def __init__(self, directory: Path, keep_last: int = 1) -> None:
        self.run = RunDirectory(directory)
        self.run.config.write_text("run: {}\n")
        self.store = CheckpointStore(self.run.checkpoints, keep_last)
        newest = self.store.latest()
        self.step = newest.step if newest else 0
        if newest is None:
            self.ledger = Ledger(self.run.ledger)
            self.metrics = JsonLines(self.run.metrics)
        else:
            newest.verify()
            self.ledger = Ledger.replay(self.run.ledger, newest.meta["ledger_offset"])
            self.metrics = JsonLines(self.run.metrics)
            self.metrics.truncate(newest.meta["metrics_offset"])
        self.history = HistoryStore(self.run.history, FINGERPRINT)
        if newest is not None:
            self.history.truncate_to(newest.step)

    def train(self, *, save: bool = True) -> None:
        """One step: answers are stored, the ledger and the metrics grow, and a checkpoint may be written."""
        keys = [GroupKey("train", self.step, prompt) for prompt in range(PROMPTS)]
        for key in keys:
            self.ledger.open(key)
            self.ledger.lease(key, "rollout-0", 0)
            self.ledger.ready(key)
        self.ledger.train(keys, self.step, self.step)
        self.step += 1
        self.history.append(self.step, [make_group(prompt, epoch=self.step) for prompt in range(PROMPTS)], SAMPLING)
        self.history.sync()
        if self.step % 2 == 0:
            self.history.seal()
        self.metrics.append({"step": self.step, "text": "x" * 50})
        rollouts = self.run.rollouts / "train"
        rollouts.mkdir(parents=True, exist_ok=True)
        (rollouts / f"step_{self.step:06d}.parquet").write_bytes(b"answers of step %d" % self.step)
        self.run.status.write_text(json.dumps({"step": self.step}))
        if save:
            self.save()

    def save(self) -> None:
        self.ledger.sync()
        self.metrics.sync()
        with self.store.begin(self.step) as writer:
            (writer.component("model") / "weights.bin").write_bytes(b"%d" % self.step * 1000)
            (writer.component("learner") / "state.bin").write_bytes(b"%d" % self.step * 500)
            writer.commit({"ledger_offset": self.ledger.offset(), "metrics_offset": self.metrics.offset()})
        self.ledger.compact(self.store.checkpoints()[0].meta["ledger_offset"])

    def close(self) -> None:
        self.ledger.close()
        self.metrics.close()
        self.history.close()


def assert_resumable(directory: Path, at_least: int) -> Checkpoint | None:
    """Everything that a resumed run reads fits together; returns the checkpoint that it goes on from."""
    run = RunDirectory(directory)
    newest = CheckpointStore(run.checkpoints).latest()
    assert (newest.step if newest else 0) >= at_least, "a step that was sent as a whole is lost"
    if newest is None:
        return None
    newest.verify()
    ledger = Ledger.replay(run.ledger, newest.meta["ledger_offset"])
    assert ledger.counts().trained == newest.step * PROMPTS
    ledger.close()
    assert [record["step"] for record in JsonLines.read(run.metrics)][: newest.step] == list(range(1, newest.step + 1))
    with HistoryStore(run.history, FINGERPRINT) as history:
        history.truncate_to(newest.step)
        assert not history.verify()
        assert history.stats().answers == newest.step * PROMPTS * 2
        assert history.stats().last_step == newest.step
    return newest
