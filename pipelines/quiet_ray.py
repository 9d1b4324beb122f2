"""Starts or joins Ray such that a terminal shows what a run tells, and nothing else of Ray's."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import ray

log = logging.getLogger(__name__)


def init_quietly(**arguments: Any) -> Any:
    """Call ``ray.init``; what Ray would print about the cluster is logged by this process, at level INFO.

    Of each process that dies Ray prints a page, whatever ``log_to_driver`` says, in the middle of the progress line. A
    run tells of deaths itself, in a line, and its ``events.log`` has the causes.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray._private.worker.print_to_stdstream = _to_log
    return ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=True, **arguments)


def _to_log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    """Stand in for Ray's function of this name and signature."""
    log.info("Ray (%s): %s", data.get("pid"), "\n".join(data["lines"]))
