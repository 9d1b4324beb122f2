"""A storm: who is struck, what counts as recovered, what it prints, and a short one over a real run."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipelines import cli
from pipelines.chaos import storm as storm_module
from pipelines.chaos.account import Account, Strike
from pipelines.chaos.drivers import Driver
from pipelines.chaos.grounds import Grounds
from pipelines.chaos.laws import Verdict
from pipelines.chaos.storm import Storm
from pipelines.chaos.targets import DRIVER, NODE, Draw, Process, draws, end_worker
from pipelines.chaos_command import rage
from pipelines.status import RunStatus
from storage.errors import UserError
from storage.records import GroupKey
from tests.conftest import ROOT
from tests.pipelines.chaos.pairs import PAIRS

KINDS = ("conductor", DRIVER, "learner", "predictor", "queue", "retriever", "reward", "rollout", NODE)


def test_the_same_seed_strikes_in_the_same_order() -> None:
    first, again, other = (list(islice(draws(seed, KINDS), 60)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_every_kind_has_its_turn_and_any_two_meet() -> None:
    drawn = list(islice(draws(0, KINDS), 100 * len(KINDS)))
    assert Counter(draw.kinds[0] for draw in drawn) == dict.fromkeys(KINDS, 100)
    pairs = {frozenset(draw.kinds) for draw in drawn if len(draw.kinds) == 2}
    assert pairs == {frozenset(pair) for pair in combinations(KINDS, 2)}
    assert 0.1 < sum(len(draw.kinds) == 2 for draw in drawn) / len(drawn) < 0.3


def test_one_of_several_is_chosen_and_what_is_not_there_is_left_out() -> None:
    living = {f"rollout-{i}": Process(f"rollout-{i}", "rollout", 100 + i, "n") for i in range(3)}
    chosen = [Draw(("rollout", "learner"), which, 0).choose(living) for which in (0.0, 0.5, 0.99)]
    assert [[p.place for p in one] for one in chosen] == [["rollout-0"], ["rollout-1"], ["rollout-2"]]


def test_only_workers_of_the_session_are_killed() -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert "is something else by now" in end_worker(bystander.pid, "session")
        assert "is something else by now" in end_worker(os.getpid(), "session")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    assert end_worker(bystander.pid, "session") == "it has gone already"


class World:
    """A run that the test plays: its processes, and the steps that it writes down."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.processes = {place: Process(place, place, 1, "n") for place in ("learner", "rollout")}
        self.killed: list[str] = []
        monkeypatch.setattr(storm_module, "living", lambda _run: dict(self.processes))
        monkeypatch.setattr(storm_module, "kill", self.kill)
        self.heals = True
        self.steps = True
        self.parts_with_a_step = False
        self.step = 0
        self.grounds = Grounds("")
        self.record()

    def record(self) -> None:
        self.step += 1
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.step, "time": time.time(), "time/step_s": 1.0}) + "\n")

    def train(self, over: threading.Event) -> None:
        while not over.wait(0.02):
            if self.steps:
                self.record()

    def kill(self, process: Process) -> str:
        self.killed.append(process.place)
        if self.parts_with_a_step:
            time.sleep(0.01)
            self.record()
        if self.heals:
            self.processes[process.place] = Process(process.place, process.kind, process.pid + 1, "n")
        return ""

    def storm(self, *kinds: str, deadline_s: float = 0.5, driver: Any = None) -> Storm:
        told: list[Strike] = []
        return Storm(
            run="run",
            directory=self.directory,
            place=self.grounds,
            driver=driver,
            draws=(Draw(tuple(kind.split("+")), 0.0, 0.0) for kind in kinds),
            deadline_s=deadline_s,
            tell=told.append,
        )


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made, over = World(tmp_path, monkeypatch), threading.Event()
    trainer = threading.Thread(target=made.train, args=(over,))
    trainer.start()
    yield made
    over.set()
    trainer.join()


