"""The shipped cluster files hold before Ray's own schema and EC2's, and files with one thing wrong do not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from rich.console import Console

from pipelines.cluster_check import check_cluster
from pipelines.cluster_file import load_cluster_file
from pipelines.cluster_laws import notes, problems
from pipelines.config_loader import preset_names
from storage.errors import UserError
from tests.cluster.conftest import ROOT, SHIPPED, filled_in

ROLES = {"rollout": {"role": "rollout"}, "learner": {"role": "learner"}}


def write(directory: Path, data: Any) -> Path:
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def refused(directory: Path, data: Any) -> str:
    """What is wrong with it, schema and laws together."""
    with pytest.raises(UserError) as error:
        check_cluster(write(directory, data), selectors=ROLES, directory=ROOT, console=Console(quiet=True))
    return str(error.value)


@pytest.mark.parametrize("provider", SHIPPED)
def test_ray_accepts_the_shipped_file(provider: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(yaml.safe_load(SHIPPED[provider].read_text())))


@pytest.mark.parametrize("provider", SHIPPED)
def test_the_shipped_file_keeps_our_laws_once_it_is_filled_in(provider: str, home: Path, tmp_path: Path) -> None:
    file = load_cluster_file(write(tmp_path, filled_in(provider)))
    assert problems(file, ROLES, ROOT) == []
    assert all("SSH (22)" in note for note in notes(file))


@pytest.mark.parametrize("provider", SHIPPED)
def test_the_shipped_file_installs_this_project_with_the_ray_of_the_tests(provider: str) -> None:
    data = yaml.safe_load(SHIPPED[provider].read_text())
    (install,) = [command for command in data["setup_commands"] if "pip install" in command]
    assert f"ray[default,train,serve]=={ray.__version__}" in install
    extras = re.search(r"\$HOME/slipstream\[([a-z,]+)\]", install)
    assert extras is not None
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras[1].split(","))
    mounted = {Path(local).name for remote, local in data["file_mounts"].items() if remote.startswith("~/slipstream/")}
    assert mounted == {"pyproject.toml", "README.md", "LICENSE", "actors", "pipelines", "storage"}


@pytest.mark.parametrize("provider", SHIPPED)
def test_the_mounted_parts_are_enough_to_build_the_project(provider: str, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "slipstream"
    for remote, local in yaml.safe_load(SHIPPED[provider].read_text())["file_mounts"].items():
        if remote.startswith("~/slipstream/"):
            target = source / remote.removeprefix("~/slipstream/")
            target.parent.mkdir(exist_ok=True)
            copy = shutil.copytree if (ROOT / local).is_dir() else shutil.copy
            copy(ROOT / local, target)
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    names = zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]).namelist()
    assert {"pipelines/cli.py", "actors/weights.py", "storage/records.py", "pipelines/presets/baseline.yaml"} <= {
        *names
    }


def test_ray_reads_cpus_and_gpus_off_the_machines_and_the_head_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.autoscaler._private.aws import node_provider
    from ray.autoscaler._private.util import validate_config

    def instance(name: str, cpus: int, gpus: int) -> dict:
        gpu = {"GpuInfo": {"Gpus": [{"Name": "L40S", "Count": gpus}]}} if gpus else {}
        size = {"VCpuInfo": {"DefaultVCpus": cpus}, "MemoryInfo": {"SizeInMiB": 65_536}}
        return {"InstanceType": name, **size, **gpu}

    offered = [instance("m6i.2xlarge", 8, 0), instance("p5.4xlarge", 16, 1), instance("g6e.4xlarge", 16, 1)]
    monkeypatch.setattr(node_provider, "list_ec2_instances", lambda *_: offered)
    filled = dict(load_cluster_file(SHIPPED["aws"]).filled)
    filled = node_provider.AWSNodeProvider.fillout_available_node_types_resources(filled)
    validate_config(filled)
    resources = {name: node["resources"] for name, node in filled["available_node_types"].items()}
    assert resources["head"] == {"CPU": 0}
    assert all(resources[name]["CPU"] == 16 and resources[name]["GPU"] == 1 for name in ("learner", "rollout"))


def test_head_takes_no_role_and_every_role_has_nodes_with_its_label() -> None:
    kinds = {kind.name: kind for kind in load_cluster_file(SHIPPED["aws"]).node_kinds()}
    assert {name: kind.labels["role"] for name, kind in kinds.items()} == {n: n for n in ("head", "learner", "rollout")}
    assert [kind.is_head for kind in kinds.values()] == [True, False, False]
    assert yaml.safe_load(SHIPPED["aws"].read_text())["available_node_types"]["head"]["resources"] == {"CPU": 0}


def test_node_kinds_of_own_machines_come_from_the_start_commands() -> None:
    head, worker = load_cluster_file(SHIPPED["local"]).node_kinds()
    assert (head.labels, head.most) == ({"role": "head"}, 1)
    assert (worker.labels, worker.most) == ({"role": None}, 2)


def test_a_coordinator_in_place_of_addresses(tmp_path: Path) -> None:
    data = filled_in("local") | {
        "provider": {"type": "local", "coordinator_address": "10.0.0.1:8899"},
        "max_workers": 7,
    }
    assert [kind.most for kind in load_cluster_file(write(tmp_path, data)).node_kinds()] == [1, 7]


def test_cluster_files_are_not_offered_as_training_presets() -> None:
    assert not [name for name in preset_names() if "cluster" in name]


def test_the_shipped_aws_file_names_the_one_place_to_fill_in(home: Path) -> None:
    with pytest.raises(UserError) as error:
        check_cluster(SHIPPED["aws"], selectors=ROLES, directory=ROOT)
    assert re.fullmatch(
        r"1 problem in .*\n  node_config.ImageId of head, learner, rollout: ami-FILL-IN is no id .*", str(error.value)
    )


def test_check_prints_nodes_notes_and_upload(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_cluster(write(tmp_path, filled_in("aws")), selectors=ROLES, directory=ROOT, console=Console(width=200))
    printed = capsys.readouterr().out
    assert re.search(r"^rollout +4 +role=rollout +g6e\.4xlarge", printed, re.MULTILINE)
    assert "note: SSH (22) of head, learner, rollout" in printed
    assert re.search(r"upload of --working-dir: [\d.]+ [KM]iB in \d+ files \(limit 100\.0 MiB\)", printed)


def put(*path: str, value: Any) -> Callable[[dict], None]:
    def change(data: dict) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def drop(*path: str) -> Callable[[dict], None]:
    def change(data: dict) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


def in_commands(field: str, old: str, new: str) -> Callable[[dict], None]:
    def change(data: dict) -> None:
        assert any(old in command for command in data[field])
        data[field] = [command.replace(old, new) for command in data[field]]

    return change


ROLLOUT = ("available_node_types", "rollout")
HEAD_START, WORKER_START = "head_start_ray_commands", "worker_start_ray_commands"
WORLD = [{"FromPort": 8265, "ToPort": 8265, "IpProtocol": "tcp", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
WORLD_V6 = [{"FromPort": 6379, "ToPort": 6379, "IpProtocol": "tcp", "Ipv6Ranges": [{"CidrIpv6": "::/0"}]}]

BAD_AWS = {
    "misspelt field": (put("max_worker", value=3), "max_worker"),
    "no provider": (drop("provider"), "provider.type: got None"),
    "unknown provider": (put("provider", "type", value="asw"), "provider.type: got 'asw'"),
    "no name": (drop("cluster_name"), "cluster_name: is missing"),
    "head type nobody defines": (put("head_node_type", value="boss"), "boss|head_node_type"),
    "more nodes than the cluster may have": (put("max_workers", value=1), "max_workers"),
    "label that is no text": (put(*ROLLOUT, "labels", value={"role": 3}), "labels.role"),
    "resources missing": (drop(*ROLLOUT, "resources"), "available_node_types.rollout: 'resources'"),
    "half a CPU": (put(*ROLLOUT, "resources", value={"CPU": 0.5}), "resources.CPU"),
    "node type without fields": (put(*ROLLOUT, value=None), "cannot make sense|rollout"),
    "misspelt EC2 field": (put(*ROLLOUT, "node_config", "InstanceTyp", value="g6e.4xlarge"), "InstanceTyp"),
    "EC2 field of a wrong type": (put(*ROLLOUT, "node_config", "BlockDeviceMappings", value="big"), "BlockDevice"),
    "no machine": (drop(*ROLLOUT, "node_config", "InstanceType"), "rollout.node_config.InstanceType: is missing"),
    "no region": (drop("provider", "region"), "provider.region"),
    "label nobody has": (put(*ROLLOUT, "labels", value={"role": "rolout"}), "the rollout role asks .* role=rollout"),
    "role that can have no node": (put(*ROLLOUT, "max_workers", value=0), "rollout|max_workers"),
    "head without token": (in_commands(HEAD_START, "RAY_AUTH_MODE=token ", ""), f"{HEAD_START}: .* without a token"),
    "worker with auth off": (in_commands(WORKER_START, "MODE=token", "MODE=disabled"), f"{WORKER_START}: .* token"),
    "token in the file": (
        in_commands(HEAD_START, "RAY_AUTH_MODE=token", "RAY_AUTH_MODE=token RAY_AUTH_TOKEN=abcd"),
        "RAY_AUTH_TOKEN is written out",
    ),
    "token stays at home": (drop("file_mounts", "~/.ray/auth_token"), "no token reaches the nodes"),
    "source that is not here": (put("file_mounts", "~/data", value="no/such/folder"), "no/such/folder does not exist"),
    "dashboard for everyone": (in_commands(HEAD_START, "127.0.0.1", "0.0.0.0"), "--dashboard-host=0.0.0.0"),
    "Ray's own open start commands": (drop(HEAD_START), "--dashboard-host=0.0.0.0"),
    "debugger for everyone": (in_commands(WORKER_START, " start ", " start --ray-debugger-external "), "debugger"),
    "port open to the world": (put("provider", "security_group", value={"IpPermissions": WORLD}), "to the world"),
    "port open to the world (IPv6)": (put("provider", "security_group", value={"IpPermissions": WORLD_V6}), "::/0"),
    "rule that is none": (put("provider", "security_group", value={"IpPermissions": ["22"]}), "must be a rule with"),
    "mount of nothing": (put("file_mounts", "~/data", value=None), "file_mounts.~/data: got None"),
    "head that starts nobody": (in_commands(HEAD_START, "--autoscaling-config", "--x"), "--autoscaling-config"),
    "worker that joins nobody": (in_commands(WORKER_START, "$RAY_HEAD_IP", "10.0.0.1"), "RAY_HEAD_IP"),
    "no start": (put(WORKER_START, value=["echo hello"]), f"{WORKER_START}: no command runs `ray start`"),
    "another Ray": (in_commands("setup_commands", f"=={ray.__version__}", "==2.56.0"), "installs Ray 2.56.0"),
}
BAD_LOCAL = {
    "no head": (drop("provider", "head_ip"), "head_ip"),
    "no workers": (put("provider", "worker_ips", value=[]), "provider.worker_ips: no node"),
    "node types": (put("available_node_types", value={"a": {}}), "available_node_types is not supported"),
    "no such key": (put("auth", "ssh_private_key", value="~/.ssh/other"), "auth.ssh_private_key: ~/.ssh/other"),
    "label nobody has": (in_commands(WORKER_START, "role=$(cat", "tier=$(cat"), "the rollout role asks"),
    "worker without token": (in_commands(WORKER_START, "RAY_AUTH_MODE=token", ""), f"{WORKER_START}: .* token"),
}


@pytest.mark.parametrize(
    ("provider", "change", "expected"),
    [("aws", *case) for case in BAD_AWS.values()] + [("local", *case) for case in BAD_LOCAL.values()],
    ids=[f"aws: {name}" for name in BAD_AWS] + [f"local: {name}" for name in BAD_LOCAL],
)
def test_a_file_with_one_thing_wrong_is_refused(
    provider: str, change: Callable[[dict], None], expected: str, home: Path, tmp_path: Path
) -> None:
    data = filled_in(provider)
    change(data)
    assert re.search(expected, refused(tmp_path, data), re.DOTALL)


def test_a_missing_token_says_how_to_make_one(home: Path, tmp_path: Path) -> None:
    (home / ".ray/auth_token").write_text("")
    assert "ray get-auth-token --generate" in refused(tmp_path, filled_in("aws"))


def test_a_token_that_others_can_read_is_noted(home: Path, tmp_path: Path) -> None:
    (home / ".ray/auth_token").chmod(0o644)
    assert any("chmod 600" in note for note in notes(load_cluster_file(write(tmp_path, filled_in("aws")))))


def test_two_problems_are_reported_together(home: Path, tmp_path: Path) -> None:
    data = filled_in("aws")
    drop("file_mounts", "~/.ray/auth_token")(data)
    in_commands(HEAD_START, "127.0.0.1", "0.0.0.0")(data)
    assert refused(tmp_path, data).startswith("2 problems in ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a: [1", "cluster.yaml:1: is no YAML"), ("- 1", "must hold fields"), ("", "must hold fields")],
)
def test_what_is_no_cluster_file_is_one_clear_line(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(expected)):
        load_cluster_file(path)


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_cluster_file(tmp_path / "none.yaml")


def test_selectors_with_sets_and_negation(home: Path, tmp_path: Path) -> None:
    file = load_cluster_file(write(tmp_path, filled_in("aws")))
    fine = {"rollout": {"role": "in(rollout, spare)"}, "reward": {"role": "!learner"}, "learner": {"tier": "!cheap"}}
    assert problems(file, fine, ROOT) == []
    (found,) = problems(file, {"reward": {"role": "!in(head, learner, rollout)"}}, ROOT)
    assert found.startswith("the reward role asks for nodes with role=!in(head, learner, rollout)")
