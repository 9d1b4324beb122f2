"""A transformers causal language model behind one call: packed tokens and a plan in, float32 logits out."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.rollout.attention import ATTENTION_NAME, QueryBlock, StepPlan, executing, register
from actors.rollout.lean_decoder import LeanDecoder
from actors.rollout.slot_cache import SlotCache
from actors.weights import WeightsError
from storage.errors import UserError

_ATTENTION_LAYERS = {"full_attention": False, "sliding_attention": True}


def check_runnable(config: Any) -> None:
    """Raise ``UserError`` naming the model class when the engine cannot run a configuration; loads no weights."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = type(config)
    name = (getattr(config, "architectures", None) or [kind.__name__])[0]
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{name} is an encoder-decoder; rollouts need a decoder-only causal language model")
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
        name = model_class.__name__
        if getattr(model_class, "_is_stateful", False):
            raise UserError(f"{name} carries recurrent state between tokens; use a model with attention layers only")
        if not getattr(model_class, "_supports_attention_backend", False):
            raise UserError(
                f"{name} has attention of its own that the rollout engine cannot replace; use another model"
            )
    try:
        layer_windows(config)
    except ValueError as error:
        raise UserError(f"{name}: {error}; use a model with full or sliding-window attention") from None


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Return each layer's sliding window in tokens, ``None`` for full attention.

    Raises:
        ValueError: A layer is neither.
    """
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", True) is False:
        window = None
    types = getattr(text, "layer_types", None)
    if types is None:
        if getattr(text, "attention_chunk_size", None) is not None:
            raise ValueError("its attention is chunked")
        types = ["full_attention" if window is None else "sliding_attention"] * text.num_hidden_layers
    unknown = sorted(set(types) - set(_ATTENTION_LAYERS))
    if unknown:
        raise ValueError(f"it has layers of type {', '.join(unknown)}")
    return tuple(window if _ATTENTION_LAYERS[t] else None for t in types)


class PackedModel:
    """One copy of the policy's weights.

    Attributes:
        model: The transformers model, in eval mode, with packed attention.
        windows: Sliding window of each layer.
        vocabulary: Logits per token.
        device: Where it runs.
        context: Longest sequence that the model can place, ``None`` when it names none. Unit: tokens.
    """

    def __init__(self, model: Any, *, lean: bool = True) -> None:
        """Wrap a transformers model; ``lean`` bypasses its modules where their shape is known."""
        self.model = model
        self.windows = layer_windows(model.config)
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])
        self.device: torch.device = next(model.parameters()).device
        text = model.config.get_text_config(decoder=True)
        self.context: int | None = getattr(text, "max_position_embeddings", None)
        names = inspect.signature(inspect.unwrap(type(model).forward)).parameters
        # Renamed in the course of transformers 5.
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._slices_logits = "logits_to_keep" in names
        self._lean = LeanDecoder.of(model) if lean else None
        self._released: list[tuple[torch.UntypedStorage, int]] = []

    @classmethod
    def load(cls, path: str | Path, dtype: str, device: str) -> PackedModel:
        """Load a local model directory; raises ``UserError`` for a model that the engine cannot run."""
        from transformers import AutoConfig

        from storage.models import load_policy

        # Consent to code that comes with a model was asked for when it was fetched.
        check_runnable(AutoConfig.from_pretrained(path, trust_remote_code=True))
        register()
        loaded = cls(load_policy(path, dtype=dtype, device=device, attention=ATTENTION_NAME))
        loaded.check()
        return loaded

    @property
    def lean(self) -> bool:
        """True when passes bypass the model's own modules (see :mod:`actors.rollout.lean_decoder`)."""
        return self._lean is not None

    @property
    def released(self) -> bool:
        """True between :meth:`release` and :meth:`reclaim`: the weights are lost, nothing may be computed."""
        return bool(self._released)

    def release(self) -> int:
        """Give the memory of the weights back and return its bytes.

        Modules, parameters and whatever shares their memory (tied weights, joined projections) stay the same objects:
        only the storages below them are emptied.
        """
        parameters = list(self.model.parameters())
        _leave_files(parameters)
        storages = {_place(p)[0]: p.untyped_storage() for p in parameters}
        self._released = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage in storages.values():
            storage.resize_(0)
        return sum(nbytes for _, nbytes in self._released)

    def reclaim(self) -> None:
        """Allocate the memory of the weights again; what it holds is arbitrary until :meth:`load_state`."""
        for storage, nbytes in self._released:
            storage.resize_(nbytes)
        self._released = []

    def twin(self) -> PackedModel:
        """Return a second copy, with tied weights tied as here."""
        return PackedModel(copy.deepcopy(self.model), lean=self.lean)

    @torch.inference_mode()
    def forward(
        self, plan: StepPlan, cache: SlotCache, token_ids: torch.Tensor, logit_index: torch.Tensor
    ) -> torch.Tensor:
        """Run one pass.

        Args:
            plan: Rows and positions of the tokens.
            cache: Read and written at the plan's slots.
            token_ids: int64[n] on the model's device.
            logit_index: int64[m], tokens whose logits are wanted, in any order, repeats allowed.

        Returns:
            Logits [m, vocabulary] in the model's dtype.
        """
        if self._lean is not None:
            return self._lean.forward(plan, cache, token_ids, logit_index)
        extra = {"logits_to_keep": logit_index} if self._slices_logits else {}
        with executing(plan):
            output = self.model(
                input_ids=token_ids[None],
                position_ids=plan.positions[None],
                use_cache=True,
                **{self._cache_name: cache},
                **extra,
            )
        logits: torch.Tensor = output.logits[0]
        return logits if self._slices_logits else logits.index_select(0, logit_index)

    def check_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raise ``WeightsError`` when a name is unknown, a shape differs, or a parameter is missing."""
        own: dict[str, torch.Tensor] = self.model.state_dict()
        for name, tensor in state.items():
            if name not in own:
                raise WeightsError(f"the snapshot holds {name!r}, which {type(self.model).__name__} does not have")
            if own[name].shape != tensor.shape:
                raise WeightsError(
                    f"tensor {name!r} has shape {tuple(tensor.shape)} in the snapshot, {tuple(own[name].shape)} here"
                )
        covered = {_place(own[name]) for name in state}
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        missing = sorted(n for n, t in own.items() if n in parameters and _place(t) not in covered)
        if missing:
            raise WeightsError(f"the snapshot lacks {len(missing)} tensors, the first is {missing[0]!r}")

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the weights in place; tied weights stay tied. Raises as :meth:`check_state`, changing nothing."""
        self.check_state(state)
        own: dict[str, torch.Tensor] = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in state.items():
                own[name].copy_(tensor)
        if self._lean is not None:
            self._lean.refresh()

    def check(self) -> None:
        """Compare packed passes with the model's own forward pass on two short rows of different lengths.

        A model that passes its keys and values around in a way that slots cannot follow is found here, before it
        writes a single wrong token; raises ``UserError`` naming its class. Lean passes that differ are given up.
        """
        name = type(self.model).__name__
        tokens = torch.from_numpy(np.arange(1, 12) * 7919 % self.vocabulary).to(self.device)
        rows = [tokens[:7], tokens[-4:]]
        try:
            expected = self._own_logits(rows)
            gap, limit = self._gap(rows, expected)
            if self.lean and not gap <= limit:
                self._lean = None
                gap, limit = self._gap(rows, expected)
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, KeyError) as error:
            raise UserError(f"{name} cannot run in the rollout engine: {type(error).__name__}: {error}") from error
        if torch.isfinite(expected).all() and not gap <= limit:
            raise UserError(
                f"{name} cannot run in the rollout engine: packed logits differ from its own by {gap:.3g}, allowed is "
                f"{limit:.3g}; its attention does something that slots do not reproduce"
            )

    def _gap(self, rows: list[torch.Tensor], expected: torch.Tensor) -> tuple[float, float]:
        """Largest difference of packed logits from ``expected``, and the largest that rounding can explain."""
        gap = float((self._two_pass_logits(rows).float() - expected).abs().max())
        share = 1e-2 if self.model.dtype == torch.float32 else 0.5
        return gap, share * (float(expected.std()) + 1e-6)

    @torch.inference_mode()
    def _own_logits(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """Logits behind each row, float32[rows, vocabulary], from the model with attention of its own."""
        self.model.set_attn_implementation("sdpa" if getattr(self.model, "_supports_sdpa", False) else "eager")
        try:
            return torch.stack([self.model(input_ids=r[None], use_cache=False).logits[0, -1].float() for r in rows])
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)

    def _two_pass_logits(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """Prefill all but the last token of two rows, decode the last; return their logits [2, vocabulary]."""
        cache = SlotCache(len(rows), max(len(r) for r in rows), block=4)
        heads = [len(r) - 1 for r in rows]
        cache.reserve(max(heads) + 1)
        positions = [torch.arange(n, device=self.device) for n in heads]
        offset = np.cumsum([0, *heads])
        plan = StepPlan(
            slots=torch.repeat_interleave(torch.arange(2, device=self.device), torch.tensor(heads, device=self.device)),
            positions=torch.cat(positions),
            blocks=[
                QueryBlock(
                    rows=torch.tensor([i], device=self.device),
                    positions=positions[i][None],
                    reach=n,
                    take=positions[i] + int(offset[i]),
                    fresh=True,
                )
                for i, n in enumerate(heads)
            ],
            put=None,
            windows=self.windows,
        )
        last = torch.tensor([0], device=self.device)
        self.forward(plan, cache, torch.cat([r[:-1] for r in rows]), last)
        at = torch.tensor(heads, device=self.device)
        both = torch.arange(2, device=self.device)
        step = StepPlan(
            slots=both,
            positions=at,
            blocks=[QueryBlock(rows=slice(0, 2), positions=at[:, None], reach=max(heads) + 1)],
            put=None,
            windows=self.windows,
        )
        return self.forward(step, cache, torch.stack([r[-1] for r in rows]), both)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the identity of a tensor's storage and its offset there; unlike an address, they outlive a release."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _leave_files(parameters: Sequence[torch.Tensor]) -> None:
    """Give parameters that lie in a mapped file memory of their own: a mapping cannot be emptied.

    What they hold is lost. Those that share a place in the file share one again.
    """
    moved: dict[tuple[object, ...], torch.Tensor] = {}
    for parameter in parameters:
        if not parameter.untyped_storage().resizable():
            where = (*_place(parameter), parameter.shape, parameter.stride())
            parameter.data = moved.setdefault(where, torch.empty_like(parameter))
