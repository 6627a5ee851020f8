"""Probe inputs: what they hold, and that they stay within what a model may be given."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from onnx_ops.analysis.probes import batch_inputs, edge_inputs, in_rows, nonfinite_inputs, probe_groups

IMAGES = np.random.default_rng(0).uniform(0, 16, (100, 8, 8)).astype(np.float32)
TOKENS = np.random.default_rng(1).integers(3, 50, (100, 12))
WORDS = np.array([f"word {i}" for i in range(100)])
MASK = np.random.default_rng(2).random((100, 12)) < 0.5
SAMPLES: dict[str, npt.NDArray[Any]] = {"image": IMAGES, "tokens": TOKENS, "words": WORDS, "mask": MASK}
EDGES = {"constants", "spikes", "x10", "x1e3", "x1e5", "x1e-8", "negatives"}


def test_every_group_has_all_inputs_with_their_types() -> None:
    groups = edge_inputs(SAMPLES)
    assert set(groups) == EDGES
    for tensors in [*groups.values(), *nonfinite_inputs(SAMPLES).values()]:
        for name, array in SAMPLES.items():
            assert tensors[name].dtype == array.dtype
            assert tensors[name].shape == (32, *array.shape[1:])


def test_floats_are_distorted_as_the_groups_say() -> None:
    groups: dict[str, npt.NDArray[Any]] = {name: tensors["image"] for name, tensors in edge_inputs(SAMPLES).items()}
    flat = groups["constants"].reshape(32, -1)
    assert (flat == flat[:, :1]).all()
    assert {0.0, 1.0, -1.0} <= set(flat[:, 0].tolist())
    assert flat.min() == -1
    assert flat.max() == IMAGES.max()
    np.testing.assert_allclose(groups["x1e3"], groups["x10"] * 100, rtol=1e-6)
    np.testing.assert_allclose(groups["negatives"], -groups["x10"] / 10, rtol=1e-6)
    assert (np.count_nonzero(groups["spikes"].reshape(32, -1), axis=1) == 1).all()
    assert np.count_nonzero(groups["spikes"].any(axis=0)) == 32
    assert groups["x1e-8"].max() < 1e-6


def test_integers_stay_within_the_range_observed_at_their_place() -> None:
    for tensors in edge_inputs(SAMPLES).values():
        assert (tensors["tokens"] >= TOKENS.min(axis=0)).all()
        assert (tensors["tokens"] <= TOKENS.max(axis=0)).all()
    constants = edge_inputs(SAMPLES)["constants"]["tokens"]
    assert (constants[0] == TOKENS.min(axis=0)).all()
    assert (constants[1] == TOKENS.max(axis=0)).all()


def test_zero_is_used_where_it_was_in_range() -> None:
    assert edge_inputs({"i": np.array([[-5], [7]])})["constants"]["i"][2] == 0


def test_text_and_booleans_are_real() -> None:
    for tensors in edge_inputs(SAMPLES).values():
        assert set(tensors["words"]) <= set(WORDS)


def test_nothing_to_distort_gives_no_groups() -> None:
    assert edge_inputs({"words": WORDS}) == {}
    assert set(edge_inputs({"tokens": TOKENS})) == {"constants"}
    assert nonfinite_inputs({"tokens": TOKENS}) == {}


def test_multiples_that_overflow_the_type_are_left_out() -> None:
    groups = edge_inputs({"image": IMAGES.astype(np.float16)})
    assert EDGES - set(groups) == {"x1e5"}
    assert all(np.isfinite(tensors["image"]).all() for tensors in groups.values())


@pytest.mark.parametrize("array", [np.ones((1,)), np.ones((3, 0)), np.full((2, 4), np.nan), np.zeros((5, 2))])
def test_odd_samples_are_no_obstacle(array: npt.NDArray[Any]) -> None:
    groups = probe_groups({"x": array})
    assert groups.pop("real")["x"] is array
    assert all(tensors["x"].shape == (32, *array.shape[1:]) for tensors in groups.values())


def test_nonfinite_rows_have_one_strange_element() -> None:
    groups: dict[str, npt.NDArray[Any]] = {
        name: tensors["image"].reshape(32, -1) for name, tensors in nonfinite_inputs(SAMPLES).items()
    }
    assert set(groups) == {"nan", "infinite"}
    assert (np.isnan(groups["nan"]).sum(axis=1) == 1).all()
    assert not np.isinf(groups["nan"]).any()
    assert (np.isinf(groups["infinite"]).sum(axis=1) == 1).all()
    assert np.isposinf(groups["infinite"]).any()
    assert np.isneginf(groups["infinite"]).any()


def test_rows_repeat_up_to_the_number_asked_for() -> None:
    np.testing.assert_array_equal(in_rows({"x": np.arange(3)}, 5)["x"], [0, 1, 2, 0, 1])
    assert len(in_rows({"x": np.arange(3)}, 0)["x"]) == 0


def test_batches_hold_real_rows() -> None:
    groups = batch_inputs(SAMPLES)
    assert [len(tensors["image"]) for tensors in groups.values()] == [0, 1, 2, 3, 17, 64, 257]
    real = {row.tobytes(): i for i, row in enumerate(IMAGES)}
    for name, tensors in groups.items():
        assert name == f"batch-{len(tensors['words'])}"
        rows = [real[row.tobytes()] for row in tensors["image"]]
        assert [f"word {i}" for i in rows] == tensors["words"].tolist()


def test_the_same_samples_give_the_same_probes() -> None:
    for make in (edge_inputs, batch_inputs):
        first, second = make(SAMPLES), make(SAMPLES)
        for group in first:
            for name in SAMPLES:
                np.testing.assert_array_equal(first[group][name], second[group][name])


@pytest.mark.parametrize("make", [edge_inputs, batch_inputs, nonfinite_inputs])
def test_no_samples_no_probes(make: Any) -> None:
    with pytest.raises(ValueError, match="there are none"):
        make({"x": np.empty((0, 3))})
