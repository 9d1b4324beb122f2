"""Builds a :class:`Config` from its sources, and says where every value came from.

Later sources win: defaults of the schema, profile of the model (``presets/models/MODEL.yaml``), preset or YAML file,
overrides of the command line. Whatever is wrong is collected and reported at once.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipelines.config import Config, RunOptions
from pipelines.config_fields import (
    describe_annotation,
    field_docs,
    item_annotation,
    section_docs,
    section_model,
    strip_optional,
)
from pipelines.config_layers import Layer, MergedValues, split_override
from pipelines.yaml_documents import KeyPath, dump_yaml, parse_yaml
from storage.errors import UserError
from storage.files import atomic_write
from storage.run_directory import find_run

PRESETS = Path(__file__).parent / "presets"
DEFAULT_PRESET = "baseline"

_PROFILES = "models"
_CLUSTERS = "cluster_"  # files for `ray up`
_RUN_CONFIG = "config.yaml"
_RESUMABLE = (
    "run.steps",
    "run.epochs",
    "run.restarts",
    "run.debug",
    "evaluation",
    "checkpoint",
    "tracking",
    "cluster",
    "rollout.workers",
    "rollout.threads",
    "rollout.max_rows",
    "rollout.num_cpus",
    "rollout.num_gpus",
    "rollout.stream_interval_s",
    "rollout.stall_deadline_s",
    "reward.workers",
    "reward.processes",
    "reward.timeout_s",
    "reward.error_alarm",
    "reward.pass_environment",
    "reward.num_cpus",
    "learner.threads",
    "learner.tokens_per_microbatch",
    "learner.gradient_checkpointing",
    "learner.num_cpus",
    "learner.num_gpus",
    "learner.deadline_s",
)
"""Fields and sections that neither change what is learned nor what a checkpoint means."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration and its history.

    Attributes:
        config: The validated configuration.
        origins: Where a field was set (``run.yaml:3``, ``preset baseline:4``, ``command line``), by dotted path;
            fields that keep the schema's default are absent.
        name: Name of the preset or stem of the file it started from.
    """

    config: Config
    origins: Mapping[str, str]
    name: str


def load(arguments: Sequence[str] = ()) -> Resolved:
    """Resolve the positional arguments of the command line: ``[PRESET|FILE] [section.field=value ...]``.

    Raises:
        UserError: With every problem found, each with its field, the value, what is allowed and where it was set.
    """
    source, overrides = split_arguments(arguments)
    source = source or DEFAULT_PRESET
    layers = _source_layers(source)
    return _resolve(layers, overrides, name=Path(source).stem, with_profile=True)


def load_config_file(path: Path | str) -> Config:
    """Load a complete file that :func:`write_config` wrote; no preset or profile comes in between."""
    return _resolve(_file_layers(Path(path), ()), (), name=Path(path).stem, with_profile=False).config


def load_for_resume(directory: Path, overrides: Sequence[str] = ()) -> Resolved:
    """Load the configuration of a run directory, with those overrides that a resumed run may take.

    Raises:
        UserError: No ``config.yaml`` there, or an override of a field that decides what is learned.
    """
    path = directory / _RUN_CONFIG
    if not path.is_file():
        raise UserError(f"{directory} is not a run directory: it has no {_RUN_CONFIG}")
    source, overrides = split_arguments(overrides)
    if source is not None:
        raise UserError(f"--resume takes its configuration from {path}: drop {source!r}")
    keys = [split_override(override)[0] for override in overrides]
    known = [key for key in keys if key in section_docs() or _is_within(key, tuple(field_docs()))]
    frozen = [key for key in known if not _is_within(key, _RESUMABLE)]
    if frozen:
        raise UserError(
            f"{', '.join(frozen)}: cannot change when a run is resumed, because its checkpoint and its history belong "
            "to the old value; start a new run instead (model.path may name the model folder of a checkpoint). "
            f"What may change: {', '.join(_RESUMABLE)}"
        )
    return _resolve(_file_layers(path, ()), overrides, name=directory.name, with_profile=False)


def load_for_evaluation(target: str, arguments: Sequence[str] = ()) -> Resolved:
    """Load the configuration that ``target`` is evaluated with.

    A run directory, or a checkpoint inside of one, brings its own; anything else is a model (name or directory) that is
    evaluated with the preset or file in ``arguments``.
    """
    run = find_run(target, Path(RunOptions().directory)) or _run_of_checkpoint(Path(target))
    source, overrides = split_arguments(arguments)
    if run is None or source is not None:
        return load([*([source] if source else []), f"model.path={target}", *overrides])
    return _resolve(_file_layers(run / _RUN_CONFIG, ()), overrides, name=run.name, with_profile=False)


def _run_of_checkpoint(path: Path) -> Path | None:
    """Return the run that a checkpoint, or a folder inside of one, belongs to."""
    if not path.exists():
        return None
    folders = path.resolve().parents
    run = next((folder.parent for folder in folders if folder.name == "checkpoints"), None)
    return run if run is not None and (run / _RUN_CONFIG).is_file() else None


def _is_within(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def write_config(config: Config, path: Path | str) -> None:
    """Write the whole configuration as YAML; :func:`load_config_file` reads an equal one. Raises ``StorageError``."""
    atomic_write(Path(path), to_yaml(config).encode())


def to_yaml(config: Config) -> str:
    """Return the whole configuration as YAML."""
    return dump_yaml(plain(config.model_dump(mode="python")))


def plain(data: Any) -> Any:
    """Turn tuples into lists all the way down, so that YAML needs no tags."""
    if isinstance(data, Mapping):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, (tuple, list)):
        return [plain(value) for value in data]
    return data


def preset_names(root: Path = PRESETS) -> list[str]:
    """Names of the shipped presets, nested ones as ``folder/name``."""
    names = (path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))
    return sorted(name for name in names if not name.startswith((f"{_PROFILES}/", _CLUSTERS)))


def profile_names(root: Path = PRESETS) -> list[str]:
    """Names of the models that have a profile."""
    return sorted(path.stem for path in (root / _PROFILES).glob("*.yaml"))


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split positional arguments into the preset or file, if any, and the overrides."""
    sources = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    for argument in sources:
        if argument in field_docs() or (len(sources) > 1 and argument != sources[0]):
            raise UserError(f"{argument}: an override needs a value, as in section.field=value")
    return (sources[0] if sources else None), overrides


