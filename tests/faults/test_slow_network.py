"""A worker behind a bad network: answers come late, packets are lost, the line is cut; the run goes on and counts once.

The head and a node with a rollout worker are in network namespaces of their own, joined by a link that this test
makes slow, lossy and dead.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from pipelines.chaos.laws import check_run
from pipelines.config_loader import write_config
from pipelines.monitoring import newest_step
from storage.run_directory import RunDirectory
from tests.conftest import ROOT
from tests.faults.networks import Link, Machine, NoNamespaces, two_machines
from tests.runs import small_config, steps_of, trained_keys

PORT = 6379
DEADLINE_S = 180.0
SLOW_S, CUT_S = 30.0, 20.0
STALL_S = 60.0
RUN = (
    "run.steps=100000",
    "run.restarts=100",
    "data.prompts=32",
    "rollout.workers=2",
    "rollout.num_cpus=1",
    "rollout.max_tokens=40",
    f"rollout.stall_deadline_s={STALL_S:g}",
    "reward.labels={machine: near}",
    "learner.labels={machine: near}",
    "cluster.labels={machine: near}",
    "evaluation.before=false",
    "evaluation.after=false",
    "checkpoint.every=10",
)


@dataclass(slots=True)
class Cluster:
    """Ray on two machines."""

    near: Machine
    far: Machine
    link: Link
    environment: dict[str, str]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    try:
        with two_machines() as (near, far, link), tempfile.TemporaryDirectory(prefix="slip-") as folder:
            token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            environment = {**os.environ, **token, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
            environment.pop("RAY_ADDRESS", None)
            head = ("--head", f"--port={PORT}", "--include-dashboard=false")
            worker = (f"--address={near.address}:{PORT}",)
            try:
                for machine, name, more in ((near, "near", head), (far, "far", worker)):
                    start_node(machine, name, more, Path(folder), environment)
                yield Cluster(near, far, link, environment)
            finally:
                near.end_everything()
                far.end_everything()
    except NoNamespaces as reason:
        pytest.skip(str(reason))


def start_node(
    machine: Machine, name: str, more: tuple[str, ...], folder: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start a node; returns when it says that it runs."""
    log = folder / f"{name}.log"
    command = [
        Path(sys.executable).with_name("ray"),
        "start",
        *more,
        f"--node-ip-address={machine.address}",
        f"--temp-dir={folder / name}",
        f"--labels=machine={name}",
        "--num-cpus=1",
        f"--object-store-memory={100 * 2**20}",
        "--disable-usage-stats",
        "--block",
    ]
    with log.open("wb") as output:
        process = machine.start(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    when(lambda: "block forever" in log.read_text() or process.poll() is not None, lambda: log.read_text())
    assert process.poll() is None, log.read_text()
    return process


def when(there: Callable[[], object], what: Callable[[], str], deadline_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not there():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {deadline_s:g} s: {what()[-3000:]}")
        time.sleep(0.2)


def test_packets_are_late_lost_and_cut_as_asked() -> None:
    """The link itself, without Ray: an echo over TCP."""
    echo = (
        "import socket\n"
        "listening = socket.create_server(('0.0.0.0', 4000))\n"
        "print('up', flush=True)\n"
        "while True:\n"
        "    caller, _ = listening.accept()\n"
        "    while data := caller.recv(65536):\n"
        "        caller.sendall(data)\n"
    )
    ask = (
        "import socket, sys, time\n"
        "began, size, got = time.monotonic(), int(sys.argv[2]), 0\n"
        "with socket.create_connection((sys.argv[1], 4000), timeout=20) as there:\n"
        "    there.sendall(bytes(size))\n"
        "    while got < size:\n"
        "        got += len(there.recv(65536))\n"
        "    print(time.monotonic() - began)\n"
    )
    try:
        with two_machines() as (near, far, link):
            server = far.start([sys.executable, "-c", echo], stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None
            assert server.stdout.readline() == "up\n"

            def ask_for(size: int) -> subprocess.Popen[str]:
                return near.start(
                    [sys.executable, "-c", ask, far.address, str(size)], stdout=subprocess.PIPE, text=True
                )

            def seconds(asking: subprocess.Popen[str]) -> float:
                output, _ = asking.communicate(timeout=60)
                assert asking.returncode == 0
                return float(output)

            link.delay_s = 0.1
            assert seconds(ask_for(100)) > 0.2, "there and back"
            link.heal()
            link.bytes_per_s = 100_000.0
            assert seconds(ask_for(200_000)) > 1.5
            link.heal()
            link.loss = 0.05
            before = link.lost
            seconds(ask_for(200_000))
            assert link.lost > before, "and yet everything has come"
            link.heal()
            link.cut, before = True, link.lost
            asking = ask_for(100)
            when(lambda: link.lost > before, lambda: "a packet that was lost")
            time.sleep(1)
            link.heal()
            assert seconds(asking) > 1.0, "TCP has tried until the line was there again"
    except NoNamespaces as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
def test_run_survives_a_slow_network_and_a_cut(cluster: Cluster, random_llama: Path, tmp_path: Path) -> None:
    link, run = cluster.link, RunDirectory(tmp_path / "far")
    config = small_config(random_llama, tmp_path, "far", *RUN, f"cluster.address={cluster.near.address}:{PORT}")
    write_config(config, tmp_path / "far.yaml")
    output = tmp_path / "driver.log"
    with output.open("wb") as log:
        command = [sys.executable, "-m", "pipelines", "train", tmp_path / "far.yaml"]
        driver = cluster.near.start(command, stdout=log, stderr=subprocess.STDOUT, env=cluster.environment, cwd=ROOT)

    def told() -> str:
        events = run.events.read_text() if run.events.exists() else ""
        return f"{output.read_text()}\n{events}"

    def steps_more(number: int, deadline_s: float = DEADLINE_S) -> float:
        """Wait for so many further steps; returns how long they took."""
        began, first = time.monotonic(), newest_step(run.metrics)[0]
        when(lambda: newest_step(run.metrics)[0] >= first + number or driver.poll() is not None, told, deadline_s)
        assert driver.poll() is None, told()
        return time.monotonic() - began

    steps_more(3)
    assert link.carried > 1000, "the worker of the other machine takes part"

    link.delay_s, link.loss, link.bytes_per_s = 0.2, 0.01, 1e6
    ends = time.monotonic() + SLOW_S
    while time.monotonic() < ends:
        steps_more(1)
    assert link.lost > 0
    link.heal()
    steps_more(2)

    link.cut = True
    time.sleep(CUT_S)
    link.heal()
    back = steps_more(2, CUT_S + STALL_S)
    steps_more(10)

    os.killpg(driver.pid, signal.SIGINT)
    assert driver.wait(DEADLINE_S) == 0, told()
    verdict = check_run(run)
    assert verdict.holds, verdict
    keys = trained_keys(run.path)
    assert len(keys) == len(set(keys)) >= 4 * verdict.steps
    times = [record["time"] for record in steps_of(run.path)]
    longest = max(after - before for before, after in pairwise(times))
    assert longest < CUT_S + STALL_S, f"longest pause {longest:.0f} s, {back:.0f} s after the cut"
    assert "has not answered for" in run.events.read_text(), "who kept the run waiting"
