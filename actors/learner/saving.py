"""The learner's part of a checkpoint: a model directory, and the trainer's state beside it.

Files are written in place: whoever owns the checkpoint makes the whole folder appear at once.
"""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.learner.sharding import piece_like
from actors.weights import pack
from storage.errors import UserError
from storage.files import StorageError, describe_failure, require_free_space

TRAINER_FILE = "trainer.pt"
REFERENCE_FILE = "reference.safetensors"
SNAPSHOT_FILE = "published.safetensors"

_KEYS = frozenset(("version", "optimiser", "weights", "random", "publisher", "published"))

# What belongs to a model directory besides weights and config.json: tokenizer, chat template, generation defaults.
_COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "additional_chat_templates",
    "generation_config.json",
    "*.py",
)


def resolve_device(device: str) -> str:
    """Return "cpu" or "cuda"; raises ``UserError`` where CUDA is asked for and missing."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("learner.device=cuda, but torch sees no GPU here: set learner.device=cpu or learner.num_gpus=1")
    return device


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Hash of names-and-all of a set of weights; equal bytes give equal hashes."""
    return pack(state, 0)[0].hash


def random_states() -> dict[str, Any]:
    """States of Python's, numpy's and torch's global generators, as tensors and plain values."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert not isinstance(keys, str)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "numpy": [
            kind,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_states(state: Mapping[str, Any]) -> None:
    """Put :func:`random_states` back."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def write_trainer(
    directory: Path,
    state: Mapping[str, Any],
    reference: Mapping[str, Tensor] | None,
    snapshot: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the trainer's state.

    Args:
        directory: The component's folder.
        state: Tensors and plain values.
        reference: Weights of the reference of a KL term; None without one.
        snapshot: What the engines hold, where it is not the trained weights; None where it is.

    Raises:
        StorageError: The disk refuses it.
    """
    with _disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        tensors = [*_tensors(state), *(reference or {}).values(), *(snapshot or {}).values()]
        require_free_space(directory, sum(t.numel() * t.element_size() for t in tensors), "the optimiser's state")
        written = {**state, "published": None if snapshot is None else fingerprint(_sorted(snapshot))}
        torch.save(written, directory / TRAINER_FILE)
        for weights, name in ((reference, REFERENCE_FILE), (snapshot, SNAPSHOT_FILE)):
            if weights is not None:
                save_file({name: t.cpu().contiguous() for name, t in weights.items()}, directory / name)


def read_trainer(directory: Path, weights: str | None, reference: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """Read what :func:`write_trainer` wrote.

    Args:
        directory: The component's folder.
        weights: Fingerprint of the policy that is loaded; it must be the one that was saved. None: not checked here.
        reference: Tensors of the reference model, whole or pieces, overwritten in place; None without a KL term. A
            component saved without a reference leaves it at what was loaded.

    Raises:
        StorageError: Missing, unreadable, or of other weights.
    """
    path = directory / TRAINER_FILE
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise StorageError(describe_failure("cannot read", path, error)) from error
    except pickle.UnpicklingError:  # its message tells how to run whatever the file holds
        raise StorageError(
            f"cannot read {path}: it is damaged, or holds more than tensors and plain values; resume from an earlier "
            "checkpoint"
        ) from None
    except (RuntimeError, EOFError) as error:
        raise StorageError(f"cannot read {path}: it is damaged ({error}); resume from an earlier checkpoint") from error
    if not isinstance(state, dict) or not state.keys() >= _KEYS:
        raise StorageError(f"{path} does not hold a trainer's state; resume from an earlier checkpoint")
    if weights is not None and state["weights"] != weights:
        raise StorageError(
            f"{path} was saved with other weights than the model that is loaded: resume with the model directory of "
            "the same checkpoint"
        )
    if reference is not None and (directory / REFERENCE_FILE).exists():
        saved = _read_weights(directory / REFERENCE_FILE, reference)
        with torch.no_grad():
            for name, tensor in reference.items():
                tensor.copy_(piece_like(saved[name], tensor))
    return state


def read_snapshot(directory: Path, state: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Read the published snapshot that :func:`write_trainer` wrote beside ``state``; None when there was none.

    Raises:
        StorageError: Missing, or not the one that was saved.
    """
    if state["published"] is None:
        return None
    path = directory / SNAPSHOT_FILE
    snapshot = _read_weights(path, None)
    if fingerprint(_sorted(snapshot)) != state["published"]:
        raise StorageError(f"{path} does not hold the weights that were published; resume from an earlier checkpoint")
    return snapshot


def write_model(model: Any, state: Mapping[str, Tensor], source: Path, directory: Path) -> None:
    """Write a model as a Hugging Face directory.

    Args:
        model: Says how its files look.
        state: Its state dictionary with whole tensors.
        source: Directory of the base model, whose companion files belong to the result too.
        directory: Where to.

    Raises:
        StorageError: The disk refuses it, or the base model has been removed.
    """
    with _disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if not source.is_dir():
            raise StorageError(
                f"{source} is gone, and with it the tokenizer that belongs to each checkpoint: put the folder back"
            )
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        require_free_space(directory, size, "the model")
        model.save_pretrained(directory, state_dict=dict(state))
        for pattern in _COMPANIONS:
            for companion in sorted(source.glob(pattern)):
                if companion.is_dir():
                    shutil.copytree(companion, directory / companion.name, dirs_exist_ok=True)
                else:
                    shutil.copy2(companion, directory / companion.name)


def _read_weights(path: Path, like: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Read a safetensors file; raises ``StorageError`` when it is damaged, or lacks names or shapes of ``like``."""
    try:
        found: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot read {path}: {error}; resume from an earlier checkpoint") from error
    for name, tensor in (like or {}).items():
        if name not in found or found[name].shape != tensor.shape:
            there = f"has shape {list(found[name].shape)}" if name in found else "is missing"
            raise StorageError(
                f"{path} does not fit the model: {name} {there}, wanted is {list(tensor.shape)}; resume with the model "
                "directory of the same checkpoint"
            )
    return found


@contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    """Turn what a full or read-only disk raises in various libraries into one kind of error with one kind of text."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(describe_failure("cannot write", directory, error)) from error
    except SafetensorError as error:
        raise StorageError(f"cannot write {directory}: {error}; free space on that disk") from error
    except RuntimeError as error:
        if "PytorchStreamWriter" not in str(error) and "write" not in str(error):
            raise
        raise StorageError(f"cannot write {directory}: {error}; free space on that disk") from error


def _sorted(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(sorted(state.items()))  # a safetensors file keeps no order, and a fingerprint depends on it


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