# -- sources ----------------------------------------------------------------------------------------------------------


def _source_layers(source: str) -> list[Layer]:
    path = Path(source)
    if source in preset_names():
        return _preset_layers(source, ())
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        return _file_layers(path, ())
    raise UserError(_unknown_preset(source) + f"; and there is no file {source}")


def _unknown_preset(name: str) -> str:
    names = preset_names()
    near = difflib.get_close_matches(name, names, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown preset {name!r}{hint}; presets: {', '.join(names) or 'none'}"


def _preset_layers(name: str, seen: tuple[str, ...]) -> list[Layer]:
    return _read_layers(PRESETS / f"{name}.yaml", f"preset {name}", seen)


def _file_layers(path: Path, seen: tuple[str, ...]) -> list[Layer]:
    return _read_layers(path, str(path), seen)


def _read_layers(path: Path, name: str, seen: tuple[str, ...]) -> list[Layer]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a YAML file: {error}") from None
    document = parse_yaml(text, name)
    data = {} if document.data is None else document.data
    if not isinstance(data, dict):
        raise UserError(f"{name}: must hold sections (section: then indented field: value lines), not a single value")
    base = data.pop("preset", None)
    layer = Layer(data, document.texts, document.lines, name)
    if base is None:
        return [layer]
    place = layer.origin(("preset",))
    if base not in preset_names():
        raise UserError(f"{place}: {_unknown_preset(str(base))}")
    if base in seen:
        raise UserError(f"{place}: presets build on one another in a circle: {' -> '.join((*seen, base))}")
    return [*_preset_layers(base, (*seen, base)), layer]


# -- merging ----------------------------------------------------------------------------------------------------------


def _resolve(layers: Sequence[Layer], overrides: Sequence[str], *, name: str, with_profile: bool) -> Resolved:
    merged = _merge(layers, overrides)
    if with_profile:
        model = merged.values.get(("model", "path"), field_docs()["model.path"].default)
        if model in profile_names():
            profile = _read_layers(PRESETS / _PROFILES / f"{model}.yaml", f"profile of model {model}", ())
            merged = _merge([*profile, *layers], overrides)
    config = _validate(merged)
    origins = {".".join(path): merged.origin(path) for path in merged.values}
    return Resolved(config, origins, name)


def _merge(layers: Sequence[Layer], overrides: Sequence[str]) -> MergedValues:
    merged = MergedValues()
    for layer in layers:
        merged.add(layer)
    for override in overrides:
        merged.override(override)
    return merged


# -- validation -------------------------------------------------------------------------------------------------------


def _validate(merged: MergedValues) -> Config:
    tree: dict[str, Any] = {}
    for path, value in merged.values.items():
        section = tree
        for part in path[:-1]:
            section = section.setdefault(part, {})
        section[path[-1]] = value
    problems = list(merged.problems)
    config = None
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False)
        for detail in details:
            # A list whose items are wrong is also called too short; only the items are worth a line.
            depth = len(detail["loc"])
            if not any(len(other["loc"]) > depth and other["loc"][:depth] == detail["loc"] for other in details):
                problems.extend(_explain(detail, merged))
    if config is None or problems:
        if len(problems) == 1:
            raise UserError(problems[0])
        raise UserError("\n  ".join([f"{len(problems)} problems in the configuration:", *problems]))
    return config


