"""An endpoint of replicas: followers run as real processes.

They follow signed tables and models in a folder or an object store.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx_ops import codec
from onnx_ops.adapters.endpoints.local_server import LocalServer
from onnx_ops.adapters.endpoints.replicas import ReplicaEndpoints
from onnx_ops.adapters.files import ObjectStore, open_objects
from onnx_ops.adapters.signers.ecdsa import create_key
from onnx_ops.attestation import sign_record
from onnx_ops.domain.attestation import OverrideRecord
from onnx_ops.domain.endpoint import Deployment, EndpointConfig
from onnx_ops.ports import Signer
from onnx_ops.protocol.messages import USER_KEY_HEADER, Counts
from onnx_ops.protocol.replica_reports import ReplicaStatus, ReportSource
from onnx_ops.protocol.replica_tables import ReplicaTable, TableNumber, decode_table
from onnx_ops.protocol.server_process import SERVER_FILE, ServerRecord
from onnx_ops.testing.endpoints import EndpointProviderSuite
from tests.adapters.endpoint_site import EndpointSite, make_config, make_models
from tests.support.must import must
from tests.support.ports import free_port

TARGET = "cpu-1t"


def approve(deployment: Deployment, signer: Signer) -> Deployment:
    """Return the deployment with a signed override; a server with keys loads it."""
    record = OverrideRecord(
        model=deployment.model,
        version=deployment.version,
        variant=deployment.variant,
        release=deployment.release,
        manifest=deployment.manifest,
        target=TARGET,
        reason="a test",
        by="tester",
        at="2026-01-01T00:00:00Z",
        execution=deployment.execution,
    )
    return replace(deployment, authority=sign_record(record, signer).envelope)


@dataclass(kw_only=True)
class ReplicaProcesses:
    """Followers of one endpoint, each with its server.

    `control_url` and `reports_url` are URLs or paths.

    Args:
        folder: contains a folder for each replica, and its log.
        keys: folder of the trusted public keys.
        environ: further variables of the followers.
    """

    folder: Path
    control_url: str
    reports_url: str
    endpoint: str
    keys: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(init=False, default_factory=dict)
    ports: dict[str, int] = field(init=False, default_factory=dict)

    def address(self, name: str = "r1") -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def start(self, name: str = "r1") -> None:
        """Start a replica; a restarted one uses the same port and folder as before."""
        port = self.ports.setdefault(name, free_port())
        command = [
            *(
                sys.executable,
                "-m",
                "onnx_ops.app.follower",
                "--state-dir",
                str(self.folder / name),
            ),
            *(
                "--follow",
                self.control_url,
                "--reports",
                self.reports_url,
                "--endpoint",
                self.endpoint,
            ),
            *("--replica", name, "--trusted-keys", str(self.keys), "--port", str(port)),
            *("--address", self.address(name)),
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environ},
                stdin=subprocess.DEVNULL,
            )

    def stop(self, name: str = "r1", number: signal.Signals = signal.SIGTERM) -> None:
        """Stop a follower, which stops its server if it can."""
        if (process := self.processes.pop(name, None)) is not None:
            process.send_signal(number)
            process.wait(60)

    def stop_all(self) -> None:
        """Stop all replicas, and the servers that remain after a follower was killed."""
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        for name in list(self.processes):
            self.stop(name)
        for name in self.ports:
            LocalServer(self.folder / name, sys.executable).stop()

    @property
    def control(self) -> ObjectStore:
        return open_objects(self.control_url)

    @property
    def control_folder(self) -> Path:
        return Path(self.control_url)

    @property
    def reports_folder(self) -> Path:
        return Path(self.reports_url)

    def status(self, name: str = "r1") -> ReplicaStatus:
        data = open_objects(self.reports_url).read(f"status/{name}.json")
        assert data is not None
        return codec.loads(data, ReplicaStatus)

    def read_counts(self, name: str = "r1") -> Counts:
        """Return the counts that the replica has reported since its last start."""
        data = open_objects(self.reports_url).read(
            ReportSource(name, self.status(name).start).counts_name
        )
        return codec.loads(must(data), Counts)

    def adopted(self, name: str = "r1") -> TableNumber | None:
        """Return the number of a replica's table; None before its first report."""
        data = open_objects(self.reports_url).read(f"status/{name}.json")
        return None if data is None else codec.loads(data, ReplicaStatus).adopted

    def read_table(self, sequence: int, phase: int = 1) -> ReplicaTable:
        number = TableNumber(sequence, phase)
        table = decode_table(must(self.control.read(number.name)), number, self.endpoint, None)
        assert isinstance(table, ReplicaTable)
        return table

    def write_table(self, number: TableNumber, data: bytes) -> None:
        assert self.control.create(number.name, data)

    def read_record(self, name: str = "r1") -> ServerRecord | None:
        path = self.folder / name / SERVER_FILE
        return codec.loads(path.read_bytes(), ServerRecord) if path.is_file() else None

    def age_reports(self, seconds: float) -> None:
        """Make the statuses that many seconds older, as if no report had arrived since."""
        for path in (self.reports_folder / "status").iterdir():
            at = path.stat().st_mtime - seconds
            os.utime(path, (at, at))


@dataclass(kw_only=True)
class ReplicaSite(EndpointSite, ReplicaProcesses):
    """A provider with its signing key, and the replicas of its endpoint."""

    replicas: int = 1
    endpoint: str = "digits"
    signer: Signer = field(init=False)
    provider: ReplicaEndpoints = field(init=False)

    def __post_init__(self) -> None:
        self.keys.mkdir(parents=True)
        self.signer = create_key(self.keys / "signing.pem")
        self.blue, self.green = approve(self.blue, self.signer), approve(self.green, self.signer)
        self.provider = ReplicaEndpoints(trusted=self.keys)
        self.provider.sign_with(lambda: self.signer)
        self.config: EndpointConfig = make_config(
            self.endpoint,
            "replicas",
            control=self.control_url,
            reports=self.reports_url,
            replicas=self.replicas,
        )

    def confirm(self, name: str = "r1") -> set[float]:
        """Confirm the rollout as a reconciliation does.

        Return the factors by which a replica multiplies after that.
        """
        self.provider.confirm_rollout(self.config)
        return {EndpointProviderSuite().scale(self.address(name)) for _ in range(20)}


def ask_replica(
    address: str,
    user: str,
    path: str = "/invocations",
    body: bytes = b'{"inputs": {"x": [[1.0, 1.0]]}}',
) -> Mapping[str, str]:
    """Send a user's request to a replica; return the headers of the answer."""
    headers = {"content-type": "application/json", USER_KEY_HEADER: user}
    with urllib.request.urlopen(
        urllib.request.Request(f"{address}{path}", body, headers), timeout=10
    ) as answer:
        return dict(answer.headers)


def report_feedback(address: str, successes: Mapping[str, bool]) -> object:
    """Report feedback by tokens to a replica; return the document that it answers."""
    entries = [{"token": token, "success": success} for token, success in successes.items()]
    body = json.dumps({"feedback": entries}).encode()
    request = urllib.request.Request(
        f"{address}/feedback", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def open_site(
    folder: Path, *, control: str = "", reports: str = "", replicas: int = 1, **more: str
) -> ReplicaSite:
    """Return a site without running replicas; by default over two folders."""
    blue, green = make_models(folder / "models")
    return ReplicaSite(
        folder=folder / "site",
        keys=folder / "site" / "trusted",
        control_url=control or str(folder / "control"),
        reports_url=reports or str(folder / "reports"),
        replicas=replicas,
        blue=blue,
        green=green,
        environ=more,
    )
