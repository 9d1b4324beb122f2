"""Configuration of the schedule: which prompts run together, and where."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class LongPoolOptions(BaseModel):
    """Rollout workers that are kept for long answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: int = Field(
        0,
        ge=0,
        le=4096,
        description="How many of rollout.workers form the long pool; 0: no fixed pool, dispatch skew_aware splits the "
        "workers anew in each round. Unit: processes.",
    )
    num_cpus: float = Field(0.0, ge=0, description="Ray CPUs per long worker; 0: as rollout.num_cpus. Unit: CPUs.")
    num_gpus: float = Field(0.0, ge=0, description="Ray GPUs per long worker; 0: as rollout.num_gpus. Unit: GPUs.")
    tensor_parallel: int = Field(
        1, ge=1, le=64, description="GPUs that share one model in a long worker; the torch engine takes 1. Unit: GPUs."
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Ray node labels that the hosts of long workers must have; empty: as rollout.labels.",
    )
    max_rows: int = Field(
        0, ge=0, le=4096, description="Answers that a long worker decodes at once; 0: as rollout.max_rows. Unit: rows."
    )
    tokens: int = Field(
        0,
        ge=0,
        description="Tokens that an answer may write in one stay in the long pool; 0: up to rollout.max_tokens. Unit: tokens.",
    )
    wall_s: float = Field(
        0.0, ge=0, description="Longest stay of an answer in the long pool; 0: no limit. Unit: seconds."
    )


class PoolOptions(BaseModel):
    """Pools of rollout workers beside the regular one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    long: LongPoolOptions = Field(default_factory=LongPoolOptions, description="Workers for long answers.")


class TimeoutOptions(BaseModel):
    """When an answer is interrupted where it runs; its tokens are kept and it goes on in the long pool."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: int = Field(
        0, ge=0, description="Tokens that an answer may write in the regular pool; 0: no limit. Unit: tokens."
    )
    wall_s: float = Field(
        0.0, ge=0, description="Longest stay of an answer in the regular pool; 0: no limit. Unit: seconds."
    )
    max_resumes: int = Field(
        3, ge=0, le=100, description="Interruptions after which an answer ends as truncated. Unit: interruptions."
    )


