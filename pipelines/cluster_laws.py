"""What a cluster file must hold beside Ray's schema, so that a cluster comes up, is ours alone, and can run a run.

A law yields problems, one line each, that name the field and what to do. Notes are allowed, but better known.
"""

from __future__ import annotations

import ipaddress
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.cluster_file import ClusterFile, NodeKind

Selector = Mapping[str, str]
"""A label selector as Ray writes it: value, ``!value``, ``in(a, b)`` or ``!in(a, b)`` by key."""

_START = re.compile(r"\bray\s+start\b")
_TOKEN_MODE = re.compile(r"\bRAY_AUTH_MODE=[\"']?token\b", re.IGNORECASE)
_TOKEN_IN_FILE = re.compile(r"\bRAY_AUTH_TOKEN=[\"']?(?!\$)[^\s\"']")
_TOKEN_FROM_PATH = re.compile(r"\bRAY_AUTH_TOKEN(?:_PATH)?=")
_DASHBOARD_HOST = re.compile(r"--dashboard-host(?:=|\s+)[\"']?([^\s\"']+)")
_RAY_PIN = re.compile(r"\bray(?:\[[^\]]*\])?==([0-9][^\s\"',;]*)")
_INSTALLS = re.compile(r"\binstall\b.*slipstream|\bslipstream\b.*\.whl", re.DOTALL)
_IMAGE = re.compile(r"ami-[0-9a-f]{8,17}")
_IMAGE_PARAMETER = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
_SET = re.compile(r"in\((.*)\)")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_STARTS = ("head_start_ray_commands", "worker_start_ray_commands")
_SETUPS = ("initialization_commands", "head_setup_commands", "worker_setup_commands")  # Ray merged setup_commands in
_TOKEN_MOUNT = ".ray/auth_token"
_MAKE_TOKEN = "make one: ray get-auth-token --generate > /dev/null && chmod 600 ~/.ray/auth_token"


def problems(file: ClusterFile, selectors: Mapping[str, Selector], directory: Path) -> list[str]:
    """Return what must be mended before ``ray up``.

    Args:
        file: A file that Ray's schema accepts.
        selectors: Which labels the nodes of each role must have, by role.
        directory: Where ``ray up`` will run; local paths are relative to it.
    """
    found = [
        *_start_commands(file),
        *_token(file, directory),
        *_local_files(file, directory),
        *_open_ports(file),
        *_nodes(file),
        *_labels(file, selectors),
        *_ray_version(file),
    ]
    if file.provider == "aws":
        found += _aws(file)
    return found


def notes(file: ClusterFile) -> list[str]:
    """Return what is allowed but worth knowing."""
    found = []
    setup = "\n".join(command for field in _SETUPS for command in file.commands(field))
    if not _INSTALLS.search(setup):
        found.append("setup_commands: none installs slipstream; the image, or --working-dir, has to bring it")
    if not _RAY_PIN.search(setup):
        found.append("setup_commands: none pins Ray (ray[default,train,serve]==VERSION); it may differ between nodes")
    if file.provider == "aws":
        bare = [kind.name for kind in file.node_kinds() if not _has_own_security_group(kind)]
        if bare:
            found.append(
                f"SSH (22) of {', '.join(bare)} is open to every address, by key: that is Ray's own rule; name "
                "SecurityGroupIds in node_config to narrow it"
            )
        known = set(_ec2().operation_model("RunInstances").input_shape.members["InstanceType"].enum)
        found += [
            f"{kind.field}.node_config.InstanceType: {kind.config['InstanceType']} is not among those that the "
            "installed boto3 knows"
            for kind in file.node_kinds()
            if kind.config.get("InstanceType", "") not in {*known, ""}
        ]
    mounted = file.filled["file_mounts"].get(f"~/{_TOKEN_MOUNT}")
    token = Path(mounted).expanduser() if mounted else None
    if token is not None and token.is_file() and token.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        found.append(f"{mounted}: other users of this machine can read the token; chmod 600 {mounted}")
    return found


