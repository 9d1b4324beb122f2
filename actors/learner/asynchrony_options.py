"""Configuration of asynchrony: how generation and training overlap, and what stale tokens are worth.

Versions count *published* snapshots of weights, blended ones included. The staleness of a token is the number of
versions between the snapshot that wrote it and the last one published when the optimiser step begins; that of a group
is the staleness of its oldest token.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class AsynchronyOptions(BaseModel):
    """How roles overlap. The defaults are synchronous: generate, train, publish."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pipeline: Literal["step", "stream"] = Field(
        "step",
        description="step: generate, then train, then publish; stream: finished answers flow to rewards and learner "
        "while others are still written.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        le=64,
        description="Oldest token that an optimiser step may see; 0 is synchronous. Systems in use take 1 to 8. "
        "Unit: versions.",
    )
    partial: Literal["off", "interrupt", "split"] = Field(
        "off",
        description="off: an answer is written by one version; interrupt: new weights take over in mid-answer (AReaL); "
        "split: a lagging snapshot writes the beginning, the current policy goes on behind the first boundary.",
    )
    interrupt_at: Literal["anywhere", "boundary"] = Field(
        "anywhere",
        description="Where partial=interrupt cuts. boundary: at the next sentence end, newline or step marker.",
    )
    on_interrupt: Literal["reprefill", "keep_kv", "drain"] = Field(
        "reprefill",
        description="reprefill: keep the tokens, read them again under the new weights; keep_kv: go on with key/value "
        "state of the old weights (cheaper, later tokens depend on both); drain: finish under the old weights.",
    )
    grace_tokens: int = Field(
        32,
        ge=0,
        le=4096,
        description="Longest wait for a boundary with interrupt_at=boundary; the cut is made there at the latest, or "
        "when a third version arrives: an engine holds two. Unit: tokens.",
    )
    k_min: int = Field(
        16,
        ge=1,
        description="Fewest tokens that the lagging snapshot writes with partial=split before a boundary ends its "
        "part; a third version ends it anywhere. Less than rollout.max_tokens. Unit: tokens.",
    )
    grad_tokens: Literal["all", "current_only", "decay"] = Field(
        "all",
        description="Which tokens have a gradient. all: every one, corrected by its own weight (AReaL); current_only: "
        "of each answer those of its newest version, times the truncated importance weight of the tokens before them "
        "(biased); decay: all, each times 2^(-staleness / half_life) (biased).",
    )
    half_life: float | None = Field(
        None,
        gt=0,
        description="Age at which data count half, batch mean 1; null: age makes no difference. Groups are weighted "
        "as wholes by their oldest token, so that baselines stay centred; with grad_tokens=decay each token by its own "
        "version instead. Unit: half_life_unit.",
    )
    half_life_unit: Literal["versions", "seconds"] = Field(
        "versions",
        description="What half_life counts. seconds: from the first token of the group's oldest answer; such a run "
        "cannot be repeated bit for bit.",
    )
    publish_blend: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of the new weights in what is published: published = share x new + (1 - share) x published "
        "before. 1: the new weights as they are. Answers are written by the blend, which is the behaviour policy.",
    )
    sync_every: int = Field(
        1, ge=1, le=1000, description="Publish after every n-th training step that moved the weights. Unit: steps."
    )
    on_stale: Literal["wait", "cancel_early", "drop", "accept", "decay"] = Field(
        "wait",
        description="Groups that could miss max_staleness. wait: the step waits for them, so that nothing is selected "
        "by length; cancel_early: they begin anew as soon as it is certain (so long answers are trained less often); "
        "drop: the same at the learner's door; accept: trained all the same; decay: weighted as half_life says.",
    )
    consumption: Literal["ready", "fifo", "freshest"] = Field(
        "ready",
        description="Which complete groups a stream trains on first. ready: in order of completion; fifo: in order of "
        "launch; freshest: those with the youngest tokens.",
    )

    @field_validator("half_life", mode="before")
    @classmethod
    def _half_life_explained(cls, value: Any) -> Any:
        if isinstance(value, int | float) and value <= 0:
            raise ValueError(
                f"half_life={value:g} leaves no weight to anything but the newest data: give the age at which data "
                "count half (above 0), null to switch the decay off, or grad_tokens=current_only"
            )
        return value

    @field_validator("publish_blend", mode="before")
    @classmethod
    def _blend_explained(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not 0 < value <= 1:
            raise ValueError(
                f"publish_blend={value:g} is not a share of the new weights: it must be above 0 (at 0 the engines "
                "would never see an update) and at most 1 (which publishes the new weights as they are)"
            )
        return value

    @property
    def lag(self) -> int:
        """Versions by which answers begin under older weights than the newest."""
        return int(self.partial == "split")

    @property
    def holds_two_versions(self) -> bool:
        """Whether an engine may write under two versions at once, and then holds two copies of the weights."""
        if self.partial == "split":
            return True
        if self.pipeline == "step":  # nothing is written while weights change
            return False
        return self.partial == "off" or self.on_interrupt == "drain" or self.interrupt_at == "boundary"

    @model_validator(mode="after")
    def _consistent(self) -> AsynchronyOptions:
        problems = list(self._conflicts())
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _conflicts(self) -> list[str]:
        problems = []
        if self.half_life is None:
            needs = [
                f"{name}=decay"
                for name, value in (("grad_tokens", self.grad_tokens), ("on_stale", self.on_stale))
                if value == "decay"
            ]
            if needs:
                problems.append(
                    f"{' and '.join(needs)} needs half_life, the age at which data count half; set half_life=4 "
                    "(versions), or choose another value"
                )
        if self.grad_tokens == "decay" and self.half_life_unit == "seconds":
            problems.append(
                "grad_tokens=decay weighs each token by its version, and tokens carry no times: set "
                "half_life_unit=versions, or grad_tokens=all to weigh whole groups by seconds"
            )
        if self.partial == "split" and self.max_staleness == 0:
            problems.append(
                "partial=split lets an older snapshot begin each answer, which max_staleness=0 forbids: set "
                "max_staleness to 1 or more, or partial=off"
            )
        if self.partial == "split" and self.pipeline == "stream" and self.max_staleness == 1:
            problems.append(
                "partial=split with pipeline=stream needs max_staleness of 2 or more: the snapshot that begins each "
                "answer is one version old already, so at max_staleness=1 nothing could be written while the learner "
                "works; set max_staleness=2, or pipeline=step"
            )
        if self.partial == "split" and self.on_interrupt == "drain":
            problems.append(
                "partial=split hands each answer over to the current policy, which on_interrupt=drain forbids: set "
                "on_interrupt=reprefill or keep_kv"
            )
        return problems

    def doubts(self) -> list[str]:
        """Return what is allowed and has no effect, one sentence each; they name the fields."""
        doubts = []
        if self.partial == "interrupt" and (self.pipeline == "step" or self.max_staleness == 0):
            why = "pipeline=step" if self.pipeline == "step" else "max_staleness=0"
            doubts.append(
                f"asynchrony.partial=interrupt has no effect with {why}: no weights arrive while an answer is written"
            )
        if self.partial != "interrupt" and self.interrupt_at == "boundary":
            doubts.append("asynchrony.interrupt_at=boundary has no effect without partial=interrupt")
        if self.interrupt_at == "boundary" and self.partial == "interrupt":
            if self.grace_tokens == 0:
                doubts.append("asynchrony.grace_tokens=0 cuts anywhere, although interrupt_at=boundary is set")
            if self.on_interrupt == "drain":
                doubts.append("asynchrony.interrupt_at=boundary has no effect with on_interrupt=drain: nothing is cut")
        if self.pipeline == "step" and self.consumption != "ready":
            doubts.append(
                f"asynchrony.consumption={self.consumption} has no effect with pipeline=step, where a step trains "
                "on everything that it launched"
            )
        if self.half_life is not None and self.max_staleness == 0 and self.on_stale not in ("accept", "decay"):
            doubts.append("asynchrony.half_life has no effect with max_staleness=0: all data are equally fresh")
        if self.pipeline == "step" and self.publish_blend < 1:
            doubts.append(
                f"asynchrony.publish_blend={self.publish_blend:g} makes even a synchronous run off-policy: answers are "
                "written by the blend, not by the weights that are trained"
            )
        return doubts
