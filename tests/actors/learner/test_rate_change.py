"""The learning rate changes between two batches, wherever the schedule stands."""

import pytest
import torch

from actors.learner.learn import SetLearningRate, Stop, TrainBatch, learn
from actors.learner.optimiser import Optimiser
from actors.learner.options import LearnerOptions
from tests.actors.learner.batches import make_learner, random_groups


def test_another_peak_scales_the_schedule_from_where_it_is():
    layer = torch.nn.Linear(2, 1)
    optimiser = Optimiser(layer, LearnerOptions(learning_rate=1.0, schedule="linear", min_learning_rate_ratio=0.2), 5)
    rates = []
    for update in range(5):
        if update == 2:
            optimiser.set_peak(0.5)
        layer.weight.grad, layer.bias.grad = torch.ones(1, 2), torch.ones(1)
        rates.append(optimiser.step().learning_rate)
    assert rates == pytest.approx([1.0, 0.8, 0.3, 0.2, 0.1])


def test_the_loop_takes_another_rate_without_an_event(model_path):
    groups = random_groups(model_path)
    commands = iter([
        TrainBatch(step=0, groups=tuple(groups)),
        SetLearningRate(value=0.003),
        TrainBatch(step=1, groups=tuple(groups)),
        Stop(),
    ])  # fmt: skip

    class Channel:
        def receive(self):
            return next(commands)

    learner = make_learner(model_path, learning_rate=0.001)
    events = list(learn(learner, Channel()))
    assert [event.report.metrics["learning_rate"] for event in events] == [0.001, 0.003]
