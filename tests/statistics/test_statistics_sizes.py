"""Other sizes of the axes that are free, from real rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_ops.statistics.probes import choose_other_sizes, make_sized_inputs

TOKENS = np.arange(3 * 6, dtype=np.int64).reshape(3, 6)
IMAGE = np.random.default_rng(0).random((5, 1, 8, 10), dtype=np.float32)


@given(st.integers(1, 500))
def test_sizes_are_one_smaller_larger_and_odd(size: int) -> None:
    found = choose_other_sizes(size)
    assert size not in found
    assert 2 * size in found
    assert any(one > size and one % 2 for one in found) or size == 1
    if size > 1:
        assert found[0] == 1


def test_inputs_that_share_a_symbol_change_together() -> None:
    samples = {"tokens": TOKENS, "mask": TOKENS * 0 + 1}
    groups = make_sized_inputs(samples, {"length": [("tokens", 1), ("mask", 1)]})
    assert set(groups) == {f"lengths:length={size}" for size in (1, 3, 7, 12)}
    for name, made in groups.items():
        size = int(name.rpartition("=")[2])
        assert made["tokens"].shape == made["mask"].shape == (32, size)
        np.testing.assert_array_equal(made["tokens"][0], TOKENS[0, np.arange(size) % 6])


def test_two_axes_change_alone_and_together() -> None:
    groups = make_sized_inputs({"image": IMAGE}, {"height": [("image", 2)], "width": [("image", 3)]})
    shapes = {made["image"].shape[2:] for made in groups.values()}
    assert {(1, 10), (16, 10), (8, 1), (8, 20), (1, 1), (16, 20)} <= shapes
    assert any(h != 8 and w != 10 and h % 2 and h > 1 for h, w in shapes)
    assert {made["image"].dtype for made in groups.values()} == {np.dtype(np.float32)}


def test_no_free_axis_no_groups() -> None:
    assert make_sized_inputs({"image": IMAGE}, {}) == {}
    with pytest.raises(ValueError, match="samples"):
        make_sized_inputs({"image": IMAGE[:0]}, {"height": [("image", 2)]})


def test_groups_that_would_fill_the_memory_are_left_out() -> None:
    wide = np.zeros((1, 300_000), dtype=np.float32)
    groups = make_sized_inputs({"x": wide}, {"length": [("x", 1)]})
    assert set(groups) == {"lengths:length=1", "lengths:length=150001", "lengths:length=300001"}
