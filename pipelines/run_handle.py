"""A driver's hold on a run that goes on elsewhere in the cluster: look, pause, change a knob, sample, save, stop.

Everything is asked of the conductor, nothing is read from files, because nodes may share no disk. Any number of drivers
may hold the same run: the conductor does what they ask for one after the other.
"""

from __future__ import annotations

import difflib
import html
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from pipelines.active_runs import active_runs, find_conductor
from pipelines.config import RunOptions
from pipelines.faults import brief, user_error
from pipelines.joining import START_HEAD, join
from pipelines.knobs import Change, Knob, Value
from pipelines.progress import LiveView, duration
from pipelines.remote_views import status_at
from pipelines.status import RunStatus
from storage.errors import UserError
from storage.remote.address import Address, is_address
from storage.run_directory import find_run

_ANSWER_S = 30.0
_GLANCE_S = 3.0
_VIEW_S = 0.5
_SUCCESSOR_S = 30.0
"""Time in which a run whose conductor died has another one: Ray or the driver notices, and a process starts."""
_SUCCESSOR_POLL_S = 0.25


class RunHandle:
    """One run, seen from a driver. Get one from :func:`pipelines.attach`; several drivers may hold the same run."""

    def __init__(self, name: str, conductor: Any) -> None:
        """Hold the run whose conductor this is."""
        self.name = name
        self._conductor = conductor
        self._latest: RunStatus | None = None

    def status(self) -> RunStatus:
        """Return what the run is doing."""
        self._latest = self._ask(_ANSWER_S, "status")
        return self._latest

    def metrics(self, last: int = 1) -> list[dict[str, Any]]:
        """Return the newest ``last`` records (at most 1,000), oldest first, by the names of ``metrics.jsonl``.

        A step has a record, and so has an evaluation.
        """
        if last < 1:
            raise UserError(f"last={last}: ask for at least one record")
        records: list[dict[str, Any]] = self._ask(_ANSWER_S, "metrics", last)
        return records

    def follow(self, interval_s: float = 1.0) -> Iterator[RunStatus]:
        """Yield the status again and again until the run has ended; the last one says how.

        Args:
            interval_s: Time between two looks. Unit: seconds.

        Raises:
            UserError: The conductor is gone and how the run ended cannot be seen from here.
        """
        while True:
            try:
                status = self.status()
            except UserError:
                ended = self._ended()
                if ended is None:
                    raise
                status = ended
            yield status
            if status.terminal:
                return
            time.sleep(interval_s)

    def pause(self) -> None:
        """Have the run rest when the step in progress is done; :meth:`status` then says ``paused``.

        A stream that rests still finishes the answers that its staleness bound has let in.
        """
        self._ask(_ANSWER_S, "pause")

    def resume(self) -> None:
        """Have a resting run go on."""
        self._ask(_ANSWER_S, "resume")

    def knobs(self) -> dict[str, Knob]:
        """Return what may be changed while the run goes on: values, ranges and what is special, by name."""
        knobs: tuple[Knob, ...] = self._ask(_ANSWER_S, "knobs")
        return {knob.name: knob for knob in knobs}

    def set(self, name: str, value: Value) -> Change:
        """Change a knob, for instance ``run.set("learner.learning_rate", 1e-4)``, from the next step on.

        The change is written to the run's log and its checkpoints, so that a resumed run keeps it.

        Raises:
            UserError: It is no knob, or does not take the value in this run; says what it takes.
        """
        change: Change = self._ask(_ANSWER_S, "set", name, value)
        return change

    def sample(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        n: int = 1,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        timeout_s: float = 300.0,
    ) -> list[str]:
        """Have the current policy answer a prompt, on one of the run's rollout workers and beside the training.

        Args:
            prompt: Text, or chat messages; rendered as the run renders its own prompts.
            n: Answers.
            temperature: 0 is greedy; by default that of the training.
            max_tokens: Longest answer; by default ``rollout.max_tokens``.
            timeout_s: Longest time to wait.
        """
        plain = prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
        texts: list[str] = self._ask(timeout_s + _ANSWER_S, "sample", plain, n, temperature, max_tokens, timeout_s)
        return texts

    def checkpoint(self, timeout_s: float = 3600.0) -> str:
        """Have a checkpoint written when the step in progress is done; returns its folder, on the conductor's node."""
        path: str = self._ask(timeout_s, "request", "checkpoint")
        return path

    def evaluate(self, timeout_s: float = 3600.0) -> dict[str, float]:
        """Have the policy evaluated on the held-out sets when the step in progress is done; returns the metrics."""
        return dict(self._ask(timeout_s, "request", "evaluation"))

    def stop(self) -> None:
        """Ask the run to save its last finished step and to end; returns at once."""
        self._ask(_ANSWER_S, "stop")

    def __repr__(self) -> str:
        """One line about the run as it is now."""
        status = self._glance()
        return f"<run {self.name}: {_headline(status) if status else 'no answer'}>"

    def _repr_html_(self) -> str:
        """A small table, for notebooks."""
        status = self._glance()
        if status is None:
            return f"<b>{html.escape(self.name)}</b>: no answer"
        rows = {"state": _headline(status), "directory": status.directory}
        rows |= {name: f"{value:.4g}" for name, value in status.latest.items()}
        if status.alarms:
            rows["last alarm"] = status.alarms[-1]
        cells = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in rows.items())
        return f"<b>{html.escape(self.name)}</b><table>{cells}</table>"

    def _glance(self) -> RunStatus | None:
        """Return the status if it can be had quickly, else the last one seen: a representation must not raise."""
        try:
            self._latest = self._ask(_GLANCE_S, "status")
        except UserError:
            self._latest = self._ended() or self._latest
        return self._latest

    def _ended(self) -> RunStatus | None:
        """Return the status that the run left on disk when it ended, where this node can read it."""
        if self._latest is None:
            return None
        if self._latest.terminal:
            return self._latest
        status = status_at(self._latest.directory)
        return status if status is not None and status.terminal else None

    def _ask(self, deadline_s: float, method: str, *arguments: Any) -> Any:
        """Ask the conductor; one that has died gets time for a successor, which is asked instead."""
        patience = time.monotonic() + min(deadline_s, _SUCCESSOR_S)
        while True:
            try:
                return ray.get(getattr(self._conductor, method).remote(*arguments), timeout=deadline_s)
            except ray.exceptions.GetTimeoutError:
                raise UserError(
                    f"{self.name} has not answered within {deadline_s:g} s ({method}): it may be busy, or its node out "
                    "of reach; try again, or look at events.log in its run directory"
                ) from None
            except ray.exceptions.RayError as error:
                fault = user_error(error)
                if fault is not None:
                    raise fault from None
                if not isinstance(error, ray.exceptions.RayActorError):
                    raise UserError(f"{self.name} could not do that ({method}): {brief(error)}") from None
                if self._ended() is not None or time.monotonic() > patience:
                    raise UserError(_gone(self.name, self._latest.directory if self._latest else "")) from None
            time.sleep(_SUCCESSOR_POLL_S)
            self._conductor = find_conductor(self.name) or self._conductor


