"""Templates of work pools, and the manifests of the services in a cluster.

They are valid, allow no unknown fields, and contain no secrets.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

from onnx_ops.adapters.signers.ecdsa import create_key, public_path
from onnx_ops.app.context import open_project
from onnx_ops.cli.diagnosis import diagnose
from onnx_ops.config.settings import load_settings
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.release.promote import bind_endpoint
from tests.infra.infra_tools import INFRA
from tests.release.release_parts import config_of

MANIFESTS = INFRA / "kubernetes" / "onnx-ops.yaml"
POOLS = {path.stem: path for path in sorted((INFRA / "pools").glob("*.json"))}
VERSIONS = ("1.29", "1.31", "1.33")
"""Kubernetes versions, the oldest to the newest, that the manifests must fit."""

PLACE = re.compile(r"{{ ?(\w+) ?}}")
WORKLOADS = ("StatefulSet", "Deployment", "DaemonSet", "Job")


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFESTS.read_text(encoding="utf-8")))


def template(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(POOLS[kind].read_text(encoding="utf-8"))
    return found


def filled(value: Any, values: dict[str, Any]) -> Any:
    """Fill a template as Prefect does.

    A value that is only a placeholder becomes its value. Without a value, its key is omitted.
    """
    if isinstance(value, str):
        if alone := PLACE.fullmatch(value):
            return values.get(alone.group(1))
        return PLACE.sub(lambda match: str(values.get(match.group(1), "")), value)
    if isinstance(value, list):
        return [filled(one, values) for one in value]
    if isinstance(value, dict):
        made = {name: filled(one, values) for name, one in value.items()}
        return {name: one for name, one in made.items() if one is not None}
    return value


def job() -> dict[str, Any]:
    """Return what the Kubernetes worker makes of its template for a run."""
    found = template("kubernetes")
    properties = found["variables"]["properties"]
    values = {name: one["default"] for name, one in properties.items() if "default" in one}
    values |= {
        "name": "brave-run",
        "command": ["prefect", "flow-run", "execute"],
        "labels": {"a": "b"},
    }
    values["env"] = [{"name": name, "value": value} for name, value in values["env"].items()]
    made: dict[str, Any] = filled(found["job_configuration"]["job_manifest"], values)
    return made


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for manifest in [*manifests(), job()]:
        if manifest["kind"] in WORKLOADS:
            yield manifest["metadata"].get("name", "run"), manifest["spec"]["template"]["spec"]


def containers() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, pod in pods():
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            yield f"{name}/{container['name']}", container


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_manifests_conform_to_schema_of_each_version(version: str) -> None:
    import kubernetes_validate

    for manifest in [*manifests(), job()]:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_kubernetes_validate_of_wrong_manifest_raises_validation_error() -> None:
    import kubernetes_validate

    wrong = job()
    wrong["spec"]["template"]["spec"]["contianers"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_kubernetes_objects_are_in_restricted_namespace() -> None:
    first, *others = manifests()
    assert first["kind"] == "Namespace"
    assert first["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert {one["metadata"]["namespace"] for one in others} == {first["metadata"]["name"]}
    names = [(one["kind"], one["metadata"]["name"]) for one in others]
    assert len(names) == len(set(names))


def test_kubernetes_pods_are_restricted_and_have_resource_requests_and_limits() -> None:
    for name, pod in pods():
        closed = pod["securityContext"]
        assert closed["runAsNonRoot"] is True, name
        assert closed["runAsUser"] > 0
        assert closed["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.get("automountServiceAccountToken", True) is (name == "worker"), name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert all("hostPath" not in volume for volume in pod["volumes"])
    for name, container in containers():
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }, name
        for bound in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(container["resources"][bound]), name


def test_kubernetes_worker_role_permits_changes_to_jobs_only() -> None:
    (role,) = [one for one in manifests() if one["kind"].endswith("Role")]
    assert role["kind"] == "Role"
    may = {
        (verb, resource)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }
    assert {resource for verb, resource in may if verb not in ("get", "list", "watch")} == {"jobs"}
    assert not any("*" in part for pair in may for part in pair)
    assert "secrets" not in {resource for _, resource in may}


def test_pool_and_manifest_files_contain_no_secret() -> None:
    assert not [one for one in manifests() if one["kind"] == "Secret"]
    for name, container in containers():
        for entry in container.get("env", ()):
            secret = re.search("PASSWORD|AUTH|SECRET|TOKEN|ACCESS_KEY", entry["name"])
            if secret and not entry["name"].endswith("_FILE"):
                assert set(entry["valueFrom"]) == {"secretKeyRef"}, (name, entry["name"])
        addresses = [
            entry.get("value", "")
            for entry in container.get("env", ())
            if "://" in entry.get("value", "")
        ]
        assert all(
            re.fullmatch(r"[^:]+://([^@]*:\$\(\w+\)@)?[^@]+", address) for address in addresses
        )
    for path in POOLS.values():
        assert not re.search(
            r"(?i)password|secret_key|api_key|auth_string", path.read_text(encoding="utf-8")
        )


def test_measurer_pod_runs_stages_one_after_another_without_key() -> None:
    (pod,) = [pod for name, pod in pods() if name == "measurer"]
    (container,) = pod["containers"]
    assert container["command"] == ["onnx-ops", "work", "--pool", "boards", "--limit", "1"]
    assert container["resources"]["requests"] == container["resources"]["limits"], "separate cores"
    (source,) = container["envFrom"]
    (settings,) = [
        one for one in manifests() if one["metadata"]["name"] == source["configMapRef"]["name"]
    ]
    assert settings["data"]["ONNX_OPS_SIGNING"] == "off"
    shared = next(
        one
        for one in manifests()
        if one["kind"] == "ConfigMap" and one["metadata"]["name"] == "onnx-ops"
    )
    assert settings["data"]["ONNX_OPS_STORE"] == shared["data"]["ONNX_OPS_STORE"]


def read_reconciler() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the reconciler's Deployment and its container."""
    (manifest,) = [one for one in manifests() if one["metadata"]["name"] == "reconciler"]
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    return manifest, container


