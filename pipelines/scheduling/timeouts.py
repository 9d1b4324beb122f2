"""When a row has run long enough where it is, and what becomes of it then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipelines.scheduling.dispatch import Pool

Overdue = Literal["tokens", "wall"]
TimeoutAction = Literal["requeue", "truncate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBudget:
    """What a row may use up in one pool, per stay; 0 means no limit.

    Attributes:
        tokens: New tokens. The primary limit: it does not depend on the machine.
        wall_s: Seconds since the row was admitted. A safety net.
    """

    tokens: int = 0
    wall_s: float = 0.0


class Timeouts:
    """Interrupts rows that use up their budget; tokens are kept, and the row goes on in the long pool.

    After ``max_resumes`` such interruptions a row ends as truncated (finish reason ``length``), so a row can neither
    run for ever nor vanish: its group is trained or ended like any other.
    """

    def __init__(self, regular: RowBudget, long: RowBudget, *, max_resumes: int = 3) -> None:
        """Set the budgets of both pools and the number of interruptions that a row survives."""
        self._budgets: dict[Pool, RowBudget] = {"regular": regular, "long": long}
        self._max_resumes = max_resumes

    def overdue(self, pool: Pool, tokens: int, seconds: float) -> Overdue | None:
        """Say which limit a row has reached, if any.

        Args:
            pool: Where it runs.
            tokens: Tokens that it wrote since it was admitted there.
            seconds: Time since then.
        """
        budget = self._budgets[pool]
        if budget.tokens and tokens >= budget.tokens:
            return "tokens"
        return "wall" if budget.wall_s and seconds >= budget.wall_s else None

    def action(self, resumes: int) -> TimeoutAction:
        """Say what happens to an overdue row that was interrupted ``resumes`` times before."""
        return "requeue" if resumes < self._max_resumes else "truncate"
