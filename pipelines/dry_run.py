"""What ``slipstream train --dry-run`` prints: the resolved configuration and the sizes that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from pipelines.config import Config
from pipelines.config_docs import annotated_yaml
from pipelines.config_loader import Resolved
from pipelines.preflight import Preflight, inspect_run
from storage.models import cache_directory
from storage.remote.address import Address, is_address
from storage.remote.objects import free_space
from storage.run_directory import RunDirectory


def print_dry_run(resolved: Resolved, *, resume: Path | None = None) -> None:
    """Check the run and print a YAML document that loads again, with the derived sizes as comments.

    Args:
        resolved: The configuration and where its values come from.
        resume: Directory of the run to go on with, None for a new one.

    Raises:
        UserError: With the problems found; nothing is printed then.
    """
    preflight = inspect_run(resolved.config)
    console, errors = Console(soft_wrap=True, highlight=False), Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(annotated_yaml(resolved.config, resolved.origins), markup=False)
    name = resolved.config.run.name or f"{resolved.name}-DATE-TIME"
    directory = _place(resolved.config.run.directory, name) if resume is None else RunDirectory(resume).address
    for name, value in size_lines(resolved.config, preflight, directory):
        console.print(f"# {name:<22} {value}", markup=False)
    for line in preflight.placement:
        console.print(f"#   {line}", markup=False)
    for note in preflight.notes:
        console.print(f"# note: {note}", markup=False)
    for warning in preflight.warnings:
        errors.print(f"warning: {warning}", markup=False, style="yellow")
    console.print("# all checks passed; nothing was started", markup=False)


def size_lines(config: Config, preflight: Preflight, directory: str) -> Iterator[tuple[str, str]]:
    """Yield names and values of what follows from the configuration."""
    rollout, estimate = config.rollout, preflight.estimate
    answers = config.samples_per_step
    yield "answers per step", f"{answers:,} ({rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples)"
    yield "prompts", f"{preflight.prompts:,}"
    yield "steps", f"{preflight.steps:,}"
    yield "steps per epoch", f"{preflight.prompts / rollout.prompts_per_step:.4g}"
    yield "epochs", f"{preflight.steps * rollout.prompts_per_step / preflight.prompts:.4g}"
    yield "most tokens per step", f"{answers * rollout.max_tokens:,}"
    if preflight.longest_prompt is not None:
        yield "longest prompt", f"{preflight.longest_prompt:,} tokens"
    yield "longest sequence", f"{preflight.max_length:,} tokens"
    if preflight.shape is not None:
        yield "parameters", f"{preflight.shape.parameters:,}"
    if estimate is not None:
        yield "key/value cache", f"{_size(estimate.kv_cache)} ({rollout.workers} x {rollout.max_rows} slots)"
        yield (
            "memory, about",
            f"{_size(estimate.total)} (engine {_size(estimate.engine + estimate.kv_cache)}, learner "
            f"{_size(estimate.learner)} before activations, processes {_size(estimate.processes)})",
        )
        if estimate.turns:
            yield "taken in turns", f"{_size(estimate.turns)}, left out above: engines sleep while there are gradients"
        yield "checkpoint", f"{_size(estimate.checkpoint)}, the last {config.checkpoint.keep_last} are kept"
    if preflight.machine is not None:
        yield "this machine", f"{preflight.machine.cores} cores, {_size(preflight.machine.memory)} of memory free"
    if is_address(directory):
        work = cache_directory() / "runs"
        yield "run directory", f"{directory}, mirrored from {work} ({_size(free_space(work))} free)"
    else:
        yield "run directory", f"{directory} ({_size(free_space(Path(directory)))} free)"


def _place(parent: str, name: str) -> str:
    return str(Address.parse(parent).child(name) if is_address(parent) else Path(parent) / name)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
