"""Checks a run before anything starts: no Ray, no weights, seconds instead of a failure minutes into the run."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.config import Config
from pipelines.placement import Node, request_problems
from pipelines.placement_check import placement_doubts, table_lines
from pipelines.run_data import RunData, load_run_data
from pipelines.sizes import Machine, MemoryEstimate, ModelShape, asks_for_gpu, machine_doubts, machine_problems
from storage.errors import UserError
from storage.remote.address import Address, is_address, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What the full check found.

    Attributes:
        prompts: Training prompts.
        steps: Optimiser steps of the whole run.
        longest_prompt: Tokens of the longest prompt, training and held-out; None when there is no tokenizer yet.
        max_length: Longest sequence that an engine slot must hold, in tokens.
        shape: Shape of the model; None when it is not on this machine yet.
        estimate: Memory that the run takes; None without ``shape``.
        machine: What this machine offers; None when the run joins a cluster elsewhere.
        placement: Table of what each role requests and what there is, a line per row; empty when that is not known.
        warnings: What is allowed but probably not meant.
        notes: What could not be checked, and why.
    """

    prompts: int
    steps: int
    longest_prompt: int | None
    max_length: int
    shape: ModelShape | None
    estimate: MemoryEstimate | None
    machine: Machine | None
    placement: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def check_run(config: Config) -> None:
    """Check what is quick to check: model, sources, rewards, algorithm, extras, directory, cores, memory and GPUs.

    Rows and prompts are checked where they are loaded, by :func:`pipelines.run_data.load_run_data`.

    Raises:
        UserError: With all problems found, each naming its field and what to do.
    """
    problems: list[str] = []
    for check in (_check_model, _check_sources_and_rewards, _check_algorithm, _check_extras, _check_directory):
        problems.extend(check(config))
    problems.extend(request_problems(config))
    shape = None if problems else _shape(config)
    machine = _machine(config)
    if machine is not None:
        # Prompt lengths are not known here, so this is the least that the run can take.
        problems.extend(machine_problems(config, machine, _estimate(config, machine, shape, config.rollout.max_tokens)))
    raise_problems(problems)


def check_memory(config: Config, model_path: Path, max_length: int) -> None:
    """Check once more, now that model and prompts are here, that a run of such sequences fits into this machine.

    Raises:
        UserError: Naming the largest part and the fields that make it.
    """
    machine = _machine(config)
    if machine is not None:
        shape = ModelShape.read(model_path)
        raise_problems(machine_problems(config, machine, _estimate(config, machine, shape, max_length)))


