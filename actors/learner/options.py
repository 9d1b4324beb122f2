"""Configuration of the learner role and of the learning algorithm."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class KlOptions(BaseModel):
    """Penalty towards a frozen reference policy (the initial weights)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    coefficient: float = Field(0.0, ge=0, le=10, description="Weight of the KL term; 0 loads no reference model.")
    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator of the KL divergence per token.")
    where: Literal["loss"] = Field("loss", description="Where the penalty enters.")


class OverlongOptions(BaseModel):
    """Treatment of answers that run into the token limit (DAPO section 3.4)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["off", "soft", "mask"] = Field(
        "off",
        description="soft: penalty that grows to -1 over the last buffer_tokens; mask: truncated answers leave the loss.",
    )
    buffer_tokens: int = Field(32, ge=1, description="Width of the soft penalty's ramp. Unit: tokens.")


class SequenceMaskOptions(BaseModel):
    """Leaves answers out of the loss that the current policy would hardly write, or far more often than it was."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["off", "geometric", "max"] = Field(
        "off",
        description="Which figure must lie within [low, high], from the ratios pi_proximal / pi_behaviour of an "
        "answer's tokens. geometric: their geometric mean; max: each of them.",
    )
    low: float = Field(0.5, gt=0, lt=1, description="Smallest ratio allowed.")
    high: float = Field(2.0, gt=1, description="Largest ratio allowed.")


class DriftGuardOptions(BaseModel):
    """What happens when few tokens of a batch carry most of the importance weight: the step before a collapse."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    action: Literal["off", "skip", "clip"] = Field(
        "off",
        description="skip: the batch is not trained on; clip: weights are capped lower until the floor is reached. "
        "Either costs one more forward pass a step.",
    )
    ess_floor: float = Field(
        0.3,
        gt=0,
        lt=1,
        description="Least effective sample size of the token weights pi_proximal / pi_behaviour, as a share of the "
        "tokens; 1 on policy.",
    )


class AlgorithmOptions(BaseModel):
    """Which objective is maximised. Fields left null take the value that the named algorithm defines."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["grpo", "dr_grpo", "dapo", "decoupled_ppo", "tis", "gspo", "cispo"] = Field(
        "grpo", description="Objective."
    )
    anchor: Literal["behaviour", "proximal"] | None = Field(
        None,
        description="Denominator of the ratio of gspo and cispo. behaviour: the policy that sampled, as in their "
        "papers; proximal: the weights just before the batch, times the truncated behaviour weight; null: by algorithm.",
    )
    clip_low: float | None = Field(None, gt=0, lt=1, description="Ratio clip below 1; null: by algorithm.")
    clip_high: float | None = Field(None, gt=0, description="Ratio clip above 1; null: by algorithm (DAPO: 0.28).")
    dual_clip: float | None = Field(None, gt=1, description="Bound of the negative branch (usually 3); null: off.")
    aggregation: Literal["token", "sequence", "constant"] | None = Field(
        None,
        description="token: sum / tokens of the batch; sequence: mean over tokens of each answer, then over answers; "
        "constant: sum / (answers x max_tokens); null: by algorithm.",
    )
    advantage: Literal["group_std", "group_mean"] | None = Field(
        None, description="group_std: (r - mean) / (std + 1e-4); group_mean: r - mean; null: by algorithm."
    )
    behaviour_cap: float | None = Field(
        None,
        gt=1,
        description="Upper cap of the behaviour weight pi_proximal / pi_behaviour per token; null: by algorithm.",
    )
    behaviour_cap_negative: float | None = Field(
        None,
        ge=1,
        description="The same where the advantage is negative: stale failures are what breaks training, so it may be "
        "tighter; null: behaviour_cap.",
    )
    prefix_cap: float = Field(
        2.0,
        ge=1,
        description="Upper cap of the importance weight of a whole prefix, with asynchrony.grad_tokens=current_only.",
    )
    sequence_mask: SequenceMaskOptions = Field(
        default_factory=SequenceMaskOptions, description="Answers whose ratios are out of bounds."
    )
    drift_guard: DriftGuardOptions = Field(
        default_factory=DriftGuardOptions, description="Batches whose effective sample size is too small."
    )
    dynamic_sampling: bool | None = Field(
        None, description="Replace groups whose rewards are all equal by fresh prompts (DAPO); null: by algorithm."
    )
    max_refills: int = Field(4, ge=0, le=100, description="Most refill waves of dynamic sampling per step.")
    overlong: OverlongOptions = Field(default_factory=OverlongOptions, description="Answers that hit the token limit.")
    kl: KlOptions = Field(default_factory=KlOptions, description="Penalty towards the initial policy.")

    @property
    def filters_zero_variance(self) -> bool:
        """True when groups with equal rewards are replaced by fresh prompts."""
        return self.name == "dapo" if self.dynamic_sampling is None else self.dynamic_sampling


