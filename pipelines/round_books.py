"""What is written down about a round of generation while it runs, and what it leaves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipelines.leases import SampleDone
from pipelines.scheduling.policy import RoundState
from storage.errors import UserError
from storage.records import GroupKey, Prompt, RoundClass, SampleHeader


@dataclass(slots=True)
class Progress:
    """Samples of the round in progress, for people who watch.

    Attributes:
        launched: Samples asked for.
        done: Samples that came back, scored or given up.
        failed: Samples without a score because something failed; crashed: those of them whose workers died too often.
        first_error: What happened to the first of those.
        started: Wall-clock second of the start.
    """

    launched: int = 0
    done: int = 0
    failed: int = 0
    crashed: int = 0
    first_error: str = ""
    started: float = field(default_factory=time.time)

    def add(self, event: SampleDone) -> None:
        """Count a sample."""
        self.done += 1
        error = event.error if event.header is None else event.header.error
        if event.header is None or event.header.reward_status in ("error", "timeout"):
            self.failed += 1
            self.crashed += event.header is None
            self.first_error = self.first_error or error

    def check(self, what: str) -> None:
        """Raise ``UserError`` when every single answer failed to be scored, unless they were all lost by crashes."""
        if self.done > self.crashed and self.failed == self.done:
            raise UserError(
                f"{what}: none of the {self.done} answers got a score, so there is nothing to learn from; the first "
                f"error: {self.first_error}. Mend that (reward.functions names the functions) before the run goes on"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What a training round brought.

    Attributes:
        keys: Groups for the learner, sorted.
        headers: Headers of their samples, by group, in index order.
        filtered: Groups that ended without being trained, by reason.
        started: Wall-clock second of the first dispatch.
        ended: Wall-clock second at which the last needed sample was scored and known here.
        generated_tokens: Tokens written in the round, whatever becomes of them.
        dropped_tokens: Tokens of whatever round that will never be trained, given up in this one.
        errors: Samples whose reward failed or timed out; scored: samples that came back.
        round_class: Kind of the round.
        waiting: Groups that wait when it ends.
        launched_lengths: Tokens of every sample that came back in the round, kept or not.
    """

    keys: tuple[GroupKey, ...]
    headers: Mapping[GroupKey, Sequence[SampleHeader]]
    filtered: Mapping[str, int]
    started: float
    ended: float
    generated_tokens: int
    dropped_tokens: int
    errors: int
    scored: int
    round_class: RoundClass = "short"
    waiting: int = 0
    launched_lengths: tuple[int, ...] = ()


@dataclass(slots=True)
class RoundBooks:
    """Books of the round in progress.

    Attributes:
        state: What the policy sees.
        prompts: Prompt of each launched group.
        order: Indices of each group's scored samples, in order of arrival.
        headers: Headers of groups that are kept.
        filtered: Groups that ended untrained, by reason.
        seen: Samples whose end is in the books already.
        lengths: Tokens of the samples that came back.
        errors: Samples whose reward failed; scored: samples that came back.
    """

    state: RoundState
    prompts: dict[GroupKey, Prompt] = field(default_factory=dict)
    order: dict[GroupKey, list[int]] = field(default_factory=dict)
    headers: dict[GroupKey, Sequence[SampleHeader]] = field(default_factory=dict)
    filtered: dict[str, int] = field(default_factory=dict)
    seen: set[tuple[GroupKey, int]] = field(default_factory=set)
    lengths: list[int] = field(default_factory=list)
    errors: int = 0
    scored: int = 0
