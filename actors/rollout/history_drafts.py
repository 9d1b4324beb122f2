"""The draft source of a rollout worker: earlier answers and running siblings propose, what pays is verified.

It joins the parts: packs of earlier answers (:mod:`pack_shelf`), what follows the rows (:mod:`row_sources`), how likely
a draft is accepted (:mod:`draft_calibration`), what a pass costs (:mod:`draft_cost`), how long drafts may be
(:mod:`draft_lengths`), and whether they pay at all (:mod:`draft_gate`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.drafts.options import GateMode, SpeculationOptions
from actors.drafts.pack import PROMPT_TAIL, SHARED_KEY, DraftPack
from actors.rollout.draft_calibration import SOURCES, Calibration
from actors.rollout.draft_cost import CostFit, PassCost
from actors.rollout.draft_gate import DraftGate
from actors.rollout.draft_lengths import AimdLengths, CalibratedLengths, FixedLengths, LengthRule
from actors.rollout.engine import Drafts, Request, RunningRows, StepStats
from actors.rollout.lenient_reuse import LenientReuse
from actors.rollout.live_rows import LiveRows
from actors.rollout.pack_shelf import Binding, PackShelf
from actors.rollout.row_sources import PROMPT, SHARED, Candidates, IndexedRows, PreviousRows, grown
from actors.rollout.table_rows import TableRows
from storage.history.index.compiled import compiled

Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_KNOWN_AFTER = 64
"""Steps from which on the cost of a pass is known well enough to begin drafting with."""
_MOST_WEIGHT = 2.0
"""Weight of a draft token in a row of at least twice the mean priority."""


class HistoryDrafts:
    """A :class:`actors.rollout.engine.DraftSource`; ``on_step`` is to be an observer of the same engine.

    ``add_pack``, ``register``, ``release``, ``switch``, ``reused`` and ``reused_tokens`` may be called from any thread,
    everything else from the thread that decodes; ``metrics`` and ``gate_reason`` only read numbers.

    Attributes:
        version: Version of the active weights, set by the owner; it decides which answers are too old to reuse.
        ready: Whether any open row has something to draft from.
        calibration: Acceptance learned so far.
    """

    def __init__(
        self,
        options: SpeculationOptions,
        *,
        cost: PassCost | None = None,
        rule: LengthRule | None = None,
        index_tail: int = PROMPT_TAIL,
    ) -> None:
        """Make a source without packs.

        Args:
            options: How to draft.
            cost: Cost of a pass where it is known (a replay); it is fitted to the engine's steps otherwise.
            rule: How long drafts are; by default what ``options.draft_length`` says.
            index_tail: Prompt tokens in front of each indexed answer.
        """
        self.version = 0
        self.ready = False
        self.calibration = Calibration()
        self._options = options
        self._index_tail = index_tail
        self._shelf = PackShelf()
        self._known_cost = cost
        self._fit = CostFit()
        self._gate = DraftGate(options.gate, options.acceptance_floor)
        self._wanted: tuple[bool, GateMode] = (True, options.gate)
        self._rule = rule or _rule(options, self.calibration)
        indexed = options.source in ("history", "hybrid")
        self._follows_previous = options.source in ("previous_epoch", "hybrid")
        self._follows_index = indexed
        self._prompt_rows = IndexedRows(PROMPT)
        self._table_rows = TableRows()
        self._shared_rows = IndexedRows(SHARED)
        self._previous_rows = PreviousRows()
        self._live_rows = LiveRows() if indexed and options.live else None
        self._reuse = LenientReuse(options) if options.verify == "lenient" else None
        self._had_history = False
        self._invited: DraftPack | None = None
        self._priority = np.zeros(8, np.float64)
        self._source = np.full(8, -1, np.int64)
        self._cells = np.zeros((8, 1), np.int32)
        self._lenient_pass = False
        self._drafted = np.zeros(len(SOURCES) + 1, np.int64)
        self._accepted = np.zeros(len(SOURCES) + 1, np.int64)
        self._drafts = 0
        self._emitted = self._row_passes = 0
        self._residual_draws, self._residual_tail = 0, 0.0

    def add_pack(self, pack: DraftPack) -> None:
        """Take over a pack; requests registered from now on draw on it. A pack nobody draws on any more is dropped."""
        self._shelf.add(pack)

    def register(self, request_id: int, prompt_hash: int, sample: int) -> None:
        """Say which sample slot of which prompt a request writes; before it is submitted, also when it is resumed."""
        self._shelf.register(request_id, prompt_hash, sample)

    def switch(self, on: bool, gate: GateMode) -> None:
        """Draft or not from the next pass on, and by which rule; off, previous answers are not reused either."""
        self._wanted = on, gate

    def release(self, request_id: int) -> None:
        """Forget a request that is done; ask :meth:`reused` before."""
        self._shelf.release(request_id)

    def reused(self, request_id: int) -> bool:
        """Return whether a request began with tokens of its previous answer, leniently kept (its sample is biased)."""
        return self._shelf.reused(request_id) >= 0

    def reused_tokens(self, request_id: int) -> int:
        """Return how many tokens of its previous answer a request kept; 0 for one written afresh."""
        return max(self._shelf.reused(request_id), 0)

    @property
    def gate_reason(self) -> str:
        """Why drafts are on or off, for people."""
        return self._gate.reason if self._wanted[0] else "off: switched off while the run goes on"

    @property
    def cost(self) -> PassCost | None:
        """What a pass costs; ``None`` while too few steps were seen."""
        return self._known_cost or self._fit.cost

    def open(self, handle: int, request: Request) -> bool:
        """As in the protocol: True when the previous answer is to be reused leniently, from its first token on."""
        reuse = self._open(handle, request)
        self.ready = self._anything()
        return reuse

    def close(self, handle: int) -> None:
        """As in the protocol."""
        self._prompt_rows.close(handle)
        self._table_rows.close(handle)
        self._shared_rows.close(handle)
        self._previous_rows.close(handle)
        if self._live_rows is not None:
            self._live_rows.close(handle)
        if self._reuse is not None:
            self._reuse.close(handle)
        self.ready = self._anything()

    def propose(self, rows: RunningRows) -> Drafts | None:
        """As in the protocol; what has nothing to say costs next to nothing."""
        exact = self._propose(rows)
        if self._reuse is None or not self._reuse.pending:
            return exact
        drafts, lenient = self._reuse.merge(rows, exact or _no_drafts(len(rows.handles)))
        if lenient.any():
            self._lenient_pass = True
            self._source[rows.handles[lenient]] = len(SOURCES)
        return drafts

    def observe(self, handles: Int64Array, drafted: Int64Array, accepted: Int64Array) -> None:
        """As in the protocol."""
        _count(self._source, handles, drafted, accepted, self._drafted, self._accepted)
        self._drafts += len(handles)
        if self._reuse is not None:
            exact = self._source[handles] < len(SOURCES)
            if not exact.all():
                self._reuse.observe(handles[~exact], drafted[~exact], accepted[~exact])
                handles, drafted, accepted = handles[exact], drafted[exact], accepted[exact]
        if len(handles):
            self.calibration.learn(self._cells, handles, drafted, accepted)
            self._rule.observe(handles, drafted, accepted)

    def on_step(self, stats: StepStats) -> None:
        """Learn the cost of a pass and what drafts bring from one engine step."""
        # Nobody asks what a pass costs while there is nothing to draft from, and learning it takes a little of each.
        if stats.drafted or self._fit.steps < _KNOWN_AFTER or self.ready:
            self._fit.observe(stats)
        self._emitted += stats.emitted
        self._row_passes += stats.rows
        self._residual_draws += stats.residual_draws
        self._residual_tail += stats.residual_tail
        # A pass that also reuses whole answers says nothing of what the other drafts bring.
        if stats.drafted and not self._lenient_pass and (cost := self.cost) is not None:
            self._gate.measure(stats, cost)
        self._lenient_pass = False

    def metrics(self) -> dict[str, float]:
        """Return counters since the start and the state of gate and cost; what is not known yet is left out."""
        values: dict[str, float] = {}
        for kind, name in enumerate((*SOURCES, "lenient")):
            values[f"drafted_{name}"] = float(self._drafted[kind])
            values[f"accepted_{name}"] = float(self._accepted[kind])
        if self._options.top_tokens:
            values["residual_draws"] = float(self._residual_draws)
            values["residual_tail"] = self._residual_tail
        drafted = int(self._drafted.sum())
        values["acceptance"] = int(self._accepted.sum()) / drafted if drafted else math.nan
        values["acceptance_length"] = 1 + int(self._accepted.sum()) / self._drafts if self._drafts else math.nan
        values["tokens_per_row_pass"] = self._emitted / self._row_passes if self._row_passes else math.nan
        values["gate_open"] = float(self._gate.state != "closed")
        values["gate_changes"] = float(self._gate.changes)
        values["predicted_gain"] = self._gate.predicted
        values["measured_gain"] = self._gate.measured
        packs = self._shelf.packs
        values["packs"] = float(len(packs))
        values["index_mb"] = sum(pack.nbytes for pack in packs) / 1e6
        if self._live_rows is not None:
            values["live_index_mb"] = self._live_rows.nbytes / 1e6
        cost = self.cost
        if cost is not None:
            values["cost_fixed_ms"] = 1e3 * cost.fixed
            values["cost_row_ms"] = 1e3 * cost.row
            values["cost_token_ms"] = 1e3 * cost.token
            values["cost_ragged_ms"] = 1e3 * cost.ragged
        return {name: value for name, value in values.items() if not math.isnan(value)}

    def export(self) -> dict[str, npt.NDArray[Any]]:
        """Return what was learned, as arrays for a checkpoint."""
        return dict(self.calibration.export())

    def load(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`export` returned; raises ``ValueError`` when it is of another shape."""
        self.calibration.load(state)

    def _open(self, handle: int, request: Request) -> bool:
        self._reserve(handle)
        self._priority[handle] = request.priority
        self._source[handle] = -1
        self._rule.open(handle)
        binding = self._shelf.binding(request)
        prompt = len(request.prompt_ids)
        if self._live_rows is not None and request.group is not None:
            self._live_rows.open(handle, request.group, prompt)
        pack = binding.pack
        if pack is None:
            return False
        begin = max(prompt - self._index_tail, 0)
        found = reuse = False
        if pack.holds(binding.key, request.prompt_ids):
            which = int(pack.automata.find([binding.key])[0])
            if self._follows_index and which >= 0:
                self._prompt_rows.open(handle, pack.automata, which, begin)
                found = True
            table = pack.tables.get(binding.key)
            if self._follows_index and table is not None:
                self._table_rows.open(handle, table)
                found = True
            at = pack.previous.find(binding.key, binding.sample) if self._follows_previous else -1
            reuse = at >= 0 and self._wanted[0] and self._reuses(handle, request, binding, at)
            if at >= 0:  # behind what is leniently kept, too: verified exactly, the rest only saves time
                self._previous_rows.open(handle, pack.previous, at, prompt)
                found = True
        elif pack.shared is not None and self._follows_index:
            which = int(pack.shared.find([binding.key, SHARED_KEY]).max())
            if which >= 0:
                self._shared_rows.open(handle, pack.shared, which, begin)
                found = True
        if found:
            self._invite(pack)
        return reuse

    def _propose(self, rows: RunningRows) -> Drafts | None:
        on, gate = self._wanted
        if gate != self._gate.mode:
            self._gate.switch(gate)
        if not on or not self.ready or (cost := self.cost) is None or not self._gate.admit():
            return None
        count = len(rows.handles)
        limits = self._rule.limits(rows)
        width = max(int(limits.max(initial=0)), 1)
        candidates = Candidates(count, width)
        self._prompt_rows.offer(rows, limits, candidates)
        self._table_rows.offer(rows, limits, candidates)
        self._shared_rows.offer(rows, limits, candidates)
        self._previous_rows.offer(rows, limits, candidates)
        if self._live_rows is not None:
            self._live_rows.offer(rows, limits, candidates)
        if self._gate.learning:
            cost = cost.hopeful(count)
        budget = self._rule.choose(candidates, rows, self._weights(rows.handles), cost)
        self._gate.expect(budget.gain, int(budget.lengths.sum()))
        longest = int(budget.lengths.max(initial=0))
        if not longest:
            return None
        if self._cells.shape[1] < longest:
            self._cells = np.pad(self._cells, ((0, 0), (0, longest - self._cells.shape[1])))
        tokens = np.zeros((count, longest), np.int32)
        _collect(
            rows.handles,
            budget.source,
            budget.lengths,
            candidates.tokens,
            candidates.cells,
            self._source,
            self._cells,
            tokens,
        )
        return Drafts(tokens, budget.lengths)

    def _reuses(self, handle: int, request: Request, binding: Binding, at: int) -> bool:
        return self._reuse is not None and self._reuse.open(handle, request, binding, at, self.version)

    def _anything(self) -> bool:
        return bool(
            self._prompt_rows or self._previous_rows or self._live_rows or self._shared_rows or self._table_rows
        )

    def _weights(self, handles: Int64Array) -> Float64Array:
        """Rows of more than the mean priority, those that are expected to end the step, are worth up to twice."""
        priority = self._priority[handles]
        if not priority.any():
            return np.ones(len(handles))
        mean = float(np.maximum(priority, 0.0).mean())
        if mean <= 0.0:
            return np.ones(len(handles))
        weights: Float64Array = np.clip(priority / mean, 1.0, _MOST_WEIGHT)
        return weights

    def _invite(self, pack: DraftPack) -> None:
        if pack is not self._invited:
            self._gate.invite(first=not self._had_history)
            self._had_history = True
            self._invited = pack

    def _reserve(self, handle: int) -> None:
        if handle >= len(self._source):
            self._source = grown(self._source, handle + 1, -1)
            self._priority = grown(self._priority, len(self._source), 0.0)
            self._cells = np.pad(self._cells, ((0, len(self._source) - len(self._cells)), (0, 0)))