class RewardDeadlineOptions(BaseModel):
    """Deadlines of reward functions that adapt to the slowest correct answer; the ceiling is reward.timeout_s."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    adaptive: bool = Field(
        False, description="Shorten the deadline of prompts for which a correct answer has been scored."
    )
    factor: float = Field(
        1.5, gt=0, le=100, description="Multiple of the time that the slowest correct answer to the prompt took."
    )
    floor_s: float = Field(2.0, gt=0, le=3600, description="Shortest deadline. Unit: seconds.")


class ScheduleOptions(BaseModel):
    """Which prompts run together, and where."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batching: Literal["all", "length_split", "tail"] = Field(
        "all",
        description="all: a step waits for every group that it launched; length_split: short and long prompts never "
        "share a step, by prediction; tail: over-launch, train the first groups to finish, run the others in long rounds.",
    )
    dispatch: Literal["least_loaded", "skew_aware"] = Field(
        "least_loaded",
        description="least_loaded: deal groups out evenly; skew_aware: the predicted tail runs on workers of its own, longest first.",
    )
    overlaunch_prompts: float = Field(
        1.25, ge=1, le=4, description="Groups launched per group trained in a short round. Batching tail only."
    )
    overlaunch_samples: float = Field(
        1.0,
        ge=1,
        le=4,
        description="Answers launched per answer needed; above 1 the trained answers are biased towards short ones. Batching tail only.",
    )
    oversample: Literal["launch", "repeat"] = Field(
        "launch",
        description="How length_split fills its short steps: launch: further fresh prompts take the places of long ones; "
        "repeat: some short prompts are written and trained twice (biased).",
    )
    oversample_ratio: float = Field(
        1.2, ge=1, le=2, description="Groups per different prompt in a short step with oversample repeat."
    )
    deferred: Literal["auto", "resume", "restart"] = Field(
        "auto",
        description="Groups left behind by a race: resume: keep tokens and go on (needs asynchrony.max_staleness); restart: "
        "begin anew; auto: resume where the allowed staleness covers the wait, else restart.",
    )
    long_rule: Literal["auto", "off", "quantile", "median"] = Field(
        "auto",
        description="Which predictions send a prompt straight to the long queue: quantile: the longest long_share; median: "
        "above median_factor times the median; off: none; auto: quantile for length_split, off for tail, whose race alone is "
        "faster (a prior lowers waste and staleness instead).",
    )
    long_share: float = Field(0.1, gt=0, le=0.5, description="Share of prompts that rule quantile calls long.")
    median_factor: float = Field(
        1.5, gt=1, le=20, description="Multiple of the median predicted length for rule median."
    )
    max_deferrals: int = Field(
        1,
        ge=1,
        le=100,
        description="Races that a group may lose before it waits for a long round; above 1 it first enters the next races. Unit: rounds.",
    )
    long_rows: int = Field(
        0,
        ge=0,
        le=4096,
        description="Answers that a worker decodes at once in a long round; 0: as rollout.max_rows. Unit: rows.",
    )
    tail_share: float = Field(
        0.2, gt=0, lt=1, description="Share of a round's groups that dispatch skew_aware treats as the tail."
    )
    second_batching: bool = Field(
        False,
        description="Regroup the unfinished answers of deferred groups by predicted remaining length when they go on.",
    )
    pools: PoolOptions = Field(default_factory=PoolOptions, description="Pools of rollout workers.")
    timeouts: TimeoutOptions = Field(default_factory=TimeoutOptions, description="When an answer is interrupted.")
    reward_deadlines: RewardDeadlineOptions = Field(
        default_factory=RewardDeadlineOptions, description="Reward deadlines that adapt to correct answers."
    )

    @property
    def rule(self) -> Literal["off", "quantile", "median"]:
        """The rule that ``long_rule`` stands for."""
        if self.long_rule == "auto":
            return "quantile" if self.batching == "length_split" else "off"
        return self.long_rule

    @property
    def deferral_span(self) -> int:
        """Versions from the first tokens of a deferred group to the long round that trains it.

        With an over-launch of r, 1 / (r - 1) short rounds fill the queue of one long round.
        """
        if self.batching != "tail" or self.overlaunch_prompts == 1:
            return 0
        return math.ceil(1 / (self.overlaunch_prompts - 1) - 1e-9)

    def resumes(self, max_staleness: int, lag: int = 0) -> bool:
        """Whether deferred groups keep their tokens when trained tokens may be ``max_staleness`` versions old.

        ``lag`` is by how many versions answers begin under older weights than the newest: they are that much older.
        """
        if self.deferred == "auto":
            return max_staleness > lag and max_staleness >= self.deferral_span + lag
        return self.deferred == "resume"

    def conflicts(
        self, *, workers: int, max_tokens: int, max_staleness: int, reward_timeout_s: float, lag: int = 0
    ) -> list[str]:
        """Return one sentence for every setting that cannot work with the rest of the configuration.

        Args:
            workers: ``rollout.workers``.
            max_tokens: ``rollout.max_tokens``.
            max_staleness: ``asynchrony.max_staleness``.
            reward_timeout_s: ``reward.timeout_s``.
            lag: Versions by which answers begin under older weights than the newest (``asynchrony.partial=split``).
        """
        long = self.pools.long
        problems = []
        span = max(1, self.deferral_span) + lag
        if self.deferred == "resume" and max_staleness == 0:
            problems.append(
                "schedule.deferred=resume trains tokens of earlier versions, but asynchrony.max_staleness is 0: allow "
                f"{span}, or choose restart or auto"
            )
        elif self.deferred == "resume" and self.batching == "tail" and lag and max_staleness < self.deferral_span + lag:
            problems.append(
                f"schedule.deferred=resume with asynchrony.partial=split: answers begin {lag} version old and then wait "
                f"{self.deferral_span} (schedule.overlaunch_prompts={self.overlaunch_prompts:g}), but "
                f"asynchrony.max_staleness is {max_staleness}: allow {self.deferral_span + lag}, or choose restart or auto"
            )
        if long.workers and long.workers >= workers:
            problems.append(
                f"schedule.pools.long.workers ({long.workers}) must be smaller than rollout.workers ({workers}): at least "
                "one worker is needed for the other answers"
            )
        if long.workers and self.dispatch != "skew_aware":
            problems.append(
                f"schedule.pools.long.workers={long.workers} needs schedule.dispatch=skew_aware: nothing else places "
                "groups by length"
            )
        if self.batching == "length_split" and self.long_rule == "off":
            problems.append(
                "schedule.long_rule=off leaves schedule.batching=length_split nothing to split by: choose quantile or median"
            )
        if self.oversample == "repeat" and self.batching != "length_split":
            problems.append(
                f"schedule.oversample=repeat belongs to schedule.batching=length_split, not to {self.batching}; drop it "
                "(batching tail over-launches by overlaunch_prompts)"
            )
        if self.overlaunch_samples > 1 and self.batching != "tail":
            problems.append(
                f"schedule.overlaunch_samples={self.overlaunch_samples:g} needs schedule.batching=tail: without a race "
                "every launched answer is waited for"
            )
        if self.second_batching and (self.batching != "tail" or not self.resumes(max_staleness, lag)):
            problems.append(
                "schedule.second_batching regroups the kept rows of deferred groups: it needs schedule.batching=tail and "
                f"deferred=resume (asynchrony.max_staleness of {span} or more)"
            )
        for path, tokens in (("timeouts.tokens", self.timeouts.tokens), ("pools.long.tokens", long.tokens)):
            if tokens > max_tokens:
                problems.append(
                    f"schedule.{path} ({tokens}) exceeds rollout.max_tokens ({max_tokens}) and would never be reached: "
                    "lower it, or set 0 for no limit"
                )
        interrupts = self.timeouts.tokens or self.timeouts.wall_s or long.tokens or long.wall_s
        if interrupts and max_staleness == 0 and self.batching == "tail":
            problems.append(
                "schedule.timeouts and schedule.pools.long limits keep the tokens of interrupted answers, which may wait "
                "for a later step; asynchrony.max_staleness is 0: raise it, or remove the limits"
            )
        if self.reward_deadlines.adaptive and self.reward_deadlines.floor_s > reward_timeout_s:
            problems.append(
                f"schedule.reward_deadlines.floor_s ({self.reward_deadlines.floor_s:g}) exceeds reward.timeout_s "
                f"({reward_timeout_s:g}): lower the one or raise the other"
            )
        return problems

    def doubts(self, *, prompts: int, prompts_per_step: int, max_staleness: int) -> list[str]:
        """Return what is allowed but probably not meant, one sentence each.

        Args:
            prompts: ``data.prompts``.
            prompts_per_step: ``rollout.prompts_per_step``.
            max_staleness: ``asynchrony.max_staleness``.
        """
        doubts = []
        if self.batching == "tail":
            launched = math.ceil(self.overlaunch_prompts * prompts_per_step - 1e-9)
            if launched == prompts_per_step and self.overlaunch_samples == 1:
                doubts.append(
                    f"schedule.batching=tail launches {launched} groups for {prompts_per_step}: without a surplus there is "
                    "no race; raise schedule.overlaunch_prompts (1.25 is usual)"
                )
            if launched > prompts:
                doubts.append(
                    f"data.prompts ({prompts}) is smaller than one over-launched round ({launched} groups): every step "
                    "waits for all of its groups, as with batching all; lower rollout.prompts_per_step or add prompts"
                )
            if 0 < max_staleness < self.deferral_span and self.deferred == "resume":
                doubts.append(
                    f"asynchrony.max_staleness={max_staleness} is shorter than the wait of deferred groups "
                    f"({self.deferral_span} versions at overlaunch_prompts={self.overlaunch_prompts:g}): most of their tokens "
                    "will be dropped as too old"
                )
            if self.overlaunch_samples > 1:
                doubts.append(
                    f"schedule.overlaunch_samples={self.overlaunch_samples:g} keeps the shortest answers of each prompt: "
                    "trained answers are about 20 % shorter than the policy's (biased); 1 keeps the law"
                )
        if self.oversample == "repeat":
            doubts.append(
                f"schedule.oversample=repeat trains short prompts {self.oversample_ratio:g} times as often as long ones (biased)"
            )
            if self.oversample_ratio > 1.3:
                doubts.append(
                    f"schedule.oversample_ratio={self.oversample_ratio:g} is above 1.3, the largest that is recommended"
                )
        return doubts
