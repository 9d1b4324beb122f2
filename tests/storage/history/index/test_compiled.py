"""Kernels and the machine code that is kept of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from numba.core.caching import IndexDataCacheFile, InTreeCacheLocator, UserWideCacheLocator

from storage.history.index.compiled import compiled


def add(a: int, b: int) -> int:
    return a + b


def test_a_kernel_is_kept_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InTreeCacheLocator, "get_cache_path", lambda self: str(tmp_path))
    assert compiled(add)(2, 3) == 5
    assert {path.suffix for path in tmp_path.iterdir()} == {".nbi", ".nbc"}
    again: Any = compiled(add)
    assert again(2, 3) == 5
    assert sum(again.stats.cache_hits.values()) == 1


def test_a_full_disk_costs_no_more_than_the_next_process_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: IndexDataCacheFile, key: Any, data: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(IndexDataCacheFile, "save", full)
    assert compiled(add)(2.0, 3.0) == 5.0


def test_a_kernel_that_can_be_kept_nowhere_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for locator in (InTreeCacheLocator, UserWideCacheLocator):
        monkeypatch.setattr(locator, "from_function", classmethod(lambda cls, *_: None))
    assert compiled(add)(2, 3) == 5
