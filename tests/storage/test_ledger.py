"""The ledger counts every group once, whatever dies and whenever."""

from __future__ import annotations

import copy
import json
import os
import random
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storage.files import StorageError
from storage.journal import JournalError, JsonLines, encode_line, read_journal
from storage.ledger import Ledger, LedgerCounts, LedgerError
from storage.records import GroupKey


def key(prompt: int, epoch: int = 0, duplicate: int = 0) -> GroupKey:
    return GroupKey("train", epoch, prompt, duplicate)


def make_ready(ledger: Ledger, *keys: GroupKey) -> None:
    for each in keys:
        ledger.open(each)
        ledger.lease(each, "rollout-0", 0)
        ledger.ready(each)


def test_group_goes_through_all_states():
    ledger = Ledger(None)
    seen = [ledger.state(key(3))]
    ledger.open(key(3))
    seen.append(ledger.state(key(3)))
    ledger.lease(key(3), "rollout-0", 0)
    seen.append(ledger.state(key(3)))
    assert ledger.leases("rollout-0") == [key(3)]
    ledger.release(key(3), "worker_died")
    seen.append(ledger.state(key(3)))
    assert ledger.leases("rollout-0") == []
    ledger.lease(key(3), "rollout-1", ledger.attempts(key(3)))
    assert ledger.attempts(key(3)) == 2
    ledger.ready(key(3))
    seen.append(ledger.state(key(3)))
    ledger.train([key(3)], step=1, version=0)
    seen.append(ledger.state(key(3)))
    assert seen == [None, "queued", "leased", "queued", "ready", "trained"]
    assert ledger.counts() == LedgerCounts(1, 0, 0, 0, 1, {})


def test_illegal_transitions_are_errors_and_change_nothing():
    ledger = Ledger(None)
    make_ready(ledger, key(0), key(1))
    ledger.train([key(0)], step=1, version=0)
    ledger.end(key(1), "zero_variance")
    ledger.open(key(2))
    make_ready(ledger, key(3))
    before = ledger.counts()
    illegal = [
        lambda: ledger.open(key(0)),
        lambda: ledger.open(key(2)),
        lambda: ledger.open(key(-1)),
        lambda: ledger.lease(key(3), "w", 0),
        lambda: ledger.lease(key(9), "w", 0),
        lambda: ledger.release(key(2), "why"),
        lambda: ledger.ready(key(2)),
        lambda: ledger.train([key(0)], step=2, version=1),
        lambda: ledger.train([key(1)], step=2, version=1),
        lambda: ledger.train([key(3), key(2)], step=2, version=1),
        lambda: ledger.train([key(3), key(3)], step=2, version=1),
        lambda: ledger.end(key(1), "again"),
        lambda: ledger.end(key(3), ""),
    ]
    for attempt in illegal:
        with pytest.raises(LedgerError, match="cannot"):
            attempt()
        assert ledger.counts() == before
        ledger.check()


def test_check_finds_a_lost_group():
    ledger = Ledger(None)
    make_ready(ledger, key(0), key(1))
    ledger.check()
    ledger._live.pop(key(1))
    with pytest.raises(LedgerError, match="launched 2"):
        ledger.check()


def test_same_prompt_may_occur_twice_under_two_keys():
    ledger = Ledger(None)
    make_ready(ledger, key(5), key(5, duplicate=1))
    ledger.train([key(5), key(5, duplicate=1)], step=1, version=0)
    assert ledger.counts().trained == 2
    with pytest.raises(LedgerError):
        ledger.open(key(5, duplicate=1))


def test_closed_epoch_is_forgotten_once_its_last_group_finished():
    ledger = Ledger(None)
    make_ready(ledger, *(key(p) for p in range(50)))
    ledger.train([key(p) for p in range(49)], step=1, version=0)
    ledger.close_epochs("train", 0)
    assert ledger.state(key(49)) == "ready"  # a group that is on its way may still finish
    assert ledger._done
    ledger.end(key(49), "dropped")
    assert not ledger._done
    assert not ledger._live_in
    assert ledger.counts() == LedgerCounts(50, 0, 0, 0, 49, {"dropped": 1})
    ledger.check()
    for prompt in (0, 77):
        with pytest.raises(LedgerError, match="closed"):
            ledger.open(key(prompt))
    ledger.open(key(0, epoch=1))
    ledger.open(GroupKey("heldout", 0, 0))  # another split has epochs of its own


