"""The reward worker without Ray: envelopes in, scored bundles out."""

import queue as queues
from dataclasses import replace

import numpy as np
import pytest
import ray
from ray.util.queue import Empty

from actors import turns
from actors.bundles import Bundle, BundleHeader, RewardEnvelope, StopEnvelope
from actors.reward.worker import RewardWorker
from actors.turns import TurnOver
from storage.records import GroupKey, Prompt, Sample, SampleHeader, Segment
from tests.actors.reward.conftest import options

KEYS = [GroupKey("train", 0, prompt) for prompt in range(3)]


class LocalQueue:
    def __init__(self, *items):
        self._items = queues.SimpleQueue()
        for item in items:
            self._items.put(item)

    def get(self, timeout):
        try:
            return self._items.get(timeout=timeout)
        except queues.Empty:
            raise Empty from None


def sample(key, index=0, text="quick", reason="stop"):
    tokens = Segment(
        source="policy", version=1, token_ids=np.arange(3, dtype=np.int32), logprobs=np.zeros(3, np.float32)
    )
    return Sample(key=key, index=index, segments=(tokens,), text=text, finish_reason=reason)


def envelope(*samples, **extra):
    prompts = {s.key: Prompt(index=s.key.prompt, token_ids=np.zeros(1, np.int32), text="p") for s in samples}
    header = BundleHeader(
        items=tuple(SampleHeader.of(s, attempt=0) for s in samples), worker="rollout-0", busy_s=0.0, version=1
    )
    return RewardEnvelope(header=header, refs=[Bundle(samples=samples, prompts=prompts)], **extra)


@pytest.fixture
def scored(monkeypatch):
    """Scores envelopes with functions of the module; returns headers and samples by key and index."""
    monkeypatch.setattr(ray, "get", lambda ref: ref)
    monkeypatch.setattr(turns, "PAIRS_A_TURN", 1)
    workers = []

    def pairs(*envelopes, functions, **settings):
        worker = RewardWorker("reward-0", options(*functions, **settings))
        workers.append(worker)
        queue, found, over = LocalQueue(*envelopes, StopEnvelope()), [], False
        while not over:
            over = True
            stream = worker.run(queue)
            for header in stream:
                payload = next(stream)
                if isinstance(header, TurnOver):
                    over = False
                else:
                    found.append((header, payload))
        return found

    def run(*envelopes, **settings):
        headers, samples = {}, {}
        for header, bundle in pairs(*envelopes, **settings):
            assert len(header.items) == len(bundle.samples)
            for item, scored_sample in zip(header.items, bundle.samples, strict=True):
                assert (item.key, item.index) not in headers
                assert (item.key, item.index) == (scored_sample.key, scored_sample.index)
                assert scored_sample.key in bundle.prompts
                headers[item.key, item.index] = item
                samples[item.key, item.index] = scored_sample
        return headers, samples

    run.stream = pairs
    yield run
    for worker in workers:
        worker.close()


def test_each_answer_is_held_to_the_deadline_of_its_prompt(scored):
    envelopes = [
        envelope(sample(KEYS[0]), sample(KEYS[1]), deadlines={KEYS[0]: 0.3}),
        envelope(sample(KEYS[2]), deadlines={KEYS[2]: 0.3}),
    ]
    headers, _ = scored(
        *envelopes, functions=[{"function": "sleeps", "arguments": {"seconds": 0.9}}], timeout_s=20.0, processes=3
    )
    assert [headers[key, 0].reward_status for key in KEYS] == ["timeout", "ok", "timeout"]


def test_record_says_how_long_the_functions_took(scored):
    headers, samples = scored(
        envelope(sample(KEYS[0])), functions=[{"function": "sleeps", "arguments": {"seconds": 0.2}}]
    )
    assert 0.2 <= headers[KEYS[0], 0].score_s < 5.0
    assert samples[KEYS[0], 0].score_s == headers[KEYS[0], 0].score_s


def test_answer_that_was_never_finished_is_an_error_and_not_scored(scored):
    headers, _ = scored(envelope(sample(KEYS[0], reason="error"), sample(KEYS[1])), functions=["length"])
    assert headers[KEYS[0], 0].reward_status == "error"
    assert headers[KEYS[0], 0].reward is None
    assert headers[KEYS[1], 0].reward == 5.0


def test_part_of_a_bundle_that_is_put_twice_is_scored_once_while_it_is_in_hand(scored):
    first = envelope(sample(KEYS[0]), sample(KEYS[1]))
    headers, _ = scored(first, first, functions=[{"function": "sleeps", "arguments": {"seconds": 0.3}}], processes=2)
    assert len(headers) == 2


def test_sample_that_was_begun_anew_is_scored_beside_what_was_written_of_it_before(scored):
    old, new = envelope(sample(KEYS[0], text="old")), envelope(sample(KEYS[0], text="newer"))
    old, new = (
        replace(e, header=replace(e.header, items=tuple(replace(i, call=call) for i in e.header.items)))
        for call, e in ((3, old), (8, new))
    )
    found = []
    for header, _ in scored.stream(old, new, functions=["length"]):
        found += [(item.call, item.reward) for item in header.items]
    assert sorted(found) == [(3, 3.0), (8, 5.0)]


@pytest.mark.parametrize(
    "error",
    [ray.exceptions.ObjectLostError("00" * 28, None, ""), ray.exceptions.ActorDiedError()],
    ids=["lost", "died"],
)
def test_answers_that_were_lost_with_a_node_or_never_put_come_back_pending(scored, monkeypatch, error):
    def lost(ref):
        raise error

    monkeypatch.setattr(ray, "get", lost)
    (pair,) = scored.stream(envelope(sample(KEYS[0]), sample(KEYS[1])), functions=["length"])
    assert [item.reward_status for item in pair[0].items] == ["pending", "pending"]
    assert pair[1].samples == ()
