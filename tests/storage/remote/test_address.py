"""URIs of run directories: what is accepted, what is refused and why, and that secrets are never shown."""

from __future__ import annotations

import pytest

from storage.errors import UserError
from storage.remote.address import Address, is_address, shown
from storage.run_directory import RunDirectory


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/runs", True),
        ("file:///runs", True),
        ("runs", False),
        ("/runs/a", False),
        ("C:/runs", False),
        ("bucket:runs", False),
    ],
)
def test_a_uri_is_told_from_a_path(text, expected):
    assert is_address(text) is expected


def test_names_and_parents_keep_the_query():
    parent = Address.parse("s3://bucket/some/runs/?endpoint_override=localhost:9&scheme=http")
    run = parent.child("first")
    assert str(run) == "s3://bucket/some/runs/first?endpoint_override=localhost:9&scheme=http"
    assert run.name == "first"
    assert run.parent == parent
    assert not run.is_root
    assert Address.parse("s3://bucket").is_root
    assert not Address.parse("file:///runs").is_root


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s4://bucket/runs", r"unknown scheme s4://; did you mean s3://\?"),
        ("http://bucket/runs", r"unknown scheme http://.*s3://, gs://"),
        ("s3:///runs", r"names no bucket; write s3://BUCKET/FOLDER"),
        ("s3://bucket/runs#x", "leave out '#x'"),
        ("abfs:///runs", "names no bucket"),
    ],
)
def test_what_is_no_address_is_refused_with_a_way_out(text, message):
    with pytest.raises(UserError, match=rf"run\.directory=.*{message}"):
        Address.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIAEXAMPLE:hunter2@bucket/runs",
        "s3://AKIAEXAMPLE:hunter2%2F@bucket/runs?region=x",
        "hdfs://me:hunter2@host:8020/runs",
        "abfs://container@account.dfs.core.windows.net/runs?client_secret=hunter2",
        "s3://bucket/runs?secret_key=hunter2&scheme=http",
    ],
)
def test_credentials_in_a_uri_are_refused_and_not_repeated(text):
    with pytest.raises(UserError, match="may not hold credentials; leave them out and use") as refusal:
        Address.parse(text)
    assert "hunter2" not in str(refusal.value)
    assert "hunter2" not in shown(text)
    assert "hunter2" not in shown(f"cannot write {text}/x: refused")


def test_a_container_before_the_at_is_no_secret():
    text = "abfs://container@account.dfs.core.windows.net/runs"
    assert str(Address.parse(text)) == shown(text) == text


def test_a_folder_that_is_no_copy_is_its_own_address(tmp_path):
    run = RunDirectory.create(tmp_path, "a")
    assert run.address == str(run.path)
    assert run.where(run.events) == str(run.events)
    assert run.ticket is None
