"""Whole runs whose directory is a URI, on an S3 server and on a local file system: trained, resumed elsewhere, read."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines import cli
from pipelines.cluster import cluster_nodes
from pipelines.launch import train
from pipelines.remote_views import saved_steps, status_at
from storage.checkpoints import CheckpointStore
from storage.errors import UserError
from storage.models import cache_directory
from storage.remote.address import Address
from storage.remote.lease import LEASE, Lease
from storage.remote.objects import Objects
from storage.remote.staging import staging_directory
from storage.remote.view import open_view
from storage.run_directory import RunDirectory
from tests.runs import small_config, small_run, steps_of, trained_keys
from tests.storage.remote.s3 import Server, s3_server
from tests.storage.remote.stores import move_to

FIXED = ("learner.schedule=constant", "checkpoint.every=2")
QUICK = ("evaluation.before=false", "evaluation.after=false")


@pytest.fixture(scope="module")
def server(ray_session) -> Iterator[Server]:
    with s3_server() as started:
        yield started


@pytest.fixture(autouse=True)
def tidy_cache() -> Iterator[None]:
    """What runs leave in this machine's cache is removed: actors use the cache of the session, not one of the test."""
    folders = [cache_directory() / name for name in ("runs", "views", "fetched")]
    before = {child for folder in folders if folder.exists() for child in folder.iterdir()}
    yield
    for child in {child for folder in folders if folder.exists() for child in folder.iterdir()} - before:
        shutil.rmtree(child, ignore_errors=True)


@pytest.fixture
def place(server) -> str:
    """A folder of runs on S3."""
    return server.address()


def address(place: str, name: str) -> str:
    return str(Address.parse(place).child(name))


def fetched(place: str, name: str) -> Path:
    """The whole run, as a reader has it."""
    return open_view(address(place, name)).fetch("")


@pytest.mark.slow
def test_ten_steps_equal_five_and_five_on_another_machine(place, random_llama, tmp_path, capsys):
    long = small_run(random_llama, tmp_path, "ten", "run.steps=10", *FIXED)
    assert train(small_config(random_llama, place, "five", "run.steps=5", *FIXED), name="five") == 0
    uri = address(place, "five")
    assert f"run directory: {uri}" in capsys.readouterr().out
    assert not staging_directory(Address.parse(uri)).exists(), "all of it is at the address"
    assert Objects(Address.parse(uri)).info(LEASE) is None
    config = small_config(random_llama, "elsewhere", "five", "run.steps=10", *FIXED)  # the address says where it lies
    assert train(config, name="five", resume=uri) == 0
    short = fetched(place, "five")
    a, b = (CheckpointStore(run / "checkpoints").latest() for run in (long, short))
    assert (a.step, b.step) == (10, 10)
    b.verify()
    assert (a.component("model") / "model.safetensors").read_bytes() == (
        b.component("model") / "model.safetensors"
    ).read_bytes()
    assert trained_keys(long) == trained_keys(short)
    assert [r["rollout/tokens"] for r in steps_of(long)] == [r["rollout/tokens"] for r in steps_of(short)]
    assert sorted(path.name for path in (short / "rollouts" / "train").iterdir()) == [
        f"step_{step:06d}.parquet" for step in range(1, 11)
    ]
    names = Objects(Address.parse(uri)).names()
    assert not [name for name in names if name.startswith((".parts", ".parcels"))], (
        "every file is one object of its name"
    )
    assert "curves.png" in names
    last = steps_of(short)[-1]
    assert last["storage/upload_failures"] == 0
    assert last["storage/upload_s"] > 0
    assert 0 <= last["storage/lag_steps"] <= 2


def test_status_show_and_eval_read_a_run_at_a_uri(place, random_llama, capsys):
    config = small_config(random_llama, place, "run", "run.steps=2", "speculation.source=history")
    assert train(config, name="run") == 0
    uri = address(place, "run")
    capsys.readouterr()
    assert cli.main(["status", uri]) == 0
    told = capsys.readouterr().out
    assert "step 2/2" in told
    assert "checkpoints: step 2" in told
    assert f"slipstream show '{uri}'" in told
    assert cli.main(["status", place]) == 0, "a folder of runs means the newest"
    assert "step 2/2" in capsys.readouterr().out
    assert cli.main(["show", uri, "--step", "1", "--limit", "1"]) == 0
    assert "train step 1, 4 prompts, 16 answers" in capsys.readouterr().out
    assert cli.main(["history", "stats", uri]) == 0
    assert "answers" in capsys.readouterr().out
    assert cli.main(["history", "compact", uri]) == 2
    assert "cannot be changed from here" in capsys.readouterr().err
    assert cli.main(["eval", uri, "run.name=measured"]) == 0
    assert f"run directory: {address(place, 'measured')}" in capsys.readouterr().out
    assert status_at(address(place, "measured")).state == "finished"


