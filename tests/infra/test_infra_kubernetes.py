"""Manifests of an endpoint of replicas in Kubernetes.

They are valid for each version of Kubernetes, and agree with the server: its variables, paths and
time limits. The container's entrypoint runs here with the settings of the manifest. No cluster is
involved.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from onnx_ops.adapters.endpoints.table_options import read_replica_options
from onnx_ops.domain.endpoint import EndpointState, TrafficSplit
from onnx_ops.protocol.routing_table import NOTICE_S
from onnx_ops.protocol.server_process import (
    FOLLOW_VARIABLE,
    IMAGE_VARIABLE,
    OPTION_PREFIX,
    REPORTS_VARIABLE,
    TRUSTED_KEYS_VARIABLE,
    ServerOptions,
)
from onnx_ops.serving import container as entrypoint
from onnx_ops.testing.endpoints import EndpointProviderSuite
from tests.adapters.replica_site import open_site
from tests.infra.infra_tools import INFRA
from tests.support.extras import require_programs
from tests.support.ports import free_port
from tests.support.processes import does_answer, running_process, until

KUBERNETES = INFRA / "kubernetes"
BASE = KUBERNETES / "endpoint"
EXAMPLES = sorted(path.name for path in (KUBERNETES / "examples").iterdir())
VERSIONS = [f"1.{minor}" for minor in range(29, 38)]
SECRETS = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
REPORTS_S = 15.0
"""Time for the last reports of a replica: three requests, each of at most 5 s."""
KILL_MARGIN_S = 2.0
BYTES = {"Mi": 1 << 20, "Gi": 1 << 30}


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return document


def read_base() -> dict[str, dict[str, Any]]:
    """Return the manifests of the base by kind."""
    manifests = [read(BASE / name) for name in read(BASE / "kustomization.yaml")["resources"]]
    return {manifest["kind"]: manifest for manifest in manifests}


def read_pod() -> dict[str, Any]:
    pod: dict[str, Any] = read_base()["Deployment"]["spec"]["template"]["spec"]
    return pod


def read_container() -> dict[str, Any]:
    (container,) = read_pod()["containers"]
    return dict(container)


def read_literals(example: str) -> dict[str, str]:
    """Return the variables that an example adds to those of the base."""
    (literals,) = [
        one["literals"]
        for one in read(KUBERNETES / "examples" / example / "kustomization.yaml")[
            "configMapGenerator"
        ]
        if one["name"] == "endpoint"
    ]
    return dict(literal.split("=", 1) for literal in literals)


def read_environment(example: str) -> dict[str, str]:
    """Return the variables of the container, as the kubelet sets them."""
    container = read_container()
    fields = {"limits.cpu": container["resources"]["limits"]["cpu"], "status.podIP": "10.1.2.3"}
    variables = read_literals(example)
    for entry in container["env"]:
        source = entry.get("valueFrom", {})
        field = source.get("resourceFieldRef", {}).get("resource") or source.get(
            "fieldRef", {}
        ).get("fieldPath")
        value = fields[field] if field else entry["value"]
        variables[entry["name"]] = re.sub(
            r"\$\((\w+)\)", lambda match: variables[match.group(1)], value
        )
    return variables


def render(example: str, folder: Path) -> list[dict[str, Any]]:
    """Return the manifests of an example, as kubectl builds them with a key."""
    shutil.copytree(KUBERNETES, folder / "kubernetes")
    place = folder / "kubernetes" / "examples" / example
    (place / "signing.pub.pem").write_text("a key", encoding="utf-8")
    done = subprocess.run(
        ["kubectl", "kustomize", str(place)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("version", VERSIONS)
def test_endpoint_manifests_conform_to_schema_of_each_version(version: str) -> None:
    import kubernetes_validate

    for manifest in [
        *read_base().values(),
        read(KUBERNETES / "examples/shared-folder/volume.yaml"),
    ]:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_kustomization_lists_all_manifests_of_base() -> None:
    assert set(read_base()) == {
        "ServiceAccount",
        "HorizontalPodAutoscaler",
        "Deployment",
        "PodDisruptionBudget",
        "NetworkPolicy",
        "Service",
    }
    listed = {*read(BASE / "kustomization.yaml")["resources"], "kustomization.yaml"}
    assert {path.name for path in BASE.iterdir()} == listed


@pytest.mark.parametrize("example", EXAMPLES)
def test_entrypoint_reads_all_variables_of_manifest_and_becomes_replica(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    class RecordingEnvironment(dict[str, str]):
        def __init__(self, values: Mapping[str, str]) -> None:
            super().__init__(values)
            self.names: set[str] = set()

        def get(self, name: str, default: Any = None) -> Any:
            self.names.add(name)
            return super().get(name, default)

        def __getitem__(self, name: str) -> str:
            self.names.add(name)
            return super().__getitem__(name)

    def start(program: str, command: list[str], environment: Mapping[str, str]) -> NoReturn:
        commands.append(command)
        raise SystemExit

    monkeypatch.setattr(os, "execve", start)
    given = read_environment(example)
    assert {
        FOLLOW_VARIABLE,
        REPORTS_VARIABLE,
        IMAGE_VARIABLE,
        TRUSTED_KEYS_VARIABLE,
        f"{OPTION_PREFIX}ENDPOINT",
        "ONNX_OPS_STATE_DIR",
    } <= set(given)
    environment = RecordingEnvironment({**given, "ONNX_OPS_STATE_DIR": str(tmp_path / "state")})
    with pytest.raises(SystemExit):
        entrypoint.main(read_container()["args"], environment)
    assert {name for name in given if name.startswith("ONNX_OPS_")} <= environment.names
    (command,) = commands
    assert {
        "onnx_ops.app.follower",
        f"--follow={given[FOLLOW_VARIABLE]}",
        f"--reports={given[REPORTS_VARIABLE]}",
        "--endpoint=digits",
        "--trusted-keys=/keys",
        "--threads=2",
        "--address=http://10.1.2.3:8080",
    } <= set(command)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_locations_are_valid_options_without_secrets(example: str) -> None:
    variables = read_literals(example)
    read_replica_options(
        {"control": variables[FOLLOW_VARIABLE], "reports": variables[REPORTS_VARIABLE]}
    )
    assert not SECRETS & set(variables)


def test_pod_disables_variables_of_services() -> None:
    assert read_pod()["enableServiceLinks"] is False


def test_probes_use_live_path_for_restarts_and_ready_path_for_traffic() -> None:
    container = read_container()
    (port,) = container["ports"]
    assert str(port["containerPort"]) == read_environment("s3")["ONNX_OPS_PORT"]
    paths = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness")}
    for probe in (*paths.values(), container["readinessProbe"]["httpGet"]):
        assert probe["port"] == port["name"]
    # Before the first table, a replica is live but not ready.
    assert {probe["path"] for probe in paths.values()} == {"/v2/health/live"}
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"


def test_readiness_probe_fails_within_notice_time_before_end_of_lease() -> None:
    probe = read_container()["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"] < NOTICE_S


def test_termination_grace_period_covers_drain_and_last_reports() -> None:
    (command, pause_s) = read_container()["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    needed_s = float(pause_s) + ServerOptions().drain + KILL_MARGIN_S + REPORTS_S
    assert needed_s < read_pod()["terminationGracePeriodSeconds"]


def test_pod_is_restricted_and_writes_only_to_its_volumes() -> None:
    pod, container = read_pod(), read_container()
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert pod["automountServiceAccountToken"] is False
    assert read_base()["ServiceAccount"]["automountServiceAccountToken"] is False
    assert container["resources"]["requests"] == container["resources"]["limits"]
    mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    writable = {path for path, mount in mounts.items() if not mount.get("readOnly")}
    assert {mounts[path]["name"] for path in writable} == {"state", "scratch"}
    assert all("sizeLimit" in volumes[mounts[path]["name"]]["emptyDir"] for path in writable)
    # The server makes its folder private, which it could not do with the volume's own folder.
    assert Path(read_environment("s3")["ONNX_OPS_STATE_DIR"]).parent == Path("/state")


def test_autoscaler_sets_replicas_and_updates_keep_all_of_them() -> None:
    base = read_base()
    deployment, autoscaler = base["Deployment"], base["HorizontalPodAutoscaler"]["spec"]
    assert "replicas" not in deployment["spec"]
    assert autoscaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert 1 < autoscaler["minReplicas"] < autoscaler["maxReplicas"]
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert base["PodDisruptionBudget"]["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_network_policy_permits_only_http_ingress_and_egress_to_dns_and_public_https() -> None:
    policy = read_base()["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"] == [{"ports": [{"port": "http", "protocol": "TCP"}]}]
    names, store = policy["egress"]
    assert {port["port"] for port in names["ports"]} == {53}
    assert [port["port"] for port in store["ports"]] == [443]
    (peer,) = store["to"]
    block = peer["ipBlock"]
    for address in ("169.254.169.254", "10.0.0.1", "172.20.0.1", "192.168.1.1", "100.100.100.200"):
        assert any(ip_address(address) in ip_network(network) for network in block["except"])


@pytest.mark.nightly
@pytest.mark.parametrize("example", EXAMPLES)
def test_kubectl_builds_valid_manifests_of_example(example: str, tmp_path: Path) -> None:
    require_programs("kubectl", packages="kubernetes-client")
    import kubernetes_validate

    manifests = render(example, tmp_path)
    for version in VERSIONS:
        for manifest in manifests:
            kubernetes_validate.validate(manifest, version, strict=True)
    assert {one["metadata"]["namespace"] for one in manifests} == {"serving"}
    assert all(one["metadata"]["name"].startswith("digits-") for one in manifests)
    by_kind = {one["kind"]: one for one in manifests}
    template = by_kind["Deployment"]["spec"]["template"]
    pod, (container,) = template["spec"], template["spec"]["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert re.fullmatch(r"[^@]+@sha256:[0-9a-f]{64}", container["image"])
    assert variables[IMAGE_VARIABLE] == container["image"]
    configured = {one["metadata"]["name"] for one in manifests if one["kind"] == "ConfigMap"}
    (keys,) = [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]
    assert {keys, container["envFrom"][0]["configMapRef"]["name"]} == configured
    selectors = (
        by_kind["Deployment"]["spec"]["selector"]["matchLabels"],
        by_kind["Service"]["spec"]["selector"],
        by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        by_kind["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        *(one["labelSelector"]["matchLabels"] for one in pod["topologySpreadConstraints"]),
    )
    for selector in selectors:
        assert selector == {
            "app.kubernetes.io/name": "onnx-ops-endpoint",
            "app.kubernetes.io/instance": "digits",
        }
        assert selector.items() <= template["metadata"]["labels"].items()


@pytest.mark.nightly
def test_kubectl_refuses_example_without_keys() -> None:
    require_programs("kubectl", packages="kubernetes-client")
    command = ["kubectl", "kustomize", str(KUBERNETES / "examples" / "s3")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "signing.pub.pem" in done.stderr


def start_limited(command: list[str], limit_bytes: int) -> list[str]:
    """Return a command that limits the private memory of each of its processes."""
    return ["sh", "-c", f'ulimit -d {limit_bytes // 1024}; exec "$@"', "sh", *command]


def read_memory_limit() -> int:
    """Return the container's limit of memory in bytes."""
    limit = read_container()["resources"]["limits"]["memory"]
    return int(limit[:-2]) * BYTES[limit[-2:]]


