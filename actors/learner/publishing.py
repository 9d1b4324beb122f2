"""Which weights the engines get, and when: the learner's own, or a blend with what they had before.

A version is a *published* snapshot. With a blend the snapshot is a policy of its own: engines sample from it and stamp
its logprobs, so importance weights need no special case. Snapshots that differ from the learner's weights are part of
its checkpoint: a resumed run announces exactly what the engines had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Publisher:
    """Decides after each training step what is published; holds the last snapshot while it differs from the weights."""

    def __init__(self, state: Mapping[str, Tensor], *, blend: float, sync_every: int) -> None:
        """Start with ``state`` as the published snapshot.

        Args:
            state: The learner's fp32 tensors by name, tied ones once; copied only where a snapshot must be held, which
                takes as much memory again.
            blend: Share b of the new weights: published_k = b theta_k + (1 - b) published_(k-1), recursive. The mean
                extra lag of what is published is (1 - b) / b steps.
            sync_every: Publish after every n-th step.
        """
        self._blend, self._sync_every = blend, sync_every
        self._holds = blend < 1 or sync_every > 1
        self._pending = 0
        self._snapshot: dict[str, Tensor] | None = _copies(state) if self._holds else None

    @torch.no_grad()
    def step(self, state: Mapping[str, Tensor]) -> bool:
        """Take note of a training step that moved the weights to ``state``; True when there is a new snapshot."""
        self._pending += 1
        if self._pending < self._sync_every:
            return False
        self._pending = 0
        if not self._holds:
            self._snapshot = None  # of a checkpoint that blended, see restore
        for name, tensor in (self._snapshot or {}).items():
            if self._blend == 1:
                tensor.copy_(state[name])
            else:
                tensor.mul_(1 - self._blend).add_(state[name], alpha=self._blend)
        return True

    def weights(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The published snapshot in the order of ``state``, which are the learner's own weights; not copies."""
        return dict(state) if self._snapshot is None else {name: self._snapshot[name] for name in state}

    @property
    def snapshot(self) -> Mapping[str, Tensor] | None:
        """The held snapshot; None when what is published are the learner's weights."""
        return self._snapshot

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides the snapshot itself."""
        return {"pending": self._pending}

    def restore(self, state: Mapping[str, Any], snapshot: Mapping[str, Tensor] | None) -> None:
        """Continue from a checkpoint.

        Options given now decide what comes next: a snapshot of a run that blended is published as it was until the
        next one is due, and a run that begins to blend starts from the weights it is on.

        Args:
            state: From :meth:`state_dict`.
            snapshot: The snapshot that was held, on any device; None when there was none.
        """
        self._pending = min(int(state["pending"]), self._sync_every - 1)
        if snapshot is None:
            return
        if self._snapshot is None:
            self._snapshot = _copies(snapshot)
            return
        for name, tensor in self._snapshot.items():
            tensor.copy_(snapshot[name])


def _copies(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}
