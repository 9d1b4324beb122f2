"""Attention for packed steps: one forward pass over the tokens of many rows that lie behind each other.

Linear layers see exactly the tokens of the step, with no padding; only here are queries regrouped by row, because each
row attends to the keys and values in its own slot. The function is registered with transformers under
``ATTENTION_NAME``; transformers builds no mask for names that it does not know, so masks are made here, once per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

ATTENTION_NAME = "slipstream_packed"


@dataclass(slots=True)
class QueryBlock:
    """Rows that are attended to in one kernel call, their queries padded to a common width.

    Attributes:
        rows: Slots of the rows: a slice of neighbours (read without a copy) or int64[b].
        positions: int64[b, width], position of each query; padding repeats the row's last query.
        reach: Number of cached positions that are read; at least the largest position + 1.
        take: int64[b * width], index of each query in the packed step; ``None`` when the block is the whole step with
            one token a row.
        fresh: True when each row starts at position 0 with nothing cached, so that plain causal attention applies.
    """

    rows: slice | torch.Tensor
    positions: torch.Tensor
    reach: int
    take: torch.Tensor | None = None
    fresh: bool = False
    _masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, repeat: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask [b, 1, repeat * width, reach], made once per kind of layer and step.

        Query heads that share a key head are laid out as further queries of that head, hence ``repeat``.
        """
        key = (window, repeat)
        if key not in self._masks:
            columns = torch.arange(self.reach, device=self.positions.device)
            query = self.positions[:, None, :, None]
            hidden = columns > query
            if window is not None:
                hidden |= columns <= query - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask.masked_fill_(hidden, float("-inf"))
            self._masks[key] = mask.repeat(1, 1, repeat, 1) if repeat > 1 else mask
        return self._masks[key]


@dataclass(slots=True)
class StepPlan:
    """Where the tokens of one forward pass belong.

    Attributes:
        slots: int64[n], slot of each token.
        positions: int64[n], position of each token in its row.
        blocks: How the queries are grouped.
        put: int64[n], place of each token's result in the concatenated blocks; ``None`` when that is the identity.
        windows: Sliding window of each layer, ``None`` for full attention. Unit: tokens.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    blocks: list[QueryBlock]
    put: torch.Tensor | None
    windows: tuple[int | None, ...]
    _writes: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def write_index(self, heads: int, capacity: int) -> torch.Tensor:
        """int64[n * heads], places of the step's keys in a buffer [slots, heads, capacity, :] as flat vectors."""
        key = (heads, capacity)
        if key not in self._writes:
            head = torch.arange(0, heads * capacity, capacity, device=self.slots.device)
            start = self.slots * (heads * capacity) + self.positions
            self._writes[key] = (start[:, None] + head).reshape(-1)
        return self._writes[key]


_PLAN: ContextVar[StepPlan | None] = ContextVar("slipstream_step_plan", default=None)


@contextmanager
def executing(plan: StepPlan) -> Iterator[None]:
    """Make ``plan`` the one that the attention layers of a forward pass follow."""
    token = _PLAN.set(plan)
    try:
        yield
    finally:
        _PLAN.reset(token)


def current_plan() -> StepPlan:
    """Return the plan of the forward pass in progress."""
    plan = _PLAN.get()
    if plan is None:
        raise RuntimeError(f"attention {ATTENTION_NAME!r} only works inside the rollout engine")
    return plan


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from the packed queries to the slots of their rows.

    Args:
        module: Attention layer; its ``layer_idx`` picks the sliding window.
        query: [1, heads, n, d].
        key: The layer's whole buffer [slots, key heads, capacity, d], as the slot cache returns it.
        value: As ``key``.
        attention_mask: Always ``None``; masks come from the plan.
        scaling: Factor of the scores; d ** -0.5 when ``None``.
        softcap: Scores become ``softcap * tanh(scores / softcap)`` (Gemma 2).
        s_aux: Attention sinks; not supported.
        unused: What else transformers passes; it is either derived from the configuration or for training.

    Returns:
        [1, n, heads, d] and ``None`` for the attention weights.
    """
    if s_aux is not None:
        raise NotImplementedError("attention sinks are not supported")
    plan = current_plan()
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    window = plan.windows[int(module.layer_idx)]  # type: ignore[arg-type]
    return attend(plan, window, query[0].transpose(0, 1), key, value, scale, softcap)[None], None


def attend(
    plan: StepPlan,
    window: int | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend as ``plan`` says from queries [n, heads, d] to a layer's buffers; returns [n, heads, d]."""
    heads, dim = query.shape[1:]
    key_heads = key.shape[1]
    groups = heads // key_heads
    results: list[torch.Tensor] = []
    for block in plan.blocks:
        rows, width = block.positions.shape
        keys, values = key[block.rows, :, : block.reach], value[block.rows, :, : block.reach]
        if block.take is None:
            q = query.reshape(rows, key_heads, groups, dim)
        else:
            q = query.index_select(0, block.take).view(rows, width, key_heads, groups, dim)
            q = q.permute(0, 2, 3, 1, 4).reshape(rows, key_heads, groups * width, dim)
        if block.fresh and softcap is None and (window is None or window >= block.reach):
            q = q.view(rows, heads, width, dim)
            keys, values = keys[:, :, :width], values[:, :, :width]
            out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale, enable_gqa=groups > 1)
        else:
            mask = block.mask(window, groups, q.dtype)
            if softcap is None:
                out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
            else:
                scores = torch.tanh(q @ keys.transpose(-1, -2) * (scale / softcap)) * softcap + mask
                out = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ values
        if block.take is None:
            results.append(out.reshape(rows, heads, dim))
        else:
            out = out.reshape(rows, key_heads, groups, width, dim).permute(0, 3, 1, 2, 4)
            results.append(out.reshape(rows * width, heads, dim))
    merged = results[0] if len(results) == 1 else torch.cat(results)
    return merged if plan.put is None else merged.index_select(0, plan.put)


def register() -> None:
    """Make :data:`ATTENTION_NAME` known to transformers; harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, packed_attention)
