"""A checkpoint is whole or absent, and the one before it survives whatever happens to the next."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from storage import checkpoints, files
from storage.checkpoints import MANIFEST, Checkpoint, CheckpointError, CheckpointStore


def save(store: CheckpointStore, step: int, content: bytes = b"weights") -> Checkpoint:
    with store.begin(step) as writer:
        (writer.component("model") / "model.safetensors").write_bytes(content)
        nested = writer.component("learner") / "rng"
        nested.mkdir()
        (nested / "state.bin").write_bytes(bytes(range(256)))
        return writer.commit({"ledger_offset": 10 * step, "order": (1, 2), "names": {7: "a", 10: "b"}})


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def run_child(source: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def test_checkpoint_gives_back_what_was_saved(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    assert store.latest() is None
    save(store, 10, b"ten")
    latest = CheckpointStore(tmp_path).latest()
    assert latest.step == 10
    assert latest.path == tmp_path / "step_000010"
    assert latest.components == ("learner", "model")
    assert latest.meta == {"ledger_offset": 100, "order": [1, 2], "names": {"7": "a", "10": "b"}}
    assert (latest.component("model") / "model.safetensors").read_bytes() == b"ten"
    assert set(latest.files) == {"model/model.safetensors", "learner/rng/state.bin"}
    latest.verify()
    with pytest.raises(CheckpointError, match="no component 'ranker', only learner, model"):
        latest.component("ranker")


def test_folder_that_another_role_wrote_becomes_a_component(tmp_path):
    store = CheckpointStore(tmp_path)
    with store.begin(1) as writer:
        (writer.path / "history").mkdir()
        (writer.path / "history" / "index").write_bytes(b"1")
        assert writer.commit({}).components == ("history",)


def test_only_the_newest_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (5, 10, 15, 1_000_000):
        save(store, step)
    assert visible(tmp_path) == ["step_000015", "step_1000000"]
    assert [c.step for c in store.checkpoints()] == [15, 1_000_000]


def test_one_that_is_in_use_is_kept_beside_the_newest_and_goes_when_nobody_uses_it(tmp_path):
    save(CheckpointStore(tmp_path), 5)
    store = CheckpointStore(tmp_path, keep_last=2, in_use=5)
    for step in (10, 15, 20):
        save(store, step)
    assert visible(tmp_path) == ["step_000005", "step_000015", "step_000020"]
    save(CheckpointStore(tmp_path, keep_last=2), 25)
    assert visible(tmp_path) == ["step_000020", "step_000025"]


def test_nothing_is_pruned_before_the_next_one_is_committed(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 5)
    writer = store.begin(10)
    (writer.component("model") / "w").write_bytes(b"1")
    assert store.latest().step == 5
    writer.abandon()
    assert visible(tmp_path) == ["step_000005"]
    with pytest.raises(ValueError, match="abandoned before"):
        writer.commit({})


def test_error_in_the_block_abandons_the_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 5)
    with pytest.raises(ZeroDivisionError), store.begin(10):
        _ = 1 / 0
    assert visible(tmp_path) == ["step_000005"]
    save(store, 10)


def test_incomplete_checkpoints_are_skipped_with_a_warning_and_then_cleared(tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (5, 10):
        save(store, step)
    (tmp_path / "step_000010" / MANIFEST).unlink()
    with caplog.at_level(logging.WARNING):
        assert store.latest().step == 5
    assert f"step_000010: incomplete, {MANIFEST} is missing" in caplog.text
    save(store, 15)
    assert visible(tmp_path) == ["step_000005", "step_000015"]


@pytest.mark.parametrize("damage", ["cut", "gone", "manifest", "meta"])
def test_cheap_damage_is_seen_by_latest(tmp_path, damage):
    store = CheckpointStore(tmp_path)
    for step in (5, 10):
        save(store, step)
    manifest, weights = tmp_path / "step_000010" / MANIFEST, tmp_path / "step_000010" / "model" / "model.safetensors"
    match damage:
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "gone":
            weights.unlink()
        case "manifest":
            manifest.write_bytes(manifest.read_bytes()[:-30])
        case "meta":
            manifest.write_text(manifest.read_text().replace('"ledger_offset": 100', '"ledger_offset": 101'))
    assert store.latest().step == 5


def test_verify_names_every_damaged_file(tmp_path):
    checkpoint = save(CheckpointStore(tmp_path), 5)
    checkpoint.verify()
    weights = checkpoint.path / "model" / "model.safetensors"
    weights.write_bytes(b"weighTs")
    with pytest.raises(CheckpointError, match=r"step_000005.*model/model.safetensors: content differs.*earlier one"):
        checkpoint.verify()
    weights.write_bytes(b"weigh")
    (checkpoint.path / "learner" / "rng" / "state.bin").unlink()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.verify()
    assert "model/model.safetensors: 5 bytes instead of 7" in str(caught.value)
    assert "learner/rng/state.bin: missing" in str(caught.value)


def test_checkpoint_of_another_format_is_refused(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    monkeypatch.setattr(checkpoints, "FORMAT_VERSION", 2)
    save(store, 5)
    monkeypatch.setattr(checkpoints, "FORMAT_VERSION", 1)
    with pytest.raises(CheckpointError, match="format version 2, this program reads 1"):
        checkpoints._load(tmp_path / "step_000005")


def test_saving_a_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 5, b"old")
    save(store, 5, b"new")
    assert (store.latest().component("model") / "model.safetensors").read_bytes() == b"new"
    assert visible(tmp_path) == ["step_000005"]


def test_going_back_removes_the_future(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=3)
    for step in (5, 10, 15):
        save(store, step)
    store.truncate_after(5)
    assert visible(tmp_path) == ["step_000005"]


def test_second_writer_is_refused_and_a_reader_disturbs_nobody(tmp_path):
    store = CheckpointStore(tmp_path)
    writer = store.begin(5)
    (writer.component("model") / "w").write_bytes(b"1")
    reader = CheckpointStore(tmp_path)  # opening clears leftovers, but not those of a living writer
    with pytest.raises(CheckpointError, match="another checkpoint is being written"):
        reader.begin(10)
    writer.commit({}).verify()
    assert reader.latest().step == 5


def test_meta_that_is_not_json_leaves_nothing_behind(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(TypeError), store.begin(5) as writer:
        writer.commit({"bad": object()})
    assert visible(tmp_path) == []


def test_killed_in_the_middle_of_a_checkpoint_leaves_the_previous_one(tmp_path):
    save(CheckpointStore(tmp_path), 5, b"five")
    child = run_child(
        """
        import sys, time
        from pathlib import Path
        from storage.checkpoints import CheckpointStore
        writer = CheckpointStore(Path(sys.argv[1])).begin(10)
        with (writer.component("model") / "model.safetensors").open("wb") as file:
            file.write(bytes(100_000))
            file.flush()
            print("writing", flush=True)
            time.sleep(60)
        """,
        tmp_path,
    )
    assert child.stdout.readline() == "writing\n"
    assert ".writing_step_000010" in visible(tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    store = CheckpointStore(tmp_path)
    assert visible(tmp_path) == ["step_000005"]  # the leftover went when the store was opened
    assert store.latest().step == 5
    store.latest().verify()
    save(store, 10)
    assert store.latest().step == 10


def test_killed_at_random_moments_there_is_always_a_whole_checkpoint(tmp_path):
    save(CheckpointStore(tmp_path, 1), 1)
    child = run_child(
        """
        import sys
        from pathlib import Path
        from storage.checkpoints import CheckpointStore
        store = CheckpointStore(Path(sys.argv[1]), keep_last=1)
        for step in range(2, 10_000):
            with store.begin(step) as writer:
                for name in "abc":
                    (writer.component(name) / "data").write_bytes(name.encode() * 100_000)
                writer.commit({"step": step})
            print(step, flush=True)
        """,
        tmp_path,
    )
    for _ in range(3):
        child.stdout.readline()
    time.sleep(0.0137)
    os.kill(child.pid, signal.SIGKILL)
    printed = child.stdout.read().split()
    child.wait()
    child.stdout.close()
    latest = CheckpointStore(tmp_path, 1).latest()
    latest.verify()
    assert latest.step >= int(printed[-1] if printed else 4)
    assert latest.meta == {"step": latest.step}


@pytest.mark.parametrize("step", [5, 10])
def test_stopped_at_each_durable_operation_there_is_a_whole_checkpoint(tmp_path, caplog, step):
    """The process ends before its n-th sync, rename or removal, for every n; also while step 5 replaces itself."""
    finished = False
    stops = 0
    while not finished:
        folder = tmp_path / str(stops)
        store = CheckpointStore(folder, keep_last=1)
        save(store, 5, b"old")
        pid = os.fork()
        if pid == 0:
            status = 0
            try:
                _die_before_operation(stops)
                save(CheckpointStore(folder, keep_last=1), step, b"new")
            except BaseException:
                status = 1
            os._exit(status)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, 9)
        finished = code == 0
        found = CheckpointStore(folder, keep_last=1).checkpoints()[-1]
        assert "skipping" not in caplog.text  # nothing half-removed looks like a checkpoint
        found.verify()
        content = (found.component("model") / "model.safetensors").read_bytes()
        assert content in (b"old", b"new")
        assert (found.step == step) if content == b"new" else (found.step == 5)
        if finished:
            assert content == b"new"
        assert not [name for name in visible(folder) if name.startswith(".")]
        stops += 1
    assert stops > 12


def _die_before_operation(number: int) -> None:
    done = 0

    def wrap(original):
        def operation(*args, **kwargs):
            nonlocal done
            if done == number:
                os._exit(9)
            done += 1
            return original(*args, **kwargs)

        return operation

    os.fsync, os.rename, os.replace = wrap(os.fsync), wrap(os.rename), wrap(os.replace)
    shutil.rmtree = wrap(shutil.rmtree)
    os.unlink = wrap(os.unlink)


def test_file_too_large_for_the_system_is_one_clear_error(tmp_path):
    """RLIMIT_FSIZE stands in for a disk that refuses the write, without any privilege."""
    save(CheckpointStore(tmp_path), 5)
    child = run_child(
        f"""
        import resource, signal, sys
        from pathlib import Path
        from storage.checkpoints import CheckpointError, CheckpointStore
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, {resource.RLIM_INFINITY}))
        try:
            with CheckpointStore(Path(sys.argv[1])).begin(10) as writer:
                (writer.component("model") / "w").write_bytes(bytes(100_000))
                writer.commit({{}})
        except CheckpointError as error:
            print(error)
        """,
        tmp_path,
    )
    output, _ = child.communicate(timeout=60)
    assert f"cannot write the checkpoint of step 10 to {tmp_path / 'step_000010'}: File too large" in output
    assert "Earlier checkpoints are intact" in output
    assert visible(tmp_path) == ["step_000005"]
    CheckpointStore(tmp_path).latest().verify()


@pytest.fixture
def tiny_disk(tmp_path):
    """A real file system of 1 MiB."""
    mount = shutil.which("mount")
    point = tmp_path / "disk"
    point.mkdir()
    made = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "none", point], capture_output=True)
    if not made or made.returncode:
        pytest.skip("mounting is not permitted here")
    yield point
    subprocess.run(["umount", point], check=True)


def test_full_disk_leaves_earlier_checkpoints_and_can_be_mended(tiny_disk):
    store = CheckpointStore(tiny_disk / "checkpoints")
    save(store, 5, bytes(100_000))
    with pytest.raises(CheckpointError, match=r"step 10 .*No space left on device; free space .*intact"):
        save(store, 10, bytes(2_000_000))
    assert visible(store.directory) == ["step_000005"]
    store.latest().verify()

    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(850_000))
    with pytest.raises(CheckpointError, match=r"step 10 needs 0\.1 MiB, 0\.\d MiB are free; free space .*intact"):
        store.begin(10)
    ballast.unlink()
    save(store, 10, bytes(100_000))
    assert store.latest().step == 10


def test_full_disk_behind_a_foreign_error_is_recognised(tiny_disk):
    store = CheckpointStore(tiny_disk)

    def save_tensors() -> None:
        with store.begin(10) as writer:
            try:
                (writer.component("model") / "w").write_bytes(bytes(2_000_000))
            except OSError:
                raise RuntimeError("PytorchStreamWriter failed writing file") from None

    with pytest.raises(CheckpointError, match="No space left"):
        save_tensors()
    assert visible(tiny_disk) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_error_at_each_sync_leaves_earlier_checkpoints(tmp_path, monkeypatch, code):
    store = CheckpointStore(tmp_path)
    save(store, 5)
    left = 0

    def failing(original):
        def sync(path):
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(code, os.strerror(code), str(path))
            return original(path)

        return sync

    for module in (checkpoints, files):
        for name in ("fsync_file", "fsync_directory"):
            monkeypatch.setattr(module, name, failing(getattr(module, name)))
    for number in range(1, 9):  # two files, four folders, the manifest and its folder
        left = number
        with pytest.raises(CheckpointError, match=os.strerror(code)):
            save(store, 10)
        assert visible(tmp_path) == ["step_000005"]
        store.latest().verify()
    save(store, 10)


def test_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=r"checkpoints: Not a directory; a part of the path is a file"):
        CheckpointStore(tmp_path / "checkpoints")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission_is_one_clear_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="Permission denied; make the folder writable"):
        CheckpointStore(tmp_path / "checkpoints").begin(5)
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("name", ["", "../model", "a/b", ".hidden", MANIFEST])
def test_component_names_stay_inside(tmp_path, name):
    with CheckpointStore(tmp_path).begin(1) as writer, pytest.raises(ValueError, match="component name"):
        writer.component(name)