def mount_key(key: Path, folder: Path) -> Path:
    """Copy a key as Kubernetes mounts a ConfigMap.

    The name of the key is a link into another folder.
    """
    (folder / "..data").mkdir(parents=True)
    shutil.copy(key, folder / "..data")
    (folder / key.name).symlink_to(Path("..data") / key.name)
    return folder


@pytest.mark.services
def test_container_with_manifest_settings_becomes_ready_and_ends_within_grace_period(
    tmp_path: Path,
) -> None:
    site, port, log = open_site(tmp_path), free_port(), tmp_path / "log"
    scratch, work = tmp_path / "scratch", tmp_path / "work"
    scratch.mkdir()
    work.mkdir(mode=0o555)
    environment = read_environment("shared-folder") | {
        FOLLOW_VARIABLE: site.control_url,
        REPORTS_VARIABLE: site.reports_url,
        TRUSTED_KEYS_VARIABLE: str(mount_key(site.keys / "signing.pub.pem", tmp_path / "keys")),
        "ONNX_OPS_STATE_DIR": str(tmp_path / "volume" / "replica"),
        "ONNX_OPS_HOST": "127.0.0.1",
        "ONNX_OPS_PORT": str(port),
        # The image sets PATH and PYTHONDONTWRITEBYTECODE, but not HOME. The other variables replace
        # its installed package and its folder /tmp.
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(INFRA.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(scratch),
    }
    container, grace_s = read_container(), read_pod()["terminationGracePeriodSeconds"]
    liveness, readiness = (
        f"http://127.0.0.1:{port}{container[name]['httpGet']['path']}"
        for name in ("livenessProbe", "readinessProbe")
    )
    command = [sys.executable, "-P", "-m", "onnx_ops.serving.container", *container["args"]]
    with running_process(
        start_limited(command, read_memory_limit()),
        log,
        lambda: does_answer(liveness),
        env=environment,
        cwd=work,
    ) as process:
        assert resource.prlimit(process.pid, resource.RLIMIT_DATA)[1] == read_memory_limit()
        assert not does_answer(readiness), "there is no table yet"
        weights = {site.blue.name: 100}
        state = EndpointState(
            deployments=(site.blue,), split=TrafficSplit(weights=weights), generation=1
        )
        site.provider.apply(site.config, state, generation=1)
        until(lambda: does_answer(readiness), "readiness")
        assert EndpointProviderSuite().scale(f"http://127.0.0.1:{port}") == 2.0
        (replica,) = site.provider.list_replicas(site.config)
        assert replica.status.image == environment[IMAGE_VARIABLE]
        assert replica.status.address == "http://10.1.2.3:8080"
        process.send_signal(signal.SIGTERM)
        assert process.wait(grace_s) == 0, log.read_text(encoding="utf-8")
        assert not does_answer(liveness)
    (replica,) = site.provider.list_replicas(site.config)
    assert replica.status.is_final
    assert [list(folder.iterdir()) for folder in (work, scratch)] == [[], []]
