"""What several learners exchange so that they act as one: sums of gradients, and now and then a small object.

Each rank holds the whole batch and knows who computes which part of it, so plans and denominators need no message. The
gradient of a minibatch is summed once, after its last micro-batch: ranks may have different numbers of them, or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

# Gradients that cross the network in one message, and the size of the only buffer that summing needs. Unit: elements.
_BUCKET_ELEMENTS = 2**24


class Ranks:
    """This process's place among the learners. Made without arguments it is the only one, and nothing is exchanged.

    Attributes:
        rank: Number of this process, from 0.
        count: How many there are.
    """

    def __init__(self, rank: int = 0, count: int = 1, objects: dist.ProcessGroup | None = None) -> None:
        """Take the place ``rank`` of ``count``; ``objects`` is a group that moves data between CPUs."""
        self.rank, self.count = rank, count
        self._objects = objects

    @classmethod
    def join(cls, timeout_s: float) -> Ranks:
        """Join torch's default process group, which exists already.

        Args:
            timeout_s: Longest time that one rank waits for the others in an exchange.
        """
        # NCCL moves nothing between CPUs, and what is exchanged as an object lies there
        apart = dist.get_backend() != "gloo"
        objects = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if apart else None
        return cls(dist.get_rank(), dist.get_world_size(), objects)

    @property
    def leads(self) -> bool:
        """True for the rank that speaks for all: it reports, publishes and writes checkpoints."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, on every rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._objects)
        return values

    def gather_to_leader(self, value: T) -> list[T] | None:
        """Return the values of all ranks, by rank, on the leading rank; None elsewhere."""
        if self.count == 1:
            return [value]
        values: list[Any] | None = [None] * self.count if self.leads else None
        dist.gather_object(value, values, dst=0, group=self._objects)
        return values

    def strangers(self, value: T) -> list[int]:
        """Return the ranks whose value differs from the leading rank's; the same answer on every rank."""
        values = self.gather(value)
        return [rank for rank, other in enumerate(values) if other != values[0]]

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace each gradient by its sum over the ranks, bit for bit the same everywhere.

        A rank without micro-batches adds zeros. What no rank has a gradient for stays without one: an optimiser would
        decay and move a parameter whose gradient is 0.
        """
        if self.count == 1 or not parameters:
            return
        device = parameters[0].device
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=device)
        dist.all_reduce(present, op=dist.ReduceOp.MAX)
        used = [p for p, there in zip(parameters, present.tolist(), strict=True) if there]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([p.grad for p in used if p.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat, op=dist.ReduceOp.SUM)
            for gradient, summed in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                gradient.copy_(summed.view_as(gradient))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Divide tensors into runs of one dtype and at most ``_BUCKET_ELEMENTS``; a larger tensor is alone."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.numel() > _BUCKET_ELEMENTS or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket
