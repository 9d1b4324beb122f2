"""Addresses of run directories that are URIs, and how to show them without secrets."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from storage.errors import UserError

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "file")
"""Schemes of pyarrow's file systems that hold what outlives a process."""

_URI = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<body>[^?#]*)(?:\?(?P<query>[^#]*))?(?P<rest>#.*)?")
_SECRET = re.compile(r"secret|password|passwd|token|access_key|account_key|signature|credential$|^sig$", re.IGNORECASE)
_WITHOUT_HOST = ("file", "hdfs", "viewfs")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or the machine's account",
    "abfs": "AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_CLIENT_SECRET, `az login`, or a managed identity",
    "hdfs": "`kinit`, or HADOOP_USER_NAME",
    "file": "the user that owns the folder",
}


def is_address(text: str) -> bool:
    """Return whether a run directory is given as a URI rather than as a path."""
    return _URI.fullmatch(text) is not None


def shown(text: str) -> str:
    """Return a text for people in which the passwords and secret parameters of every URI are left out."""
    text = re.sub(r"(://)[^/@\s]*:[^/@\s]*@", r"\1", text)
    return re.sub(r"([?&])([\w.-]+)=([^&\s'\"]*)", _without_secret, text)


def _without_secret(match: re.Match[str]) -> str:
    return f"{match[1]}{match[2]}=***" if _SECRET.search(match[2]) else match[0]


@dataclass(frozen=True, slots=True)
class Address:
    """A folder below a URI, of a run or of several. It holds no secrets, so it may be stored and shown.

    Attributes:
        scheme: One of :data:`SCHEMES`.
        body: Bucket, host or nothing, then the path; without a slash at its end.
        query: What follows the question mark, for instance ``endpoint_override=localhost:9000&scheme=http``.
    """

    scheme: str
    body: str
    query: str = ""

    @classmethod
    def parse(cls, text: str, field: str = "run.directory") -> Address:
        """Read a URI; ``field`` is where it was given, for messages.

        Raises:
            UserError: An unknown scheme, no bucket, or a secret inside of it.
        """
        found = _URI.fullmatch(text)
        place = f"{field}={shown(text)}"
        if found is None:
            raise UserError(f"{place} is no URI: write it as scheme://bucket/folder")
        scheme, body, query = found["scheme"].lower(), found["body"], found["query"] or ""
        if scheme not in SCHEMES:
            near = difflib.get_close_matches(scheme, SCHEMES, 1, 0.3)
            hint = f"did you mean {near[0]}://?" if near else "choose another"
            known = ", ".join(f"{known}://" for known in SCHEMES)
            raise UserError(f"{place}: unknown scheme {scheme}://; {hint} There are {known}")
        authority = body.partition("/")[0]
        secrets = [name for name, _ in parse_qsl(query, keep_blank_values=True) if _SECRET.search(name)]
        if ":" in authority.rpartition("@")[0] or (scheme == "s3" and "@" in authority) or secrets:
            raise UserError(
                f"{place}: a run directory is written to config.yaml and logs, so it may not hold credentials; leave "
                f"them out and use {credentials_of(scheme)}"
            )
        if found["rest"]:
            raise UserError(f"{place}: leave out {found['rest']!r}")
        if not authority and scheme not in _WITHOUT_HOST:
            raise UserError(f"{place}: names no bucket; write {scheme}://BUCKET/FOLDER")
        return cls(scheme, body.rstrip("/") or body, query)

    def __str__(self) -> str:
        """The URI."""
        return f"{self.scheme}://{self.body}" + (f"?{self.query}" if self.query else "")

    @property
    def name(self) -> str:
        """Last part of the path: the name of a run."""
        return unquote(self.body.rpartition("/")[2])

    @property
    def parent(self) -> Address:
        """The folder that it lies in."""
        return Address(self.scheme, self.body.rpartition("/")[0], self.query)

    @property
    def is_root(self) -> bool:
        """True where there is no folder above: a bucket itself, or the root of a file system."""
        return "/" not in self.body.strip("/") if self.scheme not in _WITHOUT_HOST else not self.body.strip("/")

    def child(self, name: str) -> Address:
        """Something below it."""
        return Address(self.scheme, f"{self.body}/{name}", self.query)


def credentials_of(scheme: str) -> str:
    """Say where credentials for a scheme come from."""
    key = {"gcs": "gs", "abfss": "abfs", "viewfs": "hdfs"}.get(scheme, scheme)
    return _CREDENTIALS[key]