def test_resume_queues_in_flight_groups_again_and_keeps_the_rest(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    make_ready(ledger, *(key(p) for p in range(4)))
    ledger.train([key(0)], step=1, version=0)
    ledger.end(key(1), "zero_variance")
    ledger.open(key(4))
    ledger.lease(key(4), "rollout-1", 0)
    ledger.open(key(5))
    ledger.sync()
    offset = ledger.offset()
    ledger.train([key(2), key(3)], step=2, version=1)  # after the checkpoint: undone by the resume
    ledger.close()

    resumed = Ledger.replay(path, offset)
    assert resumed.counts() == LedgerCounts(6, 4, 0, 0, 1, {"zero_variance": 1})
    assert resumed.keys("queued") == [key(2), key(3), key(4), key(5)]
    assert resumed.attempts(key(4)) == 1
    assert resumed.attempts(key(5)) == 0
    assert resumed.leases("rollout-1") == []
    resumed.lease(key(2), "rollout-0", 1)
    resumed.close()
    assert Ledger.replay(path).counts() == LedgerCounts(6, 4, 0, 0, 1, {"zero_variance": 1})


def test_resume_between_steps_leaves_no_trace_in_the_journal(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    make_ready(ledger, key(0))
    ledger.train([key(0)], step=1, version=0)
    ledger.close()
    written = path.read_bytes()
    resumed = Ledger.replay(path, ledger.offset())
    resumed.close()
    assert path.read_bytes() == written


def test_existing_journal_is_not_overwritten(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.open(key(0))
    ledger.close()
    with pytest.raises(JournalError, match="exists already"):
        Ledger(path)


def small_journal(path: Path) -> list[tuple[int, LedgerCounts]]:
    """Write a short history; returns the offset and the counts after each line."""
    ledger = Ledger(path)
    marks = [(0, ledger.counts())]

    def mark() -> None:
        ledger.sync()
        marks.append((ledger.offset(), ledger.counts()))

    for prompt in range(2):
        ledger.open(key(prompt))
        mark()
        ledger.end(key(prompt), "dropped")
        mark()
    ledger.close()
    return marks


def test_crash_at_any_byte_loses_only_the_torn_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    marks = small_journal(path)
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        ledger = Ledger.replay(path)
        expected_offset, expected = [m for m in marks if m[0] <= size][-1]
        assert (ledger.offset(), ledger.counts()) == (expected_offset, expected)
        ledger.open(key(100))  # the next line must not be glued to half of another
        ledger.close()
        assert Ledger.replay(path).state(key(100)) == "queued"


def test_zeros_behind_a_crash_are_dropped(tmp_path):
    path = tmp_path / "ledger.jsonl"
    marks = small_journal(path)
    path.write_bytes(path.read_bytes() + bytes(4096))
    ledger = Ledger.replay(path)
    assert (ledger.offset(), ledger.counts()) == marks[-1]
    assert path.stat().st_size == marks[-1][0]


def test_each_flipped_bit_in_the_middle_is_an_error_that_names_the_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    marks = small_journal(path)
    whole = path.read_bytes()
    rng = random.Random(0)
    for _ in range(200):
        position = rng.randrange(marks[-2][0])
        damaged = bytearray(whole)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        line = whole[:position].count(b"\n") + 1
        with pytest.raises(JournalError, match=rf"ledger\.jsonl line {line} is damaged"):
            Ledger.replay(path)


def test_damage_before_the_checkpoint_is_an_error_even_in_the_last_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    end = small_journal(path)[-1][0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(JournalError, match="line 4 is damaged"):
        Ledger.replay(path, end)
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    with pytest.raises(JournalError, match="belongs to another run or was cut"):
        Ledger.replay(path, end)
    path.write_bytes(whole)
    with pytest.raises(JournalError, match="belongs to another run"):
        Ledger.replay(path, end - 5)
    path.unlink()
    with pytest.raises(JournalError, match="missing"):
        Ledger.replay(path, end)


def test_impossible_story_names_the_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    records = [{"op": "open", "key": str(key(0))}, {"op": "train", "keys": [str(key(0))], "step": 1, "version": 0}]
    path.write_bytes(b"".join(map(encode_line, records)))
    with pytest.raises(JournalError, match="line 2 cannot be replayed: cannot train"):
        Ledger.replay(path)
    path.write_bytes(encode_line({"op": "forge", "key": str(key(0))}))
    with pytest.raises(JournalError, match="unknown operation 'forge'"):
        Ledger.replay(path)


def test_compaction_keeps_offsets_of_later_checkpoints_valid(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    offsets, counts = [], []
    for epoch in range(30):
        for step in range(4):
            keys = [key(4 * step + i, epoch) for i in range(4)]
            make_ready(ledger, *keys)
            ledger.train(keys, step=4 * epoch + step, version=0)
        ledger.close_epochs("train", epoch)
        ledger.sync()
        offsets.append(ledger.offset())
        counts.append(ledger.counts())
        ledger.compact(offsets[max(0, epoch - 1)])  # two checkpoints are kept
    assert path.stat().st_size < offsets[2] < offsets[-1]
    ledger.close()
    assert Ledger.replay(path).counts() == counts[-1]
    before_last = Ledger.replay(path, offsets[-2])
    assert before_last.counts() == counts[-2]
    assert before_last.offset() == offsets[-2]
    before_last.check()
    with pytest.raises(LedgerError, match="closed"):
        before_last.open(key(0, 28))
    before_last.open(key(0, 29))
    with pytest.raises(JournalError, match="resume from a later checkpoint"):
        Ledger.replay(path, offsets[-3])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_journal_on_a_full_disk_says_so_and_stays_readable(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.open(key(0))
    ledger.sync()
    file = ledger._journal._file
    kept, file._descriptor = file._descriptor, os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(StorageError, match=r"ledger\.jsonl: No space left on device; free space"):
        ledger.open(key(1))
    assert ledger.state(key(1)) is None  # memory says what the journal says
    os.close(file._descriptor)
    file._descriptor = kept
    ledger.open(key(1))
    ledger.close()
    assert Ledger.replay(tmp_path / "ledger.jsonl").counts().launched == 2


class LedgerStorm(RuleBasedStateMachine):
    """Random work, crashes and resumes, compared with plain dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.jsonl"
        self.state: dict[GroupKey, str] = {}
        self.reasons: Counter[str] = Counter()
        self.closed = -1

    @initialize()
    def start(self) -> None:
        self.ledger = Ledger(self.path)
        self.synced = 0
        self.compacted = 0
        self.history = [(0, self.remembered())]

    def remembered(self) -> tuple[dict[GroupKey, str], Counter[str], int]:
        return copy.deepcopy((self.state, self.reasons, self.closed))

    def note(self) -> None:
        self.history.append((self.ledger.offset(), self.remembered()))

    def pick(self, data: st.DataObject, *states: str) -> GroupKey | None:
        keys = sorted(k for k, s in self.state.items() if s in states)
        return data.draw(st.sampled_from(keys)) if keys else None

    @rule(prompt=st.integers(0, 5), epoch=st.integers(0, 3), duplicate=st.integers(0, 1))
    def open(self, prompt: int, epoch: int, duplicate: int) -> None:
        new = key(prompt, epoch, duplicate)
        if new in self.state or epoch <= self.closed:
            with pytest.raises(LedgerError):
                self.ledger.open(new)
            return
        self.ledger.open(new)
        self.state[new] = "queued"
        self.note()

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        if chosen := self.pick(data, "queued"):
            self.ledger.lease(chosen, "w", self.ledger.attempts(chosen))
            self.state[chosen] = "leased"
            self.note()

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if chosen := self.pick(data, "leased", "ready"):
            self.ledger.release(chosen, "lost")
            self.state[chosen] = "queued"
            self.note()

    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        if chosen := self.pick(data, "leased"):
            self.ledger.ready(chosen)
            self.state[chosen] = "ready"
            self.note()

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        keys = sorted(k for k, s in self.state.items() if s == "ready")
        batch = data.draw(st.lists(st.sampled_from(keys), unique=True)) if keys else []
        self.ledger.train(batch, step=1, version=0)
        self.state.update(dict.fromkeys(batch, "trained"))
        self.note()

    @rule(data=st.data())
    def train_again(self, data: st.DataObject) -> None:
        if chosen := self.pick(data, "trained", "ended", "queued", "leased"):
            with pytest.raises(LedgerError):
                self.ledger.train([chosen], step=1, version=0)

    @rule(data=st.data(), reason=st.sampled_from(["dropped", "timeout"]))
    def end(self, data: st.DataObject, reason: str) -> None:
        if chosen := self.pick(data, "queued", "leased", "ready"):
            self.ledger.end(chosen, reason)
            self.state[chosen] = "ended"
            self.reasons[reason] += 1
            self.note()

    @rule()
    def close_epoch(self) -> None:
        self.closed += 1
        self.ledger.close_epochs("train", self.closed)
        self.note()

    @rule()
    def sync(self) -> None:
        self.ledger.sync()
        self.synced = self.ledger.offset()

    @precondition(lambda self: self.synced > self.compacted)
    @rule()
    def compact(self) -> None:
        self.ledger.compact(self.synced)
        self.compacted = self.synced
        self.synced = self.ledger.offset()  # the new file was synced whole

    @rule(data=st.data(), to_checkpoint=st.booleans())
    def crash(self, data: st.DataObject, to_checkpoint: bool) -> None:
        end = self.ledger.offset()
        self.ledger.close()
        if to_checkpoint:
            offset, (self.state, self.reasons, self.closed) = next(
                h for h in reversed(self.history) if h[0] <= self.synced
            )
            self.ledger = Ledger.replay(self.path, offset)
        else:
            cut = data.draw(st.integers(self.synced, end))
            with self.path.open("r+b") as file:
                file.truncate(self.path.stat().st_size - (end - cut))
            offset, (self.state, self.reasons, self.closed) = next(h for h in reversed(self.history) if h[0] <= cut)
            self.ledger = Ledger.replay(self.path)
        self.history = [h for h in self.history if h[0] <= offset]
        self.reasons = self.reasons.copy()  # what is remembered must not change with what comes now
        self.state = {k: "queued" if s in ("leased", "ready") else s for k, s in self.state.items()}
        self.synced = offset
        self.note()

    @invariant()
    def conserved(self) -> None:
        self.ledger.check()
        by_state = Counter(self.state.values())
        counts = self.ledger.counts()
        assert counts.launched == len(self.state)
        assert (counts.queued, counts.leased, counts.ready, counts.trained) == tuple(
            by_state[s] for s in ("queued", "leased", "ready", "trained")
        )
        assert counts.ended == dict(self.reasons)
        for each, state in self.state.items():
            finished = state in ("trained", "ended")
            assert self.ledger.state(each) == ("closed" if finished and each.epoch <= self.closed else state)
        for state in ("queued", "leased", "ready"):
            assert set(self.ledger.keys(state)) == {k for k, s in self.state.items() if s == state}

    def teardown(self) -> None:
        self.ledger.close()
        self.folder.cleanup()


LedgerStorm.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgerStorm = LedgerStorm.TestCase


def test_metrics_lines_survive_a_crash_at_any_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    ends = [0]
    for step in range(4):
        lines.append({"step": step, "reward": float("nan") if step == 2 else 0.5})
        ends.append(lines.offset())
    lines.close()
    whole = path.read_bytes()
    assert JsonLines.read(path)[2] == {"step": 2, "reward": None}
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = sum(end <= size for end in ends) - 1
        assert [r["step"] for r in JsonLines.read(path)] == list(range(kept))
        again = JsonLines(path)
        assert again.offset() == ends[kept]
        again.append({"step": 99})
        again.close()
        assert [r["step"] for r in JsonLines.read(path)] == [*range(kept), 99]


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path, caplog):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.append({"step": 1})
    offset = lines.offset()
    lines.append({"step": 2})
    lines.truncate(offset)
    lines.append({"step": 2, "again": True})
    assert JsonLines.read(lines.path) == [{"step": 1}, {"step": 2, "again": True}]
    lines.truncate(10_000)
    assert "is shorter than" in caplog.text
    assert len(JsonLines.read(lines.path)) == 2
    lines.path.write_text('{"step": 1}\n{"step":\n{"step": 3}\n')
    with pytest.raises(JournalError, match="line 2 is not JSON"):
        JsonLines.read(lines.path)


def test_journal_lines_are_json(tmp_path):
    path = tmp_path / "ledger.jsonl"
    small_journal(path)
    records = [json.loads(line)["record"] for line in path.read_text().splitlines()]
    assert records == [line.record for line in read_journal(path)]
    assert [r["op"] for r in records] == ["open", "end", "open", "end"]
