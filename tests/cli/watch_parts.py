"""A project on a real MLflow server, with a real local endpoint.

`onnx-ops reconcile --watch` runs as a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx_ops.app.context import build_context
from onnx_ops.attestation import sign_record
from onnx_ops.config.settings import load_settings
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.decision import Verdict
from onnx_ops.domain.ledger import ActionOutcome, Intent, VersionRefused
from onnx_ops.domain.rollout_policy import RolloutPolicy
from onnx_ops.ports import Context
from onnx_ops.release.promote import bind_endpoint
from onnx_ops.testing.registries import publication
from tests.release.release_parts import config_of
from tests.support.command import PROGRAM, Result, run_command
from tests.support.must import must
from tests.support.server import stop_endpoints

TARGET = "cpu-1t"
CHAMPION, CHALLENGER = f"champion-{TARGET}", f"challenger-{TARGET}"


class Site:
    """One project.

    Model and endpoint are named for its folder, because all projects of a test run share an MLflow
    server.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.model = self.endpoint = f"linear-{folder.name}"[:40]
        folder.mkdir(exist_ok=True)
        (folder / "onnx-ops.toml").write_text(f'tracking_uri = "{url}"\n', encoding="utf-8")
        self.settings = load_settings(folder, {})
        self.context: Context = build_context(self.settings)

    def bind(self) -> None:
        digest = digest_bytes(TARGET.encode())
        config = replace(
            config_of(self.endpoint), provider="local", model=self.model, target=TARGET
        )
        bind_endpoint(self.context, replace(config, target_digest=digest), RolloutPolicy())

    def publish(self, seed: str, verdict: Verdict = Verdict.PASS) -> str:
        """Publish a version with a decision that this project's key has signed."""
        release = publication(
            self.folder / "built", model=self.model, seed=seed, verdict=verdict, target=TARGET
        )
        (variant,) = release.variants
        signed = sign_record(variant.signed[TARGET].record, must(self.context.signer()))
        variant = replace(variant, signed={TARGET: signed})
        return self.context.registry().publish(replace(release, variants=(variant,)))["fp32"]

    def command(self, *arguments: str) -> Result:
        return run_command(*arguments, cwd=self.folder, environ={"ONNX_OPS_ACTOR": "watcher"})

    def environ(self) -> Mapping[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("ONNX_OPS_", "MLFLOW_"))}
        return {**kept, "ONNX_OPS_ACTOR": "watcher"}

    def traffic(self) -> Mapping[str, int]:
        config = next(
            e.body.config
            for e in self.context.ledger.read(self.endpoint)
            if e.body.kind == "endpoint-bound"
        )
        found = self.context.provider("local").observe(config)
        return {} if found is None else dict(found.split.weights)

    def ever_deployed(self) -> set[str]:
        """Return every version that was deployed in the state of any intent."""
        bodies = [entry.body for entry in self.context.ledger.read(self.endpoint)]
        return {
            d.version
            for body in bodies
            if isinstance(body, Intent)
            for d in body.action.state.deployments
        }

    def done(self) -> list[str]:
        """Return the kinds of successful actions, and refusals, in order."""
        entries = self.context.ledger.read(self.endpoint)
        ended = {
            entry.body.of
            for entry in entries
            if isinstance(entry.body, ActionOutcome) and entry.body.ok
        }
        lines = []
        for entry in entries:
            if entry.sequence in ended and isinstance(entry.body, Intent):
                lines.append(str(entry.body.action.kind.value))
            elif entry.sequence in ended and isinstance(entry.body, VersionRefused):
                lines.append(f"refused {entry.body.alias} {entry.body.version}")
        return lines

    def stop_endpoint(self) -> None:
        stop_endpoints(self.settings.endpoints)


class Watching:
    """The process, and the reports that it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.reports: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.reports.append(json.loads(line))

    def kinds(self) -> list[str]:
        return [report["kind"] for report in self.reports]

    def end(self, signal_number: int) -> int:
        self.process.send_signal(signal_number)
        status = self.process.wait(timeout=60)
        self._reader.join(timeout=60)
        return status


@contextmanager
def watching(site: Site, *arguments: str) -> Iterator[Watching]:
    command: list[str | Path] = [PROGRAM, "reconcile", "--watch", "--json", *arguments]
    with (site.folder / "watch.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=site.folder,
            env=site.environ(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield Watching(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=60)
        if process.stdout is not None:
            process.stdout.close()
