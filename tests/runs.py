"""Small training runs for tests: a random model, a handful of prompts, the session's Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipelines.config_loader import load
from pipelines.launch import train
from pipelines.monitoring import read_records

SMALL = (
    "run.steps=3",
    "run.debug=true",
    "data.prompts=8",
    "data.shuffle=true",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=12",
    "rollout.max_rows=16",
    "rollout.threads=1",
    "learner.threads=1",
    "evaluation.prompts=6",
    "evaluation.every=0",
    "checkpoint.every=0",
    "tracking.tensorboard=false",
)


def small_config(model: Path, parent: Path, name: str, *overrides: str) -> Any:
    """Return the configuration of a small run of ``model`` in ``parent / name``."""
    arguments = [*SMALL, f"model={model}", f"run.directory={parent}", f"run.name={name}", *overrides]
    return load(["data.train=builtin:running_sums", *arguments]).config


def small_run(model: Path, parent: Path, name: str, *overrides: str) -> Path:
    """Run it to the end; returns the run directory."""
    config = small_config(model, parent, name, *overrides)
    assert train(config, name=name) == 0
    return parent / name


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Records of the training steps in ``metrics.jsonl``."""
    return [record for record in read_records(run / "metrics.jsonl") if "reward/mean" in record]


def trained_keys(run: Path) -> list[str]:
    """All keys that the ledger's journal says were trained, in order; a key that is trained twice is there twice."""
    keys: list[str] = []
    for line in (run / "ledger.jsonl").read_text().splitlines():
        record = json.loads(line)["record"]
        if record.get("op") == "train":
            keys += record["keys"]
    return keys
