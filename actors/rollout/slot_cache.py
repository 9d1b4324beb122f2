"""Key/value memory of the engine: one slot a row, addressed by (slot, position).

Tokens are written where they belong, so a rejected draft is undone by nothing more than remembering the row's length:
the next token overwrites it. The length dimension grows as rows grow, so short answers never pay for the context limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from actors.rollout.attention import StepPlan, current_plan

Snapshot = list[tuple[torch.Tensor, torch.Tensor]]


class SlotCache(Cache):  # type: ignore[misc]
    """Slot buffers of every layer, [slots, key heads, capacity, head size], made when a layer is first used.

    The buffers start at zero and stay finite: a masked position has weight 0, and 0 * NaN would still be NaN.
    """

    def __init__(self, slots: int, max_length: int, *, block: int = 64) -> None:
        """Make a cache of ``slots`` rows of at most ``max_length`` tokens that grows by at least ``block`` tokens."""
        super().__init__(layers=[])
        self.slots = slots
        self.max_length = max_length
        self.capacity = min(block, max_length)
        self._block = block
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the step's keys and values [1, heads, n, d] to their slots; return the layer's whole buffers."""
        return self.write(layer_idx, current_plan(), key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))

    def write(
        self, layer: int, plan: StepPlan, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a step's keys and values [n, heads, d] to their slots; return the layer's whole buffers."""
        if layer not in self._keys:
            self._keys[layer] = self._empty(keys)
            self._values[layer] = self._empty(values)
        both = self._keys[layer], self._values[layer]
        for buffer, states in zip(both, (keys, values), strict=True):
            heads, dim = states.shape[1:]
            buffer.view(-1, dim).index_copy_(0, plan.write_index(heads, self.capacity), states.reshape(-1, dim))
        return both

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: rows have lengths of their own, and the engine gives every position."""
        return 0

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        """Make room for rows of ``length`` tokens; grows by half at least, so that copying stays rare."""
        if length <= self.capacity:
            return
        wanted = max(length, self.capacity + self.capacity // 2)
        capacity = min(self.max_length, -(-wanted // self._block) * self._block)
        old, self.capacity = self.capacity, capacity
        for buffers in (self._keys, self._values):
            for layer, buffer in buffers.items():
                grown = buffer.new_zeros(*buffer.shape[:2], capacity, buffer.shape[3])
                grown[:, :, :old] = buffer
                buffers[layer] = grown

    @torch.inference_mode()
    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` positions of one slot to others."""
        index = torch.tensor(targets)
        for buffer in self._buffers():
            buffer[index.to(buffer.device), :, :length] = buffer[source, :, :length].clone()

    @torch.inference_mode()
    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange the first ``length`` positions of two slots."""
        for buffer in self._buffers():
            held = buffer[one, :, :length].clone()
            buffer[one, :, :length] = buffer[other, :, :length]
            buffer[other, :, :length] = held

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Zero a slot, so that a non-finite value in it cannot reach its next row."""
        for buffer in self._buffers():
            buffer[slot].zero_()

    @torch.inference_mode()
    def snapshot(self, slot: int, length: int) -> Snapshot:
        """Copy the first ``length`` positions of a slot out of the cache."""
        return [
            (self._keys[layer][slot, :, :length].clone(), self._values[layer][slot, :, :length].clone())
            for layer in self._keys
        ]

    @torch.inference_mode()
    def restore(self, snapshot: Snapshot, slot: int) -> None:
        """Write a snapshot back into a slot."""
        for layer, (keys, values) in zip(self._keys, snapshot, strict=True):
            self._keys[layer][slot, :, : keys.shape[1]] = keys
            self._values[layer][slot, :, : values.shape[1]] = values

    def release(self) -> int:
        """Give the memory of all slots back and return its bytes; a layer that is used again finds empty slots."""
        freed = self.nbytes
        self._keys.clear()
        self._values.clear()
        return freed

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers."""
        return sum(b.numel() * b.element_size() for b in self._buffers())

    def _buffers(self) -> list[torch.Tensor]:
        return [*self._keys.values(), *self._values.values()]

    def _empty(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_zeros(self.slots, states.shape[1], self.capacity, states.shape[2])
