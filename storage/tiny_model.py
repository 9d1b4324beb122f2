"""The built-in model: a small Llama with a character tokenizer, warmed up on the built-in task.

The warm-up imitates demonstrations that are often wrong in one respect (see :mod:`storage.tasks`). It ends when the
model can do the task wherever that fault plays no part, and greedy accuracy over all is between 0.4 and 0.6: a skill to
be sharpened, as a pretrained model has before reinforcement learning. It is deterministic for a given machine: seeds
are fixed and so is the number of threads.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from storage.tasks import TASKS, RunningSums

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
ACCURACY = (0.4, 0.6)

_TASK = "running_sums"
_MODEL = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class WarmUp:
    """How the warm-up goes.

    Attributes:
        seed: Of weights and demonstrations.
        threads: CPU threads; fixed, because sums depend on it in their last bits.
        learning_rate: Peak of AdamW's.
        ramp_steps: Steps of the linear ramp.
        decay_from: Step at which the rate begins to fall, to ``floor`` of the peak at ``decay_to``.
        tokens_per_step: Prompt and answer tokens in a step.
        first_check: First step at which accuracy is measured, then every ``check_every`` steps.
        max_steps: Give up here.
        validation_prompts: Prompts that accuracy is measured on, drawn with ``validation_seed``.
        skill: Accuracy on prompts without the hard term that must be reached.
    """

    seed: int = 0
    threads: int = 2
    learning_rate: float = 3e-3
    ramp_steps: int = 20
    decay_from: int = 130
    decay_to: int = 250
    floor: float = 0.05
    tokens_per_step: int = 3000
    first_check: int = 260
    check_every: int = 10
    max_steps: int = 600
    validation_prompts: int = 192
    validation_seed: int = 10_000
    skill: float = 0.98


_WARM_UP = WarmUp()
_BUCKETS = (0.0, 0.5, 0.8, 0.93, 1.0)


def recipe_id() -> str:
    """Return a short name of everything that decides the weights; a new recipe gets a new place in the cache."""
    content = json.dumps([_MODEL, asdict(_WARM_UP), ACCURACY, repr(TASKS[_TASK]), 1], sort_keys=True)
    return xxhash.xxh3_64_hexdigest(content.encode())[:12]


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a character, which puts one BOS before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD)


def build(directory: Path, progress: Callable[[str], None]) -> None:
    """Warm the model up and write it to ``directory`` as an ordinary Hugging Face checkpoint.

    Args:
        directory: An existing, empty folder.
        progress: Called with a line of text now and then.

    Raises:
        RuntimeError: The warm-up did not reach the accuracy that it should stop at.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(_WARM_UP.threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_WARM_UP.seed)
            tokenizer = character_tokenizer(TASKS[_TASK].alphabet)
            model = _new_model(tokenizer)
            _warm_up(model, tokenizer, progress)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **special, **_MODEL))


def _warm_up(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, progress: Callable[[str], None]) -> None:
    import torch

    task = TASKS[_TASK]
    assert isinstance(task, RunningSums)
    validation = list(task.generate(count=_WARM_UP.validation_prompts, seed=_WARM_UP.validation_seed))
    hard = np.array([task.has_hard_term(row) for row in validation])
    rng = np.random.default_rng(_WARM_UP.seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
    started = time.monotonic()
    progress("building the tiny model: a short supervised warm-up, once (about a minute)")
    for step in range(1, _WARM_UP.max_steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = _learning_rate(step)
        loss = _step(model, tokenizer, task, rng)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if step % 50 == 0:
            progress(f"  step {step}: loss {loss:.3f}, {time.monotonic() - started:.0f} s")
        if step < _WARM_UP.first_check or step % _WARM_UP.check_every:
            continue
        right = _greedy_is_right(model, tokenizer, validation)
        accuracy, skill = float(right.mean()), float(right[~hard].mean())
        if skill >= _WARM_UP.skill and ACCURACY[0] <= accuracy <= ACCURACY[1]:
            progress(f"  step {step}: accuracy {accuracy:.2f}, {time.monotonic() - started:.0f} s; done")
            return
    raise RuntimeError(f"the warm-up of the tiny model ended at accuracy {accuracy:.2f}, outside {ACCURACY}")


def _learning_rate(step: int) -> float:
    """Ramp up, hold, and fall off: without the fall the model keeps making slips that nobody taught it."""
    ramp = min(1.0, step / _WARM_UP.ramp_steps)
    fall = (_WARM_UP.decay_to - step) / (_WARM_UP.decay_to - _WARM_UP.decay_from)
    return _WARM_UP.learning_rate * ramp * min(1.0, max(_WARM_UP.floor, fall))


def _step(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, task: RunningSums, rng: np.random.Generator
) -> float:
    """Accumulate the gradient of one batch of fresh demonstrations; returns the mean loss of a token."""
    pairs: list[tuple[str, str]] = []
    tokens = 0
    while tokens < _WARM_UP.tokens_per_step:
        row = task.draw(rng)
        pairs.append((row["prompt"], task.demonstrate(row, rng)))
        tokens += len(pairs[-1][0]) + len(pairs[-1][1]) + 2
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    answers = sum(len(answer) + 1 for _, answer in pairs)
    total = 0.0
    for low, high in itertools.pairwise(_BUCKETS):
        # sorted by length and cut in few pieces, so that little is padded
        piece = pairs[int(low * len(pairs)) : int(high * len(pairs))]
        if piece:
            ids, mask = _batch(tokenizer, piece)
            loss = (_losses(model, ids) * mask[:, 1:]).sum() / answers
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
    return total


def _greedy_is_right(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]]
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return bool[rows]: would greedy decoding write the flawless answer?

    It would, exactly when the most likely token is the right one at each position behind the right text before it; so
    one forward pass over the flawless answers decides it.
    """
    import torch

    right = np.zeros(len(rows), np.bool_)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["solution"]))
    with torch.no_grad():
        for piece in np.array_split(np.array(order), 4):
            pairs = [(rows[i]["prompt"], f"{rows[i]['solution']}={rows[i]['answer']}") for i in piece]
            ids, mask = _batch(tokenizer, pairs)
            best = model(input_ids=ids[:, :-1]).logits.argmax(-1)
            wrong = (best != ids[:, 1:]) & (mask[:, 1:] > 0)
            right[piece] = (~wrong.any(1)).numpy()
    return right


def _losses(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    import torch

    logits = model(input_ids=ids[:, :-1]).logits
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return flat.view(ids.shape[0], -1)


def _batch(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids int64[n, length], right-padded, and a mask float32[n, length] of the answers and their EOS."""
    import torch

    encoded = [(tokenizer.encode(prompt), tokenizer.encode(answer)[1:]) for prompt, answer in pairs]
    width = max(len(prompt) + len(answer) + 1 for prompt, answer in encoded)
    ids = torch.full((len(pairs), width), tokenizer.pad_token_id)
    mask = torch.zeros(len(pairs), width)
    for row, (prompt, answer) in enumerate(encoded):
        sequence = [*prompt, *answer, tokenizer.eos_token_id]
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, len(prompt) : len(sequence)] = 1
    return ids, mask
