"""What engines are given: blended snapshots, every n-th step, and the same again after a resume."""

import numpy as np
import pytest
import torch

from actors.learner.asynchrony_options import AsynchronyOptions
from actors.learner.learn import Stop, TrainBatch, learn
from actors.learner.publishing import Publisher
from actors.weights import pack, unpack
from storage.files import StorageError
from tests.actors.learner.batches import make_learner, random_groups, weights_of


def published_of(learner):
    return torch.cat([t.flatten().clone() for t in learner.published().values()])


def hash_of(learner):
    return pack(learner.published(), learner.version)[0].hash


@pytest.fixture(scope="module")
def batches(model_path):
    return [random_groups(model_path, groups=3, samples=3, seed=seed, longest=8) for seed in range(7)]


def train(learner, batches, first=0):
    return [learner.train_step(groups, first + i) for i, groups in enumerate(batches)]


def test_blend_is_recursive(model_path, batches):
    """published_k = 0.9 theta_k + 0.1 published_(k-1), against the closed form over all earlier weights."""
    learner = make_learner(model_path, asynchrony=AsynchronyOptions(publish_blend=0.9), learning_rate=1e-2)
    history = [weights_of(learner).double()]
    for k, groups in enumerate(batches[:4], 1):
        assert learner.train_step(groups, k).published
        history.append(weights_of(learner).double())
        closed = 0.1**k * history[0] + sum(0.9 * 0.1 ** (k - j) * history[j] for j in range(1, k + 1))
        torch.testing.assert_close(published_of(learner).double(), closed, atol=1e-6, rtol=1e-6)
        # control: blending with the weights of the step before is something else from the second step on
        one_tap = 0.9 * history[k] + 0.1 * history[k - 1]
        assert k == 1 or (closed - one_tap).abs().max() > 1e-4
    assert learner.version == 4


def test_training_does_not_feel_the_blend(model_path, batches):
    plain, blended = make_learner(model_path), make_learner(model_path, asynchrony=AsynchronyOptions(publish_blend=0.5))
    for learner in (plain, blended):
        train(learner, batches[:3])
    assert torch.equal(weights_of(plain), weights_of(blended))
    assert torch.equal(published_of(plain), weights_of(plain))
    assert not torch.equal(published_of(blended), weights_of(blended))


def test_every_nth_step_is_published_and_versions_count_snapshots(model_path, batches):
    learner = make_learner(model_path, asynchrony=AsynchronyOptions(sync_every=3))
    before = published_of(learner)
    seen = []
    for step, groups in enumerate(batches[:6]):
        report = learner.train_step(groups, step)
        assert report.stepped
        seen.append((report.published, report.metrics["published"], learner.version))
        if step == 1:
            assert torch.equal(published_of(learner), before)
        if report.published:
            assert torch.equal(published_of(learner), weights_of(learner))
    assert seen == [(False, 0, 0), (False, 0, 0), (True, 1, 1), (False, 0, 1), (False, 0, 1), (True, 1, 2)]


def test_step_that_moves_nothing_is_no_step_towards_publishing(model_path, batches):
    """I10: all advantages 0, in the middle of a period and at its end."""
    idle = random_groups(model_path, groups=2, noise_rewards=False)
    learner = make_learner(model_path, asynchrony=AsynchronyOptions(sync_every=2, publish_blend=0.9))
    before = published_of(learner)
    assert not train(learner, [idle])[0].stepped
    train(learner, batches[:1], 1)
    report = train(learner, [idle], 2)[0]
    assert (report.stepped, report.published, learner.version) == (False, False, 0)
    assert torch.equal(published_of(learner), before)
    assert train(learner, batches[1:2], 3)[0].published


