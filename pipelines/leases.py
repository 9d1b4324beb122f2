"""Samples under way and what becomes of them, as the conductor writes it down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from storage.records import Assignment, GroupKey, SampleHeader

SampleId = tuple[GroupKey, int]
Stage = Literal["generating", "partial", "scoring", "scored", "failed"]


@dataclass(slots=True)
class Lease:
    """One sample under way.

    Attributes:
        assignment: What it was last given out with.
        worker: Rollout worker that it was last given to.
        attempt: Deaths of workers that it survived.
        stage: ``partial`` is interrupted: its tokens lie at ``ref``; none are there when ``ref`` is None.
        call: Number of the call that writes it.
        ref, position: Where its newest payload lies.
        header: Describes that payload.
        base: Tokens that it had when it was given out.
        stays: Interruptions by a limit of its stay.
        stopping: It was asked to stop.
        waits: It used up its stay, and nobody has sent it on yet.
        begins: Version that its worker's new rows began under when it was given out: none of its new tokens is older.
    """

    assignment: Assignment
    worker: int
    attempt: int
    stage: Stage = "generating"
    call: int = 0
    ref: Any = None
    position: int = 0
    header: SampleHeader | None = None
    base: int = 0
    stays: int = 0
    stopping: bool = False
    waits: bool = False
    begins: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that are known to be written."""
        return self.header.tokens if self.header is not None else 0


@dataclass(frozen=True, slots=True)
class SampleDone:
    """A sample left the flow, scored; or it is given up after too many crashes, and ``header`` is None.

    With ``interrupted`` it used up its stay and waits to go on.
    """

    key: GroupKey
    index: int
    header: SampleHeader | None
    error: str = ""
    interrupted: bool = False
