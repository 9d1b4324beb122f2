"""Which group is where: the book that makes every group count exactly once.

A key is opened once, leased to a worker, becomes ready when its group is complete and scored, and is trained once or
ended with a reason. Every change is a line of the journal before it is true in memory, so that a run that is killed at
any moment finds the same book again. Invariants (DESIGN.md, section 8): I1, a key is trained exactly once or ended; I2,
launched = queued + leased + ready + trained + ended.

Memory is bounded by what is in flight, plus one byte per prompt for each epoch that is not closed yet.
"""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from storage.journal import Journal, JournalError, read_journal
from storage.records import GroupKey

LiveState = Literal["queued", "leased", "ready"]
KeyState = Literal["queued", "leased", "ready", "trained", "ended", "closed"]

_DONE: dict[int, KeyState] = {1: "trained", 2: "ended"}
_TRAINED, _ENDED = 1, 2


class LedgerError(Exception):
    """A transition that the ledger does not allow, or a broken invariant: a bug of the caller, never of the user."""


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Keys by state. ``launched`` counts every key that was ever opened; ``ended`` counts by reason."""

    launched: int
    queued: int
    leased: int
    ready: int
    trained: int
    ended: dict[str, int]


@dataclass(slots=True)
class _Entry:
    state: LiveState
    worker: str = ""
    attempts: int = 0


class Ledger:
    """The book of all group keys of a run."""

    def __init__(self, journal: Path | None) -> None:
        """Start an empty ledger that writes to ``journal``, or lives in memory only if that is ``None``.

        Raises:
            JournalError: There is a journal already; :meth:`replay` goes on with one.
        """
        self._journal = None if journal is None else Journal(journal)
        self._live: dict[GroupKey, _Entry] = {}
        # Per split and epoch that may still get keys or has live ones: for each duplicate, one byte per prompt.
        self._done: dict[tuple[str, int], dict[int, bytearray]] = {}
        self._live_in: Counter[tuple[str, int]] = Counter()
        self._closed_through: dict[str, int] = {}
        self._launched = 0
        self._states: Counter[LiveState] = Counter()
        self._trained = 0
        self._ended: Counter[str] = Counter()
        self._forgotten = {_TRAINED: 0, _ENDED: 0}

    @classmethod
    def replay(cls, path: Path, upto_offset: int | None = None) -> Ledger:
        """Go on with the journal at ``path`` as it was at ``upto_offset``; the file is cut there, durably.

        Groups that were leased or ready are queued again: their payloads died with the process. (For groups that a
        checkpoint kept, call :meth:`lease` and :meth:`ready` again.) Without an offset the whole file counts, except a
        last line that a crash tore.

        Raises:
            JournalError: The file is missing, too short, damaged, or tells an impossible story; names the line.
        """
        ledger = cls(None)
        end = 0
        for line in read_journal(path, upto_offset):
            try:
                ledger._apply(line.record)
            except (LedgerError, KeyError, ValueError, TypeError) as error:
                raise JournalError(f"{path} line {line.number} cannot be replayed: {error}") from error
            end = line.end
        ledger._journal = Journal.reopen(path, end)
        if ledger._states["leased"] or ledger._states["ready"]:
            ledger._requeue()
        return ledger

    def open(self, key: GroupKey) -> None:
        """Launch a new key: it is queued. Each key can be opened once, and only while its epoch is not closed."""
        state = self.state(key)
        if state is not None:
            raise LedgerError(f"cannot open {key}: it is {state} already")
        if key.prompt < 0 or key.duplicate < 0:
            raise LedgerError(f"cannot open {key}: negative prompt or duplicate")
        self._write(op="open", key=str(key))
        self._live[key] = _Entry("queued")
        self._live_in[key[:2]] += 1
        self._states["queued"] += 1
        self._launched += 1

    def lease(self, key: GroupKey, worker: str, attempt: int) -> None:
        """Give a queued key to ``worker``; ``attempt`` is 0 the first time (see :meth:`attempts`)."""
        entry = self._expect("lease", key, "queued")
        self._write(op="lease", key=str(key), worker=worker, attempt=attempt)
        self._move(entry, "leased")
        entry.worker, entry.attempts = worker, attempt + 1

    def release(self, key: GroupKey, reason: str) -> None:
        """Queue a key again whose worker died or whose payload was lost."""
        entry = self._expect("release", key, "leased", "ready")
        self._write(op="release", key=str(key), reason=reason)
        self._move(entry, "queued")
        entry.worker = ""

    def ready(self, key: GroupKey) -> None:
        """Say that the group of a leased key is complete and scored."""
        entry = self._expect("make ready", key, "leased")
        self._write(op="ready", key=str(key))
        self._move(entry, "ready")

    def train(self, keys: Sequence[GroupKey], step: int, version: int) -> None:
        """Say that one optimiser step trained all of ``keys``: all of them or, after a crash, none.

        Args:
            keys: Ready keys, each once.
            step: The optimiser step.
            version: Version of the weights that the step started from.
        """
        if len(set(keys)) != len(keys):
            raise LedgerError(f"cannot train step {step}: a key occurs twice in the batch")
        for key in keys:
            self._expect("train", key, "ready")
        self._write(op="train", keys=[str(key) for key in keys], step=step, version=version)
        for key in keys:
            self._finish(key, _TRAINED)
        self._trained += len(keys)

    def end(self, key: GroupKey, reason: str) -> None:
        """Take a key out without training it. ``reason`` is one of a few fixed words: it becomes a counter."""
        self._expect("end", key, "queued", "leased", "ready")
        if not reason:
            raise LedgerError(f"cannot end {key}: a reason is needed")
        self._write(op="end", key=str(key), reason=reason)
        self._finish(key, _ENDED)
        self._ended[reason] += 1

    def close_epochs(self, split: str, through: int) -> None:
        """Say that no more keys of ``split`` up to epoch ``through`` will be opened.

        Once the last live key of such an epoch is trained or ended, its keys are forgotten and only counts stay.
        Closing again, or less, does nothing.
        """
        if through <= self._closed_through.get(split, -1):
            return
        self._write(op="close", split=split, through=through)
        self._closed_through[split] = through
        for epoch in [e for e in self._done if e[0] == split and e[1] <= through]:
            self._forget_if_finished(epoch)

    def state(self, key: GroupKey) -> KeyState | None:
        """Where a key is; ``closed`` for one of a closed epoch that is not live; ``None`` if it was never opened."""
        entry = self._live.get(key)
        if entry is not None:
            return entry.state
        if key.epoch <= self._closed_through.get(key.split, -1):
            return "closed"
        done = self._done.get(key[:2], {}).get(key.duplicate, b"")
        return _DONE.get(done[key.prompt]) if 0 <= key.prompt < len(done) else None

    def keys(self, state: LiveState) -> list[GroupKey]:
        """Keys in ``state``, in the order in which they were opened."""
        return [key for key, entry in self._live.items() if entry.state == state]

    def leases(self, worker: str) -> list[GroupKey]:
        """Keys leased to ``worker``, in the order in which they were opened: what to release when it dies."""
        return [key for key, entry in self._live.items() if entry.state == "leased" and entry.worker == worker]

    def attempts(self, key: GroupKey) -> int:
        """Number of the next attempt of a live key: 0 if it was never leased, also across a resume."""
        self._expect("ask for the attempts of", key, "queued", "leased", "ready")
        return self._live[key].attempts

    def counts(self) -> LedgerCounts:
        """Keys by state, in constant time."""
        return LedgerCounts(
            launched=self._launched,
            queued=self._states["queued"],
            leased=self._states["leased"],
            ready=self._states["ready"],
            trained=self._trained,
            ended=dict(self._ended),
        )

    def check(self) -> None:
        """Count again from the keys themselves; raises ``LedgerError`` when I2 or a counter is broken."""
        live = Counter(entry.state for entry in self._live.values())
        maps = [codes for epoch in self._done.values() for codes in epoch.values()]
        trained = self._forgotten[_TRAINED] + sum(codes.count(_TRAINED) for codes in maps)
        ended = self._forgotten[_ENDED] + sum(codes.count(_ENDED) for codes in maps)
        counts = self.counts()
        found = (live["queued"], live["leased"], live["ready"], trained, ended)
        kept = (counts.queued, counts.leased, counts.ready, counts.trained, sum(counts.ended.values()))
        by_epoch = {epoch: live for epoch, live in self._live_in.items() if live}
        if found != kept or sum(found) != self._launched or by_epoch != Counter(key[:2] for key in self._live):
            raise LedgerError(
                f"launched {self._launched}; (queued, leased, ready, trained, ended) counted {found}, kept {kept}"
            )

    def offset(self) -> int:
        """Offset behind the last line of the journal, for the checkpoint; 0 in memory. Call :meth:`sync` first."""
        return 0 if self._journal is None else self._journal.offset()

    def sync(self) -> None:
        """Return when every change so far is on the disk. Raises ``StorageError``."""
        if self._journal is not None:
            self._journal.sync()

    def close(self) -> None:
        """Sync and close the journal."""
        if self._journal is not None:
            self._journal.close()

    def compact(self, before: int) -> None:
        """Replace the journal before offset ``before`` by a snapshot, atomically, so that the file stays bounded.

        Give the offset of the oldest checkpoint that is still kept: later offsets stay valid, earlier ones do not.
        """
        if self._journal is None:
            return
        past = Ledger(None)
        for line in read_journal(self._journal.path, before):
            past._apply(line.record)
        self._journal.compact(before, past._snapshot())

    def _expect(self, verb: str, key: GroupKey, *states: LiveState) -> _Entry:
        entry = self._live.get(key)
        if entry is None or entry.state not in states:
            raise LedgerError(f"cannot {verb} {key}: it is {self.state(key) or 'unknown'}, not {' or '.join(states)}")
        return entry

    def _write(self, **record: Any) -> None:
        if self._journal is not None:
            self._journal.append(record)

    def _move(self, entry: _Entry, state: LiveState) -> None:
        self._states[entry.state] -= 1
        self._states[state] += 1
        entry.state = state

    def _finish(self, key: GroupKey, code: int) -> None:
        self._states[self._live.pop(key).state] -= 1
        epoch = key[:2]
        codes = self._done.setdefault(epoch, {}).setdefault(key.duplicate, bytearray())
        if key.prompt >= len(codes):
            codes.extend(bytes(key.prompt + 1 - len(codes)))
        codes[key.prompt] = code
        self._live_in[epoch] -= 1
        if epoch[1] <= self._closed_through.get(epoch[0], -1):
            self._forget_if_finished(epoch)

    def _forget_if_finished(self, epoch: tuple[str, int]) -> None:
        if self._live_in[epoch]:
            return
        del self._live_in[epoch]
        for codes in self._done.pop(epoch).values():
            for code in self._forgotten:
                self._forgotten[code] += codes.count(code)

    def _requeue(self) -> None:
        self._write(op="resume")
        for entry in self._live.values():
            if entry.state != "queued":
                self._move(entry, "queued")
                entry.worker = ""

    def _apply(self, record: dict[str, Any]) -> None:
        """Do again what a line of the journal says; this ledger must not have a journal itself."""
        parse = GroupKey.parse
        match record["op"]:
            case "open":
                self.open(parse(record["key"]))
            case "lease":
                self.lease(parse(record["key"]), record["worker"], record["attempt"])
            case "release":
                self.release(parse(record["key"]), record["reason"])
            case "ready":
                self.ready(parse(record["key"]))
            case "train":
                self.train([parse(key) for key in record["keys"]], record["step"], record["version"])
            case "end":
                self.end(parse(record["key"]), record["reason"])
            case "close":
                self.close_epochs(record["split"], record["through"])
            case "resume":
                self._requeue()
            case "snapshot":
                self._restore(record)
            case unknown:
                raise LedgerError(f"unknown operation {unknown!r}: written by a newer version?")

    def _snapshot(self) -> dict[str, Any]:
        return {
            "op": "snapshot",
            "launched": self._launched,
            "trained": self._trained,
            "ended": dict(self._ended),
            "closed": self._closed_through,
            "forgotten": [self._forgotten[_TRAINED], self._forgotten[_ENDED]],
            "live": [[str(key), entry.state, entry.worker, entry.attempts] for key, entry in self._live.items()],
            "done": [
                [split, epoch, duplicate, base64.b64encode(zlib.compress(codes)).decode()]
                for (split, epoch), duplicates in self._done.items()
                for duplicate, codes in duplicates.items()
            ],
        }

    def _restore(self, record: dict[str, Any]) -> None:
        if self._launched:
            raise LedgerError("a snapshot can only be the first line")
        self._launched, self._trained = record["launched"], record["trained"]
        self._ended.update(record["ended"])
        self._closed_through.update(record["closed"])
        self._forgotten = dict(zip((_TRAINED, _ENDED), record["forgotten"], strict=True))
        for text, state, worker, attempts in record["live"]:
            key = GroupKey.parse(text)
            self._live[key] = _Entry(state, worker, attempts)
            self._live_in[key[:2]] += 1
            self._states[state] += 1
        for split, epoch, duplicate, packed in record["done"]:
            codes = bytearray(zlib.decompress(base64.b64decode(packed)))
            self._done.setdefault((split, epoch), {})[duplicate] = codes
        self.check()
