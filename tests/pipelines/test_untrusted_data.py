"""What comes from a disk, a network or another process is data and never code: a look at every module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for folder in ("actors", "pipelines", "storage") for path in (ROOT / folder).rglob("*.py"))

UNPICKLERS = {"cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve"}
HARMLESS_OF_PICKLE = {"UnpicklingError"}
NEEDED = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}
NEVER = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "torch.jit.load", "torch.hub.load"}
EVERY_ADDRESS = {"0.0.0.0", "::"}


def violations(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pickle":
            if node.attr not in HARMLESS_OF_PICKLE:
                yield f"line {node.lineno}: pickle.{node.attr}"
        elif isinstance(node, ast.Call):
            yield from called(node)
        elif isinstance(node, ast.Constant) and node.value in EVERY_ADDRESS:
            yield f"line {node.lineno}: {node.value!r} listens to the network"


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
    names = [alias.name for alias in node.names]
    for name in names:
        parts = {*module.split("."), *name.split(".")}
        if parts & UNPICKLERS:
            yield f"line {node.lineno}: {sorted(parts & UNPICKLERS)[0]}"
    if module == "pickle" and not HARMLESS_OF_PICKLE.issuperset(names):
        yield f"line {node.lineno}: from pickle import {', '.join(names)}"
    if isinstance(node, ast.Import) and any(alias.name == "pickle" and alias.asname for alias in node.names):
        yield f"line {node.lineno}: pickle under another name"


def called(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if name in NEEDED:
        option, wanted = NEEDED[name]
        value = given.get(option)
        if not (isinstance(value, ast.Constant) and value.value is wanted):
            yield f"line {node.lineno}: {name} without {option}={wanted}"
    if name in NEVER or name in ("eval", "exec"):
        yield f"line {node.lineno}: {name}"
    for option, forbidden in (("shell", True), ("weights_only", False), ("allow_pickle", True)):
        value = given.get(option)
        if isinstance(value, ast.Constant) and value.value is forbidden:
            yield f"line {node.lineno}: {option}={forbidden}"


def test_no_module_runs_what_it_reads_or_listens_to_the_network() -> None:
    assert len(MODULES) > 150
    found = {str(path.relative_to(ROOT)): list(violations(path.read_text(encoding="utf-8"))) for path in MODULES}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b'')",
        "import pickle as p\np.loads(b'')",
        "from pickle import loads",
        "from ray import cloudpickle",
        "import ray.cloudpickle",
        "import shelve",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import numpy as np\nnp.load('x')",
        "import yaml\nyaml.load('x', Loader=None)",
        "eval('1')",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "Model.from_pretrained('x', weights_only=False)",
        "listen(host='0.0.0.0')",
    ],
)
def test_the_look_sees_each_of_them(source: str) -> None:
    assert list(violations(source))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\ntry: pass\nexcept pickle.UnpicklingError: pass",
        "import torch\ntorch.load('x', weights_only=True)",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "import yaml\nyaml.safe_load('x')",
        "model.eval()",
    ],
)
def test_the_look_lets_the_safe_ways_pass(source: str) -> None:
    assert list(violations(source)) == []
