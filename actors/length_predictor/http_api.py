"""The predictor over HTTP: request bodies, limits and error answers, as a FastAPI app without Ray.

* ``POST /predict``: ``{"prompts": ["...", {"text": "...", "group": "..."}]}``; ranks are within one request.
* ``POST /observe``: ``{"observations": [{"text": "...", "length": 120, "group": "...", "group_size": 8}]}``.
* ``GET /healthz``: JSON; 200 while the predictor answers.
* ``GET /metrics``: Prometheus text (version 0.0.4): quality and weight of each ranker, counts. A figure that is not
  known yet is ``NaN``.
* ``GET /openapi.json``: the schema. There is no page that shows it: such a page would load scripts from elsewhere.

Bad bodies get 422, bodies above the limit 413. Errors are JSON: ``{"error": sentence, "fields": {place: reason}}``;
they never repeat the input, which may be huge, or not even text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.length_predictor.quality import QualityFigures
from actors.length_predictor.records import Observation, Prediction, Query

MAX_BODY_BYTES = 8 * 2**20
MAX_PROMPTS = 1024
MAX_OBSERVATIONS = 8192
MAX_TEXT = 262_144
_MOST_FIELDS = 8
_MOST_DRAINED = 8  # times the limit

PREFIX = "slipstream_length_predictor_"


class Service(Protocol):
    """What the routes need of the predictor."""

    def predict_now(self, queries: Sequence[Query]) -> Sequence[Prediction]:
        """Predict."""

    def observe_now(self, observations: Sequence[Observation]) -> None:
        """Learn."""

    def counts(self) -> Mapping[str, int]:
        """Return how many answers and groups were observed."""

    def figures(self) -> tuple[Mapping[str, QualityFigures], Mapping[str, float]]:
        """Return quality by ranker, and weight by ranker."""


class PromptBody(BaseModel):
    """A prompt with its group."""

    model_config = ConfigDict(extra="forbid")

    text: str = Field(max_length=MAX_TEXT, description="The rendered prompt.")
    group: str = Field("", max_length=1024, description="Its running group of siblings; what these showed is used.")


class PredictBody(BaseModel):
    """Prompts to rank against each other."""

    model_config = ConfigDict(extra="forbid")

    prompts: list[PromptBody | str] = Field(
        min_length=1, max_length=MAX_PROMPTS, description="Texts, or objects with text and group."
    )


class PredictionBody(BaseModel):
    """What is expected of one prompt."""

    rank: float = Field(description="0 (shortest) to 1 (longest) among the prompts of the request.")
    p50: float = Field(description="Median length of one answer. Unit: tokens.")
    p90: float = Field(description="90th percentile of the length of one answer. Unit: tokens.")
    longest: float = Field(description="Median of the longest answer of a group. Unit: tokens.")
    confidence: float = Field(description="0 (a guess) to 1.")


class PredictionsBody(BaseModel):
    """Predictions in the order of the prompts."""

    predictions: list[PredictionBody]


class ObservationBody(BaseModel):
    """One finished answer."""

    model_config = ConfigDict(extra="forbid")

    text: str = Field(max_length=MAX_TEXT, description="The rendered prompt.")
    length: int = Field(ge=0, le=2**31 - 1, description="Tokens of the answer.")
    group: str = Field("", max_length=1024, description="Its group of siblings; empty: it has none.")
    group_size: int = Field(1, ge=1, le=65_536, description="Answers that the group has in all.")


class ObserveBody(BaseModel):
    """Finished answers, in the order in which they finished."""

    model_config = ConfigDict(extra="forbid")

    observations: list[ObservationBody] = Field(min_length=1, max_length=MAX_OBSERVATIONS)


class AcceptedBody(BaseModel):
    """How many observations were taken in."""

    accepted: int


class HealthBody(BaseModel):
    """Whether it works, and how much it has seen."""

    status: str = "ok"
    answers: int
    groups: int


class AsciiJson(Response):
    """JSON in ASCII: a lone surrogate that came in as an escape goes out as one, instead of failing to encode."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode ``content``."""
        return json.dumps(content, allow_nan=False).encode("ascii")


