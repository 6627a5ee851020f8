"""The axis of the rows of each input."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from onnx_ops.domain.row_axes import (
    Shape,
    count_common_rows,
    find_fixed_batch,
    find_output_axes,
    find_row_axes,
    find_sized_axes,
    guess_row_axes,
)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"x": ("batch", 3)}, {"x": 0}),
        (
            {"x": ("batch", "seq", 4), "h": (1, "batch", 8), "c": (1, "batch", 8)},
            {"x": 0, "h": 1, "c": 1},
        ),
        ({"x": ("seq", "batch", 4), "h": (1, "batch", 8)}, {"x": 1, "h": 1}),
        ({"x": ("s0", "s1", 4), "h": (1, "s0", 8)}, {"x": 0, "h": 1}),
        ({"input": ("N", 512), "state": (2, "N", 128), "sr": ()}, {"input": 0, "state": 1}),
        ({"x": ("num_atoms", 3), "edge_index": (2, "num_edges")}, {}),
        ({"x": ("nodes", 3), "edges": (2, "edges"), "weight": ("edges", 1)}, {}),
        ({"x": ("batch", 512), "state": (2, 1, 128)}, {"x": 0}),
        ({"ids": ("batch", "seq"), "mask": ("batch", "seq")}, {"ids": 0, "mask": 0}),
        ({"ids": (1, "seq"), "mask": (1, "seq")}, {"ids": 0, "mask": 0}),
        ({"ids": ("batch", "seq"), "position": (1, "seq")}, {"ids": 0}),
        ({"x": ("m", "n")}, {"x": 0}),
        ({"age": ("?", 1), "city": ("?", 1)}, {"age": 0, "city": 0}),
        ({"age": ("unk__6", 1), "city": ("unk__7", 1)}, {"age": 0, "city": 0}),
        ({"x": ("batch", 3), "mask": ("?", 3)}, {"x": 0, "mask": 0}),
        ({"x": (-1, 3), "y": (-1, 2)}, {"x": 0, "y": 0}),
        ({"x": (4, 3), "mask": (4, 9)}, {"x": 0, "mask": 0}),
        ({"input": (1, 512), "state": (2, 1, 128), "sr": ()}, {"input": 0, "state": 1}),
        ({"x": (4, 3), "w": (5, 3)}, {}),
        ({"edge_index": (2, "num_edges"), "x": ("num_atoms", 2)}, {}),
        ({"step": ()}, {}),
    ],
)
def test_find_row_axes_returns_axis_of_rows_of_each_input_that_has_one(
    shapes: Mapping[str, Shape], expected: Mapping[str, int]
) -> None:
    assert find_row_axes(shapes) == expected


def test_find_row_axes_pools_first_axes_of_different_names_only_if_allowed() -> None:
    shapes = {"queries": ("num_queries", 4), "documents": ("num_documents", 4)}
    assert find_row_axes(shapes) == {"queries": 0, "documents": 0}
    assert find_row_axes(shapes, pooled=False) == {}


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"x": (4, 3)}, 4),
        ({"x": ("batch", 3)}, 0),
        ({"input": ("N", 512), "state": (2, "N", 128)}, 0),
        ({"input": (1, 512), "state": (2, 1, 128)}, 1),
        ({"x": ("batch", 4), "table": (7, 4)}, 0),
    ],
)
def test_find_fixed_batch_returns_fixed_size_of_shared_axis_or_0(
    shapes: Mapping[str, Shape], expected: int
) -> None:
    assert find_fixed_batch(shapes) == expected


@pytest.mark.parametrize(
    ("shapes", "sizes", "expected"),
    [
        (
            {"x": ("?", 512), "state": (2, "?", 128)},
            {"x": (60, 512), "state": (2, 60, 128)},
            {"x": 0, "state": 1},
        ),
        ({"x": ("unk__1", 3), "edges": (2, "unk__2")}, {"x": (9, 3), "edges": (2, 20)}, {}),
        ({"x": ("nodes", 3), "edges": (2, "edges")}, {"x": (9, 3), "edges": (2, 9)}, {}),
        ({"x": (4, 3)}, {"x": (4, 3)}, {}),
    ],
)
def test_guess_row_axes_uses_array_sizes_for_unnamed_dimensions_only(
    shapes: Mapping[str, Shape], sizes: Mapping[str, tuple[int, ...]], expected: Mapping[str, int]
) -> None:
    assert guess_row_axes(shapes, sizes) == expected


def test_find_output_axes_returns_axes_named_like_input_rows() -> None:
    inputs: dict[str, Shape] = {"x": ("batch", "seq", 4), "h": (1, "batch", 8)}
    outputs: dict[str, Shape] = {"y": ("batch", 2), "hn": (1, "batch", 8), "pool": ("?", 8)}
    assert find_output_axes(inputs, outputs) == {"y": 0, "hn": 1}


@pytest.mark.parametrize(
    ("shapes", "known", "expected"),
    [
        ({"x": (60, 512), "state": (2, 60, 128)}, 0, 60),
        ({"x": (16, 128), "state": (2, 16, 128)}, 0, 16),
        ({"state": (2, 128, 128), "x": (128, 512)}, 0, 128),
        ({"x": (60, 7)}, 7, 7),
        ({"x": (60, 7)}, 8, 0),
        ({"x": (60, 7), "y": (9,)}, 0, 0),
        ({"x": (60, 7), "sr": ()}, 0, 0),
    ],
)
def test_count_common_rows_returns_rows_shared_by_all_arrays_or_0(
    shapes: Mapping[str, tuple[int, ...]], known: int, expected: int
) -> None:
    assert count_common_rows(shapes, known) == expected


def test_find_sized_axes_returns_free_dimensions_besides_rows() -> None:
    shapes: dict[str, Shape] = {
        "x": ("batch", "seq", 4),
        "h": ("batch", 1, 8),
        "mask": ("batch", "seq"),
        "other": ("batch", "?"),
    }
    assert find_sized_axes(shapes) == {"seq": [("x", 1), ("mask", 1)], "other[1]": [("other", 1)]}
    assert find_sized_axes(shapes, unnamed=False) == {"seq": [("x", 1), ("mask", 1)]}
