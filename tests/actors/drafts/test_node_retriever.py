"""A node's own retriever makes the packs that the run's retriever would make, out of answers that travel once."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.drafts.node_retriever import NodeRetriever
from actors.drafts.options import SpeculationOptions
from actors.drafts.pack import DraftPack
from actors.drafts.prompt_indexes import Stamp
from actors.drafts.retriever import DraftRetriever, PastAnswers
from storage.history.schema import prompt_hash
from storage.history.store import HistoryStore
from storage.records import Group, GroupKey, Int32Array, Prompt, Sample, SamplingParams, Segment

SAMPLING = SamplingParams(max_tokens=400)


def prompt(index: int) -> Int32Array:
    return np.arange(index, index + 6, dtype=np.int32)


def visit(epoch: int, index: int, *, tokens: int = 40) -> Group:
    rng = np.random.default_rng((epoch, index))
    key = GroupKey("train", epoch, index)
    samples = tuple(
        Sample(
            key=key,
            index=slot,
            segments=(
                Segment(
                    source="policy",
                    version=epoch,
                    token_ids=rng.integers(0, 50, tokens, dtype=np.int32),
                    logprobs=-np.ones(tokens, np.float32),
                ),
            ),
            text="",
            finish_reason="stop",
        )
        for slot in range(4)
    )
    return Group(key=key, prompt=Prompt(index=index, token_ids=prompt(index), text=""), samples=samples)


class Node:
    """A node's retriever, and what came over the network."""

    def __init__(self, home: DraftRetriever, options: SpeculationOptions) -> None:
        self.home = home
        self.retriever = NodeRetriever(options)
        self.travelled: list[int] = []
        self.bytes = 0

    def pack(self, *indices: int) -> DraftPack:
        prompts = [prompt(index) for index in indices]

        def fetch(known: Mapping[int, Stamp]) -> PastAnswers:
            sent = pickle.dumps(self.home.answers(prompts, known), protocol=5)
            self.bytes = len(sent)
            answers: PastAnswers = pickle.loads(sent)
            self.travelled.append(len(answers.prompts))
            return answers

        made = self.retriever.pack(prompts, fetch)
        assert made is not None
        return made


def same(one: DraftPack, other: DraftPack) -> bool:
    left, right = pickle.loads(pickle.dumps(one)), pickle.loads(pickle.dumps(other))
    pairs = [(getattr(left.automata, name), array) for name, array in right.automata.arrays().items()]
    pairs += [(getattr(left.previous, name), getattr(right.previous, name)) for name in ("tokens", "starts", "keys")]
    pairs += [(left.prompts, right.prompts), (left.checks, right.checks)]
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("source", ["history", "previous_epoch", "hybrid"])
def test_packs_are_those_of_the_runs_retriever_and_answers_travel_once(tmp_path: Path, source: str) -> None:
    options = SpeculationOptions(source=source)  # type: ignore[arg-type]
    home = DraftRetriever(HistoryStore(tmp_path, 1), options)
    node = Node(home, options)
    assert not len(node.pack(1, 2).prompts), "nothing is known of them yet"
    home.observe(1, [visit(0, 1), visit(0, 2)], SAMPLING)
    home.observe(2, [visit(0, 3)], SAMPLING)
    assert same(node.pack(1, 2, 3, 2), home.pack([prompt(i) for i in (1, 2, 3)]))
    assert same(node.pack(2, 1), home.pack([prompt(i) for i in (1, 2)]))
    home.observe(3, [visit(1, 2)], SAMPLING)
    assert same(node.pack(1, 2, 4), home.pack([prompt(i) for i in (1, 2)]))
    assert node.travelled == [0, 3, 0, 1]
    home.close()


def test_a_successor_of_the_runs_retriever_is_not_taken_for_the_dead_one(tmp_path: Path) -> None:
    options = SpeculationOptions(source="history")
    first = DraftRetriever(HistoryStore(tmp_path / "a", 1), options)
    first.observe(1, [visit(0, 1)], SAMPLING)
    node = Node(first, options)
    node.pack(1)
    first.close()
    # It has seen the prompt as often as the dead one, but not the same answers.
    node.home = DraftRetriever(HistoryStore(tmp_path / "b", 1), options)
    node.home.observe(1, [visit(7, 1)], SAMPLING)
    assert same(node.pack(1), node.home.pack([prompt(1)]))
    assert node.travelled == [1, 1]
    node.home.close()


