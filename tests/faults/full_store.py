"""A driver of its own on the smallest object store, most of which something else takes after some steps; prints JSON.

Run as ``python -m tests.faults.full_store MODEL FOLDER SPILL TAKEN_MB [RESUMED]``: a process can be the driver of one
Ray at a time, and the test session has one.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import ray
from rich.console import Console

from pipelines.launch import train
from pipelines.monitoring import newest_step
from tests.runs import small_config

STORE_MB = 80
STEPS = 5
TAKEN_AFTER = 2
RUN = (
    f"run.steps={STEPS}",
    f"cluster.object_store_mb={STORE_MB}",
    "data.prompts=32",
    "rollout.prompts_per_step=16",
    "rollout.samples_per_prompt=16",
    "rollout.max_tokens=400",
    "rollout.max_rows=128",
    # the likeliest tokens of each law come with each token: 800 bytes of it
    "speculation={source: previous_epoch, verify: lenient, residual: true, residual_top_k: 99}",
    "evaluation.before=false",
    "evaluation.after=false",
    "checkpoint.every=1",
)


class Taker:
    """Holds a part of the object store that can be neither evicted nor spilled: it is in use."""

    def take(self, nbytes: int) -> int:
        self.reference = ray.put(np.ones(nbytes, np.uint8))
        self.view = ray.get(self.reference)
        return int(self.view.nbytes)


def main(model: Path, folder: Path, spill: Path, taken_mb: int, *, resume: bool) -> None:
    """Train, and print what was spilled."""
    found = {"spilled": 0, "taken": 0}
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=STORE_MB * 2**20,
        object_spilling_directory=str(spill),
        log_to_driver=False,
    )
    over = threading.Event()

    def meddle(taken_mb: int) -> None:
        taker: Any = ray.remote(num_cpus=0)(Taker).remote()
        while not over.wait(0.1):
            found["spilled"] = max(found["spilled"], sum(size(file) for file in spill.rglob("*")))
            if taken_mb and newest_step(folder / "run" / "metrics.jsonl")[0] >= TAKEN_AFTER:
                with suppress(ray.exceptions.RayError):  # the disk below is full already
                    found["taken"] = ray.get(taker.take.remote(taken_mb * 2**20))
                taken_mb = 0

    thread = threading.Thread(target=meddle, args=(taken_mb,), daemon=True)
    thread.start()
    config = small_config(model, folder, "run", *RUN)
    began = time.monotonic()
    status = train(config, name="run", console=Console(stderr=True), resume=folder / "run" if resume else None)
    over.set()
    thread.join(30)
    sys.stdout.write("RESULT " + json.dumps({**found, "status": status, "seconds": time.monotonic() - began}) + "\n")
    ray.shutdown()


def size(file: Path) -> int:
    """Bytes of a file; 0 for a folder, and for one that has just gone."""
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:
        return 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), resume="RESUMED" in sys.argv)