def test_a_strike_is_over_when_the_dead_has_a_successor_and_a_step_was_finished(world: World) -> None:
    account = world.storm(*["learner", "rollout"] * 500).rage(0.005)
    assert account.holds
    assert account.kills == len(world.killed) >= 2
    assert all(strike.recovery_s is not None and strike.recovery_s < 0.4 for strike in account.strikes)


def test_a_run_without_a_successor_has_not_recovered(world: World) -> None:
    world.heals = False
    account = world.storm("learner").rage(1)
    assert [strike.recovery_s for strike in account.strikes] == [None]
    assert account.broken() == ["the run did not recover from the death of learner at 0 s"]


@pytest.mark.parametrize("parts_with_a_step", [False, True])
def test_a_run_that_makes_no_step_has_not_recovered(world: World, parts_with_a_step: bool) -> None:
    """Also if it finished one at the moment of the death."""
    world.steps, world.parts_with_a_step = False, parts_with_a_step
    assert not world.storm("learner").rage(1).holds


def test_a_run_that_ends_in_the_storm_has_broken(world: World) -> None:
    RunStatus(name="run", directory="", state="failed", message="it gave up", step=7).save(
        world.directory / "status.json"
    )
    account = world.storm("learner").rage(1)
    assert not account.holds
    assert account.problems == ["the run has failed at step 7 in the middle of the storm: it gave up"]


class Nodes(Grounds):
    """Two nodes that the test plays."""

    def __init__(self, world: World) -> None:
        super().__init__("")
        self.world = world

    def nodes(self) -> list[str]:
        return ["n", "m"]

    def kill_node(self, node: str) -> None:
        for process in list(self.world.processes.values()):
            if process.node == node:
                self.world.kill(process)


class Watcher:
    """A driver that the test plays: it sees a step as soon as it is asked for it."""

    def __init__(self, world: World) -> None:
        self.world, self.pid, self.gave_up, self.blind = world, 1, 0, False
        self.log = world.directory / "driver.log"

    def ensure(self) -> None: ...

    def kill(self) -> None:
        self.pid += 1
        self.world.killed.append("driver")

    def newest_step(self) -> int:
        return 1 if self.blind else self.world.step


def test_a_role_and_a_node_die_in_the_same_moment(world: World) -> None:
    world.processes["rollout"] = Process("rollout", "rollout", 1, "m")
    world.grounds = Nodes(world)
    account = world.storm("rollout+node").rage(1)
    assert account.holds
    [strike] = account.strikes
    assert strike.kinds == ("rollout", "node")
    assert sorted(strike.places) == ["learner", "rollout"]
    assert account.kills == 2


def test_a_driver_is_back_when_another_one_has_seen_a_step_more(world: World) -> None:
    watcher = Watcher(world)
    account = world.storm("driver", "learner+driver", driver=watcher).rage(1)
    assert account.holds
    assert [one.kinds for one in account.strikes] == [("driver",), ("learner", "driver")]
    watcher.blind = True
    assert not world.storm("driver", driver=watcher).rage(1).holds, "the run goes on, and nobody sees it"


def test_a_driver_that_gives_up_is_replaced_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = iter(["print('step 7/9 | 1 s')", "import time; print('step 8/9', flush=True); time.sleep(60)"])
    start = subprocess.Popen

    def play(command: list[str], **options: Any) -> Any:
        assert command[1:] == ["-m", "pipelines", "attach", "run"]
        return start([sys.executable, "-c", next(scripts)], **options)

    monkeypatch.setattr("pipelines.chaos.drivers.subprocess.Popen", play)
    driver = Driver("run", "127.0.0.1:1", tmp_path / "driver.log")
    driver.ensure()
    try:
        until(lambda: not driver.pid)
        assert driver.newest_step() == 7
        driver.ensure()
        until(lambda: driver.newest_step() == 8)
        first = driver.pid
        driver.ensure()
        assert driver.pid == first, "one at a time"
        assert driver.gave_up == 1
    finally:
        driver.kill()
    assert driver.pid == 0
    assert driver.gave_up == 1, "this one was killed"


