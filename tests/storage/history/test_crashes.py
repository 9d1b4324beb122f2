"""A crash at any byte or between any two operations loses at most what was not synced, and doubles nothing."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from storage import files
from storage.history import store as store_module
from storage.history import wal as wal_module
from storage.history.manifest import HistoryError
from storage.history.rows import history_schema
from storage.history.store import HistoryStore
from storage.history.wal import WriteAheadLog
from storage.records import Group
from tests.storage.history.answers import (
    FINGERPRINT,
    SAMPLING,
    contents,
    expected,
    fill,
    flip,
    make_group,
    prompt_tokens,
)

ROOT = Path(__file__).parents[3]


class CrashError(BaseException):
    """Stands for the end of the process: nothing may catch it and tidy up in Python."""


def copy_of(store: HistoryStore, place: Path) -> Path:
    """The files as they are now, as the next process would find them."""
    shutil.copytree(store.directory, place)
    return place


def log_of(directory: Path) -> Path:
    (path,) = (directory / "wal").glob("*.arrows")
    return path


@dataclass
class Small:
    """What :func:`small` made; ``ends`` are the offsets behind the header and behind each batch."""

    directory: Path
    log: Path
    appended: dict[int, list[Group]]
    ends: list[int]
    batches: list[Any]

    def expect(self, steps: list[int]) -> dict[Any, Any]:
        return expected({step: self.appended[step] for step in steps})

    def check_log(self, steps: list[int]) -> WriteAheadLog:
        """Read the log; it must hold the batches of ``steps``."""
        log = WriteAheadLog(self.log, history_schema(FINGERPRINT))
        assert len(log.blocks) == len(steps)
        for block, step in zip(log.blocks, steps, strict=True):
            rows = block.load()
            assert rows is not None
            assert rows.batch.equals(self.batches[step])
        return log


@pytest.fixture
def small(tmp_path: Path) -> Small:
    """A store whose log has two small batches, and nothing else."""
    directory = tmp_path / "history"
    with HistoryStore(directory, FINGERPRINT) as store:
        store.append(0, [], SAMPLING)
        ends = [store.wal_bytes]
        appended = {}
        for step in range(2):
            appended |= fill(store, [step], prompts=1, samples=1, tokens=2)
            ends.append(store.wal_bytes)
        batches = [block.load().batch for block in store.blocks()]
    return Small(directory, log_of(directory), appended, ends, batches)


def test_a_log_that_is_cut_at_any_byte_keeps_the_batches_before(small: Small) -> None:
    whole = small.log.read_bytes()
    for size in range(len(whole), -1, -1):
        os.truncate(small.log, size)
        kept = [step for step in (0, 1) if small.ends[step + 1] <= size]
        assert small.check_log(kept).notes == [], size
        if size % 128 not in (0, 1, 69):
            continue  # writing syncs to the disk: not at each byte
        place = small.directory.with_name(str(size))
        shutil.copytree(small.directory, place)
        with HistoryStore(place, FINGERPRINT) as writer:
            more = fill(writer, [7], prompts=1)
            assert contents(writer) == small.expect(kept) | expected(more)
        with HistoryStore(place, FINGERPRINT) as reader:
            assert contents(reader) == small.expect(kept) | expected(more)
            assert reader.verify() == ()


def test_a_flipped_byte_anywhere_in_the_log_costs_its_own_batch_only(small: Small) -> None:
    for place in range(small.ends[-1]):
        flip(small.log, place)
        kept = [step for step in (0, 1) if not small.ends[step] <= place < small.ends[step + 1]]
        log = small.check_log(kept)
        # Not told: what looks like the torn end of the file, which a crash leaves, and a header that Arrow reads the
        # same.
        assert log.notes or kept == [0] or place < small.ends[0], place
        if place % 64 == 0:
            with HistoryStore(small.directory, FINGERPRINT) as reader:
                assert contents(reader) == small.expect(kept)
                assert reader.damage == tuple(log.notes)
        flip(small.log, place)


def test_what_is_damaged_in_the_log_is_set_aside_when_it_is_sealed(tmp_path: Path) -> None:
    with HistoryStore(tmp_path, FINGERPRINT) as store:
        appended = fill(store, [0])
        first = store.wal_bytes
        appended |= fill(store, [1])
    log = log_of(tmp_path)
    content = bytearray(log.read_bytes())
    content[first - 20] ^= 4
    log.write_bytes(content)
    with HistoryStore(tmp_path, FINGERPRINT) as store:
        appended |= fill(store, [2])
        store.seal()
        assert contents(store) == expected({1: appended[1], 2: appended[2]})
        assert "damaged" in store.damage[0]
        assert (tmp_path / "damaged" / log.name).read_bytes()[: len(content)] == content
    with HistoryStore(tmp_path, FINGERPRINT) as again:
        assert again.damage == ()
        assert "set aside" in again.verify()[0]


# Where a process can die while it makes a new generation, in order.
POINTS: dict[str, tuple[object, str, bool]] = {
    "before the segment is synced": (files, "fsync_file", True),
    "before a rename": (files.os, "replace", True),
    "before a folder is synced": (files, "fsync_directory", True),
    "after a folder was synced": (files, "fsync_directory", False),
    "before the manifest": (store_module, "write_manifest", True),
    "after the manifest": (store_module, "write_manifest", False),
    "before old files go": (store_module.HistoryStore, "_tidy", True),
    "after old files went": (store_module.HistoryStore, "_tidy", False),
    "before the new log": (wal_module.WriteAheadLog, "open_for_append", True),
}
OPERATIONS: dict[str, tuple[Callable[[HistoryStore], None], int, int | None]] = {
    "seal": (lambda store: store.seal(), 9, None),
    "compact": (lambda store: store.compact(2), 2, None),
    "truncate": (lambda store: store.truncate_to(0), 9, 0),
}


@dataclass
class Trial:
    """What came of an operation that was disturbed."""

    store: HistoryStore
    appended: dict[int, list[Group]]
    survivors: Callable[[dict[int, list[Group]]], dict[Any, Any]]
    calls: int = 0
    crashed: Path | None = None
    error: BaseException | None = None


def attempt(
    folder: Path, operation: str, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, stand_in: Any
) -> Trial:
    """Make a store with a segment and a log and run ``operation`` with ``owner.name`` replaced."""
    act, window, last_step = OPERATIONS[operation]
    store = HistoryStore(folder / "history", FINGERPRINT)
    appended = fill(store, [0, 1])
    store.seal()
    appended |= fill(store, [2])

    def survivors(groups: dict[int, list[Group]]) -> dict[Any, Any]:
        steps = [step for step in groups if last_step is None or step <= last_step][-window:]
        return expected({step: groups[step] for step in steps})

    trial = Trial(store, appended, survivors)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stand_in(trial, getattr(owner, name)))
        try:
            act(store)
        except (CrashError, HistoryError) as error:
            trial.error = error
    return trial


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("point", POINTS)
def test_a_crash_between_two_steps_of_a_new_generation_leaves_the_state_before_or_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, point: str
) -> None:
    owner, name, before = POINTS[point]
    for nth in count(1):
        folder = tmp_path / str(nth)

        def crash(trial: Trial, original: Any, nth: int = nth, folder: Path = folder) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                trial.calls += 1
                result = None if before and trial.calls == nth else original(*arguments, **named)
                if trial.calls == nth:
                    trial.crashed = copy_of(trial.store, folder / "after")
                    raise CrashError
                return result

            return call

        trial = attempt(folder, operation, monkeypatch, owner, name, crash)
        if trial.crashed is None:
            assert nth > 1, "the operation never came by this point"
            break
        with HistoryStore(trial.crashed, FINGERPRINT) as reader:
            found = contents(reader)
            assert found in (expected(trial.appended), trial.survivors(trial.appended))
            assert reader.damage == ()
        with HistoryStore(trial.crashed, FINGERPRINT) as writer:
            more = fill(writer, [5])
            assert contents(writer) == found | expected(more)
            OPERATIONS[operation][0](writer)
            assert contents(writer) == trial.survivors(trial.appended | more)
            assert writer.verify() == ()
            left = {path.name for path in trial.crashed.rglob("*.arrow*")}
            assert left == {*(segment.entry.name for segment in writer.segments), f"{writer.generation:06d}.arrows"}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["fsync_file", "replace", "fsync_directory"])
def test_a_full_disk_while_a_generation_is_made_is_told_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, name: str
) -> None:
    owner = files.os if name == "replace" else files
    refused = 0
    for nth in count(1):

        def refuse(trial: Trial, original: Any, nth: int = nth) -> Any:
            def call(*arguments: Any) -> Any:
                trial.calls += 1
                if trial.calls == nth:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return original(*arguments)

            return call

        trial = attempt(tmp_path / str(nth), operation, monkeypatch, owner, name, refuse)
        if trial.calls < nth:
            break
        if trial.error is not None:
            refused += 1
            assert "free space on that disk" in str(trial.error)
        store = trial.store
        assert contents(store) in (expected(trial.appended), trial.survivors(trial.appended))
        more = fill(store, [5])
        OPERATIONS[operation][0](store)
        store.close()
        with HistoryStore(store.directory, FINGERPRINT) as again:
            assert contents(again) == trial.survivors(trial.appended | more)
            assert again.verify() == ()
    assert refused >= 2, "the segment and the manifest"


def test_an_append_that_does_not_fit_leaves_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    with HistoryStore(tmp_path, FINGERPRINT) as store:
        appended = fill(store, [0])
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (store.wal_bytes + 1000, limits[1]))
            with pytest.raises(HistoryError, match=r"cannot append to .*arrows: File too large"):
                fill(store, [1], prompts=50)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, ignored)
        assert contents(store) == expected(appended)
        appended |= fill(store, [2])
    with HistoryStore(tmp_path, FINGERPRINT) as again:
        assert contents(again) == expected(appended)
        assert again.verify() == ()


def test_an_append_in_parts_is_taken_back_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_BATCH_TOKENS", 20)
    with HistoryStore(tmp_path, FINGERPRINT) as store:
        appended = fill(store, [0])
        original, calls = os.write, [0]

        def refuse(descriptor: int, data: bytes) -> int:
            calls[0] += 1
            if calls[0] == 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(descriptor, data)

        with monkeypatch.context() as patch:
            patch.setattr(files.os, "write", refuse)
            with pytest.raises(HistoryError, match="free space"):
                fill(store, [1], prompts=5)
        assert contents(store) == expected(appended)
        appended |= fill(store, [2])
        assert contents(store) == expected(appended)


def test_a_reader_outlives_what_the_writer_takes_back_under_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part of a step is visible before the disk refuses the second; a map of it would end the reader."""
    monkeypatch.setattr(store_module, "_BATCH_TOKENS", 20)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from storage.history.store import HistoryStore\n"
        "from tests.storage.history.answers import contents\n"
        "store = HistoryStore(Path(sys.argv[1]), None)\n"
        "print('open', len(store.blocks()), flush=True)\n"
        "sys.stdin.readline()\n"
        "print('read', len(contents(store)), flush=True)\n"
    )
    with HistoryStore(tmp_path, FINGERPRINT) as store:
        fill(store, [0])
        before = len(store.blocks())
        original, calls = os.write, [0]
        readers: list[subprocess.Popen[str]] = []

        def refuse(descriptor: int, data: bytes) -> int:
            calls[0] += 1
            if calls[0] == 3:
                readers.append(
                    subprocess.Popen(
                        [sys.executable, "-c", script, str(tmp_path)],
                        cwd=ROOT,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
                assert readers[0].stdout is not None
                assert readers[0].stdout.readline().strip() == f"open {before + 2}"
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(descriptor, data)

        with monkeypatch.context() as patch:
            patch.setattr(files.os, "write", refuse)
            with pytest.raises(HistoryError, match="free space"):
                fill(store, [1], prompts=5)
        output, _ = readers[0].communicate("go\n", timeout=60)
        assert readers[0].returncode == 0
        assert output.startswith("read ")


def test_a_killed_writer_loses_nothing_that_it_had_synced(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from storage.history.store import HistoryStore\n"
        "from tests.storage.history.answers import FINGERPRINT, fill\n"
        "store = HistoryStore(Path(sys.argv[1]), FINGERPRINT, seal_bytes=60_000)\n"
        "for step in range(10**6):\n"
        "    fill(store, [step], prompts=6, tokens=60)\n"
        "    store.sync()\n"
        "    if step % 7 == 6:\n"
        "        store.compact(3)\n"
        "    print(step, flush=True)\n"
    )
    for turn, wanted in enumerate((4, 13, 26)):
        directory = tmp_path / str(turn)
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(directory)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        said = -1
        for line in process.stdout:
            said = int(line)
            if said == wanted:
                process.kill()
        process.wait()
        assert said >= wanted
        with HistoryStore(directory, FINGERPRINT) as store:
            visits = store.visits(prompt_tokens(0), 3)
            steps = [visit[0].step for visit in visits]
            assert steps[0] >= said
            assert steps == [steps[0], steps[0] - 1, steps[0] - 2]
            everything = contents(store)
            made = {step: [make_group(p, epoch=step, tokens=60) for p in range(6)] for step in range(steps[0] + 1)}
            assert everything.items() <= expected(made).items()
            store.append(steps[0] + 1, [make_group(0, epoch=steps[0] + 1)], SAMPLING)
            assert store.verify() == ()
