"""kubectl with a small API server.

It applies the manifests and runs the commands of the guide.

The pods are processes of this machine with the variables, volumes, user, memory limit and read-only
root of the manifests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from onnx_ops.app.replica_diagnosis import CHECKS
from onnx_ops.testing.models import rows, write_perceptron
from tests.infra.infra_tools import INFRA, ROOT
from tests.infra.local_pod import LocalPod, can_isolate
from tests.support.extras import require_programs, skip_or_fail
from tests.support.kubernetes_api import KubernetesApi, Object, serve_kubernetes
from tests.support.ports import free_port
from tests.support.processes import does_answer, running_process, until

KUBERNETES = INFRA / "kubernetes"
GUIDE = ROOT / "docs" / "kubernetes.md"
EXAMPLES = sorted(path.name for path in (KUBERNETES / "examples").iterdir())
MANIFESTS = {"ServiceAccount", "HorizontalPodAutoscaler", "Deployment", "PodDisruptionBudget"}
WEBSOCKETS = 31
"""Minor version of kubectl since which `exec` uses WebSockets."""

pytestmark = pytest.mark.nightly


@dataclass(kw_only=True)
class Cluster:
    """kubectl and the API server that it uses.

    `folder` is the working folder of commands.
    """

    api: KubernetesApi
    folder: Path
    environ: dict[str, str]
    pods: dict[str, LocalPod] = field(default_factory=dict)

    def run(self, line: str | Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command line of a shell, or a list of words."""
        return subprocess.run(
            line,
            shell=isinstance(line, str),
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def succeed(self, line: str | Sequence[str]) -> str:
        """Run a command that must succeed; return its output."""
        done = self.run(line)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def run_in_pod(self, pod: Object, command: Sequence[str]) -> tuple[int, bytes, bytes]:
        return self.pods[pod["metadata"]["name"]].run(command)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Yield an empty cluster, and a copy of the manifests with a key for each example."""
    require_programs("kubectl", packages="kubernetes-client")
    place = tmp_path / "infra" / "kubernetes"
    shutil.copytree(KUBERNETES, place)
    for example in EXAMPLES:
        (place / "examples" / example / "signing.pub.pem").write_text("a key", encoding="utf-8")
    api = KubernetesApi()
    with serve_kubernetes(api, tmp_path) as variables:
        made = Cluster(
            api=api,
            folder=tmp_path,
            environ={
                **{k: v for k, v in os.environ.items() if not k.startswith("ONNX_OPS_")},
                **variables,
            },
        )
        api.run = made.run_in_pod
        yield made


def read_minor_version() -> int:
    text = subprocess.check_output(["kubectl", "version", "--client", "-o", "json"], text=True)
    return int(re.sub(r"\D", "", json.loads(text)["clientVersion"]["minor"]))


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("mode", ["client", "server"])
def test_kubectl_apply_with_dry_run_accepts_example(
    mode: str, example: str, cluster: Cluster
) -> None:
    cluster.succeed("kubectl create namespace serving")
    before = dict(cluster.api.objects)
    output = cluster.succeed(
        f"kubectl apply --dry-run={mode} -k infra/kubernetes/examples/{example} -o json"
    )
    assert {one["kind"] for one in json.loads(output)["items"]} > MANIFESTS
    assert cluster.api.objects == before


def test_kubectl_apply_with_dry_run_accepts_services_and_base(cluster: Cluster) -> None:
    services = cluster.succeed("kubectl apply --dry-run=client -f infra/kubernetes/onnx-ops.yaml")
    assert len(services.splitlines()) == len(
        list(yaml.safe_load_all((KUBERNETES / "onnx-ops.yaml").read_text(encoding="utf-8")))
    )
    cluster.succeed("kubectl apply --dry-run=client -k infra/kubernetes/endpoint")
    assert not cluster.api.objects


def test_second_kubectl_apply_of_services_changes_nothing(cluster: Cluster) -> None:
    command = "kubectl apply -f infra/kubernetes/onnx-ops.yaml"
    assert cluster.succeed(command).count(" created") > len(MANIFESTS)
    again = cluster.succeed(command).splitlines()
    assert [line for line in again if not line.endswith(" unchanged")] == []


@pytest.mark.parametrize(
    ("old", "new", "mode", "error"),
    [
        ("kind: Service", "kind: Servis", "client", 'no matches for kind "Servis"'),
        ("selector: {}", "selectr: {}", "server", "'selectr' was unexpected"),
        ("port: 80", "port: http", "server", "'http' is not of type 'integer'"),
    ],
)
def test_kubectl_apply_refuses_wrong_manifest(
    old: str, new: str, mode: str, error: str, cluster: Cluster
) -> None:
    path = cluster.folder / "infra/kubernetes/endpoint/service.yaml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    cluster.succeed("kubectl create namespace serving")
    done = cluster.run(["kubectl", "-n", "serving", "apply", f"--dry-run={mode}", "-f", str(path)])
    assert done.returncode != 0
    assert error in done.stderr


def read_commands() -> list[str]:
    """Return the commands of the guide, without their comments."""
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition(" # ")[0].strip() for line in lines]


def find_command(start: str) -> str:
    """Return the only command of the guide that starts with these words."""
    (command,) = [line for line in read_commands() if line.startswith(start)]
    return command


def read_pipeline(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the pipeline of a tiny model with the endpoint of the guide."""
    (block,) = re.findall(r"```yaml\n(deploy:.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    deploy = yaml.safe_load(block)["deploy"]
    deploy[0]["options"] |= changes
    return {
        "pipeline": "digits-cnn",
        "data": {"test": {"file": "rows.npz", "inputs": {"x": "x"}}},
        "model": "model.onnx",
        "export": {"framework": "onnx"},
        "benchmark": {"targets": ["cpu-1t"]},
        "register": {"model": "digits-cnn", "promote": "auto"},
        "deploy": deploy,
    }


def write_project(folder: Path, options: dict[str, Any]) -> None:
    """Write a project whose only pipeline is the file of the guide."""
    import numpy as np

    (folder / "configs" / "pipelines").mkdir(parents=True)
    (folder / "onnx-ops.toml").touch()
    text = yaml.safe_dump(read_pipeline(options))
    (folder / "configs/pipelines/digits.yaml").write_text(text, encoding="utf-8")
    np.savez(folder / "rows.npz", allow_pickle=False, **rows(8))
    write_perceptron(folder / "model.onnx")


@pytest.mark.services
def test_commands_of_guide_start_pods_whose_doctor_finds_no_fault(cluster: Cluster) -> None:
    if read_minor_version() < WEBSOCKETS:
        skip_or_fail("`exec` of this kubectl needs SPDY; use kubectl 1.31 or newer")
    volumes, port = cluster.folder / "volumes", free_port()
    control, reports = volumes / "digits-shared/control", volumes / "digits-shared/reports"
    project = cluster.folder / "project"
    write_project(project, {"control": str(control), "reports": str(reports), "replicas": 1})
    cluster.succeed(["onnx-ops", "keys", "new"])
    # The following commands are those of the guide, with the example whose store exists here.
    starts = (
        "cp -r",
        "onnx-ops keys public",
        "kubectl create namespace",
        "kubectl label",
        "kubectl apply -k",
    )
    for start in starts:
        cluster.succeed(find_command(start).replace("examples/s3", "examples/shared-folder"))
    assert cluster.api.find("Namespace", "serving")["metadata"]["labels"] == {
        "pod-security.kubernetes.io/enforce": "restricted"
    }
    (cluster.folder / "secret.txt").write_text("secret", encoding="utf-8")
    cluster.succeed(find_command("kubectl -n serving create secret"))
    replica = LocalPod(
        api=cluster.api,
        pod=cluster.api.find("Pod", "digits-endpoint-0", "serving"),
        folder=volumes,
        work=cluster.folder,
        changes={"ONNX_OPS_PORT": str(port), "ONNX_OPS_HOST": "127.0.0.1"},
    )
    cluster.pods["digits-endpoint-0"] = replica
    doctor = find_command("kubectl -n serving exec") + " --json"
    before = cluster.run(doctor)
    assert before.returncode == 4, before.stdout + before.stderr
    assert {one["check"] for one in json.loads(before.stdout) if not one["ok"]} == {"replica"}

    start_services(cluster, volumes, project)
    serve = ["python", "-P", "-m", "onnx_ops.serving.container", "serve"]
    command, environ = replica.build_command(serve)
    log = cluster.folder / "log"
    live = f"http://127.0.0.1:{port}/v2/health/live"
    with running_process(command, log, lambda: does_answer(live), env=environ, cwd=cluster.folder):
        cluster.api.read_log = lambda pod: log.read_text(encoding="utf-8")
        findings = json.loads(cluster.succeed(doctor))
        assert [one["check"] for one in findings] == list(CHECKS)
        from_project = cluster.run(find_command("kubectl -n onnx-ops exec") + " --json")
        assert from_project.returncode == 0, from_project.stdout + from_project.stderr
        assert len(json.loads(from_project.stdout)) > 1
        cluster.succeed(find_command("kubectl -n serving logs"))
        # The reconciler's key signs the first table, which the pod trusts and serves.
        run = "kubectl -n onnx-ops exec deployment/reconciler -- onnx-ops run --json"
        cluster.succeed(f"{run} configs/pipelines/digits.yaml")
        until(lambda: does_answer(live.replace("live", "ready")), "readiness")
        served = {one["check"]: one["found"] for one in json.loads(cluster.succeed(doctor))}
        assert " serves table " in served["replica"]
    if can_isolate():
        # An isolated container can write only to its volumes.
        assert (replica.run(["touch", str(cluster.folder / "new")])[0]) != 0


def start_services(cluster: Cluster, volumes: Path, project: Path) -> None:
    """Apply the services and their secrets, and start the reconciler's pod."""
    cluster.succeed("kubectl apply -f infra/kubernetes/onnx-ops.yaml")
    text = (KUBERNETES / "onnx-ops.yaml").read_text(encoding="utf-8")
    commands = re.findall(r"^# +(kubectl .* create .*)$", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        cluster.succeed(command)
    cluster.pods["reconciler-0"] = LocalPod(
        api=cluster.api,
        pod=cluster.api.find("Pod", "reconciler-0", "onnx-ops"),
        folder=volumes,
        work=project,
        # The guide describes this mount.
        shared=volumes / "digits-shared",
        changes={
            "ONNX_OPS_STATE": str(volumes / "reconciler-0-scratch" / "state"),
            "ONNX_OPS_STORE": "",
            "ONNX_OPS_LEDGER": "",
            "ONNX_OPS_TRACKING_URI": "",
        },
    )
