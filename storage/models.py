"""Finds, checks and loads models: every one is a local Hugging Face directory by the time a role sees it.

torch and transformers are imported where weights or tokenizers are loaded, not with this module.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage.errors import UserError
from storage.files import StorageError, describe_failure, fsync_directory, try_lock
from storage.light_imports import import_losses
from storage.options import ModelOptions

Progress = Callable[[str], None]

TINY = "tiny"
SMOLLM2 = "smollm2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_HUB_IGNORED = ("original/*", "onnx/*", "openvino/*")
_POLL_S = 0.2


def cache_directory() -> Path:
    """Folder for models that are built or converted here: ``SLIPSTREAM_CACHE``, else the user's cache folder."""
    named = os.environ.get("SLIPSTREAM_CACHE")
    if named:
        return Path(named).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("slipstream")


def check_model(options: ModelOptions) -> None:
    """Check that a model is there, or can be made, without loading weights or reaching for the network.

    Raises:
        UserError: The directory is missing or lacks its configuration, weights or tokenizer; the model is no causal
            language model; it brings code that is not trusted; a package is missing.
    """
    present = present_model(options)
    if options.path == SMOLLM2 and present is None:
        from storage import smollm2

        smollm2.find_gguf()
    if options.path in (TINY, SMOLLM2):
        return
    if present is not None:
        _check_directory(present, options)
    elif not _is_hub_id(options.path):
        _check_directory(Path(options.path).expanduser(), options)


def present_model(options: ModelOptions) -> Path | None:
    """Return the model's directory when it is on this machine already; builds and fetches nothing."""
    path = Path(options.path).expanduser()
    if options.path in (TINY, SMOLLM2):
        path = _built_directory(options.path)
        return path if (path / "config.json").is_file() else None
    if path.exists():
        return path
    return _cached_snapshot(options) if _is_hub_id(options.path) else None


def resolve_model(options: ModelOptions, progress: Progress | None = None) -> Path:
    """Return a model's local Hugging Face directory; builds ``tiny``, converts ``smollm2`` and fetches hub ids once.

    Args:
        options: Which model.
        progress: Told, in one sentence each, what takes a while.

    Raises:
        UserError: As :func:`check_model`; or a hub id that cannot be fetched.
        StorageError: The cache folder cannot be written.
    """
    check_model(options)
    report = progress or (lambda _: None)
    if options.path == TINY:
        from storage import tiny_model

        return _build_once(_built_directory(TINY), tiny_model.build, report)
    if options.path == SMOLLM2:
        from storage import smollm2

        return _build_once(_built_directory(SMOLLM2), smollm2.convert, report)
    path = Path(options.path).expanduser()
    if not path.exists():
        path = _fetch(options, report)
        _check_directory(path, options)
    return path


def load_tokenizer(path: str | Path) -> Any:
    """Return the tokenizer (transformers) of a model directory; raises ``UserError`` when it cannot be read."""
    try:
        if _is_plain_tokenizer(Path(path)):
            # What AutoTokenizer would return, but AutoTokenizer imports torch: seconds and 250 MB in every driver.
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(str(path))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=_has_code(Path(path)))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{path}: its tokenizer cannot be loaded ({_first_line(error)}); save the tokenizer beside the model"
        ) from error


def load_policy(path: str | Path, dtype: str = "float32", device: str = "cpu", attention: str | None = None) -> Any:
    """Load a causal language model (transformers) in eval mode, all dropout set to 0.

    Args:
        path: Model directory that :func:`resolve_model` returned, or a checkpoint's. Consent to code that comes with a
            model was asked for there: what got past it may run here.
        dtype: Name of a torch dtype.
        device: Name of a torch device.
        attention: transformers' ``attn_implementation``; None leaves the choice to it.

    Raises:
        UserError: The weights cannot be read or do not fit the configuration.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # roles have no terminal
    import_losses()
    code = _has_code(Path(path))
    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=code)
        _remove_dropout(config)
        extra = {} if attention is None else {"attn_implementation": attention}
        model, loading = AutoModelForCausalLM.from_pretrained(
            str(path),
            config=config,
            dtype=getattr(torch, dtype),
            trust_remote_code=code,
            output_loading_info=True,
            **extra,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{path}: its weights cannot be loaded ({_first_line(error)}); fetch or save the model again"
        ) from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise UserError(
            f"{path}: its weights lack {len(missing)} tensors of {type(model).__name__} ({missing[0]}, ...), which "
            "would be random: is it the right model, complete, and a causal language model?"
        )
    return model.to(device).eval()


def eos_token_ids(path: str | Path) -> tuple[int, ...]:
    """Return every id that ends an answer, sorted: those of generation_config.json, config.json and the tokenizer."""
    path = Path(path)
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        settings = _read_json(path / name) if (path / name).is_file() else {}
        for section in (settings, settings.get("text_config") or {}):
            value = section.get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    own = load_tokenizer(path).eos_token_id
    return tuple(sorted(found if own is None else found | {own}))


def context_length(path: str | Path) -> int:
    """Return the longest sequence that a model takes, in tokens; ``sys.maxsize`` when its configuration names none."""
    saved = _read_json(Path(path) / "config.json")
    length = _longest((saved.get("text_config") or saved).get)
    if length is None:  # left to the defaults of its kind, which transformers knows, at the price of importing torch
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(path), trust_remote_code=_has_code(Path(path)))
        text = config.get_text_config(decoder=True)
        length = _longest(lambda name: getattr(text, name, None))
    return sys.maxsize if length is None else length


def _longest(setting: Callable[[str], Any]) -> int | None:
    for name in ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"):
        value = setting(name)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None


def _built_directory(name: str) -> Path:
    """Folder of a model that is made here; its name holds the recipe, so that another recipe never finds it."""
    if name == TINY:
        from storage import tiny_model

        recipe = tiny_model.recipe_id()
    else:
        from storage import smollm2

        recipe = smollm2.recipe_id()
    return cache_directory() / "models" / f"{name}-{recipe}"


def _build_once(directory: Path, build: Callable[[Path, Progress], None], report: Progress) -> Path:
    """Have ``build`` fill ``directory`` unless it exists: by one process, all of it at once or not at all."""
    if (directory / "config.json").is_file():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _lock(directory.with_name(f".{directory.name}.lock"), report):
            if not (directory / "config.json").is_file():
                temporary = directory.with_name(f".{directory.name}.tmp")
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                build(temporary, report)
                temporary.rename(directory)
                fsync_directory(directory.parent)
    except OSError as error:
        advice = "or set SLIPSTREAM_CACHE to another folder"
        raise StorageError(f"{describe_failure('cannot write', directory, error)}, {advice}") from error
    return directory


@contextmanager
def _lock(path: Path, report: Progress) -> Iterator[None]:
    """Hold a lock file, waiting for other processes that hold it."""
    told = False
    while True:
        try:
            descriptor = try_lock(path)
            break
        except BlockingIOError:
            if not told:
                report(f"waiting for another process that makes {path.parent / path.name.strip('.')[:-5]}")
                told = True
            time.sleep(_POLL_S)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _fetch(options: ModelOptions, report: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    cached = _cached_snapshot(options)
    if cached is not None:
        return cached
    report(f"fetching {options.path} from the Hugging Face hub")
    patterns = [*_HUB_FILES, *(("*.py",) if options.trust_remote_code else ())]
    try:
        return Path(snapshot_download(options.path, allow_patterns=patterns, ignore_patterns=list(_HUB_IGNORED)))
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"model.path={options.path}: there is no such directory here, and the Hugging Face hub cannot be reached: "
            "check the path or the network, or use model=tiny, which is built here"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise UserError(
            f"model.path={options.path}: there is no such directory here, and the Hugging Face hub does not give it "
            f"out ({_first_line(error)}): check the name, and log in with `hf auth login` where access is restricted"
        ) from error


def _cached_snapshot(options: ModelOptions) -> Path | None:
    """Return a hub model's folder in the hub's own cache when all of it is there."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(options.path, local_files_only=True))
        _check_directory(path, options)
    except (OSError, ValueError, UserError):
        return None
    return path


