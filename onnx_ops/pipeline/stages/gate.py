"""Gate stage: judge evidence.

The decision is signed if the pipeline registers models and there is a key.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from onnx_ops import codec
from onnx_ops.attestation import sign_record
from onnx_ops.domain.artifact import Digest, Manifest
from onnx_ops.domain.decision import DecisionRecord, Verdict, combine_verdicts
from onnx_ops.domain.evidence import EXPORT, Evidence
from onnx_ops.domain.execution import Execution
from onnx_ops.domain.gate import Gate, TaskMetricGate
from onnx_ops.domain.plan import Stage
from onnx_ops.errors import UserError
from onnx_ops.measure.files import put_document
from onnx_ops.ports import Context
from onnx_ops.statistics.judge import judge
from onnx_ops.statistics.rules.metric import explain_unscored
from onnx_ops.statistics.rules.parity_rules import BATCH_INVARIANCE
from onnx_ops.statistics.variants.choice import choose_scheduling


def execute(
    stage: Stage, key: Digest, inputs: Mapping[str, Manifest], context: Context
) -> Manifest:
    """Judge the evidence; store the decision, and the gates for a later judgement.

    Raises:
        UserError: a metric that a gate judges could not be computed for the export.
    """
    settings: Mapping[str, Any] = stage.settings
    source = inputs[f"benchmark/{stage.variant}@{stage.target}"]["evidence.json"]
    evidence = codec.loads(context.store.read(source), Evidence, where=stage.id)
    gates = codec.from_json(settings["gates"], tuple[Gate, ...], where=stage.id)
    judged = {gate.definition().label for gate in gates if isinstance(gate, TaskMetricGate)}
    if evidence.variant == EXPORT and (failures := explain_unscored(judged, evidence.scores)):
        raise UserError(next(iter(failures.values())), where="gates")
    decision = judge(gates, evidence)
    files = {
        "decision.json": put_document(context.store, decision),
        "gates.json": put_document(context.store, gates),
    }
    signer = context.signer()
    if settings["model"] and signer is not None:
        invariance = [
            result.verdict
            for result in decision.results
            if result.metric == BATCH_INVARIANCE.metric
        ]
        independent = bool(invariance) and combine_verdicts(invariance) is Verdict.PASS
        threads, batchable = choose_scheduling(evidence.scheduling, independent=independent)
        now = context.clock.now()
        record = DecisionRecord(
            model=settings["model"],
            release=evidence.release,
            variant=evidence.variant,
            target=evidence.target,
            manifest=evidence.manifest,
            target_digest=evidence.target_digest,
            gates_digest=files["gates.json"],
            evidence=source,
            verdict=decision.verdict,
            verdicts=decision.verdicts,
            custom_ops=tuple(settings["custom_ops"]),
            execution=codec.from_json(settings["execution"], Execution, where=evidence.target),
            batchable=batchable,
            threads=threads,
            decided_at=datetime.datetime.fromtimestamp(now, tz=datetime.UTC).isoformat(
                timespec="seconds"
            ),
            sequence=int(now * 1000),
        )
        files["signed.json"] = put_document(context.store, sign_record(record, signer).envelope)
    return Manifest(files=files)