@pytest.mark.parametrize(
    "fields", [{"publish_blend": 0.9}, {"sync_every": 3}, {"publish_blend": 0.7, "sync_every": 2}], ids=str
)
def test_resume_announces_what_the_engines_had_and_goes_on_bit_for_bit(model_path, batches, tmp_path, fields):
    options = AsynchronyOptions(**fields)
    straight = make_learner(model_path, asynchrony=options)
    train(straight, batches[:4])
    expected = hash_of(straight)
    straight.save(tmp_path / "learner")
    straight.save_model(tmp_path / "model")
    train(straight, batches[4:], 4)  # what happens after a save must not leak into it

    resumed = make_learner(tmp_path / "model", asynchrony=options)
    resumed.load(tmp_path / "learner")
    assert hash_of(resumed) == expected
    # control: the trained weights alone would be announced under a version that they are not
    assert not torch.equal(published_of(resumed), weights_of(resumed))
    train(resumed, batches[4:], 4)
    assert hash_of(resumed) == hash_of(straight)
    assert resumed.version == straight.version
    assert torch.equal(weights_of(resumed), weights_of(straight))


def test_snapshot_is_announced_even_when_the_resumed_run_no_longer_blends(model_path, batches, tmp_path):
    blended = make_learner(model_path, asynchrony=AsynchronyOptions(publish_blend=0.5))
    train(blended, batches[:2])
    blended.save(tmp_path / "learner")
    blended.save_model(tmp_path / "model")
    plain = make_learner(tmp_path / "model")
    plain.load(tmp_path / "learner")
    assert hash_of(plain) == hash_of(blended)
    train(plain, batches[2:3], 2)
    assert torch.equal(published_of(plain), weights_of(plain))


def test_blend_may_begin_on_resume(model_path, batches, tmp_path):
    plain = make_learner(model_path)
    train(plain, batches[:2])
    plain.save(tmp_path / "learner")
    plain.save_model(tmp_path / "model")
    blended = make_learner(tmp_path / "model", asynchrony=AsynchronyOptions(publish_blend=0.5))
    blended.load(tmp_path / "learner")
    start = weights_of(blended)
    assert torch.equal(published_of(blended), start)
    train(blended, batches[2:3], 2)
    torch.testing.assert_close(published_of(blended), (start + weights_of(blended)) / 2)


@pytest.mark.parametrize("damage", ["missing", "foreign"])
def test_snapshot_that_is_not_the_published_one_is_refused(model_path, batches, tmp_path, damage):
    options = AsynchronyOptions(publish_blend=0.9)
    learner = make_learner(model_path, asynchrony=options)
    train(learner, batches[:1])
    learner.save(tmp_path)
    file = tmp_path / "published.safetensors"
    if damage == "missing":
        file.unlink()
    else:
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    with pytest.raises(StorageError, match=r"published\.safetensors"):
        learner.load(tmp_path)


def test_plain_run_holds_and_writes_no_second_copy(model_path, batches, tmp_path):
    learner = make_learner(model_path)
    train(learner, batches[:1])
    learner.save(tmp_path)
    assert not (tmp_path / "published.safetensors").exists()
    own = learner.state()
    assert all(tensor.data_ptr() == own[name].data_ptr() for name, tensor in learner.published().items())


def test_loop_hands_over_the_blend_and_nothing_between_turns(model_path, batches):
    class Channel:
        def __init__(self, commands):
            self.commands = commands

        def receive(self):
            return self.commands.pop(0)

    learner = make_learner(model_path, asynchrony=AsynchronyOptions(publish_blend=0.9, sync_every=2))
    commands = [TrainBatch(step=i, groups=tuple(groups)) for i, groups in enumerate(batches[:2])]
    first, second = learn(learner, Channel([*commands, Stop()]))
    assert (first.manifest, first.buffer, first.report.stepped) == (None, None, True)
    assert second.manifest.version == 1
    got = unpack(second.manifest, second.buffer)
    for name, tensor in learner.published().items():
        assert torch.equal(got[name], tensor)
    assert any(not torch.equal(got[name], tensor) for name, tensor in learner.state().items())


def test_blend_holds_its_own_memory():
    state = {"w": torch.tensor([1.0, 2.0])}
    publisher = Publisher(state, blend=0.5, sync_every=1)
    state["w"].add_(2)
    assert publisher.weights(state)["w"].tolist() == [1.0, 2.0]
    assert publisher.step(state)
    np.testing.assert_array_equal(publisher.weights(state)["w"], [2.0, 3.0])
