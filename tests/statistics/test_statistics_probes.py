"""Probe inputs: their values, and that those inside the domain stay inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from onnx_ops.domain.input_values import InputValues
from onnx_ops.statistics import probes
from onnx_ops.statistics.probes import (
    InputDomain,
    ProbeGroup,
    choose_other_sizes,
    learn_domains,
    make_batch_inputs,
    make_probe_groups,
    make_range_inputs,
    make_sized_inputs,
    take_rows,
)

IMAGES = np.random.default_rng(0).uniform(0, 16, (100, 8, 8)).astype(np.float32)
TOKENS = np.random.default_rng(1).integers(3, 50, (100, 12))
WORDS = np.array([f"word {i}" for i in range(100)])
MASK = np.random.default_rng(2).random((100, 12)) < 0.5
SAMPLES: dict[str, npt.NDArray[Any]] = {
    "image": IMAGES,
    "tokens": TOKENS,
    "words": WORDS,
    "mask": MASK,
}
BEYOND = {f"beyond_range:{name}" for name in ("x10", "x1e3", "x1e5", "x1e-8", "negatives", "texts")}


def groups_of(
    samples: dict[str, npt.NDArray[Any]], **declared: InputValues
) -> dict[str, ProbeGroup]:
    return make_probe_groups(samples, learn_domains(samples, declared), empty=True)


def table(*columns: Any) -> dict[str, npt.NDArray[Any]]:
    return {"x": np.stack(columns, axis=1).astype(np.float32)}


def within(array: npt.NDArray[Any], domain: InputDomain) -> bool:
    values = array.astype(np.float64)
    finite = np.isfinite(values)
    rounding = float(np.finfo(array.dtype.name if array.dtype.kind == "f" else np.float64).eps)
    below, above = (rounding * np.abs(end) + rounding for end in (domain.low, domain.high))
    bounded = (values >= domain.low - below) & (values <= domain.high + above)
    return bool((bounded | ~finite).all())


def test_make_probe_groups_gives_each_group_all_inputs_with_their_types() -> None:
    groups = groups_of(SAMPLES)
    assert set(groups) == {"real", "range", "missing", "infinite", "empty_batch", *BEYOND}
    assert {name for name, group in groups.items() if group.inside} == {"real", "range"}
    for group in groups.values():
        for name, array in SAMPLES.items():
            assert group.inputs[name].dtype == array.dtype
            assert group.inputs[name].shape[1:] == array.shape[1:]


def test_make_range_inputs_reaches_ends_of_range_and_stays_within() -> None:
    made: dict[str, npt.NDArray[Any]] = {**make_range_inputs(SAMPLES, learn_domains(SAMPLES))}
    image = made["image"].astype(np.float64)
    # The range is wider than that of the rows, but does not extend across zero.
    assert image.min() == 0
    assert 16 < image.max() <= 24 + 1e-3
    assert made["tokens"].min() == TOKENS.min()
    assert made["tokens"].max() == TOKENS.max()
    assert set(made["words"]) <= set(WORDS)
    spikes = image[32:64].reshape(32, -1)
    assert np.count_nonzero(spikes, axis=1).max() <= 1
    assert np.count_nonzero(spikes.any(axis=0)) == 16


def test_make_range_inputs_of_index_reaches_each_table_entry() -> None:
    samples = {"tokens": TOKENS}
    made = make_range_inputs(samples, learn_domains(samples, bounds={"tokens": (0, 299)}))["tokens"]
    assert set(made.reshape(-1).tolist()) == set(range(300))


def test_make_range_inputs_of_table_keeps_range_of_each_column() -> None:
    draw = np.random.default_rng(0)
    samples = table(draw.uniform(-1, 1, 200), draw.uniform(1e4, 2e4, 200), draw.integers(0, 3, 200))
    made: npt.NDArray[Any] = make_range_inputs(samples, learn_domains(samples))["x"]
    assert np.abs(made[:, 0].astype(np.float64)).max() <= 2
    assert made[:, 1].min() >= 4_000
    assert set(made[:, 2].tolist()) == {0, 1, 2}


def test_make_range_inputs_keeps_whole_numbers_and_seen_categories() -> None:
    samples = table(np.tile([1, 5, 9], 40), np.arange(120) * 10)
    made = make_range_inputs(samples, learn_domains(samples))["x"]
    assert set(made[:, 0].tolist()) == {1, 5, 9}
    assert np.array_equal(made, np.round(made.astype(np.float64)))
    assert set(made[:, 1].tolist()) - set(samples["x"][:, 1].tolist())


def test_make_range_inputs_with_declared_values_overrides_samples() -> None:
    samples = table(np.linspace(0, 1, 50), np.linspace(0, 1, 50))
    made = make_range_inputs(samples, learn_domains(samples, {"x": InputValues(min=-7, max=3)}))[
        "x"
    ]
    assert (made.min(), made.max()) == (-7, 3)
    chosen = make_range_inputs(
        samples, learn_domains(samples, {"x": InputValues(values=(2.0, 4.0))})
    )["x"]
    assert set(chosen.reshape(-1).tolist()) == {2, 4}


def test_make_range_inputs_of_mask_returns_real_rows() -> None:
    mask = (np.arange(6) < np.random.default_rng(0).integers(2, 7, (60, 1))).astype(np.int64)
    made = make_range_inputs({"mask": mask}, learn_domains({"mask": mask}))["mask"]
    assert {tuple(row) for row in made.tolist()} <= {tuple(row) for row in mask.tolist()}


def test_make_probe_groups_puts_missing_values_inside_domain_as_declared_or_else_as_seen() -> None:
    holed = {"x": IMAGES.reshape(100, -1).copy(), "y": np.ones((100, 2), dtype=np.float32)}
    holed["x"][::7, 3] = np.nan
    group = groups_of(holed)["missing"]
    assert group.inside
    # Only columns that contain NaN in the rows get NaN.
    assert set(np.argwhere(np.isnan(group.inputs["x"]))[:, 1].tolist()) == {3}
    assert not np.isnan(group.inputs["y"]).any()
    plain = {"x": IMAGES}
    assert not groups_of(plain)["missing"].inside
    assert groups_of(plain, x=InputValues(missing=True))["missing"].inside
    assert not groups_of(holed, x=InputValues(missing=False))["missing"].inside


def test_make_probe_groups_puts_one_nonfinite_value_in_each_row_of_missing_and_infinite() -> None:
    groups = groups_of(SAMPLES)
    flat: dict[str, npt.NDArray[Any]] = {
        name: groups[name].inputs["image"].reshape(32, -1) for name in ("missing", "infinite")
    }
    assert (np.isnan(flat["missing"]).sum(axis=1) == 1).all()
    assert (np.isinf(flat["infinite"]).sum(axis=1) == 1).all()
    assert np.isposinf(flat["infinite"]).any()
    assert np.isneginf(flat["infinite"]).any()
    assert len(groups["empty_batch"].inputs["image"]) == 0


def test_make_probe_groups_beyond_range_multiplies_real_rows_within_type() -> None:
    groups = groups_of(SAMPLES)
    real = {row.tobytes() for row in (IMAGES.astype(np.float64) * 10).astype(np.float32)}
    assert {row.tobytes() for row in groups["beyond_range:x10"].inputs["image"]} <= real
    np.testing.assert_allclose(
        groups["beyond_range:x1e3"].inputs["image"].astype(np.float64),
        groups["beyond_range:x10"].inputs["image"].astype(np.float64) * 100,
        rtol=1e-6,
    )
    half = groups_of({"image": IMAGES.astype(np.float16)})
    assert BEYOND - set(half) == {"beyond_range:x1e5", "beyond_range:texts"}


def test_make_probe_groups_of_texts_adds_empty_and_unseen_unless_declared() -> None:
    cities = {"city": np.array([["Oslo"], ["Rome"]] * 40), "age": np.ones((80, 1), np.float32)}
    group = groups_of(cities)["beyond_range:texts"]
    assert not group.inside
    assert (
        {"", "unseen"} < set(group.inputs["city"][:, 0].tolist()) <= {"", "unseen", "Oslo", "Rome"}
    )
    np.testing.assert_array_equal(group.inputs["age"], np.ones((32, 1)))
    declared = groups_of(cities, city=InputValues(values=("Oslo", "Rome")))["beyond_range:texts"]
    assert set(declared.inputs["city"][:, 0].tolist()) <= {"Oslo", "Rome"}


def test_make_probe_groups_of_masks_or_indices_omits_distorted_groups() -> None:
    assert set(make_probe_groups({"m": MASK}, learn_domains({"m": MASK}), empty=False)) == {"real"}
    assert set(groups_of({"tokens": TOKENS})) == {"real", "range", "empty_batch"}


@example(np.full((3, 1), -128, np.int8))
@example(np.full((3, 1), 2**63 - 512, np.int64))
@given(
    arrays.arrays(
        dtype=st.sampled_from(
            [np.float16, np.float32, np.float64, np.int8, np.int32, np.int64, np.uint8]
        ),
        shape=arrays.array_shapes(min_dims=1, max_dims=3, max_side=5),
    )
)
def test_make_range_inputs_of_any_array_stays_within_domain(array: npt.NDArray[Any]) -> None:
    # The width of such a range overflows to infinity, so no value can be drawn from it.
    assume(np.abs(array[np.isfinite(array)].astype(np.float64)).max(initial=0.0) < 1e307)
    domain = learn_domains({"x": array})["x"]
    made = make_range_inputs({"x": array}, {"x": domain})["x"]
    assert made.shape == (96, *array.shape[1:])
    assert made.dtype == array.dtype
    assert within(made, domain)


@pytest.mark.parametrize(
    "array", [np.ones((1,)), np.ones((3, 0)), np.full((2, 4), np.nan), np.zeros((5, 2))]
)
def test_make_probe_groups_of_degenerate_samples_keeps_shapes(array: npt.NDArray[Any]) -> None:
    groups = groups_of({"x": array})
    assert groups["real"].inputs["x"] is array
    assert all(group.inputs["x"].shape[1:] == array.shape[1:] for group in groups.values())


def test_take_rows_beyond_length_repeats_rows() -> None:
    np.testing.assert_array_equal(take_rows({"x": np.arange(3)}, 5)["x"], [0, 1, 2, 0, 1])
    assert len(take_rows({"x": np.arange(3)}, 0)["x"]) == 0


def test_make_batch_inputs_returns_real_rows_in_each_size() -> None:
    groups = make_batch_inputs(SAMPLES)
    assert [len(tensors["image"]) for tensors in groups.values()] == [1, 2, 3, 17, 64, 257]
    real = {row.tobytes(): i for i, row in enumerate(IMAGES)}
    for name, tensors in groups.items():
        assert name == f"batches:{len(tensors['words'])}"
        rows = [real[row.tobytes()] for row in tensors["image"]]
        assert [f"word {i}" for i in rows] == tensors["words"].tolist()


def test_make_probe_groups_of_same_samples_returns_same_probes() -> None:
    first, second = groups_of(SAMPLES), groups_of(SAMPLES)
    for group in first:
        for name in SAMPLES:
            np.testing.assert_array_equal(first[group].inputs[name], second[group].inputs[name])


@pytest.mark.parametrize(
    "make", [learn_domains, make_batch_inputs, lambda empty: make_sized_inputs(empty, {})]
)
def test_probe_functions_without_samples_raise_value_error(
    make: Callable[[dict[str, npt.NDArray[Any]]], object],
) -> None:
    with pytest.raises(ValueError, match="there are no real samples"):
        make({"x": np.empty((0, 3))})


TOKEN_ROWS = np.arange(3 * 6, dtype=np.int64).reshape(3, 6)
IMAGE = np.random.default_rng(0).random((5, 1, 8, 10), dtype=np.float32)


@given(st.integers(1, 500))
def test_choose_other_sizes_returns_smaller_larger_and_odd_sizes(size: int) -> None:
    found = choose_other_sizes(size)
    assert size not in found
    assert {size // 2, 2 * size} - {0} <= set(found)
    assert any(one > size and one % 2 for one in found) or size == 1
    if size > 1:
        assert found[0] == 1


def test_make_sized_inputs_with_shared_symbol_changes_inputs_together() -> None:
    samples = {"tokens": TOKEN_ROWS, "mask": TOKEN_ROWS * 0 + 1}
    groups = make_sized_inputs(samples, {"length": [("tokens", 1), ("mask", 1)]})
    assert set(groups) == {f"lengths:length={size}" for size in (1, 3, 7, 12)}
    for name, made in groups.items():
        size = int(name.rpartition("=")[2])
        assert made["tokens"].shape == made["mask"].shape == (32, size)
        np.testing.assert_array_equal(made["tokens"][0], TOKEN_ROWS[0, np.arange(size) % 6])


def test_make_sized_inputs_with_two_axes_changes_them_alone_and_together() -> None:
    groups = make_sized_inputs(
        {"image": IMAGE}, {"height": [("image", 2)], "width": [("image", 3)]}
    )
    shapes = {made["image"].shape[2:] for made in groups.values()}
    assert {(1, 10), (16, 10), (8, 1), (8, 20), (1, 1), (16, 20)} <= shapes
    assert any(h != 8 and w != 10 and h % 2 and h > 1 for h, w in shapes)
    assert {made["image"].dtype for made in groups.values()} == {np.dtype(np.float32)}


def test_make_sized_inputs_without_free_axis_returns_no_groups() -> None:
    assert make_sized_inputs({"image": IMAGE}, {}) == {}


def test_make_sized_inputs_beyond_memory_limit_reduces_rows_or_omits_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probes, "_GROUP_BYTES", 1 << 20)
    # Two rows of twice the size would be 1.2 MiB.
    wide = np.zeros((1, 80_000), dtype=np.float32)
    groups = make_sized_inputs({"x": wide}, {"length": [("x", 1)]})
    assert {made["x"].shape for made in groups.values()} == {
        (32, 1),
        (6, 40_000),
        (6, 40_001),
        (3, 80_001),
    }
