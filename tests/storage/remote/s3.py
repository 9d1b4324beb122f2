"""An S3 server in this process, for tests."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

_BUCKETS = itertools.count()
"""Numbers of all buckets of this process: its servers share what they store."""


@dataclass
class Server:
    """Where it listens; makes buckets."""

    url: str

    @property
    def client(self) -> Any:
        return boto3.client("s3", endpoint_url=self.url, region_name="us-east-1")

    def address(self, folder: str = "runs", bucket: str = "") -> str:
        """URI of a folder in a new bucket."""
        if not bucket:
            bucket = f"bucket-{next(_BUCKETS)}"
            self.client.create_bucket(Bucket=bucket)
        endpoint = self.url.removeprefix("http://")
        return f"s3://{bucket}/{folder}?scheme=http&endpoint_override={endpoint}"


@contextmanager
def s3_server() -> Iterator[Server]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request otherwise
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield Server(f"http://{host}:{port}")
    finally:
        server.stop()