def test_what_travels_is_a_fraction_of_the_indexes_that_are_made_of_it(tmp_path: Path) -> None:
    options = SpeculationOptions(source="history")
    home = DraftRetriever(HistoryStore(tmp_path, 1), options)
    home.observe(1, [visit(0, index, tokens=300) for index in range(8)], SAMPLING)
    node = Node(home, options)
    made = node.pack(*range(8))
    assert node.bytes < made.nbytes / 4
    home.close()


def test_memory_is_bounded_and_what_was_dropped_is_asked_for_again(tmp_path: Path) -> None:
    options = SpeculationOptions(source="history", index_mb=0.1)
    home = DraftRetriever(HistoryStore(tmp_path, 1), options)
    home.observe(1, [visit(0, index, tokens=300) for index in range(6)], SAMPLING)
    node = Node(home, options)
    everything = home.pack([prompt(index) for index in range(6)])
    for _ in range(2):
        assert same(node.pack(*range(6)), everything), "a pack holds all that was asked for all the same"
    assert node.retriever.stats()["index_bytes"] <= 0.1e6
    assert node.travelled[1] > 0
    home.close()


def test_the_runs_retriever_makes_no_indexes_while_others_do(tmp_path: Path) -> None:
    options = SpeculationOptions(source="history")
    home = DraftRetriever(HistoryStore(tmp_path, 1), options)
    home.observe(1, [visit(0, 1)], SAMPLING)
    indexed = home.stats()["index_bytes"]
    Node(home, options).pack(1)
    home.observe(2, [visit(1, 1)], SAMPLING)
    assert home.stats()["index_bytes"] < indexed, "two visits without an index are smaller than one with"
    assert home.pack([prompt(1)]).automata.nbytes > 0
    assert home.stats()["index_bytes"] > indexed
    home.close()


def test_shared_answers_travel_and_are_indexed_once_until_they_change(tmp_path: Path) -> None:
    options = SpeculationOptions(source="history", unseen="global")
    home = DraftRetriever(HistoryStore(tmp_path, 1), options)
    home.observe(1, [visit(0, index, tokens=300) for index in range(6)], SAMPLING)
    node = Node(home, options)
    first, sent = node.pack(50), node.bytes
    again = node.pack(51)
    assert node.bytes < sent / 20
    assert first.shared is not None
    assert again.shared is not None
    assert np.array_equal(first.shared.next_token, again.shared.next_token)
    local = home.pack([prompt(52)])
    assert local.shared is not None
    assert np.array_equal(local.shared.next_token, first.shared.next_token)
    home.observe(2, [visit(1, 1, tokens=300)], SAMPLING)
    changed = node.pack(53)
    assert changed.shared is not None
    assert len(changed.shared.next_token) > len(first.shared.next_token)
    home.close()


def test_what_a_node_keeps_holds_nothing_else_in_memory(tmp_path: Path) -> None:
    options = SpeculationOptions(source="history")
    home = DraftRetriever(HistoryStore(tmp_path, 1), options)
    home.observe(1, [visit(0, 1)], SAMPLING)
    arrived = pickle.loads(pickle.dumps(home.answers([prompt(1)], {}), protocol=5))
    whole = np.concatenate([answer.token_ids for answer in arrived.prompts[prompt_hash(prompt(1))].answers])
    past = arrived.prompts[prompt_hash(prompt(1))]
    views = [replace(a, token_ids=whole[40 * i : 40 * i + 40]) for i, a in enumerate(past.answers)]
    arrived = replace(arrived, prompts={prompt_hash(prompt(1)): replace(past, answers=views)})
    node = NodeRetriever(options)
    node.pack([prompt(1)], lambda known: arrived)
    held = node._indexes.get(prompt(1))
    assert held is not None
    assert all(answer.token_ids.base is None and answer.logprobs.base is None for answer in held[0].answers)
    home.close()


@pytest.mark.parametrize("bad", [-1, 1 << 20])
@pytest.mark.parametrize("unseen", ["off", "global", "nearest"])
def test_a_token_that_no_index_holds_costs_its_own_answer_only(tmp_path: Path, bad: int, unseen: str) -> None:
    options = SpeculationOptions(source="history", unseen=unseen)  # type: ignore[arg-type]
    home = DraftRetriever(HistoryStore(tmp_path, 1), options)
    spoilt = visit(0, 1)
    spoilt.samples[2].segments[0].token_ids[5] = bad
    home.observe(1, [spoilt, visit(0, 2)], SAMPLING)
    made = home.pack([prompt(2), prompt(1), prompt(77)])
    assert home.failure == ""
    assert np.diff(made.previous.starts).tolist() == [40] * 7
    assert len(made.automata) == 2
    home.close()
