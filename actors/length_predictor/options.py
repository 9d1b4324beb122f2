"""Configuration of the length predictor."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class LengthPredictorOptions(BaseModel):
    """How the lengths of answers are predicted, and how long training waits for a prediction."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    embedding: Literal["hashing", "minilm"] = Field(
        "hashing",
        description="How prompts are compared: hashing: TF-IDF of character n-grams and words, no model; minilm: the "
        "sentence embedding all-MiniLM-L6-v2 (extra [minilm], loads torch in the predictor).",
    )
    max_prompts: int = Field(
        200_000,
        ge=1,
        le=10_000_000,
        description="Prompts whose history is kept; the least recently finished are dropped above it. Unit: prompts.",
    )
    memory: int = Field(
        4096,
        ge=16,
        le=262_144,
        description="Prompts that others are compared with; oldest dropped first. Unit: prompts.",
    )
    neighbours: int = Field(16, ge=1, le=1024, description="Most similar prompts that are averaged. Unit: prompts.")
    half_life: int = Field(
        1024,
        ge=8,
        le=1_000_000,
        description="Finished groups after which an observation counts half, in regression and in the trust in each "
        "ranker. Unit: groups.",
    )
    prior_tokens: int = Field(
        256, ge=1, le=1_000_000, description="Median length assumed before anything was observed. Unit: tokens."
    )
    deadline_s: float = Field(
        2.0,
        gt=0,
        le=60,
        description="Longest wait of training for a prediction; past it the history mean is used. Unit: seconds.",
    )
    backlog: int = Field(
        65_536,
        ge=1,
        le=10_000_000,
        description="Observations that wait for the predictor at most; oldest dropped first. Unit: observations.",
    )
    state_interval_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="How often the predictor's state is copied, to restore one that died. Unit: seconds.",
    )
    num_cpus: float = Field(0.0, ge=0, description="Ray CPUs reserved for the predictor; 0 shares. Unit: CPUs.")
