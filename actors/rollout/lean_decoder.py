"""The forward pass of Llama-shaped models in few kernel calls.

A decoding step of a small model, or of the last rows of a large one, spends most of its time between kernels. For the
plain Llama shape (Llama, Mistral, Qwen 2 and 3) this module runs the same arithmetic on the model's own parameters with
projections that share their input joined, tabulated rotations, and no module calls. ``PackedModel.check`` compares it
with the model's own forward pass before it is used; any other model runs through transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from actors.rollout.attention import StepPlan, attend
from actors.rollout.slot_cache import SlotCache

_SHAPES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Kinds of rotary embedding whose angles depend on the position alone.
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")


@dataclass(slots=True)
class _Layer:
    """Parameters of one layer; joined ones share memory with the model's own."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    eps: float
    scale: float


class LeanDecoder:
    """Runs packed passes of one Llama-shaped model.

    Joined projections become views of one tensor each, so overwriting the model's parameters in place overwrites these.
    Norms per head (Qwen 3) are read anew by :meth:`refresh`.
    """

    def __init__(self, model: Any) -> None:
        base, config = model.model, model.config
        self._heads, self._key_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim = base.layers[0].self_attn.head_dim
        self._embed: torch.Tensor = base.embed_tokens.weight
        self._norm: torch.Tensor = base.norm.weight
        self._norm_eps: float = base.norm.variance_epsilon
        self._head: torch.Tensor = model.lm_head.weight
        self._activation = base.layers[0].mlp.act_fn
        self._rotary = base.rotary_emb
        self._cos = self._sin = self._embed.new_zeros(0, 1, self._dim)
        self._modules = base.layers
        self._layers = [self._join(layer) for layer in base.layers]
        self.refresh()

    @classmethod
    def of(cls, model: Any) -> LeanDecoder | None:
        """Return a decoder for ``model``, or ``None`` when the model is not of the shape."""
        if type(model).__name__ not in _SHAPES or type(model).__module__.split(".")[0] != "transformers":
            return None
        rotary = model.model.rotary_emb
        if getattr(rotary, "rope_type", "") not in _FIXED_ROTATIONS or model.lm_head.bias is not None:
            return None
        linear = [m for layer in model.model.layers for m in layer.modules() if isinstance(m, nn.Linear)]
        if any(type(m) is not nn.Linear for m in linear) or len(linear) != 7 * len(model.model.layers):
            return None
        return cls(model)

    def refresh(self) -> None:
        """Take over parameters that are used in another form than the model holds them; call after they change."""
        for layer, module in zip(self._layers, self._modules, strict=True):
            attention = module.self_attn
            if hasattr(attention, "q_norm"):
                parts = [attention.q_norm.weight.detach()] * self._heads
                layer.head_norm = torch.stack(parts + [attention.k_norm.weight.detach()] * self._key_heads)

    def forward(
        self, plan: StepPlan, cache: SlotCache, token_ids: torch.Tensor, logit_index: torch.Tensor
    ) -> torch.Tensor:
        """Run one pass; as :meth:`PackedModel.forward`."""
        self._tabulate(cache.capacity)
        heads, key_heads, dim = self._heads, self._key_heads, self._dim
        cos, sin = self._cos.index_select(0, plan.positions), self._sin.index_select(0, plan.positions)
        hidden = F.embedding(token_ids, self._embed)
        count, width = hidden.shape
        for index, layer in enumerate(self._layers):
            normed = F.rms_norm(hidden, (width,), layer.input_norm, layer.eps)
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(count, heads + 2 * key_heads, dim)
            turning = qkv[:, : heads + key_heads]
            if layer.head_norm is not None:
                turning = F.rms_norm(turning, (dim,), None, layer.eps) * layer.head_norm
            # The sign of the rotated half is in the table of sines.
            turned = torch.addcmul(turning * cos, turning.roll(dim // 2, -1), sin)
            keys, values = cache.write(index, plan, turned[:, heads:], qkv[:, heads + key_heads :])
            mixed = attend(plan, plan.windows[index], turned[:, :heads], keys, values, layer.scale)
            hidden = hidden + F.linear(mixed.view(count, heads * dim), layer.output, layer.output_bias)
            normed = F.rms_norm(hidden, (width,), layer.mlp_norm, layer.eps)
            gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            hidden = hidden + F.linear(self._activation(gate) * up, layer.down, layer.down_bias)
        wanted = hidden.index_select(0, logit_index)
        return F.linear(F.rms_norm(wanted, (width,), self._norm, self._norm_eps), self._head)

    def _join(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        return _Layer(
            input_norm=layer.input_layernorm.weight,
            qkv=_joined(projections, "weight"),
            qkv_bias=_joined(projections, "bias") if attention.q_proj.bias is not None else None,
            head_norm=None,
            output=attention.o_proj.weight,
            output_bias=attention.o_proj.bias,
            mlp_norm=layer.post_attention_layernorm.weight,
            gate_up=_joined([mlp.gate_proj, mlp.up_proj], "weight"),
            gate_up_bias=_joined([mlp.gate_proj, mlp.up_proj], "bias") if mlp.gate_proj.bias is not None else None,
            down=mlp.down_proj.weight,
            down_bias=mlp.down_proj.bias,
            eps=layer.input_layernorm.variance_epsilon,
            scale=attention.scaling,
        )

    def _tabulate(self, length: int) -> None:
        """Have the rotations of the first ``length`` positions, [length, 1, head size] each."""
        if self._cos.shape[0] >= length:
            return
        positions = torch.arange(length, device=self._embed.device)
        cos, sin = self._rotary(self._embed[:1], positions[None])
        half = self._dim // 2
        self._cos = cos[0][:, None].contiguous()
        self._sin = torch.cat([-sin[0][:, :half], sin[0][:, half:]], dim=-1)[:, None].contiguous()


def _joined(modules: list[nn.Linear], name: str) -> torch.Tensor:
    """Join a parameter of several projections into one tensor that they share from now on."""
    own: list[nn.Parameter] = [getattr(m, name) for m in modules]
    whole = torch.cat([p.detach() for p in own])
    for parameter, part in zip(own, torch.split(whole, [len(p) for p in own]), strict=True):
        parameter.data = part
    return whole
