"""Kills roles of a run at a chosen moment."""

from __future__ import annotations

import os
import signal
import threading
import time

import ray

from pipelines.chaos.targets import living

DEADLINE_S = 600


class Killer(threading.Thread):
    """Kills a role of a run as soon as it is in a given state, for as often as it is told and lives again.

    Another signal than SIGKILL may be sent: one that is stopped lives and does nothing. Right before a kill ``before``
    is called.

    Attributes:
        pids: Processes that were killed.
    """

    def __init__(self, run, role, state="generating", after_steps=1, times=1, sent=signal.SIGKILL, before=None):
        super().__init__(daemon=True)
        self.before = before
        self.name_of_run, self.role, self.state, self.after, self.times = run, role, state, after_steps, times
        self.pids = []
        self.sent = sent

    @property
    def killed(self):
        return self.pids[-1] if self.pids else None

    def run(self):
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline and len(self.pids) < self.times:
            time.sleep(0.02)
            try:
                conductor = ray.get_actor("conductor", namespace=f"slipstream-{self.name_of_run}")
                status = ray.get(conductor.status.remote(), timeout=5)
            except (ValueError, ray.exceptions.RayError, TimeoutError):
                continue
            if status.step < self.after or status.state != self.state:
                continue
            process = living(self.name_of_run).get(self.role)
            if process is not None and process.pid not in self.pids:
                if self.before is not None:
                    self.before()
                os.kill(process.pid, self.sent)
                self.pids.append(process.pid)
