"""After a warm-up nothing of drafting is compiled any more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actors.drafts.options import SpeculationOptions
from actors.rollout import draft_budget, draft_calibration, draft_cost, history_drafts, row_sources
from actors.rollout.draft_cost import PassCost
from actors.rollout.draft_warm_up import warm_up
from actors.rollout.history_drafts import HistoryDrafts
from pipelines.replay import Recorded, replay
from storage.history.index import automaton_set, live_automaton
from storage.history.schema import prompt_hash
from tests.actors.rollout.conftest import request
from tests.actors.rollout.test_draft_sources import ANSWER, PROMPT, pack_of, past


def variants() -> dict[str, int]:
    """Compiled variants of each kernel."""
    modules: list[Any] = [draft_budget, draft_calibration, draft_cost, history_drafts, row_sources]
    modules += [automaton_set, live_automaton]
    return {
        f"{module.__name__}.{name}": len(kernel.signatures)
        for module in modules
        for name, kernel in vars(module).items()
        if hasattr(kernel, "signatures")
    }


@pytest.mark.parametrize("source", ["history", "hybrid", "previous_epoch"])
def test_drafting_compiles_nothing_after_a_warm_up(source: str) -> None:
    options = SpeculationOptions(source=source)
    warm_up(options)
    before = variants()
    drafts = HistoryDrafts(options.model_copy(update={"gate": "always"}), cost=PassCost(1.0, 0.0, 1e-3))
    drafts.add_pack(pack_of(past(ANSWER)))
    answers = [Recorded(request(i, PROMPT, group=1, max_tokens=30), np.array(ANSWER)) for i in range(6)]
    if source != "previous_epoch":  # enough text for the index of running rows to outgrow its first arrays
        far = request(99, PROMPT, group=2, max_tokens=5000)
        replay([Recorded(far, np.arange(5000) % 50)], drafts, PassCost(1.0, 0.0, 1e-3), max_rows=1)
    for item in answers:
        drafts.register(item.request.request_id, prompt_hash(PROMPT), 0)
    totals = replay(answers, drafts, PassCost(1.0, 0.0, 1e-3), max_rows=3)
    assert totals.accepted > 0
    assert variants() == before


@pytest.mark.parametrize("index", ["levels", "fuzzy"])
def test_other_indexes_can_be_warmed_up(index: str) -> None:
    warm_up(SpeculationOptions(source="history", index=index))