def _start_commands(file: ClusterFile) -> Iterator[str]:
    head, worker = _STARTS
    for field in _STARTS:
        if not any(_START.search(command) for command in file.commands(field)):
            yield f"{field}: no command runs `ray start`"
    for command in _starts(file, head):
        if "--autoscaling-config" not in command:
            yield (
                f"{head}: without --autoscaling-config=~/ray_bootstrap_config.yaml the head starts no other node; add "
                "it to `ray start`"
            )
    for command in _starts(file, worker):
        if "RAY_HEAD_IP" not in command:
            yield f"{worker}: `ray start` must join the head with --address=$RAY_HEAD_IP:6379 (the port of the head)"


def _token(file: ClusterFile, directory: Path) -> Iterator[str]:
    open_ = [field for field in _STARTS if any(not _TOKEN_MODE.search(c) for c in _starts(file, field))]
    for field in open_:
        yield (
            f"{field}: `ray start` runs without a token, so whoever reaches the nodes runs code on them; write "
            "RAY_AUTH_MODE=token before it"
        )
    commands = [command for field in (*_STARTS, *_SETUPS) for command in file.commands(field)]
    if any(_TOKEN_IN_FILE.search(command) for command in commands):
        yield "RAY_AUTH_TOKEN is written out in a command: send the file ~/.ray/auth_token by file_mounts instead"
    mounts = file.filled["file_mounts"]
    mounted = next((local for remote, local in mounts.items() if remote.endswith(_TOKEN_MOUNT)), None)
    if mounted is None:
        if not any(_TOKEN_FROM_PATH.search(command) for command in commands):
            yield "file_mounts: no token reaches the nodes; add  ~/.ray/auth_token: ~/.ray/auth_token"
        return
    path = directory / Path(mounted).expanduser()
    if not path.is_file() or not path.stat().st_size:
        yield f"file_mounts: there is no token in {mounted}; {_MAKE_TOKEN}"


def _local_files(file: ClusterFile, directory: Path) -> Iterator[str]:
    for remote, local in file.filled["file_mounts"].items():
        if not remote.endswith(_TOKEN_MOUNT) and not (directory / Path(local).expanduser()).exists():
            yield f"file_mounts.{remote}: {local} does not exist in {directory}; run from the folder of pyproject.toml"
    key = file.filled["auth"].get("ssh_private_key")
    if key is not None and not (directory / Path(key).expanduser()).is_file():
        yield f"auth.ssh_private_key: {key} does not exist; name the key that opens the machines"


def _open_ports(file: ClusterFile) -> Iterator[str]:
    for field in _STARTS:
        for command in _starts(file, field):
            host = _DASHBOARD_HOST.search(command)
            if host and host[1] not in _LOOPBACK:
                yield (
                    f"{field}: --dashboard-host={host[1]} shows the dashboard to the network; write 127.0.0.1, reach "
                    "it with `ray dashboard`"
                )
            if "--ray-debugger-external" in command:
                yield f"{field}: --ray-debugger-external lets the network into the debugger; drop it"
    group = file.filled["provider"].get("security_group") or {}
    for number, rule in enumerate(group.get("IpPermissions") or ()):
        field = f"provider.security_group.IpPermissions.{number}"
        ranges = _ranges(rule)
        if ranges is None:
            yield f"{field}: must be a rule with FromPort, ToPort, IpProtocol and IpRanges: [{{CidrIp: ...}}]"
            continue
        for address in ranges:
            if _is_everyone(address):
                yield f"{field}: {address} opens a port to the world; name the range of your own network"


def _nodes(file: ClusterFile) -> Iterator[str]:
    if "cluster_name" not in file.written:
        yield "cluster_name: is missing; two clusters of one name would be taken for one"
    if not any(kind.most for kind in file.node_kinds() if not kind.is_head):
        where = "provider.worker_ips" if file.provider == "local" else "available_node_types"
        yield f"{where}: no node beside the head can start; add one, with max_workers of at least 1"


