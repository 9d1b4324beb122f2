"""The configuration: one section per concern, composed from the options of each role.

Importing this module loads neither torch nor Ray.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from actors.learner.options import AlgorithmOptions, LearnerOptions
from actors.reward.options import RewardOptions
from actors.rollout.options import RolloutOptions
from storage.options import (
    CheckpointOptions,
    DataOptions,
    EvaluationOptions,
    ModelOptions,
    TrackingOptions,
)


class RunOptions(BaseModel):
    """Length, place and seed of the run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field("", pattern=r"^[A-Za-z0-9._-]*$", description="Name of the run; empty: preset and time.")
    directory: str = Field("runs", description="Parent folder of run directories.")
    steps: int = Field(40, ge=0, description="Optimiser steps; 0: as many as run.epochs need. Unit: steps.")
    epochs: int = Field(0, ge=0, description="Passes over the data; 0: as many as run.steps need. Unit: epochs.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seeds prompts order, sampling noise and anything else random.")
    debug: bool = Field(False, description="Assert the invariants (ledger conservation, versions, logprobs) while running.")


class ScheduleOptions(BaseModel):
    """Which prompts run together, and where."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batching: Literal["all"] = Field("all", description="all: a step waits for every group that it launched.")


class AsynchronyOptions(BaseModel):
    """How generation and training overlap."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pipeline: Literal["step"] = Field("step", description="step: generate, then train, then publish.")


class ClusterOptions(BaseModel):
    """How Ray is reached or started."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = Field(
        "", description="Ray cluster to join (host:port); empty: RAY_ADDRESS if set (as in a submitted job), else a local Ray."
    )
    dashboard: bool = Field(True, description="Serve the Ray dashboard when a local Ray is started (on 127.0.0.1).")
    object_store_mb: int = Field(256, ge=80, description="Object store of a local Ray. Unit: MB.")
    queue_groups: int = Field(256, ge=1, description="Capacity of each bounded queue. Unit: envelopes.")
    start_deadline_s: float = Field(300.0, gt=0, description="Longest wait for actors to start. Unit: seconds.")


class Config(BaseModel):
    """Everything that decides a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: RunOptions = Field(default_factory=RunOptions, description="Length, place and seed of the run.")
    model: ModelOptions = Field(default_factory=ModelOptions, description="Which policy is trained.")
    data: DataOptions = Field(default_factory=DataOptions, description="Which prompts are trained on.")
    reward: RewardOptions = Field(default_factory=RewardOptions, description="How answers are scored.")
    rollout: RolloutOptions = Field(default_factory=RolloutOptions, description="How answers are written.")
    learner: LearnerOptions = Field(default_factory=LearnerOptions, description="How the policy is updated.")
    algorithm: AlgorithmOptions = Field(default_factory=AlgorithmOptions, description="Which objective is maximised.")
    schedule: ScheduleOptions = Field(default_factory=ScheduleOptions, description="Which prompts run together.")
    asynchrony: AsynchronyOptions = Field(default_factory=AsynchronyOptions, description="How roles overlap.")
    evaluation: EvaluationOptions = Field(default_factory=EvaluationOptions, description="Held-out evaluation.")
    checkpoint: CheckpointOptions = Field(default_factory=CheckpointOptions, description="What is saved.")
    tracking: TrackingOptions = Field(default_factory=TrackingOptions, description="Where metrics go.")
    cluster: ClusterOptions = Field(default_factory=ClusterOptions, description="How Ray is reached or started.")

    @field_validator("model", mode="before")
    @classmethod
    def _model_shorthand(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @property
    def samples_per_step(self) -> int:
        """Answers trained per optimiser step."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt
