"""The pipeline by Prefect: a real server and worker, the deployments of `prefect.yaml`, a schedule that fires."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_project import Project, until

pytestmark = pytest.mark.services

PREFECT = Path(sys.executable).with_name("prefect")
VARIANTS = ("fp32", "int8-dynamic", "int8-static")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class PrefectSite:
    """A Prefect server and a worker that serve one project; everything they keep lies in `home`."""

    project: Project
    home: Path
    api: str

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PREFECT, "--no-prompt", *arguments],
            cwd=self.project.root,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def done(self, *arguments: str) -> str:
        done = self.command(*arguments)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self.log()}"
        return done.stdout

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.home / "log").open("ab") as log:
            return subprocess.Popen(
                [PREFECT, *arguments],
                cwd=self.project.root,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def environment(self) -> dict[str, str]:
        return self.project.environment(
            {
                "PREFECT_HOME": str(self.home),
                "PREFECT_API_URL": self.api,
                "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
                "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
                "PREFECT_SERVER_UI_ENABLED": "false",
                "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
                "PREFECT_WORKER_QUERY_SECONDS": "2",
                "PREFECT_CLI_COLORS": "false",
                "DO_NOT_TRACK": "1",
            }
        )

    def ask(self, path: str, **filters: Any) -> Any:
        """A question to the API, as any program may ask it."""
        answer = httpx.post(f"{self.api}{path}", json=filters, timeout=60)
        answer.raise_for_status()
        return answer.json()

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.api}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def latest(self, flow: str) -> dict[str, Any]:
        """The flow run of a flow that was created last."""
        runs: list[dict[str, Any]] = self.ask("/flow_runs/filter", flows={"name": {"any_": [flow]}})
        return max(runs, key=lambda run: str(run["created"]))

    def settle(self) -> None:
        """Wait until no flow run is under way: a worker fetches runs ahead of their time, so some outlive a schedule.

        A run that comes late releases what its file says, which would undo what a later test does.
        """

        def unfinished() -> list[dict[str, Any]]:
            kinds = ["SCHEDULED", "PENDING", "RUNNING", "CANCELLING"]
            runs: list[dict[str, Any]] = self.ask("/flow_runs/filter", flow_runs={"state": {"type": {"any_": kinds}}})
            return runs

        def quiet() -> bool:
            for run in unfinished():
                if run["state_type"] == "SCHEDULED":
                    httpx.delete(f"{self.api}/flow_runs/{run['id']}", timeout=60)
            return not unfinished()

        until(quiet, seconds=300, what="the end of every flow run")

    def task_runs(self, flow_run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Finished task runs by name; they reach the API a moment after they happen."""
        wanted = {"id": {"any_": [flow_run["id"]]}}

        def settled() -> dict[str, dict[str, Any]] | None:
            runs = self.ask("/task_runs/filter", flow_runs=wanted)
            final = all(run["state_type"] in ("COMPLETED", "FAILED") for run in runs)
            return {run["name"]: run for run in runs} if runs and final else None

        found: dict[str, dict[str, Any]] = until(settled, what="the end of all task runs")
        return found

    def table(self, key: str, flow_run: Mapping[str, Any]) -> list[dict[str, str]]:
        filters = {"key": {"any_": [key]}, "flow_run_id": {"any_": [flow_run["id"]]}}
        (artifact,) = self.ask("/artifacts/filter", artifacts=filters)
        rows: list[dict[str, str]] = json.loads(artifact["data"])
        return rows

    def log(self) -> str:
        return (self.home / "log").read_text(encoding="utf-8", errors="replace")[-10_000:]


