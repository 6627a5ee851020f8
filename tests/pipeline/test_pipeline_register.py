"""The register stage: what it stores with each version."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from onnx_ops import codec
from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.store import ContentStore
from onnx_ops.domain.artifact import Manifest, ModelInfo, TensorSpec, digest_bytes
from onnx_ops.domain.decision import Decision, GateResult, TargetObjective, Verdict
from onnx_ops.domain.evidence import (
    ColdStartMeasurement,
    Evidence,
    Interval,
    LatencySamples,
    PairedCounts,
    ScoreComparison,
    ThroughputMeasurement,
)
from onnx_ops.domain.gate import ParityGate
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.domain.release import Lineage, Registration
from onnx_ops.measure.files import VALUES, pack_arrays, put_document
from onnx_ops.measure.reference_outputs import ReferenceGroup, put_reference
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.pipeline.stages.register import build_request_example, choose_variants, execute
from onnx_ops.ports import Store
from onnx_ops.reporting.metrics import collect_metrics
from onnx_ops.testing.fakes import FakeWorld
from tests.support.evidence import make_evidence
from tests.support.voice import make_voice_rows, write_voice_detector

RELEASE = digest_bytes(b"release")
VARIANTS = ("fp32", "int8-static")


def decision_of(variant: str) -> Decision:
    verdict = Verdict.PASS if variant == "fp32" else Verdict.FAIL
    result = GateResult(
        gate="parity",
        metric="outputs",
        limit="error ≤ 10x noise",
        verdict=verdict,
        reason="as measured",
    )
    return Decision(variant=variant, target="cpu-1t", results=(result,))


def evidence_of(variant: str) -> Evidence:
    manifest = digest_bytes(variant.encode())
    return make_evidence(
        variant,
        target="cpu-1t",
        quantized=False,
        release=RELEASE,
        manifest=manifest,
        size_bytes=1000,
    )


def test_register_publishes_versions_with_metrics_report_and_package(tmp_path: Path) -> None:
    world = FakeWorld()
    context = world.context(root=tmp_path)
    store = context.store
    inputs = {
        "export": Manifest(
            files={
                "onnx/model.onnx": store.put_bytes(b"float"),
                "reference.npz": put_reference(store, []),
                "lineage.json": put_document(store, Lineage(pipeline="p", release=RELEASE)),
            }
        ),
        "quantize/int8-static": Manifest(files={"onnx/model.onnx": store.put_bytes(b"integers")}),
    }
    for variant in VARIANTS:
        inputs[f"benchmark/{variant}@cpu-1t"] = Manifest(
            files={
                "evidence.json": put_document(store, evidence_of(variant)),
                "raw.npz": store.put_bytes(b"raw"),
            }
        )
        inputs[f"gate/{variant}@cpu-1t"] = Manifest(
            files={
                "decision.json": put_document(store, decision_of(variant)),
                "gates.json": put_document(store, (ParityGate(),)),
            }
        )
    phone = {**inputs["benchmark/fp32@cpu-1t"].files, "package/model.ort": store.put_bytes(b"flat")}
    inputs["benchmark/fp32@cpu-1t"] = Manifest(files=phone)
    stage = Stage(
        id="register",
        kind=StageKind.REGISTER,
        settings={
            "model": "m",
            "targets": ["cpu-1t"],
            "policies": {"cpu-1t": {"objective": "latency"}},
            "parameters": {},
            "measured_on": "test",
            "variants": [
                {"name": "fp32", "stage": "export"},
                {"name": "int8-static", "stage": "quantize/int8-static"},
            ],
        },
    )
    with patch.object(world.registry, "publish", wraps=world.registry.publish) as publish:
        result = execute(stage, digest_bytes(b"key"), inputs, context)
    assert "cpu-1t/size_bytes" in publish.call_args.args[0].variants[0].metrics
    registration = codec.loads(store.read(result["registration.json"]), Registration)
    assert [(c.target, c.variant) for c in registration.choices] == [("cpu-1t", "fp32")]
    records = [world.registry.version("m", registration.versions[variant]) for variant in VARIANTS]
    pages = [world.registry.document(record, "report.html").decode() for record in records]
    assert pages[0] == pages[1]
    assert pages[0].startswith("<!doctype html>")
    assert world.registry.document(records[0], "packages/cpu-1t/model.ort") == b"flat"
    for variant in VARIANTS:
        assert f"{variant} on cpu-1t" in pages[0]
        assert inputs[f"benchmark/{variant}@cpu-1t"]["evidence.json"] in pages[0]


def test_choose_variants_for_unmeasured_target_returns_error_verdict() -> None:
    found = choose_variants(
        {"cpu-1t": TargetObjective(), "gpu": TargetObjective()}, (decision_of("fp32"),)
    )
    assert [(c.target, c.variant, c.verdict) for c in found] == [
        ("cpu-1t", "fp32", Verdict.PASS),
        ("gpu", None, Verdict.ERROR),
    ]


def test_collect_metrics_of_evidence_returns_quantiles_and_medians() -> None:
    evidence = replace(
        evidence_of("fp32"),
        throughput=(
            ThroughputMeasurement(
                concurrency=4, batch=1, requests=9, per_second=(210.0, 190.0, 205.0)
            ),
        ),
        starts=ColdStartMeasurement(
            batch=1, requests=2, load_s=(0.5, 0.25, 1.0), first_s=(0.5,) * 3, peak_bytes=()
        ),
        latency=LatencySamples(
            batch=1, runs=200, preempted=0, quantiles_ns={"p50": 2.5e6, "p99": 4e6}
        ),
    )
    assert collect_metrics(evidence) == {
        "size_bytes": 1000.0,
        "p50_ms": 2.5,
        "p99_ms": 4.0,
        "requests_per_second_4": 205.0,
        "load_ms": 500.0,
        "first_ms": 500.0,
    }


def test_collect_metrics_of_scores_returns_values_named_after_metrics() -> None:
    value = Interval(estimate=0.8, low=0.7, high=0.9)
    scores = (
        ScoreComparison(metric="f1 binary positive:a=b", against="", n=9, candidate=value),
        ScoreComparison(metric="f1 binary positive:a=b", against="fp32", n=9, candidate=value),
        ScoreComparison(metric="cosine", against="fp32", n=9, candidate=value),
        ScoreComparison(metric="mae", against="", n=9, failed="NaN"),
    )
    counts = (
        PairedCounts(metric="top_5", against="", n=10, both=7, only_baseline=0, only_candidate=1),
    )
    assert collect_metrics(replace(evidence_of("fp32"), metrics=counts, scores=scores)) == {
        "size_bytes": 1000.0,
        "top_5": 0.8,
        "f1 binary positive:a_b": 0.8,
        "cosine vs fp32": 0.8,
    }


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return ContentStore(LocalObjects(tmp_path / "objects"), tmp_path / "cache")


def exported(
    store: Store, array: np.ndarray, batch: int | str = "batch", group: str = "real"
) -> Manifest:
    info = ModelInfo(
        ir_version=10,
        opsets={"": 18},
        inputs=(TensorSpec(name="x", dtype="float32", shape=(batch, 2)),),
        outputs=(),
        nodes=1,
        size_bytes=1,
    )
    reference = ReferenceGroup(name=group, inputs={"x": array}, single={"y": array}, double=None)
    return Manifest(
        files={
            "info.json": put_document(store, info),
            "reference.npz": put_reference(store, [reference]),
        }
    )


ROWS = np.array([[1.5, 2], [3, 4], [5, 6]], np.float32)


@pytest.mark.parametrize(("batch", "rows"), [("batch", [[1.5, 2]]), (2, [[1.5, 2], [3, 4]])])
def test_build_request_example_has_one_row_or_fixed_batch(
    store: Store, batch: Any, rows: list[list[float]]
) -> None:
    assert json.loads(build_request_example(exported(store, ROWS, batch=batch), store)) == {
        "inputs": {"x": rows}
    }


def test_build_request_example_has_axes_and_values_of_model(store: Store, tmp_path: Path) -> None:
    model = read_model_info(write_voice_detector(tmp_path / "voice.onnx"))
    rows = make_voice_rows(3)
    real = {**rows, "state": np.moveaxis(rows["state"], 1, 0)}
    reference = ReferenceGroup(name="real", inputs=real, single={}, double=None)
    files = {
        "info.json": put_document(store, model),
        "reference.npz": put_reference(store, [reference]),
        VALUES: store.put_bytes(pack_arrays({"sr": np.array(16000)})),
    }
    inputs = json.loads(build_request_example(Manifest(files=files), store))["inputs"]
    assert inputs["sr"] == 16000
    np.testing.assert_array_equal(np.array(inputs["state"], np.float32), rows["state"][:, :1])


@pytest.mark.parametrize(
    ("array", "group"),
    [
        (np.full((1, 2), np.nan, np.float32), "real"),
        (np.zeros((1, 1 << 19), np.float32), "real"),
        (ROWS, "edge"),
    ],
    ids=["no JSON", "too large", "no real rows"],
)
def test_build_request_example_without_usable_real_rows_returns_empty(
    store: Store, array: np.ndarray, group: str
) -> None:
    assert build_request_example(exported(store, array, group=group), store) == b""
