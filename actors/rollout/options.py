"""Configuration of the rollout role."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class PacingOptions(BaseModel):
    """Stretches each forward pass to a GPU-like time t0 + k_row * rows + k_tok * tokens, for benchmarks.

    Figures measured with pacing are labelled *paced*; they are invalid when the real step takes more than 0.7 of the
    paced time in more than 5 % of the steps.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile: Literal["off", "latency_bound", "middle", "throughput_bound"] = Field(
        "off", description="Shape of the time law; off runs at the machine's own speed."
    )
    t0_ms: float = Field(60.0, gt=0, le=10_000, description="Paced time of an empty pass. Unit: milliseconds.")


class RolloutOptions(BaseModel):
    """How answers are written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["torch"] = Field("torch", description="Rollout engine.")
    workers: int = Field(1, ge=1, le=4096, description="Rollout actors. Unit: processes.")
    prompts_per_step: int = Field(16, ge=1, le=65_536, description="Prompts trained per optimiser step. Unit: prompts.")
    samples_per_prompt: int = Field(8, ge=2, le=1024, description="Answers per prompt (group size). Unit: samples.")
    temperature: float = Field(1.0, gt=0, le=10, description="Sampling temperature in training.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus mass in training; 1 keeps the whole distribution.")
    top_k: int = Field(0, ge=0, description="Highest logits kept in training; 0 keeps all. Unit: tokens.")
    max_tokens: int = Field(256, ge=1, le=1_000_000, description="Longest answer. Unit: tokens.")
    stop_strings: tuple[str, ...] = Field((), description="Texts that end an answer, beside the model's EOS ids.")
    max_rows: int = Field(64, ge=1, le=4096, description="Answers decoded at once per worker. Unit: rows (slots).")
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="CPU threads per worker; 0: as many as num_cpus reserves, without it the cores are shared out. Unit: threads.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the engine runs.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Precision of the engine's weights; auto is float32 on CPU and bfloat16 on GPU."
    )
    num_cpus: float = Field(
        0.0, ge=0, description="Ray CPUs reserved per worker; 0 for the embedded default. Unit: CPUs."
    )
    num_gpus: float = Field(0.0, ge=0, description="Ray GPUs reserved per worker; fractions share a GPU. Unit: GPUs.")
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Ray node labels that the hosts of rollout workers must have: a name and value, !value, in(a,b) or !in(a,b).",
    )
    stream_interval_s: float = Field(
        0.2, ge=0, le=60, description="Finished samples are handed on in bundles at this interval. Unit: seconds."
    )
    stall_deadline_s: float = Field(
        300.0, gt=0, description="A worker with work that emits no token for so long is restarted. Unit: seconds."
    )
    pacing: PacingOptions = Field(default_factory=PacingOptions, description="GPU-like pacing for benchmarks.")
