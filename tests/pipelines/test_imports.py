"""What starts quickly must not load what is heavy: torch and Ray are for the processes that need them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "transformers")


def loaded_by(modules: list[str]) -> dict[str, list[str]]:
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
        [sys.executable, "-c", script, json.dumps([modules, HEAVY])],
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
