"""The configuration: one section per concern, composed from the options of each role.

Importing this module loads neither torch nor Ray.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from actors.drafts.options import SpeculationOptions
from actors.learner.asynchrony_options import AsynchronyOptions
from actors.learner.options import AlgorithmOptions, LearnerOptions
from actors.length_predictor.options import LengthPredictorOptions
from actors.reward.options import RewardOptions
from actors.rollout.options import RolloutOptions
from pipelines.colocation import colocation_conflicts, colocation_doubts
from pipelines.scheduling.options import ScheduleOptions
from storage.options import (
    CheckpointOptions,
    DataOptions,
    EvaluationOptions,
    ModelOptions,
    TrackingOptions,
)

_SET_NAME = re.compile(r"[A-Za-z0-9_-]+")


class RunOptions(BaseModel):
    """Length, place and seed of the run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        "", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$", description="Name of the run; empty: preset and time."
    )
    directory: str = Field(
        "runs",
        description="Parent folder of run directories, or a URI for nodes that share no disk: s3://BUCKET/FOLDER, gs://, abfs://, hdfs://, file://.",
    )
    steps: int = Field(40, ge=0, description="Optimiser steps; 0: as many as run.epochs need. Unit: steps.")
    epochs: int = Field(
        0,
        ge=0,
        description="Passes over the data; 0: as many as run.steps need. With both, the first to end. Unit: epochs.",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seeds prompts order, sampling noise and anything else random.")
    restarts: int = Field(
        3,
        ge=0,
        description="Times that a run whose learner, queue or conductor died goes on by itself from the newest checkpoint, "
        "counted anew with each further checkpoint; 0: it ends. Workers are replaced in any case, and what the user has to "
        "mend ends a run at once.",
    )
    debug: bool = Field(
        False, description="Assert the invariants (ledger conservation, versions, logprobs) while running."
    )


class ClusterOptions(BaseModel):
    """How Ray is reached or started."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = Field(
        "",
        description="Ray cluster to join (host:port); empty: RAY_ADDRESS if set (as in a submitted job), else a local Ray.",
    )
    dashboard: bool = Field(True, description="Serve the Ray dashboard when a local Ray is started (on 127.0.0.1).")
    object_store_mb: int = Field(256, ge=80, description="Object store of a local Ray. Unit: MB.")
    queue_groups: int = Field(256, ge=1, description="Capacity of each bounded queue. Unit: envelopes.")
    start_deadline_s: float = Field(300.0, gt=0, description="Longest wait for actors to start. Unit: seconds.")
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Ray node labels that the host of conductor, queues and history must have, for instance of the head: "
        "a run ends with that node. Same forms as rollout.labels.",
    )
    placement: Literal["disaggregated", "colocated"] = Field(
        "disaggregated",
        description="disaggregated: rollout engines and learner have hardware of their own; colocated: they share it and "
        "take turns, engines give back the memory of their weights and key/value state while the learner steps. Saves "
        "memory and costs a reload of the weights in each step. On GPUs set rollout.num_gpus=0.9 and learner.num_gpus=0.1.",
    )
    wait_for_nodes: bool = Field(
        False,
        description="Where the nodes that are up cannot hold the run, wait up to start_deadline_s for an autoscaler to add "
        "some instead of refusing. Not needed on a head that `ray up` started: its node types are known.",
    )


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
    length_predictor: LengthPredictorOptions = Field(
        default_factory=LengthPredictorOptions, description="How the lengths of answers are predicted."
    )
    speculation: SpeculationOptions = Field(
        default_factory=SpeculationOptions, description="Drafts from earlier answers."
    )
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

    @property
    def predicts_lengths(self) -> bool:
        """True when a schedule asks for predicted lengths."""
        schedule = self.schedule
        sorts = schedule.batching != "all" and schedule.long_rule != "off"
        return sorts or schedule.dispatch == "skew_aware"

    @property
    def colocated(self) -> bool:
        """True when rollout engines and learner share hardware and take turns."""
        return self.cluster.placement == "colocated"

    @property
    def sequence_tokens(self) -> int:
        """Longest sequence that data and rollout options admit (prompt and answer together), in tokens."""
        return self.data.max_prompt_tokens + self.rollout.max_tokens

    def planned_steps(self, prompts: int | None = None) -> int:
        """Return how many optimiser steps the run takes over ``prompts`` prompts (``data.prompts`` when None).

        Groups that dynamic sampling drops use up prompts too, so with ``run.epochs`` it may end earlier.
        """
        by_epochs = math.ceil(self.run.epochs * (prompts or self.data.prompts) / self.rollout.prompts_per_step)
        limits = [limit for limit in (self.run.steps, by_epochs) if limit > 0]
        return min(limits)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        problems = _conflicts(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def warnings(self) -> list[str]:
        """Return what is allowed but probably not meant, one sentence each; they name the fields."""
        return _doubts(self)


def _conflicts(config: Config) -> list[str]:
    """Return one sentence for every pair of fields that cannot go together."""
    rollout, algorithm = config.rollout, config.algorithm
    problems = []
    if config.run.steps == 0 and config.run.epochs == 0:
        problems.append("run.steps and run.epochs are both 0: set one of them, or the run has no length")
    if rollout.prompts_per_step > config.data.prompts:
        problems.append(
            f"rollout.prompts_per_step ({rollout.prompts_per_step}) exceeds data.prompts ({config.data.prompts}): one step "
            "would need the same prompt twice; lower the one or raise the other"
        )
    if config.learner.minibatches > rollout.prompts_per_step:
        problems.append(
            f"learner.minibatches ({config.learner.minibatches}) exceeds rollout.prompts_per_step "
            f"({rollout.prompts_per_step}): a group of answers is never split, so some updates would be empty"
        )
    if algorithm.overlong.mode == "soft" and algorithm.overlong.buffer_tokens >= rollout.max_tokens:
        problems.append(
            f"algorithm.overlong.buffer_tokens ({algorithm.overlong.buffer_tokens}) must be smaller than "
            f"rollout.max_tokens ({rollout.max_tokens}): the ramp would punish every answer"
        )
    for name in config.evaluation.sets:
        if name == "train":
            problems.append(
                "evaluation.sets.train: the name train is taken by the training prompts; choose another name"
            )
        elif not _SET_NAME.fullmatch(name):
            problems.append(f"evaluation.sets: the name {name!r} may hold letters, digits, - and _ only")
    problems += config.schedule.conflicts(
        workers=rollout.workers,
        max_tokens=rollout.max_tokens,
        max_staleness=config.asynchrony.max_staleness,
        reward_timeout_s=config.reward.timeout_s,
        lag=config.asynchrony.lag,
    )
    problems += config.learner.conflicts()
    problems += colocation_conflicts(config)
    parallel = config.schedule.pools.long.tensor_parallel
    if parallel > 1 and rollout.engine == "torch":
        problems.append(
            f"schedule.pools.long.tensor_parallel={parallel} has no effect with rollout.engine=torch, which runs a model on "
            "one GPU: leave it at 1"
        )
    if config.asynchrony.partial == "split" and config.asynchrony.k_min >= rollout.max_tokens:
        problems.append(
            f"asynchrony.k_min ({config.asynchrony.k_min}) must be smaller than rollout.max_tokens ({rollout.max_tokens}) "
            "with partial=split: else the lagging snapshot writes whole answers and nothing is handed over; lower it"
        )
    speculation = config.speculation
    if speculation.verify == "lenient" and speculation.source not in ("previous_epoch", "hybrid"):
        problems.append(
            f"speculation.verify=lenient reuses the previous epoch's answer: it needs speculation.source=previous_epoch "
            f"or hybrid, not {speculation.source}"
        )
    if speculation.residual and speculation.verify != "lenient":
        problems.append(
            "speculation.residual decides what is drawn where a lenient draft is not kept: it needs "
            f"speculation.verify=lenient, not {speculation.verify}"
        )
    if speculation.draft_length == "fixed" and speculation.draft_tokens > speculation.max_draft:
        problems.append(
            f"speculation.draft_tokens ({speculation.draft_tokens}) exceeds speculation.max_draft "
            f"({speculation.max_draft}): raise that, or draft less"
        )
    if config.data.system_prompt and config.model.chat_template is False:
        problems.append("data.system_prompt needs a chat template, but model.chat_template is false: drop one of them")
    return problems


def _doubts(config: Config) -> list[str]:
    run, rollout, learner = config.run, config.rollout, config.learner
    doubts = []
    if rollout.top_p < 1 or rollout.top_k > 0:
        doubts.append(
            f"rollout.top_p={rollout.top_p:g} and rollout.top_k={rollout.top_k} truncate the distribution in training: "
            "tokens outside of it are never explored, and ratios are undefined where the cut moves; 1 and 0 keep all of it"
        )
    if run.steps and run.epochs and math.ceil(run.epochs * config.data.prompts / rollout.prompts_per_step) > run.steps:
        doubts.append(
            f"run.steps={run.steps} ends the run before run.epochs={run.epochs} is complete; run.steps=0 trains whole epochs"
        )
    if learner.warmup_steps >= config.planned_steps() * learner.minibatches and learner.warmup_steps > 0:
        doubts.append(
            f"learner.warmup_steps={learner.warmup_steps} lasts the whole run "
            f"({config.planned_steps() * learner.minibatches} updates): the peak learning rate is never reached"
        )
    if config.algorithm.kl.coefficient > 0 and config.algorithm.kl.estimator == "k1":
        doubts.append(
            "algorithm.kl.estimator=k1 inside the loss has an expected gradient of zero: it does not hold the policy "
            "near the reference; k3 or k2 do"
        )
    doubts += config.schedule.doubts(
        prompts=config.data.prompts,
        prompts_per_step=rollout.prompts_per_step,
        max_staleness=config.asynchrony.max_staleness,
    )
    doubts += config.asynchrony.doubts()
    doubts += learner.doubts(answers=config.samples_per_step // learner.minibatches)
    doubts += colocation_doubts(config)
    for role, section in (("rollout", rollout), ("learner", learner)):
        gpus = f"{role}.num_gpus={section.num_gpus:g}"
        if section.num_gpus > 0 and section.device == "cpu":
            doubts.append(f"{gpus} is reserved and stays idle with {role}.device=cpu: set it to 0, or device to auto")
        elif section.num_gpus > 1:
            doubts.append(f"{gpus}: each {role} worker computes on one GPU, the others stay idle; reserve 1")
    if config.speculation.verify == "lenient":
        doubts.append(
            "speculation.verify=lenient biases the samples (SPEC-RL keeps tokens that the current policy would not have "
            "drawn so often); watch speculation/bias_reward and speculation/bias_length, or use verify=exact"
        )
    epochs = config.planned_steps() * rollout.prompts_per_step / config.data.prompts
    if config.speculation.source != "off" and epochs <= 1:
        doubts.append(
            f"speculation.source={config.speculation.source}: the run visits its {config.data.prompts} prompts at most "
            "once, so there is no history to draft from; only siblings and a row's own text help"
        )
    if rollout.workers > rollout.prompts_per_step * rollout.samples_per_prompt:
        doubts.append(
            f"rollout.workers={rollout.workers} exceeds the {config.samples_per_step} answers of a step: some stay idle"
        )
    return doubts
