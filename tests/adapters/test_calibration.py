"""Histograms of calibration: those of parts add up to the histogram of all values."""

from __future__ import annotations

import itertools
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from onnx_ops.adapters.optimizers.calibration import add_histograms, count_values

BINS = 16

values = arrays.arrays(
    np.float32, st.integers(0, 20), elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
)


@given(st.lists(values, min_size=1, max_size=5), st.booleans(), st.randoms(use_true_random=False))
def test_add_histograms_of_parts_in_any_order_equals_histogram_of_whole(
    parts: list[Any], is_absolute: bool, order: Any
) -> None:
    parts = [part for part in parts if part.size] or [np.ones(1, np.float32)]
    whole = count_values(np.concatenate(parts), BINS, is_absolute=is_absolute)
    order.shuffle(parts)
    joined = reduce(
        add_histograms, (count_values(part, BINS, is_absolute=is_absolute) for part in parts)
    )
    assert joined.counts.tolist() == whole.counts.tolist()
    assert (joined.exponent, joined.lowest, joined.highest) == (
        whole.exponent,
        whole.lowest,
        whole.highest,
    )
    assert joined.counts.sum() == sum(part.size for part in parts)


@pytest.mark.parametrize("is_absolute", [False, True])
def test_count_values_into_bins_counts_values_between_their_edges(is_absolute: bool) -> None:
    drawn = np.random.default_rng(0).normal(size=1000).astype(np.float32) * 3
    histogram = count_values(drawn, BINS, is_absolute=is_absolute)
    edges = histogram.edges()
    counted = np.abs(drawn) if is_absolute else drawn
    assert edges[-1] == 16 > np.abs(drawn).max() >= 8
    inside = [
        int(((counted >= low) & (counted < high)).sum()) for low, high in itertools.pairwise(edges)
    ]
    assert histogram.counts.tolist() == inside
