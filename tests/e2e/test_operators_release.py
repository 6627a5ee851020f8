"""A release whose model needs a library of custom operators.

It is measured, served, restarted and rolled back with the library.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.e2e_project import Project
from tests.support.operators import build_library, write_softsign
from tests.support.processes import ROOT, until

pytestmark = pytest.mark.services

PIPELINE = "configs/pipelines/softsign.yaml"
TEXT = """\
pipeline: softsign
data:
  test: {file: data/rows.npz, inputs: {x: x}}
model: models/softsign.onnx
export: {framework: onnx}
benchmark: {targets: [TARGET]}
register: {model: softsign, promote: auto}
deploy: [{endpoint: softsign, target: TARGET}]
"""


@pytest.fixture
def project(fresh_project: Project) -> Project:
    root = fresh_project.root
    for name in ("data", "models", "lib"):
        (root / name).mkdir(exist_ok=True)
    library = build_library(ROOT / "examples/custom_ops/softsign.c", root / "lib/libsoftsign.so")
    rows = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
    np.savez(root / "data/rows.npz", x=rows)
    write_softsign(root / "models/softsign.onnx")
    (root / PIPELINE).write_text(TEXT.replace("TARGET", "cpu-acme"))
    (root / "configs/targets/cpu-acme.yaml").write_text(
        "name: cpu-acme\nproviders: [CPUExecutionProvider]\n"
        f"custom_ops: {{path: lib/libsoftsign.so, digest: '{library.digest}', "
        "domains: [acme.ops]}\n"
    )
    return fresh_project


def answer(project: Project) -> list[float]:
    found: list[list[float]]
    found = project.ask("softsign", "invocations", {"inputs": {"x": [[-1.0, 0.0, 3.0]]}})[
        "predictions"
    ]["y"]
    return found[0]


def find_libraries(project: Project) -> tuple[list[Path], list[Path]]:
    """Return the paths of the library of the endpoint's stable version.

    The first list is where the project stores it. The second one is the server's private copies.
    """
    status = project.status("softsign")
    stable: Any = status["roles"]["stable"]
    (name,) = stable["custom_ops"]
    digest = str(stable["manifest"]).removeprefix("sha256:")
    found = [path for path in (project.root / ".onnx-ops").rglob(name) if digest in str(path)]
    copies = [path for path in found if "endpoints" in path.parts]
    return [path for path in found if path not in copies], copies


def find_libraries_of_the_registry(project: Project, name: str) -> list[Path]:
    return list((project.root / ".onnx-ops" / "mlartifacts").rglob(name))


def tamper(path: Path) -> None:
    changed = path.with_name("changed")
    changed.write_bytes(path.read_bytes() + b"\0")
    changed.replace(path)


@pytest.mark.nightly
def test_custom_operators_are_released_and_restored_with_model(project: Project) -> None:
    first = project.run(pipeline=PIPELINE)
    assert first["choices"][0]["verdict"] == "pass"
    assert answer(project) == [-1.0, 0.0, 1.5]
    write_softsign(project.root / "models/softsign.onnx", scale=4.0)
    project.run(pipeline=PIPELINE)
    assert answer(project) == [-2.0, 0.0, 3.0]
    # Neither a rollback nor a server needs the project's file.
    (project.root / "lib/libsoftsign.so").unlink()
    project.document("rollback", "softsign", "--reason", "test")
    assert answer(project) == [-1.0, 0.0, 1.5]
    stored, copies = find_libraries(project)
    assert (len(stored), len(copies)) == (1, 1)
    until(
        lambda: not project.status("softsign")["registry_pending"],
        what="the rollback in the registry",
    )
    project.stop_endpoints()
    tamper(stored[0])
    # The private copy is intact.
    project.document("reconcile", "softsign")
    assert answer(project) == [-1.0, 0.0, 1.5]
    project.stop_endpoints()
    tamper(copies[0])
    # The files are fetched from the registry.
    project.document("reconcile", "softsign")
    assert answer(project) == [-1.0, 0.0, 1.5]
    libraries = [
        *itertools.chain(*find_libraries(project)),
        *find_libraries_of_the_registry(project, stored[0].name),
    ]
    project.stop_endpoints()
    for library in libraries:
        tamper(library)
    refused = project.document("reconcile", "softsign", code=5)
    assert refused["error"] == "DigestMismatchError"
    assert "the registry contains" in refused["what"]


def test_run_with_missing_or_tampered_operator_library_exits_2_or_4(project: Project) -> None:
    (project.root / PIPELINE).write_text(TEXT.replace("TARGET", "cpu-1t"))
    failed = project.command("run", PIPELINE)
    assert failed.code == 2, failed.stdout + failed.stderr
    assert "acme.ops::ScaledSoftsign at sign" in failed.stdout + failed.stderr
    (project.root / PIPELINE).write_text(TEXT.replace("TARGET", "cpu-acme"))
    tamper(project.root / "lib/libsoftsign.so")
    refused = project.command("run", PIPELINE)
    assert refused.code == 4, refused.stdout + refused.stderr
    assert "its digest is sha256:" in " ".join(refused.stdout.split())
