"""AdamW on fp32 weights with gradient clipping and a learning-rate schedule.

The model's own parameters are the fp32 master weights; lower precision exists only inside autocast regions, so there is
no second copy to keep in step.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from actors.learner.options import LearnerOptions
from actors.learner.sharding import piece_like, whole
from actors.memory import release_freed_memory


class Update(NamedTuple):
    """Outcome of one optimiser update.

    Attributes:
        applied: False when the gradient was not finite and the weights were left alone.
        grad_norm: Global norm before clipping.
        learning_rate: Rate of this update.
    """

    applied: bool
    grad_norm: float
    learning_rate: float


def learning_rate(options: LearnerOptions, update: int, total_updates: int) -> float:
    """Learning rate of the ``update``-th optimiser update, counted from 0.

    Rises linearly over ``warmup_steps`` (update 0 already moves, by 1 / warmup_steps of the peak), then stays, or falls
    linearly or along half a cosine to ``min_learning_rate_ratio`` x peak at update ``total_updates - 1`` and beyond.
    """
    peak = options.learning_rate
    if update < options.warmup_steps:
        return peak * (update + 1) / options.warmup_steps
    if options.schedule == "constant":
        return peak
    span = max(1, total_updates - 1 - options.warmup_steps)
    progress = min(1.0, (update - options.warmup_steps) / span)
    remaining = 1 - progress if options.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    floor = options.min_learning_rate_ratio
    return peak * (floor + (1 - floor) * remaining)


class Optimiser:
    """AdamW over the parameters of one model; vectors (norms, biases) are not decayed."""

    def __init__(self, model: torch.nn.Module, options: LearnerOptions, total_updates: int) -> None:
        """Prepare for a run of ``total_updates`` updates (used by the falling schedules only)."""
        self._options = options
        self._total_updates = total_updates
        self.updates = 0
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in self._parameters if p.ndim >= 2]
        vectors = [p for p in self._parameters if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=options.learning_rate,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_eps,
            fused=True,
        )

    def set_peak(self, rate: float) -> None:
        """Change the peak of the learning-rate schedule from the next update on."""
        self._options = self._options.model_copy(update={"learning_rate": rate})

    def step(self) -> Update:
        """Clip the accumulated gradients, update the weights and drop the gradients.

        A gradient with a NaN or an infinity changes neither weights nor moments nor the schedule.
        """
        # over all ranks, however the gradients are spread over them
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self._parameters, self._options.max_grad_norm)))
        rate = learning_rate(self._options, self.updates, self._total_updates)
        applied = math.isfinite(norm)
        if applied:
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
            self.updates += 1
        self._adamw.zero_grad(set_to_none=True)
        release_freed_memory()  # the snapshot that comes next takes as much as the gradients did
        return Update(applied, norm, rate)

    def state_dict(self) -> dict[str, Any]:
        """Moments and schedule position, made of tensors (pieces where the weights are) and plain values."""
        return {"adamw": self._adamw.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict` with whole tensors; hyperparameters stay those of the options given now."""
        hyperparameters = [
            {name: value for name, value in group.items() if name != "params"} for group in self._adamw.param_groups
        ]
        adamw = state["adamw"]
        parameters = [p for group in self._adamw.param_groups for p in group["params"]]
        moments = {
            number: {
                name: piece_like(value, parameters[number]) if value.shape == parameters[number].shape else value
                for name, value in of_parameter.items()
            }
            for number, of_parameter in adamw["state"].items()
        }
        self._adamw.load_state_dict({**adamw, "state": moments})
        for group, values in zip(self._adamw.param_groups, hyperparameters, strict=True):
            group.update(values)
        self.updates = int(state["updates"])
