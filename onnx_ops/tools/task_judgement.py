"""Judge how replacing one ONNX file by another changes the task metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.gate import ACCURACY, MetricGate, SlicesGate
from onnx_ops.domain.target import Target
from onnx_ops.errors import UserError
from onnx_ops.measure.answers import read_answers
from onnx_ops.measure.predictions import join_predictions, read_prediction
from onnx_ops.measure.scoring import ScoringRequest, measure_metrics
from onnx_ops.measure.slices import SlicePlan
from onnx_ops.ports import Dataset, Runtime, Tensors
from onnx_ops.statistics.judge import judge
from onnx_ops.statistics.scores import CANDIDATE
from onnx_ops.statistics.slices import Slicing
from onnx_ops.tools.bench import (
    A,
    make_evidence,
)
from onnx_ops.tools.judgement import JudgeRequest


def judge_task(request: JudgeRequest, runtime: Runtime, target: Target) -> list[GateResult]:
    """Judge the task metric; without labels, judge how many answers change.

    Some metrics need no labels, and are judged on every data set. For other metrics without labels,
    the result is PASS if the answers to rows of a data set change little enough. Otherwise, it is
    INCONCLUSIVE.
    """
    dataset, gate, runtime = request.dataset, request.metric, request.arrange(runtime)
    if dataset is not None and request.has_metric:
        return _judge_metric(request, runtime, target, dataset, gate, request.slices)
    rows = dataset.inputs if dataset is not None else request.settings[0].samples.rows
    agreement = _judge_agreement(request, runtime, target, rows) if rows else None
    if agreement is not None and dataset is not None and agreement.verdict is Verdict.PASS:
        return [
            replace(agreement, reason=f"{agreement.reason}; accuracy drops by at most this share")
        ]
    blank = agreement or GateResult(
        gate="task", metric="agreement", limit="", verdict=Verdict.INCONCLUSIVE, reason=""
    )
    return [
        replace(
            blank, verdict=Verdict.INCONCLUSIVE, reason=_explain_unknown_cost(agreement, dataset)
        )
    ]


def _explain_unknown_cost(agreement: GateResult | None, dataset: Dataset | None) -> str:
    """Return why the share of changed answers does not show the cost of the change.

    The text includes the remedy.
    """
    if agreement is None:
        remedy = (
            "with --data FILE, set --labels NAME and --metric METRIC, or --metric cosine for "
            "embeddings"
        )
        return (
            "the cost of rounding for the task is unknown: the answers could not be compared as "
            f"classes; {remedy}"
        )
    if dataset is None:
        return (
            f"the cost of rounding for the task is unknown: {agreement.reason}, but generated rows "
            "are not representative of yours: set --data FILE and --labels NAME"
        )
    return (
        f"{agreement.reason}: only labels can show whether the task gets worse; set --labels NAME"
    )


def _judge_metric(
    request: JudgeRequest,
    runtime: Runtime,
    target: Target,
    dataset: Dataset,
    gate: MetricGate,
    slices: Sequence[Slicing] = (),
) -> list[GateResult]:
    definition = gate.definition()
    request.report(f"scoring {definition.label} on {len(dataset)} rows")
    scoring = ScoringRequest(
        runtime=runtime,
        target=target,
        models={CANDIDATE: request.candidate, A: request.baseline},
        dataset=dataset,
        seed=request.seed,
        functions=request.functions,
        slices=SlicePlan(slicings=slices, metrics=[definition.label] if slices else ()),
    )
    metrics = measure_metrics(scoring, (definition,))
    evidence = replace(
        make_evidence(runtime, target, request.candidate),
        quantized=request.kind.is_rounded,
        metrics=metrics.counts,
        scores=metrics.scores,
        grouped=metrics.grouped,
        slices=metrics.slices,
    )
    gates = (gate, _make_slices_gate(gate)) if slices else (gate,)
    names = {"metric": "task", "slices": "slices"}
    return [
        replace(r, gate=names[r.gate], metric=r.metric.removesuffix(f" vs {A}"))
        for r in judge(gates, evidence).results
        if r.gate in names
    ]


def _make_slices_gate(gate: MetricGate) -> SlicesGate:
    """Return the gate that sets the same limit in each slice."""
    keys = {f.name: getattr(gate, f.name) for f in fields(gate) if f.name != "kind"}
    return SlicesGate(**keys)


def _judge_agreement(
    request: JudgeRequest, runtime: Runtime, target: Target, rows: Tensors
) -> GateResult | None:
    """Judge the share of rows whose class changes, with A's classes as labels.

    Return None for answers other than classes, and for those that cannot be judged.
    """
    try:
        parts = read_answers(
            runtime,
            request.baseline,
            target,
            rows,
            lambda outputs: read_prediction(ACCURACY, outputs),
        )
        reading = join_predictions(parts)
        label = (
            (reading.values > 1 / 2).astype(np.int64) if reading.columns == 1 else reading.values
        )
        gate = MetricGate(
            name=ACCURACY.name, max_drop=request.metric.max_drop or request.metric.max_increase
        )
        dataset = Dataset(inputs=rows, label=label)
        (accuracy,) = [
            r
            for r in _judge_metric(request, runtime, target, dataset, gate)
            if r.metric == ACCURACY.label and not r.advisory
        ]
    except (UserError, ValueError):
        return None
    if accuracy.estimate is None or accuracy.verdict is Verdict.ERROR:
        return None
    changed = round(-accuracy.estimate * accuracy.n)
    text = (
        f"the class changes in {changed} of {accuracy.n} rows, and in at most "
        f"{-100 * (accuracy.low or 0.0):.3g}% of similar rows"
    )
    return replace(accuracy, metric="agreement", reason=text)