def test_what_is_taken_or_missing_is_refused_before_a_model_is_loaded(place, random_llama, monkeypatch):
    config = small_config(random_llama, place, "run", "run.steps=1", *QUICK)
    assert train(config, name="run") == 0
    monkeypatch.setattr("pipelines.launch.resolve_model", lambda *a, **k: pytest.fail("a model is loaded"))
    with pytest.raises(UserError, match="exists already: go on with --resume 's3://"):
        train(config, name="run")
    with pytest.raises(UserError, match=r"unknown scheme s33://; did you mean s3://\?"):
        train(small_config(random_llama, "s33://bucket/runs", "run"), name="run")
    missing = place.replace("s3://bucket", "s3://no-bucket")
    with pytest.raises(UserError, match=r"run\.directory=s3://no-bucket.*there is no bucket no-bucket"):
        train(small_config(random_llama, missing, "run"), name="run")
    with pytest.raises(UserError, match=r"rum\?.* is not a run: it has no config\.yaml; there are run"):
        train(config, name="rum", resume=address(place, "rum"))


@pytest.mark.slow
def test_a_second_writer_is_refused_while_the_first_one_lives(place, random_llama):
    config = small_config(random_llama, place, "run", "run.steps=1", *QUICK)
    assert train(config, name="run") == 0
    uri = address(place, "run")
    lease = Lease.acquire(Objects(Address.parse(uri)), settle_s=0.0)
    with pytest.raises(UserError, match="is in use by process"):
        train(config, name="run", resume=uri)
    lease.release()


@pytest.mark.slow
def test_a_run_whose_lease_was_taken_stops_and_says_so(place, random_llama, capfd, monkeypatch):
    """Another machine took over while this run was suspended, say: two must not write."""
    uri = address(place, "run")
    original = Objects.write
    taken = []

    def write(self, name, data):
        original(self, name, data)
        if name == "INDEX.json" and not taken:  # the driver has sent what it had; now somebody else is quicker
            taken.append(name)
            original(self, LEASE, json.dumps({"token": "x", "host": "thief", "pid": 1, "since": 0.0}).encode())

    monkeypatch.setattr(Objects, "write", write)
    config = small_config(random_llama, place, "run", "run.steps=3", *QUICK)
    assert train(config, name="run") == 2
    assert f"{uri} was taken over by process 1 on thief" in capfd.readouterr().err
    assert b"thief" in Objects(Address.parse(uri)).read(LEASE), "it is left to whoever has it now"


@pytest.mark.slow
def test_a_driver_on_another_machine_than_the_conductor_reports_all_the_same(
    place, random_llama, tmp_path, monkeypatch, capsys
):
    """Two caches stand for two disks: actors have that of the session, this process has its own."""
    move_to(monkeypatch, tmp_path / "driver")
    overrides = ("run.steps=4", "checkpoint.every=2", *QUICK)
    assert train(small_config(random_llama, place, "run", *overrides), name="run") == 0
    assert f"run directory: {address(place, 'run')}" in capsys.readouterr().out
    assert [record["step"] for record in steps_of(fetched(place, "run"))] == [1, 2, 3, 4]
    longer = small_config(random_llama, place, "run", *overrides, "run.steps=6")
    assert train(longer, name="run", resume=address(place, "run")) == 0
    run = fetched(place, "run")
    assert saved_steps(RunDirectory(run)) == [4, 6]
    assert len(trained_keys(run)) == len(set(trained_keys(run))) == 24


@pytest.mark.slow
def test_on_a_cluster_roles_fetch_the_model_and_the_state_of_the_learner(place, random_llama, monkeypatch):
    """As if there were more nodes: what roles load is named by URIs, as paths would mean nothing there."""
    monkeypatch.setattr("pipelines.run_places.cluster_nodes", lambda: cluster_nodes() * 2)
    overrides = ("learner.schedule=constant", "checkpoint.every=1", *QUICK)
    assert train(small_config(random_llama, place, "run", "run.steps=2", *overrides), name="run") == 0
    names = Objects(Address.parse(address(place, "run"))).names()
    assert "model/model.safetensors" in names
    longer = small_config(random_llama, place, "run", "run.steps=4", *overrides)
    assert train(longer, name="run", resume=address(place, "run")) == 0
    run = fetched(place, "run")
    assert [record["step"] for record in steps_of(run)] == [1, 2, 3, 4]
    assert saved_steps(RunDirectory(run)) == [3, 4]
    CheckpointStore(run / "checkpoints").latest().verify()


@pytest.mark.slow
def test_a_store_that_is_away_for_a_while_costs_no_step(ray_session, random_llama, tmp_path):
    store, away = tmp_path / "store", tmp_path / "away"
    place = f"file://{store}"
    status = store / "run" / "status.json"
    config = small_config(random_llama, place, "run", "run.steps=30", "checkpoint.every=5", *QUICK)
    over = threading.Event()

    def interrupt() -> None:
        while not over.wait(0.05):
            if status.exists() and json.loads(status.read_text())["step"] >= 2:
                store.rename(away)
                store.write_text("no folder any more")
                over.wait(3)
                store.unlink()
                away.rename(store)
                return

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert train(config, name="run") == 0
    finally:
        over.set()
        thread.join()
    run = fetched(place, "run")
    assert [record["step"] for record in steps_of(run)] == list(range(1, 31))
    assert saved_steps(RunDirectory(run)) == [25, 30]
    assert steps_of(run)[-1]["storage/upload_failures"] > 0, "the store was away while the run went on"
    told = json.loads((run / "status.json").read_text())
    assert told["state"] == "finished"
    assert any("is not sent at the moment, the run goes on" in alarm for alarm in told["alarms"])
    assert any("is sent again; nothing is missing" in alarm for alarm in told["alarms"])