def _labels(file: ClusterFile, selectors: Mapping[str, Selector]) -> Iterator[str]:
    kinds = [kind for kind in file.node_kinds() if kind.most]
    for role, selector in selectors.items():
        if not any(all(_matches(kind, key, wanted) for key, wanted in selector.items()) for kind in kinds):
            wanted = ", ".join(f"{key}={value}" for key, value in selector.items())
            there = "; ".join(f"{kind.name} has {_show(kind.labels)}" for kind in kinds)
            yield f"the {role} role asks for nodes with {wanted}, which no node has ({there}): change one of them"


def _ray_version(file: ClusterFile) -> Iterator[str]:
    import ray

    for field in ("head_setup_commands", "worker_setup_commands"):
        for command in file.commands(field):
            pin = _RAY_PIN.search(command)
            if pin and pin[1] != ray.__version__:
                yield f"setup_commands: installs Ray {pin[1]}, this machine has {ray.__version__}; make them the same"
                return


def _aws(file: ClusterFile) -> Iterator[str]:
    from botocore.validate import ParamValidator

    shape = _ec2().operation_model("RunInstances").input_shape
    if "region" not in file.filled["provider"]:
        yield "provider.region: is missing"
    imageless: dict[str, list[str]] = {}
    for kind in file.node_kinds():
        field = f"{kind.field}.node_config"
        # SubnetIds is Ray's own key; the counts are Ray's to add.
        request = {key: value for key, value in kind.config.items() if key != "SubnetIds"}
        report = ParamValidator().validate({**request, "MinCount": 1, "MaxCount": 1}, shape)
        if report.has_errors():
            yield f"{field}: {' '.join(report.generate_report().split())}"
        if "LaunchTemplate" in kind.config:
            continue
        if "InstanceType" not in kind.config:
            yield f"{field}.InstanceType: is missing"
        image = str(kind.config.get("ImageId", ""))
        if not _IMAGE.fullmatch(image):
            imageless.setdefault(image, []).append(kind.name)
    for image, names in imageless.items():
        yield (
            f"node_config.ImageId of {', '.join(names)}: {image or 'nothing'} is no id of an image; find one with: "
            f"aws ssm get-parameter --region {file.filled['provider'].get('region')} --query Parameter.Value "
            f"--output text --name {_IMAGE_PARAMETER}"
        )


def _starts(file: ClusterFile, field: str) -> Iterator[str]:
    return (command for command in file.commands(field) if _START.search(command))


def _has_own_security_group(kind: NodeKind) -> bool:
    return any(key in kind.config for key in ("SecurityGroupIds", "NetworkInterfaces", "LaunchTemplate"))


def _ranges(rule: Any) -> list[Any] | None:
    """Return the addresses that a rule lets in; None when it is no rule."""
    if not isinstance(rule, dict):
        return None
    parts = [rule.get(key) or [] for key in ("IpRanges", "Ipv6Ranges")]
    if not all(isinstance(part, list) and all(isinstance(each, dict) for each in part) for part in parts):
        return None
    return [each.get("CidrIp", each.get("CidrIpv6")) for part in parts for each in part]


def _is_everyone(address: Any) -> bool:
    try:
        return ipaddress.ip_network(address, strict=False).prefixlen == 0
    except ValueError:
        return False


def _matches(kind: NodeKind, key: str, wanted: str) -> bool:
    negated = wanted.startswith("!")
    if key not in kind.labels:
        return negated
    value = kind.labels[key]
    if value is None:  # the node decides, so it may well be the one
        return True
    listed = _SET.fullmatch(wanted.removeprefix("!"))
    among = [part.strip() for part in listed[1].split(",")] if listed else [wanted.removeprefix("!")]
    return (value in among) is not negated


def _show(labels: Mapping[str, str | None]) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels.items()) or "none"


def _ec2() -> Any:
    import botocore.session

    return botocore.session.get_session().get_service_model("ec2")
