"""The log of a run is bounded, whatever goes wrong how often."""

from __future__ import annotations

import logging

from pipelines import conductor


def test_the_log_of_a_run_is_bounded_and_ends_with_what_happened_last(tmp_path, monkeypatch):
    monkeypatch.setattr(conductor, "_LOG_BYTES", 10_000)
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        conductor._log_to(tmp_path / "events.log")
        for i in range(1000):
            logging.getLogger("pipelines.flow").warning("worker %d died", i)
    finally:
        for handler in set(root.handlers) - set(before):
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["events.log", "events.log.1"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000
    assert (tmp_path / "events.log").read_text().endswith("WARNING pipelines.flow: worker 999 died\n")
