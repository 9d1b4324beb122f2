import pytest
import torch

from actors.learner.optimiser import Optimiser, learning_rate
from actors.learner.options import LearnerOptions


def rates(total, **fields):
    options = LearnerOptions(learning_rate=1.0, **fields)
    return [learning_rate(options, update, total) for update in range(total)]


def test_warm_up_rises_linearly_then_stays():
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_the_floor_at_the_last_update():
    assert rates(5, schedule="linear", min_learning_rate_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert learning_rate(LearnerOptions(learning_rate=1.0, schedule="linear"), 99, 5) == pytest.approx(0.1)


def test_cosine_falls_to_the_floor_after_warm_up():
    got = rates(7, schedule="cosine", min_learning_rate_ratio=0.0, warmup_steps=2)
    assert got == pytest.approx([0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466, 0.0], abs=1e-6)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_run_of_one_update_has_a_rate(schedule):
    assert rates(1, schedule=schedule) == [1.0]


def test_gradient_is_clipped_by_its_global_norm():
    layer = torch.nn.Linear(2, 1)
    before = layer.weight.detach().clone()
    optimiser = Optimiser(layer, LearnerOptions(learning_rate=0.5, max_grad_norm=1.0, adam_eps=1.0), 1)
    layer.weight.grad = torch.tensor([[30.0, 40.0]])
    layer.bias.grad = torch.tensor([0.0])
    update = optimiser.step()
    assert update.grad_norm == pytest.approx(50.0)
    # first Adam step on g is lr * g / (|g| + eps), with g clipped to (0.6, 0.8)
    expected = before - 0.5 * torch.tensor([[0.6 / 1.6, 0.8 / 1.8]])
    torch.testing.assert_close(layer.weight.detach(), expected, atol=1e-6, rtol=0)
    assert layer.weight.grad is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_moves_nothing(bad):
    layer = torch.nn.Linear(2, 1)
    optimiser = Optimiser(layer, LearnerOptions(), 10)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.tensor([[bad, 1.0]])
    layer.bias.grad = torch.tensor([1.0])
    update = optimiser.step()
    assert not update.applied
    assert optimiser.updates == 0
    assert torch.equal(layer.weight, before)
    assert layer.weight.grad is None
    assert not optimiser.state_dict()["adamw"]["state"]


def test_vectors_are_not_decayed():
    layer = torch.nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.fill_(1.0)
    optimiser = Optimiser(layer, LearnerOptions(learning_rate=0.1, weight_decay=0.5), 1)
    layer.weight.grad = torch.zeros(2, 2)
    layer.bias.grad = torch.zeros(2)
    optimiser.step()
    torch.testing.assert_close(layer.weight.detach(), torch.full((2, 2), 0.95))
    torch.testing.assert_close(layer.bias.detach(), torch.ones(2))
