"""Configuration of the reward role."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class RewardFunctionOptions(BaseModel):
    """One reward function."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    function: str = Field(
        description="Built-in name (exact, numeric, partial_credit, math_verify, reasoning_gym) or dotted path "
        "module.function of your own."
    )
    weight: float = Field(1.0, description="Factor of this function in the weighted sum of rewards.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Extra keyword arguments for the function.")


class RewardOptions(BaseModel):
    """How answers are scored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    functions: tuple[RewardFunctionOptions, ...] = Field(
        (RewardFunctionOptions(function="exact"),),
        min_length=1,
        description="Reward functions; their weighted sum counts.",
    )
    workers: int = Field(1, ge=1, le=1024, description="Reward actors. Unit: processes.")
    processes: int = Field(1, ge=1, le=256, description="Killable scoring processes per reward actor. Unit: processes.")
    timeout_s: float = Field(
        10.0, gt=0, le=3600, description="Deadline per sample; past it the process is killed. Unit: seconds."
    )
    error_alarm: float = Field(
        0.01, gt=0, le=1, description="Share of failed or timed-out scores in a step that raises an alarm."
    )
    pass_environment: tuple[str, ...] = Field(
        (),
        description="Environment variables that reward functions see although they look like secrets, by name: what is "
        "called *TOKEN*, *KEY*, AWS_* and the like is kept from them.",
    )
    num_cpus: float = Field(
        0.0, ge=0, description="Ray CPUs reserved per reward actor; 0 for the embedded default. Unit: CPUs."
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Ray node labels that the hosts of reward workers must have: a name and value, !value, in(a,b) or !in(a,b).",
    )