class LearnerOptions(BaseModel):
    """How the policy is updated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="Learners that share each batch; more than 1 form a Ray Train group. Unit: processes.",
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp",
        description="With several workers. ddp: each holds the whole model, gradients are summed once an update; fsdp: "
        "weights, gradients and moments are cut into one piece a worker.",
    )
    learning_rate: float = Field(1e-3, gt=0, le=1, description="Peak learning rate of AdamW.")
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up. Unit: optimiser updates.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="Learning rate after warm-up; linear and cosine fall to min_learning_rate_ratio at the last step.",
    )
    min_learning_rate_ratio: float = Field(0.1, ge=0, le=1, description="Final share of the peak learning rate.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta 1.")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta 2.")
    adam_eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient clipping by global norm.")
    minibatches: int = Field(1, ge=1, le=64, description="Optimiser updates per global batch (split by group).")
    tokens_per_microbatch: int = Field(
        16_384, ge=16, description="Packed tokens (prompt and answer) per forward/backward. Unit: tokens."
    )
    gradient_checkpointing: bool | None = Field(None, description="Recompute activations; null: on GPU only.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Autocast precision; auto is float32 on CPU, bfloat16 on GPU. Weights stay float32."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the learner runs.")
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="CPU threads of each learner; 0: all cores of its node, shared evenly. Unit: threads.",
    )
    num_cpus: float = Field(
        0.0, ge=0, description="Ray CPUs reserved for each worker; 0: embedded default. Unit: CPUs."
    )
    num_gpus: float = Field(
        0.0,
        ge=0,
        description="Ray GPUs reserved for each worker; a fraction shares a GPU, which several workers cannot. Unit: GPUs.",
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Ray node labels that the learner's host must have: a name and value, !value, in(a,b) or !in(a,b).",
    )
    deadline_s: float = Field(
        1800.0, gt=0, description="Longest time one step may take before a stall report. Unit: seconds."
    )

    def conflicts(self) -> list[str]:
        """Return one sentence for every setting with which several workers could not exchange gradients."""
        if self.workers == 1:
            return []
        problems = []
        who = f"learner.workers={self.workers}"
        if self.device == "cuda" and self.num_gpus == 0:
            problems.append(
                f"{who} with learner.device=cuda: set learner.num_gpus=1, so that each of the learners gets a GPU of its own"
            )
        if self.device == "cpu" and self.num_gpus > 0:
            problems.append(
                f"{who} with learner.device=cpu and learner.num_gpus={self.num_gpus:g}: set learner.num_gpus=0, or "
                "learner.device=auto"
            )
        if self.device != "cpu" and self.num_gpus != int(self.num_gpus):
            problems.append(
                f"{who} with learner.num_gpus={self.num_gpus:g}: learners that share a GPU cannot exchange gradients over "
                "NCCL; reserve a whole GPU for each, or use one worker"
            )
        return problems

    def doubts(self, *, answers: int) -> list[str]:
        """Return what is allowed and has no effect, one sentence each; ``answers`` are those behind an update."""
        doubts = []
        if self.workers > answers:
            doubts.append(
                f"learner.workers={self.workers} exceeds the {answers:g} answers of an update (rollout.prompts_per_step x "
                "rollout.samples_per_prompt / learner.minibatches): some have nothing to do; use fewer workers"
            )
        if self.workers == 1 and self.parallel == "fsdp":
            doubts.append(
                "learner.parallel=fsdp has no effect with learner.workers=1: there is nobody to share pieces with"
            )
        return doubts
