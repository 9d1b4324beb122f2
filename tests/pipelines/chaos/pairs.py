"""A storm in which two kinds die at once, over a run on two emulated nodes; prints the figures as JSON.

Run as ``python -m tests.pipelines.chaos.pairs FOLDER``: a process can be the driver of one Ray at a time, and the test
session has one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from pipelines.chaos.targets import Draw
from pipelines.chaos_command import rage

PAIRS = (
    ("rollout", "reward"),
    ("rollout", "node"),
    ("conductor", "driver"),
    ("learner", "queue"),
    ("retriever", "predictor"),
    ("conductor", "node"),
    ("reward", "queue"),
    ("learner", "driver"),
)
"""Each kind at least once: roles with roles, with what has no successor, and with their node."""


def main(folder: Path) -> None:
    """Strike once with each pair; the last line is one JSON object."""
    account = rage(
        (),
        Console(width=160),
        minutes=30.0,
        seed=0,
        nodes=2,
        deadline_s=180.0,
        keep=folder,
        strikes=(Draw(pair, index / len(PAIRS), 1.0) for index, pair in enumerate(PAIRS)),
    )
    struck = [list(strike.kinds) for strike in account.strikes]
    found = {"figures": account.figures(), "broken": account.broken(), "struck": struck}
    sys.stdout.write("RESULT " + json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
