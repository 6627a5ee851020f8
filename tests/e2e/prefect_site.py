"""A Prefect server, and workers, that serve one project: for the tests that run flows as users do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.e2e_project import Project, until
from tests.support.ports import free_port

PREFECT = Path(sys.executable).with_name("prefect")


@dataclass
class PrefectSite:
    """A Prefect server and a worker that serve one project; everything they keep lies in `home`."""

    project: Project
    home: Path
    api: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    password: str = ""

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

    def start(self, *arguments: str, before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        with (self.home / "log").open("ab") as log:
            return subprocess.Popen(
                [*before, PREFECT, *arguments],
                cwd=self.project.root,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def environment(self) -> dict[str, str]:
        names = ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING") if self.password else ()
        return self.project.environment(
            {
                **dict.fromkeys(names, self.password),
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
        user, _, password = self.password.partition(":")
        auth = (user, password) if user else None
        answer = httpx.post(f"{self.api}{path}", json=filters, timeout=60, auth=auth)
        answer.raise_for_status()
        return answer.json()

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.api}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def latest(self, flow: str) -> dict[str, Any]:
        """The flow run of a flow that was asked for last.

        A schedule's runs do not count: the server creates them days ahead and at any moment, also during another run.
        """
        runs: list[dict[str, Any]] = self.ask("/flow_runs/filter", flows={"name": {"any_": [flow]}})
        return max((run for run in runs if not run["auto_scheduled"]), key=lambda run: str(run["created"]))

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

    def task_runs(self, flow_run: Mapping[str, Any], expected: Set[str]) -> dict[str, dict[str, Any]]:
        """Finished task runs by name, those that are expected among them: they reach the API after they happened."""
        wanted = {"id": {"any_": [flow_run["id"]]}}

        def settled() -> dict[str, dict[str, Any]] | None:
            runs = {run["name"]: run for run in self.ask("/task_runs/filter", flow_runs=wanted)}
            final = all(run["state_type"] in ("COMPLETED", "FAILED") for run in runs.values())
            return runs if final and expected <= runs.keys() else None

        found: dict[str, dict[str, Any]] = until(settled, what=f"the end of {sorted(expected)}")
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


@contextlib.contextmanager
def served(project: Project, home: Path, password: str = "") -> Iterator[PrefectSite]:
    """A healthy server with its own database; what `made.started` lists ends before it."""
    port = free_port()
    made = PrefectSite(project, home, f"http://127.0.0.1:{port}/api", password=password)
    made.started.append(made.start("server", "start", "--host", "127.0.0.1", "--port", str(port)))
    try:
        until(made.healthy, seconds=120, what="a healthy Prefect server")
        yield made
    finally:
        ended(made.started[::-1])