def until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def account(*strikes: Strike, **verdict: object) -> Account:
    return Account(strikes=list(strikes), verdict=Verdict(steps=9, trained=36, **verdict), minutes=2.0)  # type: ignore[arg-type]


def strike(kinds: tuple[str, ...], recovery_s: float | None) -> Strike:
    return Strike(at_s=61.0, kinds=kinds, places=kinds, recovery_s=recovery_s, step=3)


def test_figures_count_every_process_and_take_medians_by_kind() -> None:
    seconds = ((("learner",), 10.0), (("learner",), 20.0), (("rollout",), 3.0), (("learner", "rollout"), 30.0))
    made = account(*(strike(kinds, recovery) for kinds, recovery in seconds))
    assert made.holds
    figures = made.figures()
    assert (figures["kills"], figures["lost"], figures["trained_twice"], figures["unrecovered"]) == (5, 0, 0, 0)
    assert (figures["recovery_median_s"], figures["recovery_max_s"]) == (15.0, 30.0)
    assert figures["recovery_median_s_learner"] == 15.0, "pairs are nobody's"
    assert figures["recovery_median_s_rollout"] == 3.0


def test_what_broke_is_printed_and_makes_the_account_fail() -> None:
    made = account(strike(("learner",), None), lost=(GroupKey("train", 0, 3),), problems=("step 2 is not there",))
    assert not made.holds
    out = io.StringIO()
    made.show(Console(file=out, width=160))
    text = out.getvalue()
    for part in (
        "1 groups were lost: train/e0/p3/d0",
        "did not recover from the death of learner",
        "step 2 is not there",
    ):
        assert f"BROKEN: {part}" in text or part in text
    assert "every law held" not in text
    assert "lost = 1" in text
    assert "NOT RECOVERED" in strike(("learner",), None).line()


def test_bad_input_is_refused_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chaos", "--json", str(tmp_path / "missing" / "chaos.json")]) == 2
    assert cli.main(["chaos", "rollout.workers=0"]) == 2
    assert cli.main(["chaos", "--nodes", "2", "cluster.address=10.0.0.1:6379"]) == 2
    errors = capsys.readouterr().err
    assert "the folder does not exist" in errors
    assert "rollout.workers" in errors
    assert "--nodes emulates nodes on this machine" in errors


def test_a_run_that_does_not_begin_is_one_message(ray_session: None, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the training run did not begin \(status 2\)"):
        rage([f"model={tmp_path / 'nothing'}"], Console(quiet=True), minutes=0.1, seed=0, keep=tmp_path)


@pytest.mark.slow
def test_a_short_storm_over_a_real_run_breaks_no_law(ray_session: None, random_llama: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    plain = ("speculation.source=off", "schedule.dispatch=least_loaded", "rollout.max_tokens=12", "data.prompts=16")
    found = rage(
        [f"model={random_llama}", "data.train=builtin:running_sums", *plain],
        Console(file=out, width=160),
        minutes=0.25,
        seed=1,
        keep=tmp_path,
        strikes=draws(1, ("learner", "rollout", "reward")),
    )
    assert found.holds, found.broken()
    assert found.kills >= 1
    assert found.verdict.steps >= 2
    assert "back in" in out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [0, 2])
def test_a_storm_over_everything_breaks_no_law(tmp_path: Path, nodes: int) -> None:
    """As a user starts it, with every role of the preset and a Ray of its own."""
    figures = tmp_path / "figures.json"
    command = [
        sys.executable,
        "-m",
        "pipelines",
        "chaos",
        "--minutes",
        "3",
        "--nodes",
        str(nodes),
        "--json",
        str(figures),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())
    assert found["kills"] >= 4
    assert (found["lost"], found["trained_twice"], found["problems"], found["unrecovered"]) == (0, 0, 0, 0)


@pytest.mark.slow
def test_two_at_once_break_no_law_whichever_they_are(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipelines.chaos.pairs", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        env=environment,
        check=False,
    )
    results = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(results[0])
    assert found["broken"] == [], done.stdout
    assert found["struck"] == [list(pair) for pair in PAIRS], "both were there to be killed"
