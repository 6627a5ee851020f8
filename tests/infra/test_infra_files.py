"""The files in infra/, read by the tools for each format.

The tests also check the documented properties of the files.
"""

from __future__ import annotations

import re
import stat
from typing import Any

import pytest
import yaml

from tests.infra.infra_tools import INFRA, tool

COMPOSE = INFRA / "compose" / "compose.yaml"
DOCKERFILE = INFRA / "docker" / "Dockerfile"
GITHUB = INFRA.parent / ".github"
BICEP = INFRA / "azure" / "onnx-ops.bicep"


@pytest.mark.parametrize(
    "command",
    [
        ("hadolint", "--failure-threshold", "style", DOCKERFILE),
        ("check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE),
        ("cfn-lint", "--non-zero-exit-code", "informational", INFRA / "aws" / "onnx-ops.yaml"),
        ("zizmor", "--offline", "--quiet", GITHUB),
        (
            "check-jsonschema",
            "--builtin-schema",
            "vendor.github-workflows",
            *sorted(GITHUB.glob("workflows/*.yml")),
        ),
        (
            "check-jsonschema",
            "--builtin-schema",
            "vendor.github-actions",
            *sorted(GITHUB.glob("actions/*/action.yml")),
        ),
    ],
    ids=lambda command: f"{command[0]}-{command[2]}",
)
def test_linter_of_infra_or_github_file_reports_no_problem(command: tuple[str, ...]) -> None:
    done = tool(*command)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "broken", "arguments"),
    [
        ("hadolint", "FROM python\nRUN cd /src && sudo make\n", ()),
        (
            "check-jsonschema",
            "services: {one: {imag: two}}\n",
            ("--builtin-schema", "vendor.compose-spec"),
        ),
        (
            "zizmor",
            "on: push\njobs: {a: {runs-on: x, steps: [{run: 'echo ${{ github.head_ref }}'}]}}\n",
            ("--offline",),
        ),
        (
            "cfn-lint",
            "Resources: {One: {Type: 'AWS::S3::Bucket', Properties: {Bucketname: two}}}\n",
            (),
        ),
    ],
)
def test_linter_of_broken_file_fails(
    tmp_path_factory: pytest.TempPathFactory, name: str, broken: str, arguments: tuple[str, ...]
) -> None:
    file = tmp_path_factory.mktemp("broken") / "broken.yaml"
    file.write_text(broken, encoding="utf-8")
    assert tool(name, *arguments, file).returncode != 0


def parsed_bicep() -> Any:
    from pycep import BicepParser

    return BicepParser().parse(text=BICEP.read_text(encoding="utf-8"))


def test_bicep_template_defines_workspace_and_keyless_identities() -> None:
    resources = parsed_bicep()["resources"]
    kinds = {resource["type"] for resource in resources.values()}
    assert {
        "Microsoft.MachineLearningServices/workspaces",
        "Microsoft.Storage/storageAccounts",
        "Microsoft.ContainerRegistry/registries",
        "Microsoft.ManagedIdentity/userAssignedIdentities",
        "Microsoft.ManagedIdentity/userAssignedIdentities/federatedIdentityCredentials",
        "Microsoft.Authorization/roleAssignments",
    } <= kinds
    assert not any("onlineEndpoints" in kind for kind in kinds), "endpoints are the pipeline's"
    text = BICEP.read_text(encoding="utf-8")
    assert "listKeys(" not in text
    used = set(re.findall(r"roles\.(\w+)", text))
    named = set(re.findall(r"^  (\w+): '[0-9a-f-]{36}'$", text, re.MULTILINE))
    assert used == named, "every role is assigned, and known"


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    return found


def test_compose_ports_are_bound_to_loopback_by_default() -> None:
    ports = [port for service in services().values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("${ONNX_OPS_BIND:-127.0.0.1}:") for port in ports)


def test_compose_services_except_job_have_health_checks_and_wait_for_dependencies() -> None:
    found = services()
    assert set(found) == {
        "postgres",
        "store",
        "buckets",
        "mlflow",
        "prefect",
        "worker",
        "reconciler",
    }
    assert {name for name, service in found.items() if "healthcheck" not in service} == {"buckets"}
    for service in found.values():
        for name, how in service.get("depends_on", {}).items():
            state = "healthy" if "healthcheck" in found[name] else "completed_successfully"
            assert how["condition"] == f"service_{state}"


def test_compose_file_contains_no_secret_value() -> None:
    document = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
    assert all(set(secret) == {"file"} for secret in document["secrets"].values())
    for service in services().values():
        for name in service.get("environment", {}):
            assert not name.endswith(("PASSWORD", "SECRET", "ACCESS_KEY", "TOKEN"))


def test_compose_services_of_platform_image_have_read_only_root_and_no_privileges() -> None:
    ours = [
        service for service in services().values() if "ONNX_OPS_PLATFORM_IMAGE" in service["image"]
    ]
    assert len(ours) == 5
    for service in ours:
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_image_installs_wheel_with_extras_of_serving_and_stores() -> None:
    installs = [
        line
        for line in (INFRA / "docker" / "install.sh").read_text("utf-8").splitlines()
        if "install " in line
    ]
    (command,) = [line for line in installs if line.startswith("pip install")]
    assert command.endswith('--constraint "$constraints" "$(echo "$reports"/*.whl)[blob,s3,serve]"')
    assert not list((INFRA / "docker").glob("*requirements*"))


def test_serving_image_runs_container_entrypoint_as_unprivileged_user() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    serving = text[text.index(" AS serving") :]
    assert "ARG RUN_AS=10001:10001" in serving
    assert "USER ${RUN_AS}" in serving
    assert (
        'ENTRYPOINT ["/opt/onnx-ops/bin/python", "-P", "-m", "onnx_ops.serving.container"]'
        in serving
    )
    assert 'CMD ["serve"]' in serving
    assert "HEALTHCHECK" in serving
    assert "VOLUME /tmp" in serving
    assert "pip" not in serving, "what is installed comes from the stage before"
    assert "infra/docker/install.sh" in text
    assert (INFRA / "docker" / "install.sh").stat().st_mode & stat.S_IXUSR


def test_infra_files_set_no_package_index() -> None:
    for file in INFRA.rglob("*"):
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"--\S*(index|links)\b|/simple\b", text), file