def _explain(detail: Any, merged: MergedValues) -> Iterator[str]:
    path = tuple(str(part) for part in detail["loc"] if part != "[key]")
    dotted = ".".join(path)
    if detail["type"] == "value_error":
        for line in str(detail["ctx"]["error"]).split("\n"):
            yield f"{dotted}: {line}" if dotted else line
        return
    place = merged.origin(path)
    annotation, metadata, unit = _annotation_at(path)
    if detail["type"] == "extra_forbidden":
        model = section_model(strip_optional(_annotation_at(path[:-1])[0])[0])
        names = list(model.model_fields) if model else []
        near = difflib.get_close_matches(path[-1], names, 1, 0.0)
        hint = f"; did you mean {near[0]}?" if near else ""
        yield f"{dotted}: unknown key ({place}){hint}"
        return
    wanted = describe_annotation(annotation, metadata) + (f" ({unit})" if unit else "")
    if detail["type"] == "missing":
        yield f"{dotted}: is missing ({place}); must be {wanted}"
        return
    yield f"{dotted}: got {_show(detail['input'])} ({place}); must be {wanted}"


def _annotation_at(path: KeyPath) -> tuple[Any, Sequence[Any], str]:
    """Return annotation, constraints and unit of the value at a path, inside lists and mappings too."""
    annotation: Any = Config
    metadata: Sequence[Any] = ()
    unit = ""
    for depth, part in enumerate(path):
        model = section_model(strip_optional(annotation)[0])
        if model is not None:
            info = model.model_fields.get(part)
            annotation, metadata = (info.annotation, info.metadata) if info else (Any, ())
            doc = field_docs().get(".".join(path[: depth + 1]))
            unit = doc.unit if doc else unit
        else:
            annotation, metadata = item_annotation(annotation), ()
    return annotation, metadata, unit


def _show(value: Any) -> str:
    text = json.dumps(plain(value), default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
