"""Weights, gradients and moments cut into pieces, one a rank (FSDP2), and put together again.

Each decoder layer is gathered while it computes and dropped behind it, so a GPU holds one layer of weights at a time
beside its share. The gathering happens inside every forward and backward pass: all ranks must make equally many.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from actors.learner.logprobs import Scorer


def shard(scorer: Scorer, ranks: int, device: str) -> None:
    """Cut the model of ``scorer`` into ``ranks`` pieces and keep this rank's on ``device``, in place.

    The parts are the classes that the model itself says must stay whole (its decoder layers); embedding, final norm
    and head belong to the scorer, which applies the head. Gradients are summed over ranks, not averaged: the loss is
    divided by counts over the whole batch already.
    """
    mesh = init_device_mesh(device, (ranks,))
    parts = set(scorer.model._no_split_modules or ())
    layers: list[nn.Module] = [module for module in scorer.model.modules() if type(module).__name__ in parts]
    for module in [*layers, scorer]:
        # the scorer too: between passes every parameter is a piece, and pieces are what optimiser and checkpoint see
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor that ``tensor`` is a piece of, on every rank (all must call); others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def piece_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's piece of the whole ``tensor``, cut and placed as ``like`` is; whole where ``like`` is."""
    if not isinstance(like, DTensor):
        return tensor
    # every rank has the whole tensor: nothing needs to be sent
    local = tensor.to(device=like.to_local().device, dtype=like.dtype)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)


def gathered(state: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Put the pieces of each tensor together, one tensor after the other.

    Args:
        state: Pieces by name, in the same order on every rank; all must call. Tensors that are whole stay themselves,
            and a tensor under two names stays one tensor.
        keep: True where the result is wanted: whole tensors that were pieces lie in CPU memory then. Elsewhere the
            result is empty, and no more than one tensor exists at a time.
    """
    found: dict[int, Tensor | None] = {}
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if id(tensor) not in found:  # on every rank, or their exchanges would no longer match
            complete = whole(tensor.detach())
            found[id(tensor)] = (complete.cpu() if isinstance(tensor, DTensor) else complete) if keep else None
        kept = found[id(tensor)]
        if kept is not None:
            result[name] = kept
    return result


def gathered_tree(value: Any, *, keep: bool) -> Any:
    """Return :func:`gathered` for tensors anywhere inside dictionaries and lists; without ``keep`` tensors are lost."""
    if isinstance(value, Tensor):
        complete = whole(value)
        return (complete.cpu() if isinstance(value, DTensor) else complete) if keep else None
    if isinstance(value, Mapping):
        return {key: gathered_tree(item, keep=keep) for key, item in value.items()}
    if isinstance(value, list):
        return [gathered_tree(item, keep=keep) for item in value]
    return value
