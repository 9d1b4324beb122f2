"""The length predictor as a Ray Serve deployment: over HTTP for others, by handle inside training.

One replica: what it learns is its value, and two would each know half. Calls run one after another on its event loop,
a few dozen milliseconds each at most, which is what keeps the predictor free of locks.
"""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.schema import LoggingConfig

from actors.length_predictor.http_api import build_app
from actors.length_predictor.options import LengthPredictorOptions
from actors.length_predictor.predictor import LengthPredictor, dump_state, parse_state
from actors.length_predictor.quality import QualityFigures
from actors.length_predictor.records import Observation, Prediction, Query, Reply
from actors.length_predictor.semantic import check_minilm
from storage.errors import UserError

APP = "length-predictor"
_MAX_ONGOING, _MAX_QUEUED = 64, 256
_HEALTH_PERIOD_S = 5.0


def _http_app() -> FastAPI:
    return build_app(lambda: serve.get_replica_context().servable_object)


class LengthPredictorReplica:
    """The deployed class. Methods without ``_now`` are called by handle."""

    def __init__(self, options: LengthPredictorOptions) -> None:
        """Start without knowledge; a client that has some hands it over by :meth:`restore`."""
        self._predictor = LengthPredictor(options)
        self._incarnation = uuid.uuid4().hex

    async def predict(self, queries: Sequence[Query]) -> Reply:
        """Predict; see :meth:`LengthPredictor.predict`."""
        return Reply(incarnation=self._incarnation, predictions=tuple(self._predictor.predict(queries)))

    async def observe(self, observations: Sequence[Observation]) -> str:
        """Learn; returns the incarnation. See :meth:`LengthPredictor.observe`."""
        self._predictor.observe(observations)
        return self._incarnation

    async def snapshot(self) -> tuple[str, int, bytes]:
        """Return the incarnation, the number of observed answers, and the state."""
        return self._incarnation, self._predictor.answers, dump_state(self._predictor.state())

    async def restore(self, state: bytes) -> None:
        """Take over a state (empty: none); what this replica has observed is forgotten. Raises ``UserError``."""
        if state:
            self._predictor.load_state(parse_state(state))
        else:
            self._predictor.forget()

    async def health(self) -> tuple[str, int]:
        """Return the incarnation and the number of observed answers."""
        return self._incarnation, self._predictor.answers

    async def quality(self) -> dict[str, QualityFigures]:
        """Return the quality of each ranker and of their fusion."""
        return self._predictor.quality()

    def predict_now(self, queries: Sequence[Query]) -> Sequence[Prediction]:
        """Predict, for the HTTP routes."""
        return self._predictor.predict(queries)

    def observe_now(self, observations: Sequence[Observation]) -> None:
        """Learn, for the HTTP routes."""
        self._predictor.observe(observations)

    def counts(self) -> Mapping[str, int]:
        """Return how many answers and groups were observed."""
        return {"answers": self._predictor.answers, "groups": self._predictor.groups}

    def figures(self) -> tuple[Mapping[str, QualityFigures], Mapping[str, float]]:
        """Return quality by ranker, and weight by ranker."""
        return self._predictor.quality(), self._predictor.weights()


def deploy(
    options: LengthPredictorOptions, *, name: str = APP, host: str = "127.0.0.1", port: int | None = None
) -> Any:
    """Deploy the predictor on the Ray that this process is connected to, and return its handle when it answers.

    Args:
        options: Options of the predictor.
        name: Name of the Serve application; runs that share a cluster have one each.
        host: Address that HTTP binds to; anything but loopback opens it to the network, without authentication.
        port: Port of HTTP; None: no HTTP, only the handle.

    Raises:
        UserError: The embedding is not installed, or the port is taken.
    """
    if options.embedding == "minilm":
        check_minilm()
    for noisy in ("ray.serve", "ray._private.worker"):  # its progress reports are not for the reader of a training run
        logging.getLogger(noisy).setLevel(logging.ERROR)
    _start(host, port)
    deployment = serve.deployment(
        name="LengthPredictor",
        num_replicas=1,
        max_ongoing_requests=_MAX_ONGOING,
        max_queued_requests=_MAX_QUEUED,
        health_check_period_s=_HEALTH_PERIOD_S,
        ray_actor_options={"num_cpus": options.num_cpus},
        logging_config=LoggingConfig(enable_access_log=False, log_level="ERROR"),
    )(serve.ingress(_http_app)(LengthPredictorReplica))
    route = None if port is None else "/"
    return serve.run(deployment.bind(options), name=name, route_prefix=route)


def find(name: str) -> Any:
    """Return the handle of a predictor that is deployed; raises what Serve raises where there is none."""
    return serve.get_app_handle(name)


def remove(name: str = APP, *, keep_serve: bool = False) -> None:
    """Take the predictor down, and Serve with it when nothing else is deployed there, unless it is to be kept."""
    serve.delete(name)
    if not keep_serve and not serve.status().applications:
        serve.shutdown()


def check_port(host: str, port: int) -> None:
    """Raise ``UserError`` when nothing can listen there; Serve itself would only call its proxy unhealthy."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise UserError(f"the predictor cannot listen at {host}:{port} ({error}): choose another port") from error


def _start(host: str, port: int | None) -> None:
    if serve.status().proxies:
        return
    if port is None:
        serve.start(proxy_location=ProxyLocation.Disabled)
        return
    check_port(host, port)
    serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=HTTPOptions(host=host, port=port))