def ended(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def site(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectSite]:
    port = free_port()
    made = PrefectSite(project, tmp_path_factory.mktemp("prefect"), f"http://127.0.0.1:{port}/api")
    started = [made.start("server", "start", "--host", "127.0.0.1", "--port", str(port))]
    try:
        until(made.healthy, seconds=120, what="a healthy Prefect server")
        made.done("work-pool", "create", "local", "--type", "process")
        made.done("deploy", "--all")
        started.insert(0, made.start("worker", "start", "--pool", "local", "--install-policy", "never"))
        yield made
    finally:
        ended(started)


@pytest.fixture(scope="module")
def first(site: PrefectSite) -> dict[str, Any]:
    """The first run of the pipeline, watched to its end."""
    site.done("deployment", "run", "pipeline/digits-mlp", "--watch")
    return site.latest("pipeline")


def test_the_run_completes_and_says_what_serves(first: dict[str, Any]) -> None:
    assert (first["name"], first["state_type"]) == ("digits-mlp", "COMPLETED")
    assert "cpu-1t: serves " in first["state"]["message"]


def test_every_stage_is_a_task_run(first: dict[str, Any], site: PrefectSite) -> None:
    runs = site.task_runs(first)
    assert {f"benchmark {variant} @ cpu-1t" for variant in VARIANTS} < set(runs)
    assert {f"gate {variant} @ cpu-1t" for variant in VARIANTS} < set(runs)
    assert {"data train", "data test", "train", "export fp32", "register", "deploy digits @ cpu-1t"} < set(runs)
    upstream = {entry["id"] for entry in runs["gate fp32 @ cpu-1t"]["task_inputs"]["wait_for"]}
    assert upstream == {runs["benchmark fp32 @ cpu-1t"]["id"]}


def test_tables_are_found_through_the_api(first: dict[str, Any], site: PrefectSite) -> None:
    gates = site.table("digits-mlp-gates", first)
    assert {row["variant"] for row in gates} == set(VARIANTS)
    assert all(row["verdict"] for row in gates)
    (choice,) = site.table("digits-mlp-choices", first)
    assert (choice["target"], choice["verdict"]) == ("cpu-1t", "PASS")


def test_a_scheduled_run_fires_by_itself(first: dict[str, Any], site: PrefectSite) -> None:
    del first
    site.done("deployment", "schedule", "create", "pipeline/digits-mlp", "--interval", "15", "--replace", "-y")

    def fired() -> dict[str, Any] | None:
        runs = site.ask("/flow_runs/filter", flow_runs={"state": {"type": {"any_": ["COMPLETED", "FAILED"]}}})
        return next((run for run in runs if run["auto_scheduled"]), None)

    run = until(fired, seconds=120, what="a scheduled run")
    site.done("deployment", "schedule", "clear", "pipeline/digits-mlp", "-y")
    site.settle()
    assert (run["name"], run["state_type"]) == ("digits-mlp", "COMPLETED")
    assert "nothing changed" in run["state"]["message"]


def test_a_failed_gate_fails_its_task_run_and_the_run(first: dict[str, Any], site: PrefectSite) -> None:
    del first
    tight = json.dumps(["gates[5].max=1 kB"])
    done = site.command("deployment", "run", "pipeline/digits-mlp", "-p", f"overrides={tight}", "--watch")
    assert done.returncode == 1
    run = site.latest("pipeline")
    assert (run["state_type"], run["state_name"]) == ("FAILED", "GateFailed")
    assert "size" in run["state"]["message"]
    runs = site.task_runs(run)
    assert runs["train"]["state_name"] == "Cached"
    assert runs["gate fp32 @ cpu-1t"]["state_name"] == "GateFailed"
    assert runs["gate fp32 @ cpu-1t"]["state"]["message"].startswith("size: ")
    assert runs["deploy digits @ cpu-1t"]["state_name"] == "Skipped"


def test_a_rollback_by_deployment_is_in_the_ledger(first: dict[str, Any], site: PrefectSite) -> None:
    del first
    (before,) = site.project.document("status", "digits")
    site.project.run("train.with.seed=8")
    (between,) = site.project.document("status", "digits")
    assert between["roles"]["stable"]["version"] != before["roles"]["stable"]["version"]
    site.done(
        "deployment", "run", "rollback/rollback", "-p", 'endpoints=["digits"]', "-p", "reason=it was slow", "--watch"
    )
    (after,) = site.project.document("status", "digits")
    assert after["roles"]["stable"]["version"] == before["roles"]["stable"]["version"]
    run = site.latest("rollback")
    assert "100 % of traffic. Reason: it was slow" in run["state"]["message"]
    actors = {line["actor"] for line in site.project.document("history", "digits")}
    assert f"tester via prefect flow run {run['id']}" in actors


def test_reconcile_by_deployment_tells_each_endpoint(first: dict[str, Any], site: PrefectSite) -> None:
    del first
    site.done("deployment", "run", "reconcile/reconcile", "--watch")
    run = site.latest("reconcile")
    assert run["state"]["message"].startswith("digits: ")
    assert set(site.task_runs(run)) == {"reconcile digits"}