def _no_drafts(rows: int) -> Drafts:
    return Drafts(np.zeros((rows, 0), np.int32), np.zeros(rows, np.int64))


@compiled
def _collect(
    handles: Int64Array,
    source: Int64Array,
    lengths: Int64Array,
    tokens: Int32Array,
    cells: Int32Array,
    sources: Int64Array,
    kept_cells: Int32Array,
    drafts: Int32Array,
) -> None:
    """Copy the chosen candidate of each row to ``drafts``; keep its source and cells under the row's handle."""
    for row in range(len(handles)):
        handle = handles[row]
        sources[handle] = source[row]
        for j in range(lengths[row]):
            drafts[row, j] = tokens[source[row], row, j]
            kept_cells[handle, j] = cells[source[row], row, j]


@compiled
def _count(
    source: Int64Array,
    handles: Int64Array,
    drafted: Int64Array,
    accepted: Int64Array,
    drafted_by: Int64Array,
    accepted_by: Int64Array,
) -> None:
    for i in range(len(handles)):
        drafted_by[source[handles[i]]] += drafted[i]
        accepted_by[source[handles[i]]] += accepted[i]


def _rule(options: SpeculationOptions, calibration: Calibration) -> LengthRule:
    if options.draft_length == "fixed":
        return FixedLengths(options.match_length, options.draft_tokens)
    if options.draft_length == "aimd":
        return AimdLengths(options.match_length, options.max_draft)
    return CalibratedLengths(calibration, options.max_draft)
