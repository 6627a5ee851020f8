"""A console over fakes, on a real socket, and requests to it."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from onnx_ops import codec
from onnx_ops.app.context import Project
from onnx_ops.attestation import sign_record
from onnx_ops.config.settings import load_settings
from onnx_ops.console.server import ConsoleServer
from onnx_ops.domain.artifact import Manifest, digest_bytes, digest_file
from onnx_ops.domain.decision import Decision
from onnx_ops.domain.pool import PlacedRun, PoolStatus
from onnx_ops.domain.release import Lineage, Publication, VariantRecord
from onnx_ops.ports import Context
from onnx_ops.testing.fakes import FakeWorld
from tests.release.release_parts import decision_record

GOLDEN = Path(__file__).parent.parent / "golden" / "schema-4"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str


@dataclass(frozen=True, slots=True)
class Console:
    """A running console."""

    address: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        parts = urlsplit(self.address)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
        sent = {**self.headers, **{k.replace("_", "-"): v for k, v in headers.items()}}
        connection.request(method, path, headers=sent)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, found, text)

    def show(self, path: str) -> str:
        """Return the text of a page that exists."""
        answer = self.ask(path)
        assert answer.status == 200, answer.text
        return answer.text


def publish_with_evidence(world: FakeWorld, folder: Path, *, report: str) -> str:
    """Register a version of `digits` with evidence and a report; return its number."""
    case = GOLDEN / "patients-mlp-fp32"
    decision = codec.loads((case / "decision.json").read_bytes(), Decision)
    model, page = folder / "model.onnx", folder / "page.html"
    model.write_bytes(b"model")
    page.write_text(report, encoding="utf-8")
    manifest = Manifest(files={"model.onnx": digest_file(model)})
    record = replace(
        decision_record(digest_bytes(b"evidence"), decision.variant, manifest.digest()),
        target=decision.target,
        evidence=digest_file(case / "evidence.json"),
        gates_digest=digest_file(case / "gates.json"),
        verdict=decision.verdict,
        verdicts=decision.verdicts,
    )
    variant = VariantRecord(
        variant=decision.variant,
        files={"model.onnx": model},
        manifest=manifest,
        evidence={
            f"evidence/{decision.target}.json": case / "evidence.json",
            f"evidence/{decision.target}.gates.json": case / "gates.json",
            "report.html": page,
        },
        signed={decision.target: sign_record(record, world.signer)},
    )
    lineage = Lineage(pipeline="p", release=record.release)
    publication = Publication(model="digits", lineage=lineage, variants=(variant,))
    return world.registry.publish(publication)[decision.variant]


class FakePools:
    """Pools of work without Prefect: one pool with a stage that waits."""

    @property
    def pools(self) -> FakePools:
        return self

    def read_status(self) -> tuple[PoolStatus, ...]:
        run = PlacedRun(
            run="1",
            stage="benchmark/fp32",
            kind="benchmark",
            state="waiting",
            since=0.0,
            why="busy",
        )
        return (PoolStatus(pool="gpu", runs=(run,)),)


def project_of(folder: Path, context: Context) -> Project:
    """Return a project in a folder, whose adapters are those of `context`."""
    (folder / "onnx-ops.toml").touch()
    running: Any = FakePools
    settings = load_settings(folder, {})
    return Project(settings=settings, context=replace(context, root=folder), running=running)


@contextmanager
def serving_console(folder: Path, context: Context, **options: Any) -> Iterator[Console]:
    """Serve the console of a context until the block ends."""
    options = {"interval_s": 0.05, **options}
    with ConsoleServer(project_of(folder, context), "127.0.0.1", 0, **options) as server:
        yield Console(server.url)
