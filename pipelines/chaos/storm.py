"""Kills parts of a run one after the other, each once the run has recovered from the last, and keeps the account."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.chaos.account import Account, Strike
from pipelines.chaos.drivers import Driver
from pipelines.chaos.grounds import Grounds, on_node
from pipelines.chaos.targets import DRAFTS, DRIVER, NODE, Draw, Process, kill, living
from pipelines.monitoring import newest_step
from pipelines.progress import load_status
from storage.errors import UserError

_POLL_S = 0.2
_FIRST_STEP_S = 300.0


@dataclass(slots=True)
class Storm:
    """One storm over one run.

    Attributes:
        run: Name of the run.
        directory: Its run directory, which this process can read.
        place: The Ray that it runs on.
        draws: What comes next.
        deadline_s: Longest time that a recovery may take.
        tell: Called with each strike when it is over.
        driver: Watches the run; None where nobody does.
    """

    run: str
    directory: Path
    place: Grounds
    draws: Iterator[Draw]
    deadline_s: float
    tell: Callable[[Strike], None]
    driver: Driver | None = None
    account: Account = field(default_factory=Account)
    _began: float = 0.0

    def rage(self, minutes: float) -> Account:
        """Kill until the time or the draws are used up, a recovery takes too long, or the run ends.

        Returns what was found out.

        Raises:
            UserError: The run made no first step, or its driver sees none.
        """
        self._await("has made no step", lambda: newest_step(self._metrics)[0] > 0, self.directory / "events.log")
        if self.driver is not None:
            driver = self.driver
            driver.ensure()
            self._await("shows its driver no step", lambda: driver.newest_step() > 0, driver.log)
        self._began = time.time()
        ends = self._began + 60 * minutes
        try:
            while time.time() < ends and not self.account.problems:
                draw = next(self.draws, None)
                if draw is None:
                    break
                time.sleep(draw.pause_s)
                if self._ended() or not self._strike(draw):
                    break
        finally:
            self.account.minutes = (time.time() - self._began) / 60
            self.account.drivers_gave_up = 0 if self.driver is None else self.driver.gave_up
        return self.account

    def _strike(self, draw: Draw) -> bool:
        """Kill what was drawn and wait for the recovery; False when there was none."""
        before = self._living()
        nodes = self.place.nodes()
        at = time.time()
        victims = [process for process in draw.choose(before) if not self._end(process)]
        killed = {process.kind for process in victims}
        if NODE in draw.kinds:
            node = nodes[int(draw.which * len(nodes))]
            victims = [process for process in victims if not _stays_away(process, node)]
            lost = [process for process in on_node(list(before.values()), node) if not _stays_away(process, node)]
            victims += [process for process in lost if process not in victims]
            killed.add(NODE)
            self.place.kill_node(node)
        if not killed:  # it is on its way back from something else
            return True
        recovered = self._await_recovery(victims, at)
        strike = Strike(
            at_s=at - self._began,
            kinds=tuple(kind for kind in draw.kinds if kind in killed),
            places=tuple(process.place for process in victims),
            recovery_s=None if recovered is None else recovered - at,
            step=newest_step(self._metrics)[0],
        )
        self.account.strikes.append(strike)
        self.tell(strike)
        return recovered is not None

    def _living(self) -> Mapping[str, Process]:
        """What lives of the run, and who watches it."""
        found = living(self.run)
        if self.driver is not None:
            self.driver.ensure()
            found[DRIVER] = Process(DRIVER, DRIVER, self.driver.pid, "")
        return found

    def _end(self, process: Process) -> str:
        """Kill a process; returns why it was spared, or nothing."""
        if process.kind != DRIVER:
            return kill(process)
        assert self.driver is not None  # it is one of the living
        self.driver.kill()
        return ""

    def _await_recovery(self, victims: Sequence[Process], at: float) -> float | None:
        """Return when all was well again; None past the deadline.

        That is when all victims had successors, and a step was finished after that: one that ended at the moment of the
        death says nothing. Where a driver died, it is when another one had seen that step.
        """
        back: float | None = None
        first = 0
        watched = self.driver is not None and any(process.kind == DRIVER for process in victims)
        while time.time() < at + self.deadline_s:
            if self._ended():
                return None
            if back is None and _succeeded(victims, self._living()):
                back = time.time()
            step, finished = newest_step(self._metrics)
            if back is not None and finished > back and step:
                first = first or step
                if not watched:
                    return finished
                assert self.driver is not None
                self.driver.ensure()
                if self.driver.newest_step() >= first:
                    return time.time()
            time.sleep(_POLL_S)
        return None

    def _await(self, lack: str, there: Callable[[], bool], log: Path) -> None:
        """Wait for what a storm begins with."""
        deadline = time.time() + _FIRST_STEP_S
        while not there():
            if self._ended() or time.time() > deadline:
                raise UserError(f"the run {lack} in {_FIRST_STEP_S:g} s: see {log}")
            time.sleep(_POLL_S)

    @property
    def _metrics(self) -> Path:
        return self.directory / "metrics.jsonl"

    def _ended(self) -> bool:
        status = load_status(self.directory)
        if status is None or not status.terminal:
            return False
        text = f": {status.message}" if status.message else ""
        problem = f"the run has {status.state} at step {status.step} in the middle of the storm{text}"
        if problem not in self.account.problems:
            self.account.problems.append(problem)
        return True


def _stays_away(process: Process, node: str) -> bool:
    """Whether a process belonged to one node only, which has died: the retriever of that node's drafts."""
    return process.node == node and process.place.startswith(DRAFTS)


def _succeeded(victims: Sequence[Process], now: Mapping[str, Process]) -> bool:
    """Whether another process has taken the place of each victim."""
    return all(
        victim.place in now and (now[victim.place].pid, now[victim.place].node) != (victim.pid, victim.node)
        for victim in victims
    )
