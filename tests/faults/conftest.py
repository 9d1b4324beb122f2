"""A disk that can be filled."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class Disk:
    """A file system in memory whose size can be changed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resize(self, size: int | str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", self.path], check=True, capture_output=True)

    @property
    def used(self) -> int:
        return shutil.disk_usage(self.path).used


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    point = tmp_path / "disk"
    point.mkdir()
    made = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "none", point], capture_output=True
    )
    if not made or made.returncode:
        pytest.skip("mounting is not permitted here")
    yield Disk(point)
    subprocess.run(["umount", "--lazy", point], check=True)