def attach(run: str | Path = "", address: str = "") -> RunHandle:
    """Take hold of a run that is going on in a Ray cluster, from any Python on one of its nodes.

    Args:
        run: Name or directory of the run; empty for the only one that is going on.
        address: Ray cluster (``host:port``); empty for RAY_ADDRESS, else the Ray on this machine. A process that has
            joined a cluster already stays there.

    Raises:
        UserError: There is no such cluster, no such run, or more than one run to choose from.
    """
    _connect(address)
    active = active_runs()
    name = (Address.parse(str(run), "run").name if is_address(str(run)) else Path(run).name) if run else ""
    if not name:
        if len(active) == 1:
            name = active[0]
        elif active:
            raise UserError(f"{len(active)} runs are going on, name one of them: {', '.join(active)}")
        else:
            raise UserError(
                "no run is going on in this cluster: start one with `slipstream train --detach`, or look at one that "
                "has ended with `slipstream status RUN`"
            )
    conductor = find_conductor(name)
    if conductor is None:
        raise UserError(_unknown(str(run), name, active))
    handle = RunHandle(name, conductor)
    handle.status()
    return handle


def watch(run: str = "", address: str = "", *, stop: bool = False, console: Console | None = None) -> int:
    """Show a run that is going on as the program that started it does, until it ends or Ctrl-C; the run goes on.

    Args:
        run: As for :func:`attach`.
        address: As for :func:`attach`.
        stop: Ask the run to save and end, and watch it do so.
        console: Where people look; standard output by default.

    Returns:
        The exit status: 0, or 1 when the run has failed.
    """
    console = console or Console()
    handle = attach(run, address)
    if stop:
        handle.stop()
    statuses, status = handle.follow(_VIEW_S), handle.status()
    try:
        with LiveView(lambda: next(statuses), console=console) as view:
            while not status.terminal:
                status = view.update() or status
    except KeyboardInterrupt:
        console.print(f"\n{handle.name} goes on without you; stop it with: slipstream attach {handle.name} --stop")
        return 0
    console.print(f"all about it: slipstream status {status.directory}", highlight=False, soft_wrap=True)
    return 1 if status.state == "failed" else 0


def _connect(address: str) -> None:
    if ray.is_initialized():
        return
    given = os.environ.get("RAY_ADDRESS", "")
    origin = f"address={address}" if address else f"RAY_ADDRESS={given}" if given else "the Ray of this machine"
    advice = f"start one ({START_HEAD}), or name its head with address= or RAY_ADDRESS (HOST:6379)"
    join(address or given or "auto", origin, advice)


def _unknown(given: str, name: str, active: Sequence[str]) -> str:
    """Say what became of a run that is not going on here."""
    directory = given if is_address(given) else find_run(given, Path(RunOptions().directory))
    status = status_at(str(directory)) if directory is not None else None
    if status is not None and status.terminal:
        ended = f"{name} has {status.state} after {status.step} of {status.steps} steps"
        hint = "" if status.state == "finished" else f"; go on with: slipstream train --resume {directory}"
        return f"{ended}: see `slipstream status {directory}`{hint}"
    if directory is not None:
        return (
            f"{name} is not going on in this cluster: if it runs elsewhere, name that cluster with address=; if its "
            f"processes were killed, go on with: slipstream train --resume {directory}"
        )
    near = difflib.get_close_matches(name, active, 1, 0.0)
    hint = f"did you mean {near[0]}? Going on: {', '.join(active)}" if near else "no run is going on here"
    return f"no run of the name {name} is going on in this cluster; {hint}"


def _gone(name: str, directory: str) -> str:
    status = status_at(directory) if directory else None
    if status is not None and status.terminal:
        return f"{name} has {status.state}: see `slipstream status {directory}`"
    where = f" {directory}" if directory else ""
    return (
        f"{name} has ended, or its conductor was killed: see `slipstream status{where}`, and go on with `slipstream "
        f"train --resume{where}` if it was not finished"
    )


def _headline(status: RunStatus) -> str:
    parts = [status.state, f"step {status.step} of {status.steps}"]
    if "reward/mean" in status.latest:
        parts.append(f"reward {status.latest['reward/mean']:.3f}")
    if status.eta_seconds is not None and not status.terminal:
        parts.append(f"{duration(status.eta_seconds)} left")
    return ", ".join(parts)
