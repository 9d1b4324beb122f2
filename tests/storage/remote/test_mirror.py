"""What lies at the address of a run: the same files, whatever happens to an upload."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from storage.files import StorageError
from storage.remote import mirror as mirror_module
from storage.remote.address import Address
from storage.remote.index import INDEX, read_index
from storage.remote.lease import Lease
from storage.remote.mirror import Mirror
from storage.remote.objects import Objects, RemoteError
from storage.remote.staging import create_staging, fill_staging
from tests.storage.remote.life import Life, assert_resumable
from tests.storage.remote.stores import Fault, FlakyObjects, ProcessDied, file_address, move_to, unreachable

MANY = 40


@pytest.fixture
def address(tmp_path, monkeypatch) -> Address:
    move_to(monkeypatch, tmp_path / "machine")
    return file_address(tmp_path / "store")


def leased(objects: Objects) -> Lease:
    return Lease.acquire(objects, stale_s=0.0, settle_s=0.0)


def begin(address: Address, fault: Fault | None = None) -> tuple[Path, Mirror]:
    objects = FlakyObjects(address, fault or Fault())
    directory = create_staging(address)
    (directory / "config.yaml").write_text("run: {}\n")
    return directory, Mirror.open(directory, objects, leased(objects))


def fetched(address: Address, monkeypatch, machine: Path) -> Path:
    """The run as another machine takes it up."""
    move_to(monkeypatch, machine)
    return fill_staging(address, Objects(address), lambda text: None)


def remote_files(address: Address) -> dict[str, bytes]:
    """What is at the address, by object, without what is always there."""
    objects = Objects(address)
    return {name: objects.read(name) for name in objects.names() if name not in (".lock", INDEX)}


def content(address: Address, name: str) -> bytes:
    """A file of the run, put together from its objects."""
    objects = Objects(address)
    entry = read_index(objects).files[name]
    return b"".join((objects.read(part) or b"")[:size] for part, size in entry.parts)


def test_the_address_holds_what_the_directory_holds(address):
    directory, mirror = begin(address)
    (directory / "rollouts" / "train").mkdir(parents=True)
    (directory / "rollouts" / "train" / "step_000001.parquet").write_bytes(b"answers")
    (directory / "empty.txt").write_bytes(b"")
    (directory / ".hidden").write_text("not sent")
    mirror.sync()
    assert remote_files(address) == {
        "config.yaml": b"run: {}\n",
        "rollouts/train/step_000001.parquet": b"answers",
        "empty.txt": b"",
    }
    (directory / "rollouts" / "train" / "step_000001.parquet").unlink()
    mirror.sync()
    assert sorted(remote_files(address)) == ["config.yaml", "empty.txt"]


def test_nothing_is_sent_when_nothing_has_changed(address):
    fault = Fault()
    directory, mirror = begin(address, fault)
    (directory / "events.log").write_text("a line\n")
    mirror.sync()
    count = fault.count
    assert mirror.sync().nbytes == 0
    assert fault.count == count


def test_a_large_file_that_grows_is_sent_in_parts_until_they_are_many(address, monkeypatch):
    monkeypatch.setattr(mirror_module, "WHOLE_BYTES", 1000)
    directory, mirror = begin(address)
    file = directory / "metrics.jsonl"
    file.write_bytes(b"0" * 1500)
    mirror.sync()
    sent = []
    for step in range(20):
        with file.open("ab") as sink:
            sink.write(b"%d" % (step % 10) * 200)
        sent.append(mirror.sync().nbytes)
        assert content(address, "metrics.jsonl") == file.read_bytes()
    assert sent.count(200) >= 15, "only what is new"
    assert max(sent) > 1500, "and from time to time all of it"
    mirror.sync(settle=True)
    assert remote_files(address)["metrics.jsonl"] == file.read_bytes()
    assert not [name for name in remote_files(address) if name.startswith(".parts")]


def test_a_file_that_is_rewritten_never_makes_the_present_index_wrong(address):
    fault = Fault(error=unreachable)
    directory, mirror = begin(address, fault)
    file = directory / "ledger.jsonl"
    file.write_bytes(b"a long story\n")
    mirror.sync()
    fault.at, fault.lasts = fault.count + 2, 1  # the new content goes out, the index does not
    file.write_bytes(b"short\n")
    with pytest.raises(RemoteError):
        mirror.sync()
    assert content(address, "ledger.jsonl") == b"a long story\n"
    mirror.sync()
    assert content(address, "ledger.jsonl") == b"short\n"
    mirror.sync(settle=True)
    mirror.sync(settle=True)
    assert remote_files(address)["ledger.jsonl"] == b"short\n"
    assert not [name for name in remote_files(address) if name.startswith(".parts")]


def test_what_was_sent_before_a_failure_is_not_sent_again(address):
    fault = Fault(error=unreachable)
    directory, mirror = begin(address, fault)
    for name in "abc":
        (directory / f"{name}.bin").write_bytes(name.encode() * 1000)
    fault.at = fault.count + 4  # after the configuration, at the last of the files
    with pytest.raises(RemoteError):
        mirror.sync()
    assert mirror.sync().nbytes == 1000


def test_a_checkpoint_in_the_making_is_not_sent(address):
    directory, mirror = begin(address)
    life = Life(directory)
    life.train()
    with life.store.begin(2) as writer:
        (writer.component("model") / "half").write_bytes(b"x")
        mirror.sync()
    life.close()
    assert not [name for name in remote_files(address) if "writing" in name or "half" in name]


def test_markers_go_last_and_are_removed_first(address):
    fault = Fault()
    directory, mirror = begin(address, fault)
    life = Life(directory)
    life.train()
    mirror.sync()
    sent = [line.split(" ", 1)[1] for line in fault.log if line.startswith("upload")]
    assert sent.index("ledger.jsonl") < sent.index("checkpoints/step_000001/CHECKPOINT.json")
    assert sent.index("checkpoints/step_000001/model/weights.bin") < sent.index(
        "checkpoints/step_000001/CHECKPOINT.json"
    )
    fault.log.clear()
    life.train()
    mirror.sync()
    life.close()
    index = next(i for i, line in enumerate(fault.log) if line == f"write {INDEX}")
    removed = [line.split(" ", 1)[1] for line in fault.log[index:] if line.startswith("remove checkpoints")]
    assert removed[0] == "checkpoints/step_000001/CHECKPOINT.json"
    assert all(not line.startswith("remove") for line in fault.log[:index]), (
        "nothing goes before its successor is there"
    )


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_run_goes_on_on_another_machine(address, monkeypatch, tmp_path, keep_last):
    directory, mirror = begin(address)
    life = Life(directory, keep_last)
    for _ in range(3):
        life.train()
        mirror.sync()
    life.train(save=False)  # trained, and lost with the machine
    mirror.sync()
    life.close()
    directory = fetched(address, monkeypatch, tmp_path / "other")
    assert assert_resumable(directory, 3).step == 3
    assert not (directory / "rollouts").exists(), "a resumed run does not read what it has written"
    objects = Objects(address)
    mirror = Mirror.open(directory, objects, leased(objects))
    mirror.forget_after(3)
    life = Life(directory, keep_last)
    life.train()
    mirror.sync()
    life.close()
    names = read_index(objects).files
    assert "rollouts/train/step_000001.parquet" in names, "what was not fetched stays"
    assert content(address, "rollouts/train/step_000004.parquet") == b"answers of step 4"
    steps = sorted({name.split("/")[1] for name in names if name.startswith("checkpoints/")})
    assert steps == [f"step_{step:06d}" for step in range(4, 4 - keep_last, -1)][::-1]
    assert assert_resumable(fetched(address, monkeypatch, tmp_path / "third"), 4).step == 4


def test_a_folder_that_is_ahead_is_taken_up_as_it_is(address):
    directory, mirror = begin(address)
    life = Life(directory)
    life.train()
    mirror.sync()
    life.train()  # not sent
    life.close()
    again = fill_staging(address, Objects(address), lambda text: pytest.fail("nothing has to be fetched"))
    assert again == directory
    assert assert_resumable(again, 2).step == 2


def test_a_folder_of_which_another_machine_went_on_is_not_used(address, monkeypatch, tmp_path):
    directory, mirror = begin(address)
    life = Life(directory)
    life.train()
    mirror.sync()
    life.close()
    machine = tmp_path / "machine"
    other = fetched(address, monkeypatch, tmp_path / "other")
    objects = Objects(address)
    second = Mirror.open(other, objects, leased(objects))
    life = Life(other)
    life.train()
    second.sync()
    life.close()
    with pytest.raises(StorageError, match="is older than"):
        Mirror.open(directory, objects, leased(objects))
    assert assert_resumable(fetched(address, monkeypatch, machine), 2).step == 2


def test_a_damaged_checkpoint_is_passed_over_and_a_damaged_ledger_is_named(address, monkeypatch, tmp_path):
    directory, mirror = begin(address)
    life = Life(directory, keep_last=2)
    for _ in range(2):
        life.train()
    mirror.sync()
    life.close()
    objects = Objects(address)
    objects.write("checkpoints/step_000002/model/weights.bin", b"9" * 1000)
    told: list[str] = []
    move_to(monkeypatch, tmp_path / "other")
    directory = fill_staging(address, objects, told.append)
    assert assert_resumable(directory, 1).step == 1
    assert "its checksum differs" in told[-1]
    ledger = objects.read("ledger.jsonl")
    objects.write("ledger.jsonl", ledger.replace(b"open", b"OPEN"))
    move_to(monkeypatch, tmp_path / "third")
    with pytest.raises(RemoteError, match=r"ledger\.jsonl does not hold what was sent"):
        fill_staging(address, objects, told.append)


def train_under(address: Address, fault: Fault, steps: int) -> int:
    """Train and send after each step until the process dies; returns the newest step that was sent as a whole."""
    sent = 0
    directory, mirror = begin(address, fault)
    life = Life(directory)
    try:
        for step in range(1, steps + 1):
            life.train(save=step % 2 == 1)
            mirror.sync()
            sent = step if step % 2 == 1 else sent
        mirror.sync(settle=True)
    except ProcessDied:
        pass
    finally:
        life.close()
    return sent


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_operation_the_run_resumes_from_the_last_whole_upload(tmp_path, monkeypatch, after):
    monkeypatch.setattr(mirror_module, "WHOLE_BYTES", 300)  # so that parts are sent, too
    steps = 3
    for number in itertools.count(1):
        folder = tmp_path / f"{after}-{number}"
        move_to(monkeypatch, folder / "machine")
        address = file_address(folder / "store")
        fault = Fault(at=number, after=after)
        sent = train_under(address, fault, steps)
        if fault.count < number:
            break
        if not Objects(address).info("config.yaml") or read_index(Objects(address)) is None:
            assert sent == 0
            continue
        directory = fetched(address, monkeypatch, folder / "other")
        newest = assert_resumable(directory, sent)
        life = Life(directory)  # and it can go on and be sent from there
        objects = Objects(address)
        mirror = Mirror.open(directory, objects, leased(objects))
        mirror.forget_after(newest.step if newest else 0)
        life.train()
        mirror.sync(settle=True)
        mirror.sync(settle=True)
        life.close()
        stray = {name for name in objects.names() if not name.startswith((".lock", ".probe"))}
        stray -= {INDEX, "config.yaml", "status.json"} | read_index(objects).objects()
        assert not stray, "what the killed upload left is cleared away"
        assert assert_resumable(fetched(address, monkeypatch, folder / "third"), life.step).step == life.step
    assert number > MANY, "the operations of a whole run"


def test_a_store_that_fails_now_and_then_costs_nothing_but_time(tmp_path, monkeypatch):
    monkeypatch.setattr(mirror_module, "WHOLE_BYTES", 300)
    move_to(monkeypatch, tmp_path / "machine")
    address = file_address(tmp_path / "store")
    fault = Fault(error=unreachable)
    directory, mirror = begin(address, fault)
    life = Life(directory)
    for step in range(1, 7):
        life.train(save=step % 2 == 1)
        fault.at = fault.count + step  # each upload fails at another place, and the next step makes up for it
        try:
            mirror.sync()
        except RemoteError:
            life.metrics.append({"step": life.step, "text": "meanwhile"})
    fault.at = 0
    mirror.sync(settle=True)
    mirror.sync(settle=True)
    life.close()
    files = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    files = {name: data for name, data in files.items() if not any(part.startswith(".") for part in Path(name).parts)}
    assert remote_files(address) == files
