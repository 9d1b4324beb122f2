"""Ten steps equal five, a save, a load and five more, bit for bit on CPU (I7)."""

import os
import random
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from actors.learner.learn import Save, Saved, Stop, TrainBatch, Trained, learn
from actors.weights import unpack
from storage.files import StorageError
from tests.actors.learner.batches import make_learner, random_groups, weights_of

SETTINGS = {
    "grpo": {},
    "decoupled_ppo": {"minibatches": 2, "schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.01},
    "tis": {"kl": {"coefficient": 0.1}, "schedule": "linear"},
}
TIMES = ("seconds_forward_backward", "seconds_proximal", "seconds_optimiser")


@pytest.fixture(scope="module")
def batches(model_path):
    return [random_groups(model_path, groups=3, samples=3, seed=seed, longest=10) for seed in range(10)]


def train(learner, batches, first):
    reports = [learner.train_step(groups, first + i) for i, groups in enumerate(batches)]
    return [{k: v for k, v in report.metrics.items() if k not in TIMES} for report in reports]


@pytest.mark.parametrize("algorithm", sorted(SETTINGS))
def test_resume_is_bitwise(model_path, batches, tmp_path, algorithm):
    straight = make_learner(model_path, algorithm, **SETTINGS[algorithm])
    expected = train(straight, batches, 0)

    first = make_learner(model_path, algorithm, **SETTINGS[algorithm])
    train(first, batches[:5], 0)
    first.save(tmp_path / "learner")
    first.save_model(tmp_path / "model")
    train(first, batches[5:6], 5)  # what happens after a save must not leak into it

    second = make_learner(tmp_path / "model", algorithm, **SETTINGS[algorithm])
    second.load(tmp_path / "learner")
    assert second.version == 5
    assert train(second, batches[5:], 5) == expected[5:]
    assert torch.equal(weights_of(second), weights_of(straight))
    assert second.version == straight.version == 10


def test_forgetting_the_optimiser_is_noticed(model_path, batches, tmp_path):
    """Negative control: without the moments the same weights go elsewhere."""
    straight = make_learner(model_path)
    train(straight, batches[:4], 0)
    first = make_learner(model_path)
    train(first, batches[:2], 0)
    first.save_model(tmp_path / "model")
    second = make_learner(tmp_path / "model")
    train(second, batches[2:4], 2)
    assert not torch.equal(weights_of(second), weights_of(straight))


def test_trainer_state_needs_no_pickled_code_and_restores_random_states(model_path, tmp_path):
    learner = make_learner(model_path)
    learner.save(tmp_path)
    state = torch.load(tmp_path / "trainer.pt", weights_only=True)
    assert state["version"] == 0
    expected = (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random())
    learner.load(tmp_path)
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()) == expected


def test_state_of_other_weights_is_refused(model_path, batches, tmp_path):
    learner = make_learner(model_path)
    train(learner, batches[:1], 0)
    learner.save(tmp_path)
    with pytest.raises(StorageError, match="saved with other weights"):
        make_learner(model_path).load(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_missing_or_damaged_state_names_the_file(model_path, tmp_path, damage):
    learner = make_learner(model_path)
    if damage == "cut":
        learner.save(tmp_path)
        file = tmp_path / "trainer.pt"
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(StorageError, match=r"trainer\.pt"):
        learner.load(tmp_path)


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_state_that_would_run_code_is_refused_and_runs_none(model_path, tmp_path):
    learner = make_learner(model_path)
    torch.save({"version": 0, "weights": Payload(tmp_path / "harm")}, tmp_path / "trainer.pt")
    with pytest.raises(StorageError, match=r"trainer\.pt: it is damaged, or holds more than tensors") as caught:
        learner.load(tmp_path)
    assert "weights_only" not in str(caught.value), "torch's advice is to run it"
    assert not (tmp_path / "harm").exists()
    torch.load(tmp_path / "trainer.pt", weights_only=False)
    assert (tmp_path / "harm").is_dir(), "the payload does no harm, so the test proves nothing"


def test_state_of_something_else_is_refused(model_path, tmp_path):
    learner = make_learner(model_path)
    for content in ({"version": 0}, [1, 2], torch.zeros(2)):
        torch.save(content, tmp_path / "trainer.pt")
        with pytest.raises(StorageError, match=r"trainer\.pt does not hold a trainer's state"):
            learner.load(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "lacking", "reshaped"])
def test_reference_that_is_damaged_or_of_another_model_is_refused(model_path, tmp_path, damage):
    learner = make_learner(model_path, kl={"coefficient": 0.1})
    learner.save(tmp_path)
    file = tmp_path / "reference.safetensors"
    weights = load_file(file)
    name = min(weights)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:100])
    elif damage == "lacking":
        save_file({other: tensor for other, tensor in weights.items() if other != name}, file)
    else:
        save_file({**weights, name: torch.zeros(3, 5)}, file)
    with pytest.raises(StorageError, match=r"reference\.safetensors"):
        learner.load(tmp_path)


def test_full_disk_names_the_folder(model_path, tmp_path, monkeypatch):
    learner = make_learner(model_path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(StorageError, match=r"here: No space left on device; free space"):
        learner.save(tmp_path / "here")


def test_saved_model_is_an_ordinary_checkpoint(model_path, batches, tmp_path):
    learner = make_learner(model_path)
    train(learner, batches[:1], 0)
    learner.save_model(tmp_path / "model")
    names = {p.name for p in (tmp_path / "model").iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    } <= names
    again = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    for name, tensor in learner.state().items():
        assert torch.equal(again.state_dict()[name], tensor)


class Channel:
    def __init__(self, *commands):
        self.commands, self.received = list(commands), 0

    def receive(self):
        self.received += 1
        return self.commands.pop(0)


def test_loop_answers_each_command_once_and_only_when_asked(model_path, batches, tmp_path):
    learner = make_learner(model_path)
    idle = random_groups(model_path, groups=1, noise_rewards=False)
    channel = Channel(
        TrainBatch(step=0, groups=tuple(batches[0])),
        TrainBatch(step=1, groups=tuple(idle)),
        Save(path=str(tmp_path)),
        Stop(),
    )
    events = learn(learner, channel)
    trained = next(events)
    assert channel.received == 1
    assert isinstance(trained, Trained)
    assert (trained.manifest.version, trained.report.step) == (1, 0)
    packed = unpack(trained.manifest, trained.buffer)
    assert all(torch.equal(packed[name], tensor) for name, tensor in learner.state().items())
    still = next(events)
    assert (still.manifest, still.buffer, still.report.stepped) == (None, None, False)
    assert next(events) == Saved(path=str(tmp_path))
    assert list(events) == []
    again = make_learner(tmp_path / "model")
    again.load(tmp_path / "learner")
    assert again.version == 1


def test_published_buffer_is_a_snapshot(model_path, batches):
    """The next step must not write through into weights that are on their way to the engines."""
    learner = make_learner(model_path)
    channel = Channel(*(TrainBatch(step=i, groups=tuple(batches[i])) for i in range(2)), Stop())
    events = learn(learner, channel)
    first = next(events)
    before = first.buffer.copy()
    next(events)
    assert (first.buffer == before).all()


def test_a_model_whose_tokenizer_has_gone_is_not_saved_without_it(model_path, tmp_path):
    base = shutil.copytree(model_path, tmp_path / "base")
    learner = make_learner(base)
    shutil.rmtree(base)
    with pytest.raises(StorageError, match="base is gone, and with it the tokenizer"):
        learner.save_model(tmp_path / "model")
