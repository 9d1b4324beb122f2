"""The driver of a run: somebody who watches it by `slipstream attach`, in a process that may die like any other.

What it prints says which steps it has seen.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_STEP = re.compile(rb"^step (\d+)/", re.MULTILINE)
_END_S = 10.0


@dataclass(slots=True)
class Driver:
    """One driver at a time.

    Attributes:
        run: Name of the run.
        address: Ray cluster that it goes on in.
        log: What all of them print, one behind the other.
        gave_up: Drivers that ended by themselves, because they got no answer for too long.
    """

    run: str
    address: str
    log: Path
    gave_up: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _begins: int = 0

    @property
    def pid(self) -> int:
        """Process id of the driver that lives; 0 when none does."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    def ensure(self) -> None:
        """Attach another driver, if none lives."""
        if self.pid:
            return
        self.gave_up += self._process is not None
        with self.log.open("ab") as output:
            self._begins = output.seek(0, os.SEEK_END)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipelines", "attach", self.run],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RAY_ADDRESS": self.address},
                start_new_session=True,  # Ctrl-C is for the storm
            )

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_END_S)
            self._process = None

    def newest_step(self) -> int:
        """Newest step that the driver that lives has shown; 0 before any."""
        with self.log.open("rb") as source:
            source.seek(self._begins)
            return max((int(step) for step in _STEP.findall(source.read())), default=0)
