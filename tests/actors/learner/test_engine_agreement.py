"""Engine and learner meet: what the engine records is what the learner recomputes (I3), before and after an update."""

from dataclasses import replace

import numpy as np
import pytest

from actors.rollout.engine import Request
from actors.rollout.torch_engine import TorchEngine
from actors.weights import pack
from storage.records import Group, GroupKey, Prompt, Sample, SamplingParams, request_id
from tests.actors.learner.batches import EOS, make_learner


def rollout(engine, sampling, *, epoch, rewards):
    """Four groups of four answers, with random rewards."""
    requests, owners = [], {}
    for number in range(4):
        key = GroupKey("train", epoch, number)
        prompt = Prompt(index=number, token_ids=np.array([1, 2 + number, 5], np.int32), text="")
        for index in range(4):
            ident = request_id(0, key, index)
            owners[ident] = (prompt, key, index)
            params = SamplingParams(max_tokens=16, stop_token_ids=(EOS,), **sampling)
            requests.append(Request(request_id=ident, prompt_ids=prompt.token_ids, sampling=params, group=number))
    engine.submit(requests)
    samples = {}
    while len(samples) < len(requests):
        for completion in engine.step():
            _, key, index = owners[completion.request_id]
            samples[key, index] = Sample(
                key=key,
                index=index,
                segments=completion.segments,
                text="",
                finish_reason=completion.finish_reason,
                reward=float(rewards.normal()),
                reward_status="ok",
            )
    prompts = {key: prompt for prompt, key, _ in owners.values()}
    return [
        Group(key=key, prompt=prompt, samples=tuple(samples[key, i] for i in range(4)))
        for key, prompt in prompts.items()
    ]


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 1.2, "top_k": 5}, {"temperature": 1.0, "top_p": 0.8}],
)
def test_equal_weights_give_ratio_one(model_path, sampling):
    rewards = np.random.default_rng(0)
    engine = TorchEngine(model_path, max_rows=5, max_length=32, dtype="float32", device="cpu")
    learner = make_learner(
        model_path,
        learning_rate=1e-2,
        max_tokens=16,
        sampling={"temperature": 1.0, "top_p": 1.0, "top_k": 0} | sampling,
    )
    for step in range(2):
        groups = rollout(engine, sampling, epoch=step, rewards=rewards)
        metrics = learner.train_step(groups, step).metrics
        assert metrics["tokens_trained"] > 50
        assert metrics["rejected_support"] == 0
        assert metrics["ratio_outside"] == 0
        assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-4)
        assert metrics["ratio_p99"] == pytest.approx(1, abs=1e-4)
        assert metrics["kl_behaviour"] < 1e-8
        assert metrics["staleness_max"] == 0
        assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0
        manifest, buffer = pack(learner.state(), learner.version)
        engine.load_weights(manifest, buffer)
        engine.activate_weights(learner.version)
    # control: the same answers one version later are off policy
    late = learner.train_step(groups, 2).metrics
    assert late["ratio_outside"] > 0.1
    assert late["staleness_max"] == 1


def test_stale_logprobs_of_another_temperature_are_seen(model_path):
    """Negative control: an engine at 0.7 and a learner that believes 1.0 do not agree."""
    engine = TorchEngine(model_path, max_rows=16, max_length=32, dtype="float32", device="cpu")
    groups = rollout(engine, {"temperature": 0.7}, epoch=0, rewards=np.random.default_rng(0))
    assert make_learner(model_path, max_tokens=16).train_step(groups, 0).metrics["ratio_outside"] > 0.3


def test_order_of_arrival_changes_no_bit(model_path):
    engine = TorchEngine(model_path, max_rows=16, max_length=32, dtype="float32", device="cpu")
    groups = rollout(engine, {"temperature": 1.0}, epoch=0, rewards=np.random.default_rng(0))
    digests = []
    for order in (groups, groups[::-1]):
        learner = make_learner(model_path, max_tokens=16)
        learner.train_step([replace(group) for group in order], 0)
        digests.append(pack(learner.state(), 1)[0].hash)
    assert digests[0] == digests[1]
