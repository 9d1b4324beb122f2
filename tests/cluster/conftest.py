"""Homes in which the files that a cluster file names do exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SHIPPED = {"aws": ROOT / "cluster.yaml", "local": ROOT / "pipelines/presets/cluster_onprem.yaml"}
IMAGE = "ami-0123456789abcdef0"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with a token and a key."""
    home = tmp_path / "home"
    for name, mode in {".ray/auth_token": 0o600, ".ssh/id_ed25519": 0o600}.items():
        path = home / name
        path.parent.mkdir(parents=True)
        path.write_text("secret")
        path.chmod(mode)
    monkeypatch.setenv("HOME", str(home))
    return home


def filled_in(provider: str) -> dict:
    """The shipped file with what a user has to fill in."""
    data = yaml.safe_load(SHIPPED[provider].read_text())
    for node in data.get("available_node_types", {}).values():
        node["node_config"]["ImageId"] = IMAGE
    return json.loads(json.dumps(data))  # anchors end here: a test changes one node type alone