def read_variables(container: dict[str, Any], secrets: dict[str, str]) -> dict[str, str]:
    """Return the variables of a container, as the kubelet sets them.

    They include the settings of runs.
    """
    assert container["envFrom"] == [{"configMapRef": {"name": "onnx-ops"}}]
    (shared,) = [
        one
        for one in manifests()
        if (one["kind"], one["metadata"]["name"]) == ("ConfigMap", "onnx-ops")
    ]
    variables: dict[str, str] = dict(shared["data"])
    for entry in container["env"]:
        source = entry.get("valueFrom", {}).get("secretKeyRef")
        variables[entry["name"]] = secrets[source["name"]] if source else entry["value"]
    return variables


def test_reconciler_pod_uses_ledger_of_runs_and_public_keys(tmp_path: Path) -> None:
    manifest, container = read_reconciler()
    pod = manifest["spec"]["template"]["spec"]
    assert (manifest["spec"]["replicas"], manifest["spec"]["strategy"]) == (1, {"type": "Recreate"})
    assert container["command"][:3] == ["onnx-ops", "reconcile", "--watch"]
    assert pod["serviceAccountName"] == "onnx-ops-reconciler"
    variables = read_variables(container, {"onnx-ops-signing": "a key"})
    assert "ONNX_OPS_LEDGER" not in {entry["name"] for entry in container["env"]}
    settings = load_settings(tmp_path, variables)
    assert settings.ledger == variables["ONNX_OPS_LEDGER"]
    (keys,) = [volume for volume in pod["volumes"] if volume["name"] == "keys"]
    assert set(keys) == {"name", "configMap"}, "public keys are no secret"
    assert {"name": "keys", "mountPath": str(settings.trusted_keys), "readOnly": True} in container[
        "volumeMounts"
    ]


