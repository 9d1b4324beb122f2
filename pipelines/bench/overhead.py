"""Share of a synchronous step that is neither generation, nor reward, nor learning, from one real run.

A step lasts from the end of the step before to the acknowledged weights and the durable ledger, so that nothing between
two steps is left out but evaluations and checkpoints. Generation is the time inside engine steps of the busiest rollout
worker, learning the time from the batch in the learner's hands to its new weights, and reward what scoring takes beyond
the last answer; the rest is the price of the system: queues, calls, publication, bookkeeping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from pipelines.bench.harness import BenchResult, OptionValue
from pipelines.bench.training import run_training, workplace
from storage.errors import UserError

OPTIONS: dict[str, OptionValue] = {"steps": 20, "seed": 0, "keep": ""}

_FEWEST = 3
_PARTS = (
    ("generate", "engine steps of the busiest rollout worker"),
    ("reward", "from the last answer to the last score"),
    ("learn", "batch in hand to new weights"),
    ("publish", "new weights to acknowledgement"),
    ("rest", "dispatch, queues, fetching, ledger, logs"),
)


def run(options: Mapping[str, OptionValue]) -> BenchResult:
    """Train the default configuration for some steps and take its steps apart."""
    steps, seed = int(options["steps"]), int(options["seed"])
    if steps < _FEWEST:
        raise UserError(f"option steps={steps}: at least {_FEWEST} steps are needed, the first one is left out")
    settings = [
        f"run.steps={steps}",
        f"run.seed={seed}",
        "evaluation.before=false",
        "evaluation.after=false",
        "evaluation.every=0",
    ]
    with workplace(str(options["keep"])) as parent:
        records = run_training(parent, f"overhead-seed{seed}", settings).steps
    return report(records)


def report(records: Sequence[Mapping[str, Any]]) -> BenchResult:
    """Make the table and figures from the records of training steps; the first step, which warms up, is left out."""
    measured = records[1:]
    if len(measured) < _FEWEST - 1:
        raise UserError(f"the run has {len(records)} steps, {_FEWEST} are needed: it ran out of data or was stopped")
    seconds = [parts(record) for record in measured]
    whole = [sum(step.values()) for step in seconds]
    rows = []
    for name, meaning in _PARTS:
        taken = [step[name] for step in seconds]
        shares = [t / w for t, w in zip(taken, whole, strict=True)]
        rows.append((name, f"{1000 * median(taken):.0f}", f"{median(shares):.1%}", f"{_p90(shares):.1%}", meaning))
    rows.append(("step", f"{1000 * median(whole):.0f}", "100%", "", "end of a step to end of the next"))
    overhead = [float(record["time/overhead_share"]) for record in measured]
    with_reward = [(s["reward"] + s["publish"] + s["rest"]) / w for s, w in zip(seconds, whole, strict=True)]
    return BenchResult(
        name="overhead",
        columns=("part", "median ms", "median share", "P90 share", "what it is"),
        rows=tuple(rows),
        figures={
            "overhead_share": median(overhead),
            "overhead_share_p90": _p90(overhead),
            "overhead_with_reward_share": median(with_reward),
            "step_s": median(whole),
        },
        notes=(
            f"{len(measured)} steps of the default configuration in real time; the first step is left out",
            "overhead is publish + rest; with_reward adds the wait for the last scores, which is mostly queue hops",
        ),
    )


def parts(record: Mapping[str, Any]) -> dict[str, float]:
    """Split the seconds of a step into parts that add up to it."""
    step = float(record["time/step_s"])
    found = {name: float(record[f"time/{name}_s"]) for name in ("generate", "reward", "learn", "publish")}
    return {**found, "rest": max(0.0, step - sum(found.values()))}


def _p90(values: Sequence[float]) -> float:
    return quantiles(values, n=10, method="inclusive")[-1]
