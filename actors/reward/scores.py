"""What goes into the scoring pool and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ScoreStatus = Literal["ok", "abstained", "error", "timeout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreItem:
    """One answer to score.

    Attributes:
        ident: Whatever the caller knows it by; returned with the result.
        prompt: Prompt text. completion: answer text.
        columns: The row's other columns; values may be anything that JSON holds, plus arrays, bytes and dates.
        timeout_s: Deadline of this answer in seconds; None: that of the pool.
    """

    ident: Any
    prompt: str
    completion: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """What became of one item.

    Attributes:
        ident: As in the item.
        reward: Weighted sum over the functions that did not abstain; ``None`` unless ``status`` is ``ok``.
        parts: Unweighted reward by function name; ``None`` where it abstained or failed.
        status: ``ok``; ``abstained`` (all functions did); ``error`` (one raised, returned nonsense, or took its process
            down); ``timeout`` (killed at the deadline).
        error: The reason of an error or a timeout, else empty.
        seconds: Time that the functions took, or until the process was killed.
    """

    ident: Any
    reward: float | None
    parts: Mapping[str, float | None]
    status: ScoreStatus
    error: str = ""
    seconds: float = 0.0