def inspect_run(config: Config) -> Preflight:
    """Check everything, every row included, and return the sizes of the run; starts nothing.

    Raises:
        UserError: With all problems found by the first stage that finds any.
    """
    check_run(config)
    path = _present(config)
    shape = _shape(config)
    notes = []
    data: RunData | None = None
    if path is None:
        prompts = _count_rows(config)
        notes.append(
            f"model.path={config.model.path} is not on this machine yet (the first run fetches or builds it): prompt "
            "lengths and memory are not checked"
        )
    else:
        data = load_run_data(config, path)
        prompts = len(data.train)
    if config.rollout.prompts_per_step > prompts:
        raise_problems(
            [
                f"data.train={config.data.train} has {prompts} prompts, fewer than rollout.prompts_per_step="
                f"{config.rollout.prompts_per_step}: lower that"
            ]
        )
    max_length = data.max_length if data else config.sequence_tokens
    machine = _machine(config)
    warnings = config.warnings()
    estimate = None
    nodes: list[Node] = []
    if machine is None:
        nodes = _joined_nodes(config, notes)
    else:
        nodes = [machine.node(config)]
        estimate = _estimate(config, machine, shape, max_length)
        raise_problems(machine_problems(config, machine, estimate))
        warnings += machine_doubts(config, machine, estimate)
    warnings += placement_doubts(config, nodes) if nodes else []
    longest = None
    if data is not None:
        longest = max(len(p.token_ids) for group in (data.train, *data.evaluation.values()) for p in group)
    if prompts < config.data.prompts:
        warnings.append(
            f"data.train={config.data.train} has only {prompts} of the data.prompts={config.data.prompts} asked for"
        )
    return Preflight(
        prompts=prompts,
        steps=config.planned_steps(prompts),
        longest_prompt=longest,
        max_length=max_length,
        shape=shape,
        estimate=estimate,
        machine=machine,
        placement=tuple(table_lines(config, nodes)) if nodes else (),
        warnings=tuple(warnings),
        notes=tuple(notes),
    )


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one ``UserError`` for all problems; does nothing without any."""
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        raise UserError("\n  ".join([f"{len(problems)} problems:", *problems]))


def _check_model(config: Config) -> Iterator[str]:
    from storage.models import check_model

    try:
        check_model(config.model)
    except UserError as error:
        yield str(error)


def _check_sources_and_rewards(config: Config) -> Iterator[str]:
    """Check that sources exist and that reward functions find their columns in each of them."""
    from actors.reward.functions import check_functions
    from storage.datasets import check_source

    sources = {"data.train": config.data.train}
    sources |= {f"evaluation.sets.{name}": source for name, source in config.evaluation.sets.items()}
    checked: set[frozenset[str]] = set()
    for field, source in sources.items():
        try:
            columns = frozenset(check_source(source, config.data.prompt_column)) - {config.data.prompt_column}
        except UserError as error:
            yield f"{field}: {error}"
            continue
        if columns in checked:
            continue
        checked.add(columns)
        try:
            check_functions(config.reward, columns)
        except UserError as error:
            yield f"reward.functions (with the columns of {field}): {error}"
            return  # the same import or signature would fail for the other sources again


def _check_algorithm(config: Config) -> Iterator[str]:
    from actors.learner.algorithms import check_algorithm

    try:
        check_algorithm(config.algorithm, max_tokens=config.rollout.max_tokens)
    except UserError as error:
        yield str(error)


def _check_extras(config: Config) -> Iterator[str]:
    if config.tracking.wandb and importlib.util.find_spec("wandb") is None:
        yield "tracking.wandb: the package wandb is missing; pip install 'slipstream[wandb]'"


def _check_directory(config: Config) -> Iterator[str]:
    """Check by writing that the run directory can be made: modes do not tell about full or read-only disks."""
    if is_address(config.run.directory):
        yield from _check_address(config.run.directory)
        return
    parent = Path(config.run.directory)
    place = parent
    while not place.exists() and place != place.parent:
        place = place.parent
    problem = f"run.directory={config.run.directory}: cannot write in {place}"
    if not place.is_dir():
        yield f"{problem}: it is not a directory; choose another"
        return
    try:
        with tempfile.NamedTemporaryFile(dir=place) as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        yield f"{problem}: {error.strerror}; choose another place"


def _check_address(text: str) -> Iterator[str]:
    """Check by writing that there can be runs below a URI."""
    from storage.remote.objects import Objects

    try:
        Objects(Address.parse(text)).check()
    except UserError as error:
        place = f"run.directory={shown(text)}"
        yield str(error) if str(error).startswith(place) else f"{place}: {error}"


def _joined_nodes(config: Config, notes: list[str]) -> list[Node]:
    """Look at the cluster that the run would join; one that is out of reach from here is a note."""
    from pipelines.cluster import peek, refusals

    try:
        nodes = peek(config)
    except UserError as error:
        notes.append(f"what the cluster has is not checked: {error}")
        return []
    raise_problems(refusals(config, nodes))
    notes.append("the run joins a Ray cluster: the memory of its nodes is not checked from here")
    return nodes


def _machine(config: Config) -> Machine | None:
    if config.cluster.address or os.environ.get("RAY_ADDRESS"):
        return None
    return Machine.look(gpus=bool(asks_for_gpu(config)))


def _estimate(config: Config, machine: Machine, shape: ModelShape | None, max_length: int) -> MemoryEstimate | None:
    return MemoryEstimate.of(config, shape, max_length, gpus=machine.gpus or 0) if shape else None


def _present(config: Config) -> Path | None:
    from storage.models import present_model

    return present_model(config.model)


def _shape(config: Config) -> ModelShape | None:
    path = _present(config)
    return ModelShape.read(path) if path else None


def _count_rows(config: Config) -> int:
    """Read every row without a tokenizer; returns the number of training rows."""
    from storage.datasets import load_rows

    column = config.data.prompt_column
    rows = load_rows(config.data.train, count=config.data.prompts, seed=config.data.seed, prompt_column=column)
    seen = rows.prompt_texts(column)
    for source in config.evaluation.sets.values():
        load_rows(
            source, count=config.evaluation.prompts, seed=config.evaluation.seed, prompt_column=column, exclude=seen
        )
    return len(rows)
