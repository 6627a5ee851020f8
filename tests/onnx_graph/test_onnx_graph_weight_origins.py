"""Originals of rounded weights in another file.

They are found by name, place and values; the tests check which of these decides.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from onnx_ops.measure.quantization import measure_weights
from tests.support.graphs import write_graph

GRAPH = (
    "(float[n,8] x) => (float[n,8] y) { h1 = MatMul(x, v1) r = Relu(h1) h2 = MatMul(r, v2) "
    "y = Tanh(h2) }"
)
SCALE = np.float32(0.05)


def write_source(path: Path) -> Path:
    draw = np.random.default_rng(3)
    weights = {name: draw.normal(size=(8, 8)).astype(np.float32) for name in ("v1", "v2")}
    return write_graph(path, GRAPH, **weights)


def write_rounded(source: Path, path: Path, names: dict[str, str]) -> Path:
    """Write a copy with levels of 8 bits, in which tensors and nodes have these names."""
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(source).graph.initializer}
    levels = {
        f"{names[name]}_quantized": np.clip(np.rint(values / SCALE), -127, 127).astype(np.int8)
        for name, values in stored.items()
    }
    v1, v2, h1, h2 = (names[name] for name in ("v1", "v2", "h1", "h2"))
    nodes = (
        f"{v1} = DequantizeLinear({v1}_quantized, scale, zero) {h1} = MatMul(x, {v1}) "
        f"r = Relu({h1}) {v2} = DequantizeLinear({v2}_quantized, scale, zero) "
        f"{h2} = MatMul(r, {v2}) y = Tanh({h2})"
    )
    text = f"(float[n,8] x) => (float[n,8] y) {{ {nodes} }}"
    return write_graph(path, text, **levels, scale=SCALE, zero=np.int8(0))


def test_measure_weights_with_swapped_names_pairs_by_values(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source.onnx")
    names = {"v1": "v2", "v2": "v1", "h1": "h2", "h2": "h1"}
    derived = write_rounded(source, tmp_path / "derived.onnx", names)
    assert max(one.steps for one in measure_weights(source, derived)) <= 0.51


def test_measure_weights_with_wrong_values_of_same_name_returns_more_than_ten_steps(
    tmp_path: Path,
) -> None:
    source = write_source(tmp_path / "source.onnx")
    derived = write_rounded(
        source, tmp_path / "derived.onnx", {name: name for name in ("v1", "v2", "h1", "h2")}
    )
    model = onnx.load(derived)
    (second,) = [t for t in model.graph.initializer if t.name == "v2_quantized"]
    second.CopyFrom(
        numpy_helper.from_array(np.roll(numpy_helper.to_array(second), 3, axis=0), "v2_quantized")
    )
    onnx.save(model, derived)
    found = {one.tensor: one.steps for one in measure_weights(source, derived)}
    assert max(found.values()) > 10


def test_measure_weights_of_other_single_number_pairs_nothing(tmp_path: Path) -> None:
    """A rounded factor of .5 is no counterpart of the source's factor of 3.

    Single numbers are paired by their values.
    """
    source = write_graph(
        tmp_path / "source.onnx",
        "(float[n,8] x) => (float[n,8] y) { y = Mul(x, factor) }",
        factor=np.float32(3),
    )
    derived = write_graph(
        tmp_path / "derived.onnx",
        "(float[n,8] x) => (float[n,8] y) { half = DequantizeLinear(level, scale, zero) "
        "y = Mul(x, half) }",
        level=np.int8(127),
        scale=np.float32(0.5 / 127),
        zero=np.int8(0),
    )
    assert measure_weights(source, derived) == ()
