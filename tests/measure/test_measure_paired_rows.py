"""Runs that scored the same rows, and their comparison row by row afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_ops.adapters.files import LocalObjects
from onnx_ops.adapters.store import ContentStore
from onnx_ops.domain.artifact import digest_bytes
from onnx_ops.domain.evidence import Evidence, PairedCounts, ScoreComparison
from onnx_ops.domain.gate import ACCURACY, MetricDefinition
from onnx_ops.measure.files import pack_arrays
from onnx_ops.measure.paired_rows import compare_rows, digest_rows, extract_rows
from onnx_ops.ports import Dataset
from onnx_ops.statistics.scores import CANDIDATE, score
from tests.reporting.test_reporting_html import evidence_of

RMSE = MetricDefinition(name="rmse")
_NORMAL = np.random.default_rng(0).standard_normal((5, 300))
LABEL, ANSWERS, NOISE = _NORMAL[0], _NORMAL[1], _NORMAL[2]
ROWS = Dataset(inputs={"x": _NORMAL[3:].T}, label=LABEL)


@pytest.fixture
def store(tmp_path: Path) -> ContentStore:
    return ContentStore(LocalObjects(tmp_path / "store"), tmp_path / "cache")


def kept(
    store: ContentStore, definition: MetricDefinition, answers: Any, rows: Dataset = ROWS
) -> Evidence:
    arrays = {**extract_rows(definition, rows.label, answers), **digest_rows(rows)}
    return evidence_of(raw=store.put_bytes(pack_arrays(arrays)))


def test_compare_rows_of_accuracy_returns_paired_counts(store: ContentStore) -> None:
    mine, theirs = np.ones(300, dtype=bool), np.arange(300) % 3 > 0
    (found,) = compare_rows(store, kept(store, ACCURACY, mine), kept(store, ACCURACY, theirs))
    assert found == PairedCounts(
        metric="accuracy", against="base", n=300, both=200, only_baseline=0, only_candidate=100
    )


def test_compare_rows_of_rmse_matches_direct_score(store: ContentStore) -> None:
    theirs = LABEL + ANSWERS
    mine = theirs + 0.1 * NOISE
    (found,) = compare_rows(store, kept(store, RMSE, mine), kept(store, RMSE, theirs))
    assert isinstance(found, ScoreComparison)
    _, expected = score(RMSE, LABEL, {CANDIDATE: mine, "base": theirs}, seed=0)
    assert found.metric == "rmse"
    assert found.ratio is not None
    assert expected.ratio is not None
    assert (found.ratio.low, found.ratio.high) == pytest.approx(
        (expected.ratio.low, expected.ratio.high)
    )


def test_compare_rows_of_metrics_of_named_outputs_names_outputs(store: ContentStore) -> None:
    definitions = [MetricDefinition(name="mae", output=output) for output in ("price", "cost")]
    arrays = digest_rows(ROWS)
    for definition in definitions:
        arrays |= extract_rows(definition, LABEL, LABEL + ANSWERS)
    stored = evidence_of(raw=store.put_bytes(pack_arrays(arrays)))
    assert [found.metric for found in compare_rows(store, stored, stored)] == [
        "mae output:cost",
        "mae output:price",
    ]


def test_compare_rows_of_unknown_metric_omits_it(store: ContentStore) -> None:
    arrays = {**digest_rows(ROWS), "error/median_error": LABEL}
    stored = evidence_of(raw=store.put_bytes(pack_arrays(arrays)))
    assert compare_rows(store, stored, stored) == ()


@pytest.mark.parametrize(
    "other",
    [replace(ROWS, label=LABEL + 1), replace(ROWS, inputs={"x": ROWS.inputs["x"][::-1].copy()})],
)
def test_compare_rows_of_different_rows_returns_nothing(
    store: ContentStore, other: Dataset
) -> None:
    mine, theirs = kept(store, RMSE, LABEL), kept(store, RMSE, LABEL, other)
    assert compare_rows(store, mine, theirs) == ()


def test_compare_rows_without_stored_rows_returns_nothing(store: ContentStore) -> None:
    mine = kept(store, RMSE, LABEL)
    assert compare_rows(store, mine, evidence_of()) == ()
    assert compare_rows(store, mine, evidence_of(raw=digest_bytes(b"elsewhere"))) == ()


def test_extract_rows_of_metric_without_values_per_row_returns_nothing() -> None:
    assert extract_rows(MetricDefinition(name="auc"), LABEL, LABEL) == {}
