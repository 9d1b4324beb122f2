"""A cluster file for ``ray up``: read, filled with Ray's defaults, and held against Ray's own schema."""

from __future__ import annotations

import importlib.util
import io
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from storage.errors import UserError

_PROVIDERS = ("aws", "local")
"""Those that :mod:`pipelines.cluster_laws` knows; Ray has more."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LABELS = re.compile(r"--labels(?:=|\s+)(?P<quote>[\"']?)(?P<pairs>(?:\$\([^)]*\)|[^\s\"'])+)(?P=quote)")


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes that are started the same way.

    Attributes:
        name: Node type, or ``head`` and ``worker`` with a provider that has none.
        field: Where the file describes it.
        is_head: True for the head.
        most: Most nodes of the kind.
        labels: Labels of its nodes; None as the value of one that each node decides for itself.
        config: ``node_config``; empty with a provider that has none.
    """

    name: str
    field: str
    is_head: bool
    most: int
    labels: Mapping[str, str | None]
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """A valid cluster file.

    Attributes:
        path: Where it lies; local paths in it are relative to the directory that ``ray up`` runs in.
        written: What the file says.
        filled: The same with Ray's defaults.
    """

    path: Path
    written: Mapping[str, Any]
    filled: Mapping[str, Any]

    @property
    def provider(self) -> str:
        """Type of the provider: ``aws`` or ``local``."""
        return str(self.filled["provider"]["type"])

    def commands(self, field: str) -> Sequence[str]:
        """Return the shell commands of a field such as ``setup_commands``."""
        return tuple(self.filled.get(field) or ())

    def node_kinds(self) -> Iterator[NodeKind]:
        """All kinds of nodes, the head first."""
        if self.provider == "local":
            head, worker = "head_start_ray_commands", "worker_start_ray_commands"
            addresses = self.filled["provider"].get("worker_ips")  # a coordinator knows them in its place
            most = int(self.filled["max_workers"])
            workers = most if addresses is None else min(len(addresses), most)
            yield NodeKind("head", head, True, 1, _labels_in(self.commands(head)), {})
            yield NodeKind("worker", worker, False, workers, _labels_in(self.commands(worker)), {})
            return
        types = self.filled["available_node_types"]
        head = self.filled["head_node_type"]
        for name in sorted(types, key=lambda name: name != head):
            node = types[name]
            most = 1 if name == head else min(int(node["max_workers"]), int(self.filled["max_workers"]))
            field = f"available_node_types.{name}"
            yield NodeKind(name, field, name == head, most, node.get("labels") or {}, node["node_config"])


def load_cluster_file(path: Path | str) -> ClusterFile:
    """Read a cluster file and hold it against the schema of the installed Ray.

    Raises:
        UserError: It cannot be read, is no YAML, or Ray would refuse it; names the field.
    """
    path = Path(path)
    written = _read(path)
    provider = written.get("provider")
    type_ = provider.get("type") if isinstance(provider, dict) else None
    if type_ not in _PROVIDERS:
        raise UserError(f"{path}: provider.type: got {type_!r}; must be one of {', '.join(_PROVIDERS)}")
    if type_ == "aws" and importlib.util.find_spec("boto3") is None:
        raise UserError(f"{path}: provider.type: aws needs the package boto3; pip install 'slipstream[aws]'")
    mounts = written.get("file_mounts")
    for remote, local in mounts.items() if isinstance(mounts, dict) else ():
        if not isinstance(local, str):  # the schema says nothing about them
            raise UserError(f"{path}: file_mounts.{remote}: got {local!r}; must be a path on this machine")
    return ClusterFile(path, written, _fill(path, written))


def _read(path: Path) -> dict[str, Any]:
    try:
        # Ray reads it like this; other rules would check something else than what `ray up` sees.
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a YAML file: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise UserError(f"{path}:{line}: is no YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: is no YAML: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: must hold fields such as provider, not a single value")
    return data


def _fill(path: Path, written: dict[str, Any]) -> Mapping[str, Any]:
    import click
    import jsonschema
    from ray.autoscaler._private.util import prepare_config, validate_config

    said = io.StringIO()
    try:
        with _captured(said):
            filled: dict[str, Any] = prepare_config(written)
            validate_config(filled)
    except jsonschema.ValidationError as error:
        field = ".".join(map(str, error.absolute_path)) or "top level"
        raise UserError(f"{path}: {field}: {error.message}") from None
    except click.ClickException as error:
        # Ray prints the reason and raises an error that may have none.
        reason = " ".join(_COLOUR.sub("", said.getvalue()).split()) or error.message
        raise UserError(f"{path}: {reason}") from None
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        # Ray fills defaults in before it looks at the schema, so a value of a wrong type may fail anywhere.
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{path}: Ray cannot make sense of it: {reason}; a field is missing or of a wrong type"
        ) from None
    return filled


@contextmanager
def _captured(stream: io.StringIO) -> Iterator[None]:
    """Keep what Ray's launcher prints, through both of its outlets, from the terminal."""
    logger = logging.getLogger("ray.autoscaler")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(stream), redirect_stderr(stream):
            yield
    finally:
        logger.setLevel(level)


def _labels_in(commands: Sequence[str]) -> Mapping[str, str | None]:
    labels: dict[str, str | None] = {}
    for command in commands:
        for found in _LABELS.finditer(command):
            for pair in found["pairs"].split(","):
                key, _, value = pair.partition("=")
                labels[key] = None if "$" in value else value
    return labels
