"""Stores for tests: one that breaks at a chosen operation, and machines that share nothing but a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from storage.remote import kept
from storage.remote.address import Address
from storage.remote.objects import Objects, RemoteError


class ProcessDied(BaseException):
    """Stands for a SIGKILL: nothing between here and the test may catch it."""


@dataclass
class Fault:
    """What happens at which of the operations that change the store.

    Attributes:
        at: Number of the operation, from 1; 0 for never.
        after: True to let the operation take effect first.
        error: What is raised.
        lasts: Operations that fail from then on.
        count: Operations so far.
    """

    at: int = 0
    after: bool = False
    error: Callable[[], BaseException] = ProcessDied
    lasts: int = 1
    count: int = 0
    log: list[str] = field(default_factory=list)

    def around(self, what: str, name: str, act: Callable[[], Any]) -> Any:
        self.count += 1
        hit = self.at and self.at <= self.count < self.at + self.lasts
        if hit and not self.after:
            raise self.error()
        result = act()
        self.log.append(f"{what} {name}")
        if hit:
            raise self.error()
        return result


class FlakyObjects(Objects):
    """Objects with faults in what changes them; probes and leases are left alone."""

    def __init__(self, address: Address, fault: Fault) -> None:
        super().__init__(address)
        self.fault = fault

    def write(self, name: str, data: bytes) -> None:
        if name.startswith((".probe", ".lock")):
            super().write(name, data)
        else:
            self.fault.around("write", name, lambda: Objects.write(self, name, data))

    def upload(self, name: str, descriptor: int, start: int, size: int) -> None:
        self.fault.around("upload", name, lambda: Objects.upload(self, name, descriptor, start, size))

    def remove(self, name: str) -> None:
        if name.startswith((".probe", ".lock")):
            super().remove(name)
        else:
            self.fault.around("remove", name, lambda: Objects.remove(self, name))

    def remove_folder(self, folder: str) -> None:
        self.fault.around("remove folder", folder, lambda: Objects.remove_folder(self, folder))


def unreachable() -> RemoteError:
    return RemoteError("the store does not answer")


def move_to(monkeypatch: pytest.MonkeyPatch, machine: Path) -> None:
    """Be another machine from now on: one with a disk of its own."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(machine))


def file_address(folder: Path, name: str = "run") -> Address:
    return Address.parse(f"file://{folder.absolute()}").child(name)


def leave() -> None:
    """End all uses of copies of remote runs by this process, as its end would."""
    for note in kept._held.values():
        note.close()
    kept._held.clear()
