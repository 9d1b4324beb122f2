"""The log of a run is bounded, whatever goes wrong how often, and a disk that refuses it is told of, no more."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pipelines import events_log


@pytest.fixture(autouse=True)
def root() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield root
    for handler in set(root.handlers) - set(before):
        root.removeHandler(handler)
        with suppress(OSError):  # of what a full disk has not taken
            handler.close()
    root.setLevel(level)


def test_the_log_of_a_run_is_bounded_and_ends_with_what_happened_last(tmp_path: Path) -> None:
    events = events_log.EventsLog(tmp_path / "events.log", max_bytes=10_000)
    logging.getLogger().addHandler(events)
    for i in range(1000):
        logging.getLogger("pipelines.flow").warning("worker %d died", i)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["events.log", "events.log.1"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000
    assert (tmp_path / "events.log").read_text().endswith("WARNING pipelines.flow: worker 999 died\n")
    assert events.failure == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_costs_lines_and_nobody_is_shown_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events.log").symlink_to("/dev/full")
    events = events_log.log_to(tmp_path / "events.log")
    logging.getLogger("pipelines.flow").warning("worker 0 died")
    assert events.failure.startswith(f"cannot write {tmp_path}/events.log: No space left on device; free space")
    assert capfd.readouterr().err == ""
