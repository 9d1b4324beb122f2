"""Joins the Ray that is asked for, or starts one of its own."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from rich.console import Console

from pipelines.config import Config
from storage.errors import UserError

_HOST_AND_PORT = re.compile(r"(?:ray://)?(?P<host>.+):(?P<port>\d{1,5})")
_PROBE_S = 10.0


@contextmanager
def local_or_joined_ray(config: Config, console: Console) -> Iterator[str]:
    """Join the cluster that is asked for, or start a local Ray; yields the dashboard's URL.

    A Ray that this process uses already (a notebook's, say) is used and left alone.

    Raises:
        UserError: The cluster cannot be reached, or the local Ray cannot be started.
    """
    if ray.is_initialized():
        _say_what_is_missing(config, console)
        yield ""
        return
    address = config.cluster.address or os.environ.get("RAY_ADDRESS", "")
    context = _join(config, address, console) if address else _start(config)
    url = getattr(context, "dashboard_url", "") or ""
    try:
        yield f"http://{url}" if url else ""
    finally:
        ray.shutdown()


def reserved(config: Config) -> dict[str, float]:
    """Return what the actors of a run reserve, by the names of Ray's resources."""
    rollout, reward, learner = config.rollout, config.reward, config.learner
    return {
        "CPU": rollout.workers * rollout.num_cpus + reward.workers * reward.num_cpus + learner.num_cpus,
        "GPU": rollout.workers * rollout.num_gpus + learner.num_gpus,
    }


def shortage(config: Config) -> str:
    """Say which resources the actors reserve beyond what the cluster has; empty when there is enough."""
    there = ray.cluster_resources()
    short = {name: count for name, count in reserved(config).items() if count > there.get(name, 0.0)}
    return "; ".join(
        f"the run reserves {count:g} {name}s (num_{name.lower()}s of rollout, reward and learner), the cluster has "
        f"{there.get(name, 0.0):g}"
        for name, count in short.items()
    )


def _common() -> dict[str, Any]:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}


def _join(config: Config, address: str, console: Console) -> Any:
    origin = f"cluster.address={address}" if config.cluster.address else f"RAY_ADDRESS={address}"
    advice = "check that the cluster is up and the address is its head's, or leave it empty for a local Ray"
    found = _HOST_AND_PORT.fullmatch(address)
    if found:  # Ray itself would try for minutes before it says so
        try:
            socket.create_connection((found["host"], int(found["port"])), timeout=_PROBE_S).close()
        except (OSError, OverflowError) as error:
            raise UserError(f"{origin}: nothing answers there ({error}); {advice}") from error
    try:
        context = ray.init(address=address, **_common())
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{origin} cannot be joined: {_first_line(error)}; {advice}") from error
    console.print(f"joined the Ray cluster at {address}", highlight=False)
    _say_what_is_missing(config, console)
    return context


def _start(config: Config) -> Any:
    try:
        return ray.init(
            address="local",
            include_dashboard=config.cluster.dashboard,
            dashboard_host="127.0.0.1",
            object_store_memory=config.cluster.object_store_mb * 1024 * 1024,
            **_common(),
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"a local Ray cannot be started (cluster.object_store_mb={config.cluster.object_store_mb}): "
            f"{_first_line(error)}; lower that if memory is short, and see that Ray may write to its temporary "
            "folder (RAY_TMPDIR)"
        ) from error


def _say_what_is_missing(config: Config, console: Console) -> None:
    missing = shortage(config)
    if missing:
        wait = f"waiting up to cluster.start_deadline_s={config.cluster.start_deadline_s:g} s for it to grow"
        console.print(f"{missing}: {wait}", highlight=False)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
