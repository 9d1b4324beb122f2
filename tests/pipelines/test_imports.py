"""What starts quickly must not load what is heavy: torch and Ray are for the processes that need them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "transformers")


def loaded_by(modules: list[str], heavy: tuple[str, ...] = HEAVY) -> dict[str, list[str]]:
    """Import modules in a fresh interpreter; return the heavy packages that were there after each."""
    script = (
        "import importlib, json, sys\n"
        "modules, heavy = json.loads(sys.argv[1])\n"
        "seen = {}\n"
        "for module in modules:\n"
        "    importlib.import_module(module)\n"
        "    seen[module] = [name for name in heavy if name in sys.modules]\n"
        "print(json.dumps(seen))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps([modules, heavy])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def modules_in(folder: str, pattern: str) -> list[str]:
    paths = sorted((ROOT / folder).rglob(pattern))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]


@pytest.mark.parametrize(
    ("folder", "pattern", "least"),
    [("storage", "*.py", 8), ("actors", "options.py", 3), ("pipelines/scheduling", "*.py", 1)],
)
def test_storage_options_and_schedules_load_neither_torch_nor_ray(folder: str, pattern: str, least: int) -> None:
    modules = modules_in(folder, pattern)
    assert len(modules) >= least
    assert {module: found for module, found in loaded_by(modules).items() if found} == {}


def test_configuration_and_command_line_load_neither_torch_nor_ray() -> None:
    modules = [
        f"pipelines.{name}" for name in ("config", "cli", "config_loader", "config_docs", "preflight", "dry_run")
    ]
    assert {module: found for module, found in loaded_by(modules).items() if found} == {}


def test_the_probe_sees_a_heavy_import() -> None:
    assert loaded_by(["transformers"])["transformers"] != []


def test_a_model_is_loaded_without_scipy(random_llama: Path) -> None:
    script = (
        "import sys\n"
        "from storage.models import load_policy\n"
        "load_policy(sys.argv[1])\n"
        "from transformers.utils import is_scipy_available\n"
        "print('scipy' in sys.modules, is_scipy_available())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(random_llama)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split()[0] == "False"
    assert done.stdout.split()[1] == str(importlib.util.find_spec("scipy") is not None), "others may use it as before"


def test_the_conductor_loads_nothing_that_only_its_roles_need() -> None:
    heavy = ("torch", "transformers", "numba", "scipy", "pandas", "matplotlib", "ray.serve")
    assert loaded_by(["pipelines.conductor", "pipelines.launch"], heavy) == {
        "pipelines.conductor": [],
        "pipelines.launch": [],
    }


@pytest.mark.parametrize("role", ["actors.reward.worker", "actors.drafts.worker", "actors.learner.worker"])
def test_the_module_of_a_role_loads_torch_in_the_role_alone(role: str) -> None:
    assert loaded_by([role], ("torch", "transformers", "numba")) == {role: []}
