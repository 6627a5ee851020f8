"""Stored results of a model for each row, beside the model's evidence.

Labels are not stored. Metrics that count rows store whether each row is right. Metrics of errors,
such as `mae` and `rmse`, store the error of each row. Other metrics need labels: two runs are then
compared by two separate intervals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from onnx_ops.domain.artifact import Digest
from onnx_ops.domain.evidence import Evidence, PairedCounts, ScoreComparison
from onnx_ops.domain.gate import MetricDefinition
from onnx_ops.domain.task_metrics import METRICS, CountedRows, MeanLoss
from onnx_ops.errors import CorruptStateError
from onnx_ops.measure.files import load_arrays
from onnx_ops.metric_formulas import Array
from onnx_ops.ports import Dataset, Store
from onnx_ops.statistics.grouping import compute_design_effect
from onnx_ops.statistics.scores import CANDIDATE, score

_RIGHT, _ERROR, _GROUP, _ROWS = "right/", "error/", "rows.group", "rows.digest"


def extract_rows(
    definition: MetricDefinition, label: Array | None, answers: Array
) -> dict[str, Array]:
    """Return the arrays to store for one metric; empty for a metric that needs labels.

    `answers` are the candidate's answers; whether each row is right, if the metric counts rows.
    """
    match definition.method:
        case CountedRows():
            return {f"{_RIGHT}{definition.label}": answers.astype(np.bool_)}
        case MeanLoss(of_errors=True) if label is not None:
            return {f"{_ERROR}{definition.label}": answers - label}
        case _:
            return {}


def digest_rows(dataset: Dataset) -> dict[str, Array]:
    """Return the digest of the scored rows and, with groups, each row's group number."""
    digest = hashlib.sha256()
    for name, array in (*sorted(dataset.inputs.items()), ("", dataset.label)):
        if array is not None:
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(
                repr(array.tolist()).encode() if array.dtype.kind == "O" else array.tobytes()
            )
    groups = (
        {} if dataset.group is None else {_GROUP: np.unique(dataset.group, return_inverse=True)[1]}
    )
    return {_ROWS: np.frombuffer(digest.digest(), dtype=np.uint8), **groups}


def compare_rows(
    store: Store, mine: Evidence, theirs: Evidence
) -> tuple[PairedCounts | ScoreComparison, ...]:
    """Compare two runs by each metric that both stored for each row.

    The result is empty if the runs scored different rows. Errors of a metric that this version does
    not define are left out. The run of `theirs` has the name `base` in the result.
    """
    candidate, base = _load_rows(store, mine.raw), _load_rows(store, theirs.raw)
    if _ROWS not in candidate or not np.array_equal(candidate[_ROWS], base.get(_ROWS, ())):
        return ()
    group = candidate.get(_GROUP)
    comparisons: list[PairedCounts | ScoreComparison] = []
    for name in sorted(candidate.keys() & base.keys()):
        if name.startswith(_RIGHT):
            comparisons.append(
                count_pairs(name.removeprefix(_RIGHT), "base", base[name], candidate[name], group)
            )
        elif name.startswith(_ERROR):
            label = name.removeprefix(_ERROR)
            metric = label.partition(" ")[0]
            if metric not in METRICS:
                # Another version of onnx-ops has measured this metric, and this version does not
                # define it.
                continue
            definition = MetricDefinition(name=metric)
            errors = {CANDIDATE: candidate[name], "base": base[name]}
            compared = score(
                definition, np.zeros(len(candidate[name])), errors, seed=0, group=group
            )
            comparisons += [
                replace(comparison, metric=label) for comparison in compared if comparison.against
            ]
    return tuple(comparisons)


def _load_rows(store: Store, raw: Digest | None) -> Mapping[str, Array]:
    if raw is None:
        return {}
    try:
        return load_arrays(store, raw)
    except CorruptStateError:
        # For example, a run with another store recorded the evidence, so that its arrays are not in
        # this store.
        return {}


def count_pairs(
    metric: str,
    against: str,
    baseline: Array,
    candidate: Array,
    group: Array | None = None,
    *,
    equal: bool = False,
) -> PairedCounts:
    """Count rows that are right in both models, in one of them, or in neither.

    `baseline` and `candidate` are boolean arrays. `equal` has the same meaning as in
    `PairedCounts`.
    """
    effects: dict[str, Any] = {}
    if group is not None:
        effects = {
            "groups": len(np.unique(group)),
            "change_effect": compute_design_effect(candidate.astype(np.float64) - baseline, group),
            "value_effect": compute_design_effect(candidate.astype(np.float64), group),
        }
    return PairedCounts(
        metric=metric,
        against=against,
        n=len(candidate),
        both=int((baseline & candidate).sum()),
        only_baseline=int((baseline & ~candidate).sum()),
        only_candidate=int((~baseline & candidate).sum()),
        equal=equal,
        **effects,
    )
