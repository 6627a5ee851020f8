"""Releases with faults.

Each run ends with the right exit code and a reason, and no faulty variant gets traffic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.e2e_project import MLP, ONLY_FP32, SECOND, Project

pytestmark = pytest.mark.services

FAULTY = {"PYTHONPATH": str(Path(__file__).parent / "plugins")}
SLOW = ("train.with.hidden=[512, 512]", "train.with.max_iter=15", "gates[3].max_regression=5%")


@pytest.fixture(scope="module")
def released(released: Project) -> Project:
    released.environ = dict(FAULTY)
    return released


def state_of(project: Project) -> tuple[Any, Any]:
    status = project.status()
    return (status["roles"], status["traffic"]), project.registry.aliases("digits-mlp")


def failing(document: Any, variant: str) -> list[Any]:
    decision = next(d for d in document["decisions"] if d["variant"] == variant)
    return [r for r in decision["results"] if r["verdict"] == "fail" and not r["advisory"]]


def test_run_with_wrong_export_fails_parity_and_moves_no_traffic(released: Project) -> None:
    before = state_of(released)
    document = released.run(ONLY_FP32, "export.framework=sklearn-swapped", code=1)
    reasons = [r for r in failing(document, "fp32") if r["gate"] == "parity"]
    assert reasons, "the parity gate must have failed"
    assert "noise" in reasons[0]["limit"]
    assert reasons[0]["estimate"] > 10
    assert reasons[0]["reason"]
    assert document["choices"][0]["variant"] is None
    assert state_of(released) == before


@pytest.mark.nightly
def test_run_of_release_slower_than_champion_fails_and_moves_no_traffic(released: Project) -> None:
    before = state_of(released)
    document = released.run(ONLY_FP32, *SLOW, code=1)
    (result,) = [r for r in failing(document, "fp32") if r["gate"] == "latency"]
    assert "champion" in result["metric"]
    assert result["low"] > 1.05
    assert "1.05" in result["limit"]
    assert document["choices"][0]["variant"] is None
    assert state_of(released) == before


def test_run_output_of_failed_release_names_gate_and_target(released: Project) -> None:
    sets = [part for override in (ONLY_FP32, *SLOW) for part in ("--set", override)]
    done = released.command("run", MLP, *sets)
    assert done.code == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FAIL cpu-1t")]
    assert "latency" in done.stdout
    assert "no release" in line


def test_run_with_lossy_variant_registers_but_does_not_choose_it(released: Project) -> None:
    document = released.run("quantize=[{name: lossy, method: lossy}]")
    assert any(
        r["gate"] == "metric" and "accuracy" in r["metric"] for r in failing(document, "lossy")
    )
    assert document["choices"][0]["variant"] == "fp32"
    assert "lossy" in document["registration"]["versions"], (
        "failed variants are registered with their evidence"
    )


def test_run_of_failing_variant_exits_1_and_moves_no_traffic(released: Project) -> None:
    before = state_of(released)
    document = released.run(ONLY_FP32, "gates[2].min=99.9%", code=1)
    assert document["choices"][0]["variant"] is None
    assert "99.9%" in document["choices"][0]["reason"]
    assert state_of(released) == before


def test_run_with_crashing_optimizer_chooses_other_variant(released: Project) -> None:
    document = released.run("quantize=[{name: broken, method: crashing}]")
    decision = next(d for d in document["decisions"] if d["variant"] == "broken")
    assert [r["verdict"] for r in decision["results"]] == ["error"]
    assert "the optimizer crashed" in decision["results"][0]["reason"]
    assert document["choices"][0]["variant"] == "fp32"


def test_promote_of_tampered_registry_artifact_is_refused(released: Project) -> None:
    """The change is found before any deployment.

    No local copy of the model exists yet.
    """
    artifacts = released.root / ".onnx-ops" / "mlartifacts"
    registered = set(artifacts.rglob("model.onnx"))
    document = released.run(ONLY_FP32, SECOND, "register.promote=manual")
    version = document["registration"]["versions"]["fp32"]
    (artifact,) = set(artifacts.rglob("model.onnx")) - registered
    content = bytearray(artifact.read_bytes())
    content[-100] ^= 0xFF
    artifact.write_bytes(bytes(content))
    before = state_of(released)
    done = released.command("promote", f"digits-mlp/{version}", "--target", "cpu-1t")
    output = done.stdout + done.stderr
    assert done.code == 5
    assert "refused" in output
    assert "registered" in output
    after = state_of(released)
    assert after[0] == before[0]
    assert after[1] == before[1], "the alias was put back"
    assert any(
        "refused" in line["what"]
        for line in released.document("history", "digits", "--since", "1d")
    )


def test_run_without_signing_stops_at_gates(released: Project) -> None:
    document = released.document(
        "run", MLP, "--set", ONLY_FP32, "--set", SECOND, environ={"ONNX_OPS_SIGNING": "off"}
    )
    assert document["registration"] is None
    assert {stage.partition("/")[0] for stage in document["executed"]}.isdisjoint(
        {"register", "promote", "deploy"}
    )
