"""The same on a real S3 protocol, and what people are told when the store does not play along."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from storage.errors import UserError
from storage.remote.address import Address
from storage.remote.held_run import hold_existing, hold_new
from storage.remote.lease import LEASE
from storage.remote.objects import Objects, RemoteError
from storage.remote.view import open_view
from tests.storage.remote.life import Life, assert_resumable
from tests.storage.remote.s3 import Server, s3_server
from tests.storage.remote.stores import move_to


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with s3_server() as started:
            yield started


def test_objects_are_written_read_listed_and_removed(server: Server):
    objects = Objects(Address.parse(server.address()))
    objects.check()
    assert objects.read("a/b") is None
    assert objects.info("a/b") is None
    objects.write("a/b", b"1")
    objects.write("a/c.gz", b"not compressed, whatever its name says")
    assert objects.read("a/c.gz") == b"not compressed, whatever its name says"
    assert objects.info("a/b").size == 1
    assert set(objects.names()) == {"a/b", "a/c.gz"}
    assert objects.folders() == ["a"]
    objects.remove("a/b")
    objects.remove("a/b")
    assert set(objects.names()) == {"a/c.gz"}
    objects.remove_folder("a")
    objects.remove_folder("a")
    assert not objects.names()


def test_a_file_larger_than_a_part_arrives_whole(server: Server, tmp_path):
    data = bytes(range(256)) * (100 << 10)  # 25 MiB
    (tmp_path / "large").write_bytes(data)
    objects = Objects(Address.parse(server.address()))
    with (tmp_path / "large").open("rb") as source:
        objects.upload("large", source.fileno(), 5, len(data) - 5)
    assert objects.read("large") == data[5:]


def test_a_run_goes_on_on_another_machine_and_can_be_read(server: Server, tmp_path, monkeypatch):
    address = Address.parse(server.address()).child("run")
    move_to(monkeypatch, tmp_path / "machine")
    with hold_new(address) as run:
        life = Life(run.path)
        mirror = run.mirror()
        for _ in range(3):
            life.train()
            mirror.sync()
        life.close()
    move_to(monkeypatch, tmp_path / "other")
    with hold_existing(address, lambda text: None) as run:
        assert assert_resumable(run.path, 3).step == 3
        with pytest.raises(UserError, match="in use by process"):
            hold_existing(address, print).__enter__()
        life = Life(run.path)
        life.train()
        mirror = run.mirror()
        mirror.sync(settle=True)
        mirror.sync(settle=True)
        life.close()
    assert Objects(address).info(LEASE) is None
    view = open_view(str(address))
    assert view.newest_checkpoint() == "checkpoints/step_000004"
    assert (view.fetch() / "metrics.jsonl").read_bytes() == run.metrics.read_bytes()
    listed = server.client.list_objects_v2(Bucket=address.body.split("/")[0])["Contents"]
    keys = {entry["Key"].removeprefix("runs/run/") for entry in listed}
    assert {"config.yaml", "ledger.jsonl", "checkpoints/step_000004/CHECKPOINT.json"} <= keys
    assert not [key for key in keys if "step_000003/" in key and key.startswith("checkpoints/")]


def test_a_missing_bucket_is_named(server: Server):
    address = Address.parse(server.address(bucket="no-such-bucket"))
    with pytest.raises(RemoteError, match="there is no bucket no-such-bucket; make it first"):
        Objects(address).check()
    with pytest.raises(RemoteError, match="there is no bucket no-such-bucket"):
        Objects(address).read("config.yaml")


def test_a_store_that_does_not_answer_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = Address.parse(f"s3://bucket/runs?scheme=http&endpoint_override=127.0.0.1:{port}")
    with pytest.raises(RemoteError, match="the store does not answer; check the network, the region and endpoint"):
        Objects(address).check()


class _Forbidding(BaseHTTPRequestHandler):
    def refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = refuse

    def log_message(self, *_: object) -> None:
        pass


def test_denied_access_says_where_credentials_come_from(server: Server):
    forbidding = HTTPServer(("127.0.0.1", 0), _Forbidding)
    threading.Thread(target=forbidding.serve_forever, daemon=True).start()
    try:
        uri = f"s3://bucket/runs?scheme=http&endpoint_override=127.0.0.1:{forbidding.server_port}"
        with pytest.raises(
            RemoteError, match=r"access denied.*AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE"
        ):
            Objects(Address.parse(uri)).check()
    finally:
        forbidding.shutdown()
        forbidding.server_close()


def test_an_option_that_pyarrow_does_not_know_is_named():
    with pytest.raises(RemoteError, match="endpoint_overide"):
        Objects(Address.parse("s3://bucket/runs?endpoint_overide=localhost:1"))


def test_a_local_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(RemoteError, match="cannot write file:///"):
        Objects(Address.parse(f"file://{tmp_path}/file/runs")).check()
