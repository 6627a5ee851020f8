"""A new variant with outputs far from its source's is reported as such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.measure.variants.answer_distance import describe_far_answers
from tests.support.graphs import parse_graph

_SOFTMAX = "(float[n, 8] x) => (float[n, 4] y) { z = MatMul(x, w) y = Softmax(z) }"
_PLAIN = "(float[n, 8] x) => (float[n, 4] y) { y = MatMul(x, w) }"


@pytest.fixture
def generator() -> np.random.Generator:
    """A generator for one test, so that its draws are the same whichever tests run before it."""
    return np.random.default_rng(5)


def write(path: Path, text: str, weights: Any) -> Path:
    onnx.save(parse_graph(text, w=weights), str(path))
    return path


@pytest.mark.parametrize(
    ("text", "noise", "distance"),
    [
        (_PLAIN, 0.01, ""),
        (_PLAIN, 10.0, "median cosine"),
        (_SOFTMAX, 0.01, ""),
        (_SOFTMAX, 10.0, "of the classes agree"),
    ],
)
def test_describe_far_answers_returns_distance_only_if_answers_are_far(
    tmp_path: Path, generator: np.random.Generator, text: str, noise: float, distance: str
) -> None:
    # With weights this small, the classes have nearly the same probability: cosines are close to 1.
    scale = 0.002 if "Softmax" in text else 1
    weights = scale * generator.normal(size=(8, 4)).astype(np.float32)
    change = noise * weights.std() * generator.normal(size=weights.shape).astype(np.float32)
    other = weights + change
    source, variant = (
        write(tmp_path / "a.onnx", text, weights),
        write(tmp_path / "b.onnx", text, other),
    )
    rows = {"x": generator.normal(size=(40, 8)).astype(np.float32)}
    said = describe_far_answers(OnnxRuntime(), source, variant, rows)
    assert distance in said
    assert bool(said) == bool(distance)


def test_describe_far_answers_of_variant_that_lacks_output_returns_its_name(
    tmp_path: Path, generator: np.random.Generator
) -> None:
    weights = generator.normal(size=(8, 4)).astype(np.float32)
    source = write(tmp_path / "a.onnx", _PLAIN, weights)
    variant = write(tmp_path / "b.onnx", _PLAIN.replace("y", "other"), weights)
    rows = {"x": generator.normal(size=(40, 8)).astype(np.float32)}
    message = describe_far_answers(OnnxRuntime(), source, variant, rows)
    assert message == "the variant lacks output y of its source"


@pytest.mark.parametrize("masks", [([1, 1], [1, 0]), ([0, 0], [0, 0])], ids=["other", "no"])
def test_describe_far_answers_of_outputs_with_other_row_count_or_no_rows_returns_empty_text(
    tmp_path: Path, generator: np.random.Generator, masks: tuple[list[int], list[int]]
) -> None:
    """A detector's number of boxes depends on its inputs."""
    source, variant = (
        write(
            tmp_path / f"{place}.onnx",
            "(float[n, 8] x) => (float[k, 8] y) { y = Compress<axis = 0>(x, w) }",
            np.array(mask, np.bool_),
        )
        for place, mask in enumerate(masks)
    )
    rows = {"x": generator.normal(size=(40, 8)).astype(np.float32)}
    assert describe_far_answers(OnnxRuntime(), source, variant, rows) == ""
