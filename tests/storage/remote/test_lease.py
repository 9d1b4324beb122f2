"""Two who want to write to one run: the first one does, and a dead one does not stand in the way."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from storage.errors import UserError
from storage.remote.address import Address
from storage.remote.held_run import HeldRun, hold_existing, hold_new
from storage.remote.lease import LEASE, STALE_S, Holder, Lease, LeaseLost
from storage.remote.objects import Objects
from tests.storage.remote.stores import file_address, move_to


@pytest.fixture
def objects(tmp_path) -> Objects:
    return Objects(file_address(tmp_path / "store"))


def held_by(objects: Objects, holder: Holder, age_s: float = 0.0) -> None:
    objects.write(LEASE, json.dumps(asdict(holder)).encode())
    path = Path("/" + objects.address.body.lstrip("/")) / LEASE
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))


def test_a_second_writer_is_told_who_writes(objects):
    Lease.acquire(objects, settle_s=0.0)
    with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on {re.escape(socket.gethostname())}"):
        Lease.acquire(objects, settle_s=0.0)


def test_a_lease_that_was_left_behind_is_taken_over(objects, caplog):
    elsewhere = Holder("old", "another-host", 12, 0.0)
    held_by(objects, elsewhere, age_s=STALE_S - 30)
    with pytest.raises(UserError, match=r"process 12 on another-host, seen 150 s ago.*taken over 180 s after"):
        Lease.acquire(objects, settle_s=0.0)
    held_by(objects, elsewhere, age_s=STALE_S + 30)
    lease = Lease.acquire(objects, settle_s=0.0)
    assert "took over from process 12 on another-host, which has not been heard of for 210 s" in caplog.text
    lease.check()
    with pytest.raises(LeaseLost, match=f"taken over by process {os.getpid()}"):
        Lease(objects, elsewhere).refresh()


def test_a_dead_process_of_this_host_is_not_waited_for(objects):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    held_by(objects, Holder("dead", socket.gethostname(), child.pid, 0.0))
    Lease.acquire(objects, settle_s=0.0)


def test_of_two_at_once_only_one_gets_it(objects):
    gate = threading.Barrier(2)
    won, refused = [], []

    def take() -> None:
        gate.wait()
        try:
            won.append(Lease.acquire(objects, settle_s=0.5))
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused)) == (1, 1)
    won[0].check()


def test_a_released_lease_is_free_and_one_that_was_lost_is_left_alone(objects):
    first = Lease.acquire(objects, settle_s=0.0)
    first.release()
    second = Lease.acquire(objects, settle_s=0.0)
    first.release()
    second.check()
    assert objects.info(LEASE) is not None


def test_a_name_that_is_taken_is_refused(tmp_path, monkeypatch):
    move_to(monkeypatch, tmp_path / "machine")
    address = file_address(tmp_path / "store")
    with hold_new(address) as run, pytest.raises(UserError, match="in use by process"), hold_new(address):
        pass
    with hold_new(address) as run:
        run.config.write_text("run: {}\n")
        run.send()
    with (
        pytest.raises(UserError, match=rf"{re.escape(str(address))} exists already: go on with --resume"),
        hold_new(address),
    ):
        pass
    assert Objects(address).info(LEASE) is None, "nothing is left of those who were refused"


def test_a_process_of_the_run_shares_the_lease_by_its_ticket(tmp_path, monkeypatch):
    move_to(monkeypatch, tmp_path / "machine")
    address = file_address(tmp_path / "store")
    with hold_new(address) as run:
        run.config.write_text("run: {}\n")
        run.send()
        same = HeldRun.adopt(run.ticket)
        assert same.path == run.path, "on the same machine it works in the same folder"
        move_to(monkeypatch, tmp_path / "other")
        elsewhere = HeldRun.adopt(run.ticket)
        assert elsewhere.path != run.path
        assert elsewhere.config.read_text() == "run: {}\n"
        elsewhere.mirror().beat()
        run.send()


def test_what_is_no_run_cannot_be_held(tmp_path, monkeypatch):
    move_to(monkeypatch, tmp_path / "machine")
    address = file_address(tmp_path / "store", "first")
    with hold_new(address) as run:
        run.config.write_text("run: {}\n")
        run.send()
    missing = Address.parse(str(address.parent)).child("frist")
    with pytest.raises(UserError, match=r"frist is not a run: it has no config\.yaml; there are first"):
        hold_existing(missing, print).__enter__()
