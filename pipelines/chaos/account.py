"""What was killed and how long it took to come back: lines while it happens, a table and figures at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from rich.console import Console
from rich.table import Table

from pipelines.chaos.laws import Verdict

_SHOWN = 5
_ROLE_GOAL_S = 20.0
_GOALS_S = {"node": 60.0, "conductor": 60.0, "driver": 60.0}
"""Longest median recovery that a run is meant to have: without a role a step waits, without these all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Something that was killed, alone or with others in the same moment.

    Attributes:
        at_s: When, in seconds since the storm began.
        kinds: What, by kind: rollout, learner, node and so on.
        places: Which processes died.
        recovery_s: Seconds until every one of them had a successor and a step was finished after it; None: never.
        step: Newest finished step when it was over.
    """

    at_s: float
    kinds: tuple[str, ...]
    places: tuple[str, ...]
    recovery_s: float | None
    step: int

    def line(self) -> str:
        """One line for people."""
        clock = f"{int(self.at_s) // 60}:{int(self.at_s) % 60:02d}"
        who = " + ".join(self.kinds)
        places = ", ".join(self.places[:_SHOWN]) + (" ..." if len(self.places) > _SHOWN else "")
        end = "NOT RECOVERED" if self.recovery_s is None else f"back in {self.recovery_s:5.1f} s"
        return f"{clock:>6}  {who:<24} {end}   step {self.step:<5} {places}"


@dataclass(slots=True)
class Account:
    """Everything that a storm found out.

    Attributes:
        strikes: What was killed.
        problems: What broke, beside the laws of the verdict.
        verdict: What the run left behind.
        minutes: How long the storm lasted.
        drivers_gave_up: Drivers that ended by themselves, because they got no answer for too long.
    """

    strikes: list[Strike] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)
    minutes: float = 0.0
    drivers_gave_up: int = 0

    @property
    def kills(self) -> int:
        """Processes or nodes that were told to die; those of a pair count one each."""
        return sum(len(strike.kinds) for strike in self.strikes)

    @property
    def holds(self) -> bool:
        """True when no law broke."""
        stalled = any(strike.recovery_s is None for strike in self.strikes)
        return self.verdict.holds and not self.problems and not stalled

    def recoveries(self, kind: str = "") -> list[float]:
        """Seconds of recovery; with a ``kind``, of the strikes that it was hit by alone."""
        return [
            strike.recovery_s
            for strike in self.strikes
            if strike.recovery_s is not None and (not kind or strike.kinds == (kind,))
        ]

    def figures(self) -> dict[str, float]:
        """The numbers that others quote, by name."""
        found = {
            "kills": float(self.kills),
            "lost": float(len(self.verdict.lost)),
            "trained_twice": float(len(self.verdict.trained_twice)),
            "problems": float(len(self.verdict.problems) + len(self.problems)),
            "unrecovered": float(sum(strike.recovery_s is None for strike in self.strikes)),
            "steps": float(self.verdict.steps),
            "drivers_gave_up": float(self.drivers_gave_up),
            "minutes": self.minutes,
        }
        if recoveries := self.recoveries():
            found["recovery_median_s"] = median(recoveries)
            found["recovery_max_s"] = max(recoveries)
        for kind in self._kinds():
            if alone := self.recoveries(kind):
                found[f"recovery_median_s_{kind}"] = median(alone)
        return found

    def show(self, console: Console) -> None:
        """Print recoveries by kind, then what the laws say."""
        table = Table("killed", "times", "alone", "median s", "meant s", "longest s", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for kind in self._kinds():
            alone = self.recoveries(kind)
            times = sum(kind in strike.kinds for strike in self.strikes)
            middle, longest = (f"{median(alone):.1f}", f"{max(alone):.1f}") if alone else ("", "")
            goal = f"{_GOALS_S.get(kind, _ROLE_GOAL_S):.0f}"
            table.add_row(kind, str(times), str(len(alone)), middle, goal, longest)
        console.print(table)
        verdict = self.verdict
        console.print(
            f"{verdict.steps} steps survive: {verdict.trained} groups trained, {verdict.ended} ended with a reason, "
            f"{verdict.waiting} waiting",
            highlight=False,
        )
        for name, value in self.figures().items():
            console.print(f"{name} = {value:.4g}", highlight=False)
        for text in self.broken():
            console.print(f"BROKEN: {text}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        if self.holds:
            console.print("every law held", style="green", highlight=False)

    def broken(self) -> list[str]:
        """Every law that broke, a sentence each."""
        verdict, found = self.verdict, []
        for keys, what in ((verdict.lost, "lost"), (verdict.trained_twice, "trained more than once")):
            if keys:
                shown = ", ".join(map(str, keys[:_SHOWN]))
                found.append(f"{len(keys)} groups were {what}: {shown}{' ...' if len(keys) > _SHOWN else ''}")
        found += [
            f"the run did not recover from the death of {' and '.join(strike.kinds)} at {strike.at_s:.0f} s"
            for strike in self.strikes
            if strike.recovery_s is None
        ]
        return [*found, *verdict.problems, *self.problems]

    def _kinds(self) -> Sequence[str]:
        return sorted({kind for strike in self.strikes for kind in strike.kinds})
