"""The jitter envelope explains what rounding may do to a tree, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.statistics.parity import LARGEST
from onnx_ops.statistics.tree_parity import (
    COPIES,
    JITTER,
    compute_envelope,
    jitter_rows,
    join_envelopes,
    measure_within_envelope,
)

EXACT = np.array([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]])
BOUNDS = np.stack([EXACT, EXACT])
BOUNDS[0, 1], BOUNDS[1, 1] = (0.3, 0.4), (0.6, 0.7)


def floats(onnx: Any, bounds: Any = BOUNDS, exact: Any = EXACT) -> Any:
    answer = np.asarray(onnx, dtype=np.float32)
    return measure_within_envelope(
        group="real", output="p", onnx=answer, single=exact.astype(np.float32), double=exact, bounds=bounds
    )


def labels(onnx: Any, bounds: Any) -> Any:
    exact = np.array([1, 2, 3])
    return measure_within_envelope(
        group="real", output="l", onnx=np.asarray(onnx), single=exact, double=exact, bounds=np.asarray(bounds)
    )


@given(st.integers(0, 2**31), st.integers(1, 5))
def test_copies_differ_by_rounding_only(seed: int, count: int) -> None:
    x = np.random.default_rng(seed).normal(0, 10, (count, 3)).astype(np.float32)
    many = jitter_rows({"x": x, "token": np.arange(count)}, seed=seed)
    assert many["x"].shape == (COPIES * count, 3)
    assert many["x"].dtype == np.float32
    spread = np.abs(many["x"].reshape(COPIES, count, 3).astype(np.float64) / x - 1)
    assert spread.max() <= JITTER + 2.0**-23
    assert spread.max() > 0
    np.testing.assert_array_equal(many["token"].reshape(COPIES, count), np.tile(np.arange(count), (COPIES, 1)))


def test_the_envelope_spans_floats_and_lists_labels() -> None:
    answers = [{"p": np.array([[1.0], [5.0]]), "l": np.array(["a", "b"])}]
    answers += [{"p": np.array([[3.0], [4.0]]), "l": np.array(["c", "b"])}]
    found = compute_envelope([*answers, answers[0]])
    np.testing.assert_array_equal(found["p"], [[[1.0], [4.0]], [[3.0], [5.0]]])
    assert [set(found["l"][:, row]) for row in range(2)] == [{"a", "c"}, {"b"}]


def test_parts_of_the_rows_join_to_the_whole() -> None:
    found = join_envelopes([{"l": np.array([[1, 2], [3, 2]])}, {"l": np.array([[7]])}])
    np.testing.assert_array_equal(found["l"], [[1, 2, 7], [3, 2, 7]])


def test_a_row_within_the_bounds_is_explained_and_no_error() -> None:
    found = floats([[0.2, 0.8], [0.6, 0.4], [0.9, 0.1]])
    assert (found.explained, found.unexplained) == (1, 0)
    assert found.ratio <= 1


def test_a_row_beyond_its_bounds_is_told_with_what_lies_beyond() -> None:
    found = floats([[0.2, 0.8], [0.75, 0.25], [0.9, 0.1]])
    assert (found.explained, found.unexplained) == (0, 1)
    assert found.error == pytest.approx(0.15, abs=1e-6)
    assert found.ratio > 1000


def test_bounds_of_one_row_explain_no_other() -> None:
    found = floats([[0.4, 0.6], [0.5, 0.5], [0.9, 0.1]])
    assert found.unexplained == 1
    assert found.ratio > 1000


def test_a_jump_of_the_source_in_float32_is_no_noise() -> None:
    """Else one row that flips would hide every fault of its group."""
    single = EXACT.copy()
    single[1] = 0.6, 0.4
    found = measure_within_envelope(
        group="real",
        output="p",
        onnx=(EXACT + np.array([[0.1], [0], [0]])).astype(np.float32),
        single=single.astype(np.float32),
        double=EXACT,
        bounds=BOUNDS,
    )
    assert found.noise < 1e-5
    assert found.unexplained == 1


def test_labels_must_be_one_of_the_answers() -> None:
    bounds = [[1, 2, 3], [1, 5, 3]]
    assert labels([1, 5, 3], bounds).ratio == 0
    assert labels([1, 5, 3], bounds).explained == 1
    wrong = labels([2, 5, 3], bounds)
    assert (wrong.error, wrong.ratio, wrong.unexplained) == (pytest.approx(1 / 3), LARGEST, 1)


def test_another_shape_or_a_new_nan_is_never_explained() -> None:
    assert "shape" in floats([[0.2, 0.8]]).mismatch
    assert "non-finite" in floats([[0.2, np.nan], [0.5, 0.5], [0.9, 0.1]]).mismatch
