"""Whether drafts are worth having at all, decided by what they were seen to bring.

The budget never drafts at a predicted loss, but a prediction can be wrong, and even looking for drafts costs time. The
gate compares the measured tokens per second of passes with drafts with what the fitted cost says the same rows would
have made without. It counts passes, not seconds, and has hysteresis: it closes below 0.97, opens after a probe
above 1, and waits twice as long after each probe that fails. A probe first drafts at a hopeful price, so that a fit
that has the price too high sees passes that correct it.
"""

from __future__ import annotations

import math
from typing import Literal

from actors.drafts.options import GateMode
from actors.rollout.draft_cost import PassCost
from actors.rollout.engine import StepStats

GateState = Literal["probing", "open", "closed"]

CLOSE_BELOW = 0.97
"""Measured gain below which an open gate closes: under 1 by more than the noise of the measurement."""
LEARNING_PASSES = 8
"""Passes with drafts at the begin of a probe that are not judged: the cost is learned from them."""
PROBE_PASSES = 16
"""Judged passes with drafts after which a probe with a clear result ends."""
LONGEST_PROBE = 48
"""Judged passes with drafts after which any probe ends; it has then succeeded if it gained at all."""
FIRST_WAIT, LONGEST_WAIT = 32, 2048
"""Passes between a closing and the next probe; doubled by each probe that fails."""
IDLE_PASSES = 32
"""Passes in a row without a draft that pays after which even looking for one stops."""
CONTROL_EVERY = 128
"""An open gate lets one pass in so many go without drafts, so that the price of plain decoding stays measured."""

_CLEAR = 0.03
_MEMORY = 64.0
"""Passes over which a measurement is averaged."""


class DraftGate:
    """Opens and closes drafting. Not thread-safe; it belongs to the thread that decodes.

    Attributes:
        state: ``probing`` while drafts are tried out, ``open``, ``closed``.
        predicted: Expected gain of the latest pass that looked for drafts; 1 without drafts.
        changes: Times that the gate opened or closed.
    """

    def __init__(self, mode: GateMode, acceptance_floor: float = 0.7) -> None:
        """Begin with a probe, or open for good with mode ``always``."""
        self.predicted = 1.0
        self.changes = 0
        self._floor = acceptance_floor
        self._passes = 0
        self.switch(mode)

    def switch(self, mode: GateMode) -> None:
        """Go by another rule from the next pass on, with nothing measured yet."""
        self.state: GateState = "open" if mode == "always" else "probing"
        self._mode = mode
        self._reason = "always open" if mode == "always" else "on: trying drafts out"
        self._wait = FIRST_WAIT
        self._closed_for = 0
        self._learning = LEARNING_PASSES if mode == "auto" else 0
        self._probed = -self._learning
        self._idle = 0
        self._with = self._without = 0.0
        self._drafted = self._accepted = 0.0

    @property
    def mode(self) -> GateMode:
        """The rule that it goes by."""
        return self._mode

    @property
    def reason(self) -> str:
        """Why the gate is as it is, for people."""
        if self.state == "closed":
            return f"{self._reason}; next try in {max(self._wait - self._closed_for, 0)} passes"
        if self.state == "open" and self._mode == "auto" and self._with:
            predicted = "" if math.isnan(self.predicted) else f", predicted {self.predicted:.2f}"
            return f"on: measured gain {self.measured:.2f}{predicted}"
        return self._reason

    @property
    def learning(self) -> bool:
        """Whether the coming drafts are there to learn the cost from, and may be longer than seems to pay."""
        return self.state == "probing" and self._probed < 0

    @property
    def measured(self) -> float:
        """Tokens per second of passes with drafts relative to the same passes without; NaN before there was one."""
        return self._without / self._with if self._with else math.nan

    @property
    def acceptance(self) -> float:
        """Share of accepted draft tokens, averaged over recent passes; NaN before there was one."""
        return self._accepted / self._drafted if self._drafted else math.nan

    def admit(self) -> bool:
        """Return whether the coming pass may look for drafts; called once a pass."""
        self._passes += 1
        if self._mode == "always":
            return True
        if self.state == "closed":
            self._closed_for += 1
            if self._closed_for < self._wait:
                return False
            self._probe()
        return not (self.state == "open" and self._mode == "auto" and self._passes % CONTROL_EVERY == 0)

    def expect(self, gain: float, drafted: int) -> None:
        """Hear what the budget of an admitted pass expects: its gain, and how many tokens are drafted."""
        self.predicted = gain
        self._idle = 0 if drafted else self._idle + 1
        if self._mode == "auto" and self._idle >= IDLE_PASSES:
            self._close("off: no draft pays (predicted gain is not above 1)", failed=self.state == "probing")

    def measure(self, stats: StepStats, cost: PassCost) -> None:
        """Hear how a step with drafts went and what a pass costs; other steps are ignored."""
        if not stats.drafted or not stats.rows:
            return
        self._probed += 1
        if self.state == "probing" and self._probed <= 0:
            return
        keep = 1.0 - 1.0 / _MEMORY
        plain = cost.seconds(
            stats.rows, stats.tokens - stats.drafted, passes=stats.passes, ragged=stats.prefill_tokens > 0
        )
        self._with = keep * self._with + stats.paced_seconds
        self._without = keep * self._without + plain * stats.emitted / stats.rows
        self._drafted = keep * self._drafted + stats.drafted
        self._accepted = keep * self._accepted + stats.accepted
        if self._mode != "always" and self.state != "closed":
            self._judge()

    def invite(self, *, first: bool = False) -> None:
        """Bring the next probe forward because new drafts are at hand: to an eighth of the wait, or to now."""
        if self.state != "closed":
            return
        if first:
            self._wait = FIRST_WAIT
            self._closed_for = self._wait
        elif self._closed_for >= self._wait // 8:
            self._closed_for = self._wait

    def _judge(self) -> None:
        if self._probed < PROBE_PASSES:
            return
        if self._mode == "acceptance":
            value, least = self.acceptance, self._floor
            fact = f"acceptance {value:.0%}, floor {self._floor:.0%}"
        else:
            value, least = self.measured, 1.0
            fact = f"measured gain {value:.2f}"
        if self.state == "probing":
            clear = abs(value / least - 1.0) >= _CLEAR
            if not clear and self._probed < LONGEST_PROBE:
                return
            if value >= least:
                self.state, self._wait = "open", FIRST_WAIT
                self._reason = f"on: {fact}"
                self.changes += 1
            else:
                self._close(f"off: {fact}", failed=True)
        elif value < least * CLOSE_BELOW:
            self._close(f"off: {fact}", failed=False)

    def _close(self, reason: str, *, failed: bool) -> None:
        self._wait = min(2 * self._wait, LONGEST_WAIT) if failed else FIRST_WAIT
        self.state, self._reason = "closed", reason
        self._closed_for = self._idle = 0
        self.changes += 1

    def _probe(self) -> None:
        self.state, self._reason = "probing", "on: trying drafts out again"
        self._probed, self._idle = -self._learning, 0
        self._with = self._without = self._drafted = self._accepted = 0.0
