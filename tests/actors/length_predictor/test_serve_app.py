"""The deployment on a real Ray Serve: over HTTP, by handle, and after its replica was killed."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import ray

from actors.length_predictor.client import PredictorClient
from actors.length_predictor.http_api import MAX_BODY_BYTES, MAX_PROMPTS, PREFIX
from actors.length_predictor.options import LengthPredictorOptions
from actors.length_predictor.records import Observation, Query
from actors.length_predictor.serve_app import check_port, deploy, remove
from storage.errors import UserError
from tests.actors.length_predictor.serving import free_port

OPTIONS = LengthPredictorOptions(deadline_s=20.0, state_interval_s=0.2)


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    kind: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True)
class Deployed:
    handle: Any
    port: int

    def send(self, path: str, body: bytes | Any = None, kind: str = "application/json") -> Answer:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": kind})
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return Answer(response.status, response.read().decode(), response.headers["Content-Type"])
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read().decode(), error.headers["Content-Type"])


@pytest.fixture(scope="module")
def service(ray_session: None) -> Iterator[Deployed]:
    port = free_port()
    yield Deployed(deploy(OPTIONS, port=port), port)
    remove()


def test_what_was_observed_over_http_shows_in_predictions(service: Deployed) -> None:
    seen = [
        {"text": f"{name} {i}", "length": length + j, "group": f"{name}{i}", "group_size": 2}
        for i in range(40)
        for name, length in (("essay", 800), ("yes or no", 3))
        for j in range(2)
    ]
    for start in range(0, len(seen), 40):
        assert service.send("/observe", {"observations": seen[start : start + 40]}).json == {"accepted": 40}
    prompts = ["yes or no 3", {"text": "essay 3", "group": "new"}, "essay of another kind"]
    answer = service.send("/predict", {"prompts": prompts})
    assert answer.status == 200
    short, long, unseen = answer.json["predictions"]
    assert short["rank"] < min(long["rank"], unseen["rank"])
    assert set(short) == {"rank", "p50", "p90", "longest", "confidence"}
    assert 2 <= short["p50"] <= 12 < 400 < long["p50"] <= long["p90"]


def test_texts_of_all_kinds_are_taken(service: Deployed) -> None:
    texts = ["", "\x00", "日本語 ŵ 🏎️ ", "a" * 100_000, 'quote " and \\ slash', "line\nbreak"]
    answer = service.send("/predict", {"prompts": texts})
    assert answer.status == 200
    assert len(answer.json["predictions"]) == len(texts)
    assert service.send("/predict", b'{"prompts": ["half of a pair: \\ud800"]}').status == 200


BAD_BODIES: dict[str, tuple[str, bytes, str]] = {
    "not JSON": ("/predict", b"{prompts", "not JSON"),
    "empty": ("/predict", b"", "body"),
    "not UTF-8": ("/predict", b'{"prompts": ["\xff\xfe"]}', "UTF-8"),
    "a list": ("/predict", b"[]", "JSON object"),
    "no prompts": ("/predict", b"{}", "prompts: Field required"),
    "empty prompts": ("/predict", b'{"prompts": []}', "at least 1"),
    "too many prompts": (
        "/predict",
        json.dumps({"prompts": ["a"] * (MAX_PROMPTS + 1)}).encode(),
        f"at most {MAX_PROMPTS}",
    ),
    "a number as prompt": ("/predict", b'{"prompts": [7]}', "prompts.0"),
    "unknown field": ("/predict", b'{"prompts": ["a"], "prompt": "b"}', "prompt: Extra inputs"),
    "no length": ("/observe", b'{"observations": [{"text": "a"}]}', "observations.0.length: Field required"),
    "negative length": ("/observe", b'{"observations": [{"text": "a", "length": -1}]}', "observations.0.length"),
    "nan as length": ("/observe", b'{"observations": [{"text": "a", "length": NaN}]}', "observations.0.length"),
    "huge length": ("/observe", b'{"observations": [{"text": "a", "length": 1e300}]}', "observations.0.length"),
    "group of none": ("/observe", b'{"observations": [{"text": "a", "length": 1, "group_size": 0}]}', "group_size"),
}


@pytest.mark.parametrize("kind", BAD_BODIES)
def test_a_bad_body_is_refused_with_its_field(service: Deployed, kind: str) -> None:
    path, body, expected = BAD_BODIES[kind]
    before = service.send("/healthz").json["answers"]
    answer = service.send(path, body)
    assert answer.status == 422, answer.text
    assert expected in answer.json["error"]
    assert service.send("/healthz").json["answers"] == before


def test_a_body_of_another_type_is_told_what_to_send(service: Deployed) -> None:
    answer = service.send("/predict", b"prompts=a", kind="application/x-www-form-urlencoded")
    assert answer.status == 422
    assert "Content-Type: application/json" in answer.json["error"]


def test_a_body_that_is_too_large_is_refused_and_the_service_lives_on(service: Deployed) -> None:
    answer = service.send("/predict", b'{"prompts": ["' + b"x" * MAX_BODY_BYTES + b'"]}')
    assert answer.status == 413
    assert "fewer prompts" in answer.json["error"]
    assert service.send("/healthz").status == 200


def test_errors_do_not_repeat_the_input(service: Deployed) -> None:
    answer = service.send("/predict", {"prompts": [{"text": 5, "secret": "x" * 5000}]})
    assert answer.status == 422
    assert len(answer.text) < 2000
    assert "xxx" not in answer.text


def test_unknown_paths_and_methods_are_json_errors(service: Deployed) -> None:
    assert (service.send("/nowhere").status, service.send("/predict").status) == (404, 405)
    assert service.send("/nowhere").json["error"] == "Not Found"


def test_health_quality_and_schema_are_published(service: Deployed) -> None:
    assert service.send("/healthz").json["status"] == "ok"
    metrics = service.send("/metrics")
    assert metrics.kind.startswith("text/plain; version=0.0.4")
    lines = [line for line in metrics.text.splitlines() if not line.startswith("#")]
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    for figure in ("spearman", "kendall_tau", "recall20", "weight"):
        assert f'{PREFIX}{figure}{{ranker="history"}}' in values
    assert f'{PREFIX}recall20{{ranker="fused"}}' in values
    assert f"{PREFIX}answers_total" in values
    schema = service.send("/openapi.json").json
    assert set(schema["paths"]) == {"/predict", "/observe", "/healthz", "/metrics"}


def test_no_page_loads_scripts_from_elsewhere(service: Deployed) -> None:
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert service.send(path).status == 404


def test_it_listens_on_loopback_unless_told(service: Deployed) -> None:
    assert service.send("/healthz").status == 200
    addresses = [entry.address for found in psutil.net_if_addrs().values() for entry in found]
    others = [a for a in addresses if a.count(".") == 3 and not a.startswith("127.")]
    assert others, "this machine has no other address: nothing is shown"
    for address in others:
        with (
            pytest.raises(OSError, match=r"refused|timed out|reach"),
            socket.create_connection((address, service.port), timeout=2),
        ):
            pass


def test_by_handle_it_serves_a_training_run(service: Deployed) -> None:
    async def story() -> None:
        client = PredictorClient(service.handle, OPTIONS)
        client.observe([Observation(text=f"handled {i}", length=10 + 90 * (i % 2)) for i in range(32)])
        assert await client.flush(30)
        answer = await client.predict([Query(text="handled 2"), Query(text="handled 3")])
        assert answer.fallback == ""
        assert answer.predictions[0].rank < answer.predictions[1].rank
        assert answer.predictions[0].confidence > 0
        quality = await service.handle.quality.remote()
        assert set(quality) == {"history", "group_probe", "output_length", "semantic_similarity", "fused"}
        await client.close()

    asyncio.run(story())


def test_a_killed_replica_comes_back_with_what_it_knew(service: Deployed) -> None:
    async def story() -> None:
        client = PredictorClient(service.handle, OPTIONS)
        client.observe([Observation(text="elephant", length=4000), Observation(text="ant", length=4)])
        assert await client.flush(30)
        assert await client.state()
        client.observe([Observation(text="whale", length=9000)])  # after the state that the client keeps
        assert await client.flush(30)
        answers = (await service.handle.health.remote())[1]
        await asyncio.to_thread(kill_replica)
        queries = [Query(text=text) for text in ("ant", "elephant", "whale")]
        deadline = time.monotonic() + 60
        seen = set()
        while time.monotonic() < deadline:
            answer = await client.predict(queries)
            seen.add(answer.fallback)
            ranks = [found.rank for found in answer.predictions]
            assert ranks == sorted(ranks)
            assert len(set(ranks)) == 3  # by the predictor or by the fallback, but never lost
            if not answer.fallback and client.counters()["restores"]:
                break
            await asyncio.sleep(0.2)
        assert "" in seen
        assert client.counters()["restores"] == 1
        assert (await service.handle.health.remote())[1] == answers
        await client.close()

    asyncio.run(story())


def test_a_port_that_is_taken_is_a_user_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="choose another port"):
            check_port("127.0.0.1", taken.getsockname()[1])


def kill_replica() -> None:
    actors = ray.util.list_named_actors(all_namespaces=True)
    replicas = [a for a in actors if a["name"].startswith("SERVE_REPLICA::length-predictor#")]
    assert len(replicas) == 1
    ray.kill(ray.get_actor(replicas[0]["name"], namespace=replicas[0]["namespace"]))
