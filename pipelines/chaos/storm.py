"""Kills parts of a run one after the other, each once the run has recovered from the last, and keeps the account."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.chaos.account import Account, Strike
from pipelines.chaos.grounds import Grounds, on_node
from pipelines.chaos.targets import NODE, Draw, Process, kill, living
from pipelines.progress import load_status
from storage.errors import UserError
from storage.journal import JsonLines

_POLL_S = 0.2
_FIRST_STEP_S = 300.0
_TAIL_BYTES = 1 << 16


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
    """

    run: str
    directory: Path
    place: Grounds
    draws: Iterator[Draw]
    deadline_s: float
    tell: Callable[[Strike], None]
    account: Account = field(default_factory=Account)
    _began: float = 0.0

    def rage(self, minutes: float) -> Account:
        """Kill until the time is up, a recovery takes too long, or the run ends; returns what was found out.

        Raises:
            UserError: The run made no first step.
        """
        self._await_first_step()
        self._began = time.time()
        ends = self._began + 60 * minutes
        try:
            while time.time() < ends and not self.account.problems:
                draw = next(self.draws)
                time.sleep(draw.pause_s)
                if self._ended() or not self._strike(draw):
                    break
        finally:
            self.account.minutes = (time.time() - self._began) / 60
        return self.account

    def _strike(self, draw: Draw) -> bool:
        """Kill what was drawn and wait for the recovery; False when there was none."""
        before = living(self.run)
        nodes = self.place.nodes()
        at = time.time()
        if NODE in draw.kinds:
            node = nodes[int(draw.which * len(nodes))]
            victims = on_node(list(before.values()), node)
            kinds: tuple[str, ...] = (NODE,)
            self.place.kill_node(node)
        else:
            victims = [process for process in draw.choose(before) if not kill(process)]
            kinds = tuple(process.kind for process in victims)
            if not victims:  # it is on its way back from something else
                return True
        recovered = self._await_recovery(victims, at)
        strike = Strike(
            at_s=at - self._began,
            kinds=kinds,
            places=tuple(process.place for process in victims),
            recovery_s=None if recovered is None else recovered - at,
            step=_newest_step(self.directory)[0],
        )
        self.account.strikes.append(strike)
        self.tell(strike)
        return recovered is not None

    def _await_recovery(self, victims: Sequence[Process], at: float) -> float | None:
        """Return when all victims had successors and a step was finished after their death; None past the deadline."""
        back: float | None = None
        while time.time() < at + self.deadline_s:
            if self._ended():
                return None
            if back is None and _succeeded(victims, living(self.run)):
                back = time.time()
            step, finished = _newest_step(self.directory)
            if back is not None and finished > at and step:
                return max(back, finished)
            time.sleep(_POLL_S)
        return None

    def _await_first_step(self) -> None:
        deadline = time.time() + _FIRST_STEP_S
        while not _newest_step(self.directory)[0]:
            if self._ended() or time.time() > deadline:
                raise UserError(f"the run has made no step in {_FIRST_STEP_S:g} s: see {self.directory / 'events.log'}")
            time.sleep(_POLL_S)

    def _ended(self) -> bool:
        status = load_status(self.directory)
        if status is None or not status.terminal:
            return False
        text = f": {status.message}" if status.message else ""
        problem = f"the run has {status.state} at step {status.step} in the middle of the storm{text}"
        if problem not in self.account.problems:
            self.account.problems.append(problem)
        return True


def _succeeded(victims: Sequence[Process], now: dict[str, Process]) -> bool:
    """Whether another process has taken the place of each victim."""
    return all(
        victim.place in now and (now[victim.place].pid, now[victim.place].node) != (victim.pid, victim.node)
        for victim in victims
    )


def _newest_step(directory: Path) -> tuple[int, float]:
    """Number of the newest finished step, and when it was finished (seconds since the epoch); zeros before any."""
    try:
        records = JsonLines.tail(directory / "metrics.jsonl", _TAIL_BYTES)
    except FileNotFoundError:  # a run that begins anew
        return 0, 0.0
    steps = [record for record in records if "time/step_s" in record]
    return (int(steps[-1]["step"]), float(steps[-1]["time"])) if steps else (0, 0.0)
