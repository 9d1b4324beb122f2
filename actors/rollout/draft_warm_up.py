"""Compiles what drafting needs before the first rollout asks for it and is held up."""

from __future__ import annotations

import numpy as np

from actors.drafts.options import SpeculationOptions
from actors.drafts.pack import PastAnswer, PastPrompt, build_pack
from actors.rollout.draft_cost import CostFit, PassCost
from actors.rollout.engine import Request, RunningRows, StepStats
from actors.rollout.history_drafts import HistoryDrafts
from storage.history.index.live_automaton import LiveAutomaton
from storage.history.schema import prompt_hash
from storage.records import SamplingParams


def warm_up(options: SpeculationOptions) -> None:
    """Draft for two made-up rows with ``options``; machine code that is on disk already is only loaded."""
    prompt = np.arange(4, dtype=np.int32)
    answer = np.arange(4, 40, dtype=np.int32)
    past = PastAnswer(token_ids=answer, logprobs=np.zeros(len(answer), np.float32), sample=0)
    exact = options.model_copy(update={"verify": "exact", "gate": "always"})
    source = HistoryDrafts(exact, cost=PassCost(1.0, 0.0, 1e-3))
    source.add_pack(build_pack([PastPrompt(prompt_ids=prompt, answers=[past])], generation=0, index=options.index))
    tokens = np.zeros((2, 64), np.int32)
    tokens[:, :4], tokens[:, 4:40] = prompt, answer
    rows = np.arange(2)
    for handle in (0, 1):
        source.register(handle, prompt_hash(prompt), 0)
        source.open(
            handle, Request(request_id=handle, prompt_ids=prompt, sampling=SamplingParams(max_tokens=60), group=0)
        )
    ends, room = np.array([4, 4]), np.array([8, 8])
    for length in (8, 16):
        source.propose(RunningRows(rows, tokens, ends, np.array([length, length + 4]), room))
        source.observe(rows, np.array([4, 4]), np.array([4, 0]))
    if options.live and options.source in ("history", "hybrid"):
        _outgrow_live_index()
    fit = CostFit()
    for count in range(1, 20):
        fit.observe(
            StepStats(
                rows=count,
                tokens=count,
                prefill_tokens=0,
                emitted=count,
                drafted=0,
                accepted=0,
                waiting=0,
                seconds=1.0,
                paced_seconds=1.0,
            )
        )


def _outgrow_live_index() -> None:
    """Let the index of running rows move to larger arrays, as it does when a run has been going for a while."""
    index = LiveAutomaton()
    [document] = index.add_group(1).tolist()
    begun = index.nbytes
    while index.nbytes == begun:
        index.extend(document, np.arange(512))
