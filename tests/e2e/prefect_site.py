"""A Prefect server that tests share, and the workers of one project.

It is for tests that run flows as users do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.e2e_project import Project
from tests.support.ports import free_port
from tests.support.processes import until

PREFECT = Path(sys.executable).with_name("prefect")
PASSWORD = "admin:of-the-tests"  # noqa: S105
"""User and password of the shared server."""


@dataclass
class PrefectSite:
    """A Prefect server, as a project and its workers use it.

    Args:
        project: whose flows run.
        home: where its processes keep their files and their log.
        api: URL of the server's API.
        started: what runs until the site ends.
    """

    project: Project
    home: Path
    api: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

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
        return self.project.environment(
            {
                **self.client,
                "PREFECT_SERVER_API_AUTH_STRING": PASSWORD,
                "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
                "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
                "PREFECT_SERVER_UI_ENABLED": "false",
                "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
                    "prefect.server.concurrency.lease_storage.filesystem"
                ),
                "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "0.2",
                "PREFECT_WORKER_QUERY_SECONDS": "1",
                "PREFECT_CLI_COLORS": "false",
                "DO_NOT_TRACK": "1",
            }
        )

    @property
    def client(self) -> dict[str, str]:
        """Return the variables by which a command reaches the server."""
        return {
            "PREFECT_HOME": str(self.home),
            "PREFECT_API_URL": self.api,
            "PREFECT_API_AUTH_STRING": PASSWORD,
        }

    @contextlib.contextmanager
    def http(self) -> Iterator[httpx.Client]:
        user, _, password = PASSWORD.partition(":")
        with httpx.Client(base_url=self.api, auth=(user, password), timeout=60) as client:
            yield client

    def call(self, method: str, path: str, document: Any = None) -> Any:
        """Call the API as any program does, and return its answer.

        The server's own transactions can lock its SQLite database for up to a minute. It then
        answers 503 or nothing, or closes the connection. Prefect's client repeats the request in
        that case. This method does the same where a second request changes nothing.
        """
        may_repeat = (
            method == "GET" or path.endswith("/filter") or "idempotency_key" in (document or {})
        )
        with self.http() as client:
            for left in reversed(range(5)):
                with contextlib.suppress(*[httpx.TransportError] if may_repeat and left else []):
                    answer = client.request(method, path, json=document)
                    if answer.status_code != 503 or not left:
                        assert answer.is_success, f"{method} {path}: {answer.text}"
                        return answer.json() if answer.content else None
                time.sleep(1)
        raise AssertionError("unreachable: the last time ends it")

    def ask(self, path: str, **filters: Any) -> Any:
        return self.call("POST", path, filters)

    def healthy(self) -> bool:
        try:
            with self.http() as client:
                return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def flow_run(
        self, deployment: str, *, ends: str = "COMPLETED", **parameters: Any
    ) -> dict[str, Any]:
        """Run a deployment, `FLOW/NAME`, and return its flow run.

        The flow run must end in a state of the type `ends`.
        """
        found = self.call("GET", f"/deployments/name/{deployment}")
        asked = {"parameters": parameters, "idempotency_key": uuid.uuid4().hex}
        run = self.call("POST", f"/deployments/{found['id']}/create_flow_run", asked)

        def final() -> dict[str, Any] | None:
            seen: dict[str, Any] = self.call("GET", f"/flow_runs/{run['id']}")
            return (
                seen
                if seen["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
                else None
            )

        seen: dict[str, Any] = until(final, seconds=300, what=f"the end of {deployment}")
        assert seen["state_type"] == ends, f"{seen['state']}\n{self.log()}"
        return seen

    def latest(self, flow: str) -> dict[str, Any]:
        """Return the flow run of a flow that was requested last.

        Runs of a schedule do not count. The server creates them days in advance, at any moment, and
        also during another run.
        """
        runs: list[dict[str, Any]] = self.ask("/flow_runs/filter", flows={"name": {"any_": [flow]}})
        return max(
            (run for run in runs if not run["auto_scheduled"]), key=lambda run: str(run["created"])
        )

    def wait_until_quiet(self) -> None:
        """Wait until no run of a schedule is in progress.

        A worker fetches runs ahead of time, so some of them start after the schedule was deleted.

        A late run would release what its file describes, and undo what a later test does. Other
        runs belong to tests that share the server.
        """

        def unfinished() -> list[dict[str, Any]]:
            kinds = ["SCHEDULED", "PENDING", "RUNNING", "CANCELLING"]
            runs: list[dict[str, Any]] = self.ask(
                "/flow_runs/filter", flow_runs={"state": {"type": {"any_": kinds}}}
            )
            return [run for run in runs if run["auto_scheduled"]]

        def quiet() -> bool:
            for run in unfinished():
                if run["state_type"] == "SCHEDULED":
                    self.call("DELETE", f"/flow_runs/{run['id']}")
            return not unfinished()

        try:
            until(quiet, seconds=300, what="the end of every scheduled run")
        except AssertionError as error:
            kept = [
                (run["name"], run["state_name"], run["created"], run["start_time"])
                for run in unfinished()
            ]
            raise AssertionError(
                f"{error}: {kept}\n{self.ask('/logs/filter', sort='TIMESTAMP_DESC', limit=20)}"
            ) from None

    def task_runs(
        self, flow_run: Mapping[str, Any], expected: Set[str]
    ) -> dict[str, dict[str, Any]]:
        """Return the finished task runs by name, after all expected ones have arrived.

        They reach the API only after they have happened.
        """
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
def served(home: Path, **environ: str) -> Iterator[str]:
    """Yield the URL of the API of a healthy server.

    Its SQLite database is in `home`.
    """
    port = free_port()
    server = PrefectSite(Project(home, environ), home, f"http://127.0.0.1:{port}/api")
    server.started.append(
        server.start("server", "start", "--host", "127.0.0.1", "--port", str(port))
    )
    try:
        until(server.healthy, seconds=300, what="a healthy Prefect server")
        yield server.api
    finally:
        ended(server.started)


@contextlib.contextmanager
def site_of(project: Project, home: Path, api: str) -> Iterator[PrefectSite]:
    """Yield a project's access to a server; processes in `made.started` end with it."""
    made = PrefectSite(project, home, api)
    try:
        yield made
    finally:
        ended(made.started[::-1])
