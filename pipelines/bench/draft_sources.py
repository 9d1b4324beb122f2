"""What each kind of index brings on the same recorded answers, played back through the run's own draft retrieval.

The store, the indexes, the packs and the draft rules are those of a training run; only the model is replaced by the
answers that it wrote. Seen prompts are compared from the second visit on, unseen ones on the first visit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.drafts.options import SpeculationOptions
from actors.drafts.retriever import DraftRetriever
from actors.rollout.draft_cost import PassCost
from actors.rollout.history_drafts import HistoryDrafts
from pipelines.bench.harness import BenchTable
from pipelines.recorded_steps import RecordedStep, recorded_steps
from pipelines.replay import Recorded, Totals, replay
from storage.history.archive import RolloutArchive
from storage.history.schema import to_groups
from storage.history.store import HistoryStore
from storage.records import TRAIN_SPLIT, Group

SEEN: Mapping[str, Mapping[str, Any]] = {
    "automaton, siblings and own text": {},
    "automaton alone": {"live": False},
    "levels by frequency": {"index": "levels", "live": False},
    "levels by recency": {"index": "levels", "order": "recency", "live": False},
    "fuzzy (MinHash)": {"index": "fuzzy", "live": False},
}
"""Indexes of answers to the same prompt, with what differs from the defaults."""

UNSEEN: Mapping[str, Mapping[str, Any]] = {
    "siblings and own text": {},
    "with one global index": {"unseen": "global"},
    "with the nearest prompts": {"unseen": "nearest"},
}
"""Sources for prompts without an earlier answer."""


@dataclass(frozen=True, slots=True)
class SourceResult:
    """What one source came to: on prompts seen before (or for ``UNSEEN`` on new ones), by acceptance and by cost."""

    name: str
    totals: Totals
    plain: Totals

    @property
    def speedup(self) -> float:
        """Time of plain decoding over that with drafts, by the cost that was given."""
        return self.plain.seconds / self.totals.seconds


def compare_sources(
    archive: RolloutArchive, cost: PassCost, folder: Path, *, max_rows: int, fingerprint: int
) -> list[SourceResult]:
    """Play the recorded answers back through every source.

    Args:
        archive: Rollouts of a run that visited its prompts more than once.
        cost: What a forward pass costs.
        folder: For the histories.
        max_rows: Rows side by side.
        fingerprint: Of the run's tokenizer.
    """
    results: list[SourceResult] = []
    for seen, sources in ((True, SEEN), (False, UNSEEN)):
        for name, changes in sources.items():
            options = SpeculationOptions.model_validate({"source": "history", "gate": "always", **changes})
            place = folder / f"{len(results)}"
            results.append(_walk(archive, name, options, cost, place, max_rows, fingerprint, seen=seen))
    return results


def sources_table(results: list[SourceResult]) -> BenchTable:
    """One line a source."""
    return BenchTable(
        "draft sources on the same traces, by the measured cost of a pass",
        ("source", "prompts", "tokens/row/pass", "acceptance", "speed-up"),
        tuple(
            (
                result.name,
                "seen" if number < len(SEEN) else "new",
                f"{result.totals.acceptance_length:.2f}",
                f"{result.totals.acceptance:.0%}",
                f"{result.speedup:.2f}",
            )
            for number, result in enumerate(results)
        ),
    )


def _walk(
    archive: RolloutArchive,
    name: str,
    options: SpeculationOptions,
    cost: PassCost,
    folder: Path,
    max_rows: int,
    fingerprint: int,
    *,
    seen: bool,
) -> SourceResult:
    drafts = HistoryDrafts(options, cost=cost)
    retriever = DraftRetriever(HistoryStore(folder, fingerprint), options)
    totals, plain = Totals(), Totals()
    try:
        for step, groups in _steps(archive, options):
            answered = {key for key, visits in zip(_keys(step), step.visits, strict=True) if visits.answers}
            counted = [a for a, key in zip(step.answers, _keys(step), strict=True) if (key in answered) == seen]
            if counted:
                drafts.add_pack(retriever.pack([group.prompt.token_ids for group in groups]))
                _register(drafts, step)
                totals.add(replay(counted, drafts, cost, max_rows))
                _release(drafts, step.answers)
                plain.add(replay(counted, None, cost, max_rows))
            retriever.observe(step.number, groups, step.answers[0].request.sampling)
    finally:
        retriever.close()
    return SourceResult(name, totals, plain)


def _steps(archive: RolloutArchive, options: SpeculationOptions) -> Iterator[tuple[RecordedStep, list[Group]]]:
    tables = archive.iterate(TRAIN_SPLIT)
    for step, (_, table) in zip(recorded_steps(archive, options, TRAIN_SPLIT), tables, strict=True):
        if step.answers:
            yield step, to_groups(table)


def _keys(step: RecordedStep) -> list[int]:
    return [key for key, _ in step.slots]


def _register(drafts: HistoryDrafts, step: RecordedStep) -> None:
    for recorded, (key, sample) in zip(step.answers, step.slots, strict=True):
        drafts.register(recorded.request.request_id, key, sample)


def _release(drafts: HistoryDrafts, answers: list[Recorded]) -> None:
    for recorded in answers:
        drafts.release(recorded.request.request_id)