def test_reconciler_pod_with_release_key_can_sign_tables_and_ledger_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, container = read_reconciler()
    key = tmp_path / "made" / "signing.pem"
    create_key(key)
    keys = tmp_path / "keys"
    keys.mkdir()
    shutil.copy(public_path(key), keys)
    secrets = {"onnx-ops-signing": key.read_text(encoding="ascii")}
    local = {
        "ONNX_OPS_STATE": str(tmp_path / "state"),
        "ONNX_OPS_LEDGER": "",
        "ONNX_OPS_TRACKING_URI": "",
        "ONNX_OPS_TRUSTED_KEYS": str(keys),
    }
    for name, value in (read_variables(container, secrets) | local).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    project = open_project()
    bind_endpoint(
        project.context, replace(config_of("digits"), provider="replicas"), RolloutPolicy()
    )
    findings = {one.check: one for one in diagnose(project)}
    assert findings["signatures"].found.endswith(
        "can sign decisions and ledger entries that need a key"
    )
    (release_key, *_) = project.context.provider("replicas").diagnose({})
    assert (release_key.check, release_key.ok) == ("release key", True)


@pytest.mark.parametrize("kind", POOLS)
def test_pool_template_uses_exactly_its_variables(kind: str) -> None:
    import jsonschema

    found = template(kind)
    assert set(found) == {"job_configuration", "variables"}
    jsonschema.Draft202012Validator.check_schema(found["variables"])
    properties = found["variables"]["properties"]
    assert set(PLACE.findall(json.dumps(found["job_configuration"]))) == set(properties)
    for name, one in properties.items():
        if "default" in one:
            jsonschema.validate(one["default"], one)
        assert one["title"], name


def test_pool_templates_include_process_docker_and_kubernetes() -> None:
    assert set(POOLS) == {"process", "docker", "kubernetes"}


def test_docker_pool_container_has_read_only_root_and_no_privileges() -> None:
    made = template("docker")["job_configuration"]
    closed = made["container_create_kwargs"]
    assert (closed["read_only"], closed["cap_drop"], made["privileged"]) == (True, ["ALL"], False)
    assert closed["security_opt"] == ["no-new-privileges:true"]
    assert closed["user"] == "10001:10001"
    assert closed["pids_limit"] > 0
    assert template("docker")["variables"]["properties"]["mem_limit"]["default"]


def _list_images(value: object) -> list[str]:
    if isinstance(value, dict):
        own = [value["image"]] if isinstance(value.get("image"), str) else []
        return own + [image for item in value.values() for image in _list_images(item)]
    return (
        [image for item in value for image in _list_images(item)] if isinstance(value, list) else []
    )


def test_pulled_images_except_prefect_image_are_pinned_by_digest() -> None:
    compose = yaml.safe_load((INFRA / "compose" / "compose.yaml").read_text(encoding="utf-8"))
    of_jobs = template("kubernetes")["variables"]["properties"]["image"]["default"]
    images = {of_jobs, *_list_images(manifests()), *_list_images(compose)}
    built_here = {image for image in images if image.startswith("${")}
    by_tag = {
        image
        for image in images - built_here
        if not re.fullmatch(r"[^@]+@sha256:[0-9a-f]{64}", image)
    }
    assert by_tag == {"prefecthq/prefect:3.8.8-python3.11-kubernetes"}


def test_network_policy_blocks_private_addresses_outside_namespace() -> None:
    rules = {
        one["metadata"]["name"]: one["spec"]
        for one in manifests()
        if one["kind"] == "NetworkPolicy"
    }
    outside = rules["out"]
    assert (outside["podSelector"], outside["policyTypes"]) == ({}, ["Egress"])
    blocks = [to["ipBlock"] for rule in outside["egress"] for to in rule["to"] if "ipBlock" in to]
    assert [block["cidr"] for block in blocks] == ["0.0.0.0/0"]
    for address in ("169.254.169.254", "10.0.0.1", "172.20.0.1", "192.168.1.1", "100.100.100.200"):
        assert any(ip_address(address) in ip_network(network) for network in blocks[0]["except"])
    namespaces = [
        to["namespaceSelector"]
        for rule in outside["egress"]
        for to in rule["to"]
        if "namespaceSelector" in to
    ]
    assert namespaces == [{"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}]
    assert rules["api"]["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "worker"}}
