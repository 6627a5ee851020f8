"""The main job by its commands: one sequence on one project.

Each step is observed from outside.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.e2e.e2e_project import MLP, SECOND, Project

pytestmark = [pytest.mark.services, pytest.mark.in_order, pytest.mark.usefixtures("first")]

VARIANTS = ("fp32", "int8-dynamic", "int8-static")


@pytest.fixture(scope="module")
def first(project: Project) -> Any:
    return project.run()


def test_first_run_judges_all_variants_and_chooses_passing_variant(first: Any) -> None:
    assert {d["variant"] for d in first["decisions"]} == set(VARIANTS)
    (choice,) = first["choices"]
    assert (choice["target"], choice["verdict"]) == ("cpu-1t", "pass")
    fp32 = next(d for d in first["decisions"] if d["variant"] == "fp32")
    gates = {r["gate"] for r in fp32["results"]}
    assert {"parity", "metric", "size"} <= gates
    assert all(r["verdict"] == "pass" for r in fp32["results"] if not r["advisory"])


def test_endpoint_answers_open_inference_and_invocations(project: Project) -> None:
    from sklearn.datasets import load_digits

    status = project.status()
    assert status["traffic"] == {status["roles"]["stable"]["name"]: 100}
    digits = load_digits()
    rows = digits.data[:20]
    tensor = {"name": "x", "shape": [20, 64], "datatype": "FP32", "data": rows.ravel().tolist()}
    answer = project.ask("digits", "v2/models/digits-mlp/infer", {"inputs": [tensor]})
    labels = next(o["data"] for o in answer["outputs"] if o["name"] == "label")
    assert np.mean(np.array(labels) == digits.target[:20]) >= 0.9
    scored = project.ask("digits", "invocations", {"inputs": {"x": rows.tolist()}})
    assert scored["predictions"]["label"] == labels


def test_registry_after_run_contains_variant_versions_and_champion(
    first: Any, project: Project
) -> None:
    from onnx_ops.attestation import TrustedKeys, verify_envelope
    from onnx_ops.domain.decision import DecisionRecord

    registration = first["registration"]
    assert set(registration["versions"]) == set(VARIANTS)
    registry = project.registry
    chosen = registration["versions"][first["choices"][0]["variant"]]
    assert registry.aliases("digits-mlp") == {"champion-cpu-1t": chosen}
    record = registry.version("digits-mlp", chosen)
    signed = record.decisions["cpu-1t"]
    trusted = TrustedKeys(project.root / ".onnx-ops" / "keys")
    assert verify_envelope(signed.envelope, DecisionRecord, trusted) == signed.record
    assert signed.record.manifest == record.manifest
    assert signed.record.batchable is (record.variant != "int8-dynamic")
    evidence = json.loads(registry.document(record, "evidence/cpu-1t.json"))
    assert evidence["runtime"]["used"] == ["CPUExecutionProvider"]


def test_unchanged_second_run_executes_no_stage_and_avoids_heavy_imports(
    project: Project,
) -> None:
    """The run queries the registry for its versions, which must still exist.

    It loads no other package that is slow to import.
    """
    done = project.process("run", MLP, environ={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.code == 0
    assert "no stage was executed" in done.stdout
    imported = {
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    heavy = {"prefect", "torch", "onnxruntime", "onnx", "sklearn", "skl2onnx"}
    assert not heavy & {name.partition(".")[0] for name in imported}


def test_run_with_changed_gate_judges_again_without_measuring(first: Any, project: Project) -> None:
    """The versions stay unchanged; only their decisions change."""
    changed = project.run("gates[1].max_drop=3%")
    kinds = {stage.partition("/")[0] for stage in changed["executed"]}
    assert kinds == {"gate", "register"}
    assert changed["registration"]["versions"] == first["registration"]["versions"]
    back = project.run()
    assert back["executed"] == ["register"], "the registry records the earlier decisions again"


def test_explain_of_registered_version_reproduces_decision(first: Any, project: Project) -> None:
    version = first["registration"]["versions"]["fp32"]
    (explained,) = project.document("explain", f"digits-mlp/{version}")
    assert explained["reproduced"] is True
    assert explained["signature"] == "valid"
    assert explained["decision"]["results"] == next(
        d["results"] for d in first["decisions"] if d["variant"] == "fp32"
    )


def test_plan_with_changed_setting_shows_stages_to_run(project: Project) -> None:
    planned = project.document("plan", MLP, "--set", SECOND)
    would = {stage["stage"]: stage["would"] for stage in planned["stages"]}
    assert would["data/train"] == "unchanged"
    assert would["train"] == would["register"] == "run"


def test_run_with_tampered_store_file_executes_stage_again(project: Project) -> None:
    blobs = [p for p in (project.root / ".onnx-ops" / "store" / "blobs").rglob("*") if p.is_file()]
    model = max(
        blobs, key=lambda p: p.stat().st_size if p.read_bytes()[:4] == b"\x08\x0a\x12\x08" else 0
    )
    victim = model if model.read_bytes()[:2] == b"\x08\x0a" else blobs[0]
    victim.chmod(0o644)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 0xFF
    victim.write_bytes(bytes(content))
    mended = project.run()
    assert mended["executed"], "the stage that made the file must run again"
    assert project.run()["executed"] == []


def test_doctor_of_healthy_project_reports_all_checks_ok(project: Project) -> None:
    findings = project.document("doctor")
    assert all(finding["ok"] for finding in findings)
    assert any(f["check"] == "endpoint digits" and "answers at" in f["found"] for f in findings)