def build_app(service: Callable[[], Service]) -> FastAPI:
    """Return the app; ``service`` gives the predictor when a request is handled."""
    app = FastAPI(
        title="Slipstream length predictor",
        description="Ranks prompts by the length of the answers to expect, and learns from every finished answer.",
        version="1",
        docs_url=None,
        redoc_url=None,
        default_response_class=AsciiJson,
    )
    app.add_middleware(BodyLimit, limit=MAX_BODY_BYTES)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _failed)

    @app.post("/predict", summary="Rank prompts by expected length")
    async def predict(body: PredictBody) -> PredictionsBody:
        queries = [
            Query(text=prompt) if isinstance(prompt, str) else Query(text=prompt.text, group=prompt.group)
            for prompt in body.prompts
        ]
        found = service().predict_now(queries)
        return PredictionsBody(
            predictions=[
                PredictionBody(rank=p.rank, p50=p.p50, p90=p.p90, longest=p.longest, confidence=p.confidence)
                for p in found
            ]
        )

    @app.post("/observe", summary="Report finished answers")
    async def observe(body: ObserveBody) -> AcceptedBody:
        service().observe_now(
            [
                Observation(text=seen.text, length=seen.length, group=seen.group, group_size=seen.group_size)
                for seen in body.observations
            ]
        )
        return AcceptedBody(accepted=len(body.observations))

    @app.get("/healthz", summary="Is it alive")
    async def healthz() -> HealthBody:
        return HealthBody(**service().counts())

    @app.get("/metrics", summary="Quality figures as Prometheus text", response_class=Response)
    async def metrics() -> Response:
        return Response(prometheus_text(service()), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def prometheus_text(service: Service) -> str:
    """Return the quality figures and counts of a predictor in Prometheus' text format."""
    quality, weights = service.figures()
    series: list[tuple[str, str, Mapping[str, float]]] = [
        (
            "spearman",
            "Rank correlation with the group's longest answer",
            {k: q.spearman for k, q in quality.items()},
        ),
        ("kendall_tau", "Kendall's tau-b with the longest answer", {k: q.kendall for k, q in quality.items()}),
        ("recall20", "Recall of the longest 20 % of the groups", {k: q.recall20 for k, q in quality.items()}),
        ("measured_groups", "Groups in the window of these figures", {k: q.groups for k, q in quality.items()}),
        ("weight", "Recent Spearman that the ranker is trusted with", weights),
    ]
    lines = []
    for name, meaning, values in series:
        lines += [f"# HELP {PREFIX}{name} {meaning}", f"# TYPE {PREFIX}{name} gauge"]
        lines += [f'{PREFIX}{name}{{ranker="{ranker}"}} {_number(value)}' for ranker, value in values.items()]
    for name, count in service.counts().items():
        lines += [f"# HELP {PREFIX}{name}_total Observed {name}", f"# TYPE {PREFIX}{name}_total counter"]
        lines.append(f"{PREFIX}{name}_total {count}")
    return "\n".join(lines) + "\n"


class BodyLimit:
    """Refuses bodies above a limit with 413, by their announced size or else while they arrive."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        size = int(announced) if announced.isdigit() else 0
        held: list[Message] = []
        received = 0
        # All of it is read before the answer begins: a client that is still writing would see a broken connection
        # instead of the reason. What is too large is dropped on the way, and far beyond that the client is cut off.
        while received <= _MOST_DRAINED * self._limit:
            message = await receive()
            received += len(message.get("body", b""))
            size = max(size, received)
            if size <= self._limit:
                held.append(message)
            if message["type"] != "http.request" or not message.get("more_body", False):
                break
        if size > self._limit:
            text = f"the body exceeds {self._limit:,} bytes: send fewer prompts or observations in one request"
            await AsciiJson({"error": text, "fields": {}}, status_code=413)(scope, receive, send)
            return

        async def replay() -> Message:
            return held.pop(0) if held else await receive()

        await self._app(scope, replay, send)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fields: dict[str, str] = {}
    for problem in error.errors():
        # The first part says "body"; the type names in the middle are pydantic's for the branches of a union.
        place = ".".join(str(part) for part in problem["loc"][1:] if part not in ("PromptBody", "str"))
        reason = str(problem["msg"])
        if problem["type"] == "json_invalid":
            place, reason = "body", f"not JSON, see character {place}"
        elif not place and problem["type"] == "model_attributes_type":
            reason = "expected a JSON object, sent with Content-Type: application/json"
        fields.setdefault((place or "body")[:200], reason[:200])
    shown = dict(list(fields.items())[:_MOST_FIELDS])
    more = f" and {len(fields) - len(shown)} more" if len(fields) > len(shown) else ""
    text = "; ".join(f"{place}: {reason}" for place, reason in shown.items())
    return AsciiJson({"error": f"the body cannot be used: {text}{more}", "fields": shown}, status_code=422)


async def _failed(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:  # FastAPI's answer to a body that is not even text
        return AsciiJson({"error": "the body cannot be used: it is not JSON in UTF-8", "fields": {}}, status_code=422)
    return AsciiJson({"error": str(error.detail), "fields": {}}, status_code=error.status_code, headers=error.headers)


def _number(value: float) -> str:
    return "NaN" if value != value else f"{value:.6g}"
