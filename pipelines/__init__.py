"""Turns the actors into a training system: configuration, conductor, schedules, monitoring and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.run_handle import RunHandle

__all__ = ["attach"]


def attach(run: str | Path = "", address: str = "") -> RunHandle:
    """Take hold of a run that is going on in a Ray cluster, from any Python on one of its nodes.

    Args:
        run: Name or directory of the run; empty for the only one that is going on.
        address: Ray cluster (``host:port``); empty for RAY_ADDRESS, else the Ray on this machine. A process that has
            joined a cluster already stays there.

    Returns:
        A handle with ``status()``, ``metrics()``, ``follow()``, ``pause()``, ``resume()``, ``knobs()``, ``set()``,
        ``sample()``, ``checkpoint()``, ``evaluate()`` and ``stop()``.

    Raises:
        UserError: There is no such cluster, no such run, or more than one run to choose from.
    """
    from pipelines.run_handle import attach as take_hold  # loads Ray, which most parts of the package do without

    return take_hold(run, address)