def _check_directory(path: Path, options: ModelOptions) -> None:
    if not path.exists():
        raise UserError(
            f"model.path={options.path}: there is no such directory; give tiny, smollm2, a Hugging Face directory or a "
            "hub id"
        )
    if not path.is_dir():
        raise UserError(f"model.path={options.path}: it is a file; give the Hugging Face directory that holds it")
    if not (path / "config.json").is_file():
        hint = ""
        nested = next((p.parent for p in sorted(path.glob("*/config.json"))), None)
        if nested is not None:
            hint = f" (there is one in {nested})"
        raise UserError(f"model.path={options.path}: it has no config.json{hint}; give a Hugging Face model directory")
    settings = _read_json(path / "config.json")
    _check_architecture(settings, options)
    _check_weights(path, options)
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise UserError(
            f"model.path={options.path}: it has no tokenizer (tokenizer.json and the like); save the tokenizer "
            "of the model there with tokenizer.save_pretrained"
        )


def _check_weights(path: Path, options: ModelOptions) -> None:
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (path / name).is_file():
            shards = sorted(set(_read_json(path / name).get("weight_map", {}).values()))
            lost = [shard for shard in shards if not (path / shard).is_file()]
            if lost:
                raise UserError(
                    f"model.path={options.path}: {len(lost)} of its {len(shards)} weight files are missing ({lost[0]}"
                    "); fetch them again"
                )
            return
    if not any(next(path.glob(pattern), None) for pattern in _WEIGHTS):
        raise UserError(
            f"model.path={options.path}: it has no weights (model.safetensors); save the model there with "
            "model.save_pretrained"
        )


def _check_architecture(settings: dict[str, Any], options: ModelOptions) -> None:
    if "auto_map" in settings and not options.trust_remote_code:
        raise UserError(
            f"model.path={options.path}: it brings code of its own; read that code, then set "
            "model.trust_remote_code=true"
        )
    names = settings.get("architectures") or []
    if "auto_map" in settings or any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    classes = {name for value in known.values() for name in (value if isinstance(value, list | tuple) else (value,))}
    if not (classes & set(names) if names else settings.get("model_type") in known):
        kind = names[0] if names else f"of type {settings.get('model_type')!r}"
        raise UserError(
            f"model.path={options.path}: it is {kind}, not a causal language model; give a decoder that writes text"
        )


def _has_code(path: Path) -> bool:
    return any(
        (path / n).is_file() and "auto_map" in _read_json(path / n) for n in ("config.json", "tokenizer_config.json")
    )


def _is_plain_tokenizer(path: Path) -> bool:
    """Whether a directory's tokenizer is all in ``tokenizer.json`` and says so, as those that we save do."""
    settings = path / "tokenizer_config.json"
    if not settings.is_file() or not (path / "tokenizer.json").is_file() or (path / "tekken.json").exists():
        return False
    return _read_json(settings).get("tokenizer_class") == "TokenizersBackend" and not _has_code(path)


def _remove_dropout(config: Any) -> None:
    for section in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
        for name, value in list(vars(section).items()):
            if isinstance(value, float) and ("dropout" in name or name.endswith(("_pdrop", "_drop"))):
                setattr(section, name, 0.0)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({_first_line(error)}); fetch or save the model again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object; fetch or save the model again")
    return content


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
