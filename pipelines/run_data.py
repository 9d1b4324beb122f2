"""What a run works on, read and checked before Ray starts: prompts, sampling limits, lengths.

The tokenizer is loaded here and in the rollout workers only; the conductor gets token ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipelines.config import Config
from storage.errors import UserError
from storage.files import StorageError, describe_failure
from storage.records import TRAIN_SPLIT, Prompt, SamplingParams

SAMPLED_SUFFIX = "@k"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Everything that roles need to know about model and data.

    Attributes:
        model_path: Local Hugging Face directory that the roles load: the base model, or a checkpoint's.
        train: Training prompts.
        evaluation: Held-out prompts by set name.
        stop_token_ids: All EOS ids of the model.
        max_length: Longest sequence, prompt and answer together. Unit: tokens.
        total_steps: Optimiser steps of the whole run.
        tokenizer_fingerprint: xxh3-64 of the tokenizer files; history written by another one is not reused.
    """

    model_path: str
    train: tuple[Prompt, ...]
    evaluation: dict[str, tuple[Prompt, ...]]
    stop_token_ids: tuple[int, ...]
    max_length: int
    total_steps: int
    tokenizer_fingerprint: int

    def training_sampling(self, config: Config) -> SamplingParams:
        """How training samples are drawn."""
        rollout = config.rollout
        return SamplingParams(
            max_tokens=rollout.max_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=self.stop_token_ids,
            stop_strings=rollout.stop_strings,
        )

    def greedy_sampling(self, config: Config) -> SamplingParams:
        """How greedy evaluation decodes."""
        return SamplingParams(
            max_tokens=config.rollout.max_tokens,
            temperature=0.0,
            stop_token_ids=self.stop_token_ids,
            stop_strings=config.rollout.stop_strings,
        )

    def sampling_by_split(self, config: Config) -> dict[str, SamplingParams]:
        """Sampling parameters of training and of each evaluation split."""
        splits = {TRAIN_SPLIT: self.training_sampling(config)}
        for name in self.evaluation:
            splits[name] = self.greedy_sampling(config)
            splits[name + SAMPLED_SUFFIX] = self.training_sampling(config)
        return splits


def tokenizer_fingerprint(model_path: Path) -> int:
    """Return xxh3-64 over the tokenizer's files, in name order."""
    import xxhash

    digest = xxhash.xxh3_64()
    for path in sorted(model_path.glob("*")):
        if path.name.startswith(("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.intdigest()


def load_run_data(config: Config, model_path: Path, *, train: bool = True) -> RunData:
    """Read and render all prompts of a run.

    Args:
        config: The resolved configuration.
        model_path: Local Hugging Face directory with the tokenizer.
        train: False leaves the training prompts out.

    Raises:
        UserError: Bad data; names file, row or column, and what to do.
    """
    from storage.datasets import Rows, build_prompts, load_rows
    from storage.models import context_length, eos_token_ids, load_tokenizer
    from storage.rendering import Renderer

    renderer = Renderer(
        load_tokenizer(model_path), chat_template=config.model.chat_template, system_prompt=config.data.system_prompt
    )
    context = context_length(model_path)
    column = config.data.prompt_column

    def prompts(rows: Rows) -> tuple[Prompt, ...]:
        return tuple(
            build_prompts(
                rows,
                renderer,
                prompt_column=column,
                max_prompt_tokens=config.data.max_prompt_tokens,
                context_length=context,
                max_tokens=config.rollout.max_tokens,
            )
        )

    training_rows = load_rows(config.data.train, count=config.data.prompts, seed=config.data.seed, prompt_column=column)
    if len(training_rows) < config.rollout.prompts_per_step:
        raise UserError(
            f"data.train={config.data.train} has {len(training_rows)} prompts, fewer than rollout.prompts_per_step="
            f"{config.rollout.prompts_per_step}: lower that"
        )
    trained = prompts(training_rows)
    seen = training_rows.prompt_texts(column)
    held_out = {
        name: prompts(
            load_rows(
                source,
                count=config.evaluation.prompts,
                seed=config.evaluation.seed,
                prompt_column=column,
                exclude=seen,
            )
        )
        for name, source in config.evaluation.sets.items()
    }
    longest = max(len(prompt.token_ids) for group in (trained, *held_out.values()) for prompt in group)
    return RunData(
        model_path=str(model_path.absolute()),
        train=trained if train else (),
        evaluation=held_out,
        stop_token_ids=eos_token_ids(model_path),
        max_length=min(context, longest + config.rollout.max_tokens),
        total_steps=config.planned_steps(len(trained)),
        tokenizer_fingerprint=tokenizer_fingerprint(model_path),
    )


def write_generated(config: Config, folder: Path) -> None:
    """Write the rows of built-in sources as Parquet, so that people can read and reuse what a run was trained on.

    Args:
        config: The resolved configuration.
        folder: Gets ``train.parquet`` and one file per evaluation set; sources that are files stay where they are.
    """
    from storage.datasets import BUILTIN, load_rows, write_builtin

    column = config.data.prompt_column
    sources = {TRAIN_SPLIT: (config.data.train, config.data.prompts, config.data.seed)}
    sources |= {
        name: (source, config.evaluation.prompts, config.evaluation.seed)
        for name, source in config.evaluation.sets.items()
    }
    seen: frozenset[str] = frozenset()
    for name, (source, count, seed) in sources.items():
        exclude = seen
        if name == TRAIN_SPLIT:
            seen = load_rows(source, count=count, seed=seed, prompt_column=column).prompt_texts(column)
        if source.startswith(BUILTIN):
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                raise StorageError(describe_failure("cannot make", folder, error)) from error
            path = folder / f"{name}.parquet"
            write_builtin(source.removeprefix(BUILTIN), path, count=count, seed=seed, exclude=exclude)
