"""The gate stage: the signed record of its decision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnx_ops import codec
from onnx_ops.attestation import read_envelope
from onnx_ops.domain.artifact import Manifest, digest_bytes
from onnx_ops.domain.decision import DecisionRecord
from onnx_ops.domain.evidence import BatchInvariance, SchedulingMeasurement, ScoreComparison
from onnx_ops.domain.execution import Execution, SessionSettings
from onnx_ops.domain.gate import MetricGate, ParityGate
from onnx_ops.domain.plan import Stage, StageKind
from onnx_ops.errors import UserError
from onnx_ops.measure.files import put_document
from onnx_ops.pipeline.stages.gate import execute
from onnx_ops.testing.fakes import FakeWorld
from tests.support.evidence import make_evidence

STAGE = Stage(
    id="gate/fp32@cpu",
    kind=StageKind.GATE,
    variant="fp32",
    target="cpu",
    settings={
        "model": "m",
        "gates": codec.to_json((ParityGate(noise_factor=10.0),)),
        "custom_ops": [digest_bytes(b"library")],
        "execution": codec.to_json(Execution(session=SessionSettings(intra_op_threads=4))),
    },
)


def record_of(
    world: FakeWorld, root: Path, *invariance: BatchInvariance, **measured_too: Any
) -> DecisionRecord:
    context = world.context(root=root)
    evidence = make_evidence("fp32", batch_invariance=invariance, **measured_too)
    measured = Manifest(files={"evidence.json": put_document(context.store, evidence)})
    result = execute(STAGE, digest_bytes(b"key"), {"benchmark/fp32@cpu": measured}, context)
    return read_envelope(context.store.read(result["signed.json"]), DecisionRecord).record


@pytest.mark.parametrize(
    ("ratios", "batchable"),
    [([], False), ([1.0], True), ([1.0, 1e6], False)],
    ids=["not measured", "independent", "dependent"],
)
def test_gate_record_is_batchable_only_with_passed_batch_invariance(
    tmp_path: Path, ratios: list[float], batchable: bool
) -> None:
    invariance = (
        BatchInvariance(output=f"y{place}", rows=32, error=1e-7, ratio=ratio, changed=0.0)
        for place, ratio in enumerate(ratios)
    )
    assert record_of(FakeWorld(), tmp_path, *invariance).batchable is batchable


def test_gate_record_contains_number_of_threads_chosen_by_scheduling_measurements(
    tmp_path: Path,
) -> None:
    independent = BatchInvariance(output="y", rows=32, error=1e-7, ratio=1.0, changed=0.0)
    rates = {(1, 1): 50.0, (1, 16): 100.0, (2, 1): 60.0, (2, 10): 85.0}
    ways = tuple(
        SchedulingMeasurement(threads=t, rows=rows, rows_per_s=rate)
        for (t, rows), rate in rates.items()
    )
    record = record_of(FakeWorld(), tmp_path, independent, scheduling=ways)
    assert (record.batchable, record.threads) == (True, 1)


def test_gate_with_metric_that_failed_in_evidence_raises_user_error(tmp_path: Path) -> None:
    context = FakeWorld().context(root=tmp_path)
    unread = ScoreComparison(metric="accuracy", against="", n=0, failed="accuracy requires classes")
    evidence = put_document(context.store, make_evidence("fp32", scores=(unread,)))
    inputs = {"benchmark/fp32@cpu": Manifest(files={"evidence.json": evidence})}
    judged = codec.to_json((MetricGate(name="accuracy", min=0.8),))
    with pytest.raises(UserError, match="accuracy requires classes"):
        execute(
            replace(STAGE, settings={**STAGE.settings, "gates": judged}),
            digest_bytes(b"key"),
            inputs,
            context,
        )
    execute(STAGE, digest_bytes(b"key"), inputs, context)


def test_gate_record_contains_custom_ops_and_session_of_target(tmp_path: Path) -> None:
    record = record_of(FakeWorld(), tmp_path)
    assert record.custom_ops == (digest_bytes(b"library"),)
    assert record.execution.session.intra_op_threads == 4


def test_gate_record_one_millisecond_later_has_higher_sequence(tmp_path: Path) -> None:
    world = FakeWorld()
    earlier = record_of(world, tmp_path)
    world.clock.advance(0.001)
    assert record_of(world, tmp_path).sequence - earlier.sequence == 1
