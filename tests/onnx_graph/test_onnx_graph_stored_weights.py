"""Rounded constants in layouts of other quantizers, paired with their originals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic

from onnx_ops.onnx_graph.dequantization import write_dequantized, write_with_weights
from onnx_ops.onnx_graph.quantized_weights import PairedWeights, pair_quantized_weights
from onnx_ops.statistics.quantization import compute_weight_error
from tests.support.graphs import write_graph

ROWS, COLUMNS, BLOCK = 32, 8, 16
WEIGHT = np.random.default_rng(5).standard_normal((ROWS, COLUMNS)).astype(np.float32)
OTHER = np.random.default_rng(6).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def write(path: Path, nodes: Sequence[Any], tensors: Sequence[Any], opset: int = 21) -> Path:
    """Write a model from `x` (N, ROWS) to `y` (N, COLUMNS)."""
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", size])
        for name, size in (("x", ROWS), ("y", COLUMNS))
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=imports), path)
    return path


def write_source(folder: Path) -> Path:
    """Write two products of the same shape, and their sum.

    Only values and places distinguish the products.
    """
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="first"),
        helper.make_node("MatMul", ["x", "v"], ["b"], name="second"),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    return write(
        folder / "source.onnx",
        nodes,
        [numpy_helper.from_array(WEIGHT, "w"), numpy_helper.from_array(OTHER, "v")],
    )


def round_blocks(weight: np.ndarray, bits: int, *, signed: bool) -> tuple[Any, Any, Any]:
    """Return levels, scales and zero points of blocks of `BLOCK` along axis 0."""
    parts = weight.reshape(-1, BLOCK, weight.shape[1])
    low, high = np.minimum(parts.min(1), 0), np.maximum(parts.max(1), 0)
    most = (1 << (bits - 1)) - 1 if signed else (1 << bits) - 1
    scale = (np.maximum(high, -low) if signed else high - low) / most
    zero = np.zeros_like(scale) if signed else np.rint(-low / scale)
    levels = np.rint(parts / scale[:, None]) + zero[:, None]
    return (
        np.clip(levels, -most if signed else 0, most).reshape(weight.shape),
        scale.astype(np.float32),
        zero,
    )


def blocked(
    weight: np.ndarray, name: str, *, signed: bool, zeros: int = 0
) -> tuple[list[Any], list[Any]]:
    levels, scale, zero = round_blocks(weight, 4, signed=signed)
    kind = TensorProto.INT4 if signed else TensorProto.UINT4
    tensors = [
        helper.make_tensor(f"{name}0", kind, levels.shape, levels.astype(int).reshape(-1).tolist()),
        numpy_helper.from_array(scale, f"{name}1"),
        helper.make_tensor(
            f"{name}2",
            kind,
            zero.shape,
            (zero.astype(int) + zeros).clip(0, 15).reshape(-1).tolist(),
        ),
    ]
    inputs = [f"{name}0", f"{name}1", f"{name}2"]
    node = helper.make_node("DequantizeLinear", inputs, [f"{name}.f"], axis=0, block_size=BLOCK)
    return [node], tensors


def write_pairs(
    path: Path, parts: Callable[[np.ndarray, str], tuple[list[Any], list[Any]]]
) -> Path:
    """Write the source with both weights behind DequantizeLinear nodes.

    No name matches the source's, and the order is exchanged.
    """
    nodes, tensors = parts(OTHER, "k")
    more, others = parts(WEIGHT, "m")
    products = [
        helper.make_node("MatMul", ["x", "k.f"], ["b2"], name="p"),
        helper.make_node("MatMul", ["x", "m.f"], ["a2"], name="q"),
        helper.make_node("Add", ["a2", "b2"], ["y"]),
    ]
    return write(path, [*nodes, *more, *products], [*tensors, *others])


def steps(paired: PairedWeights) -> dict[str, float]:
    return {
        p.origin: compute_weight_error(p.original, p.dequantized, p.scale) for p in paired.pairs
    }


@pytest.mark.parametrize("signed", [True, False])
def test_pair_quantized_weights_of_unnamed_4_bit_blocks_pairs_by_value(
    tmp_path: Path, signed: bool
) -> None:
    source = write_source(tmp_path)
    derived = write_pairs(tmp_path / "b.onnx", lambda w, n: blocked(w, n, signed=signed))
    paired = pair_quantized_weights(source, derived)
    assert paired.unpaired == ()
    assert {pair.name: pair.origin for pair in paired.pairs} == {"k0": "v", "m0": "w"}
    assert max(steps(paired).values()) <= 0.51


def test_pair_quantized_weights_with_wrong_zero_point_exceeds_one_step(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    derived = write_pairs(tmp_path / "b.onnx", lambda w, n: blocked(w, n, signed=False, zeros=1))
    assert min(steps(pair_quantized_weights(source, derived)).values()) > 1


def test_pair_quantized_weights_of_transposed_weight_records_orientation(tmp_path: Path) -> None:
    source = write_source(tmp_path)

    def parts(weight: np.ndarray, name: str) -> tuple[list[Any], list[Any]]:
        scale = np.float32(np.abs(weight).max() / 127)
        tensors = [
            numpy_helper.from_array(np.rint(weight.T / scale).astype(np.int8), f"{name}0"),
            numpy_helper.from_array(np.asarray(scale), f"{name}1"),
        ]
        read = helper.make_node("DequantizeLinear", [f"{name}0", f"{name}1"], [f"{name}.t"])
        return [
            read,
            helper.make_node("Transpose", [f"{name}.t"], [f"{name}.f"], perm=[1, 0]),
        ], tensors

    paired = pair_quantized_weights(source, write_pairs(tmp_path / "b.onnx", parts))
    assert {(pair.origin, pair.transposed) for pair in paired.pairs} == {("w", True), ("v", True)}
    assert max(steps(paired).values()) <= 0.51


def test_pair_quantized_weights_of_constant_quantized_at_run_time_reads_it_with_clipping(
    tmp_path: Path,
) -> None:
    source = write_source(tmp_path)

    def parts(weight: np.ndarray, name: str, most: float = 127) -> tuple[list[Any], list[Any]]:
        scale = np.float32(np.abs(weight).max() / most)
        tensors = [
            numpy_helper.from_array(weight, f"{name}0"),
            numpy_helper.from_array(np.asarray(scale), f"{name}1"),
            numpy_helper.from_array(np.asarray(0, np.int8), f"{name}2"),
        ]
        inputs = [f"{name}1", f"{name}2"]
        write = helper.make_node("QuantizeLinear", [f"{name}0", *inputs], [f"{name}.q"])
        return [
            write,
            helper.make_node("DequantizeLinear", [f"{name}.q", *inputs], [f"{name}.f"]),
        ], tensors

    assert (
        max(steps(pair_quantized_weights(source, write_pairs(tmp_path / "b.onnx", parts))).values())
        <= 0.51
    )
    cut = write_pairs(tmp_path / "cut.onnx", lambda w, n: parts(w, n, 254))
    assert min(steps(pair_quantized_weights(source, cut)).values()) > 10


def write_fused(path: Path, operator: str) -> Path:
    """Write the source with integer products as ONNX Runtime fuses them.

    Their biases are 0.
    """
    nodes, tensors = [], []
    if operator == "MatMulIntegerToFloat":
        nodes.append(helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]))
    for name, weight, result in (("k", WEIGHT, "a2"), ("m", OTHER, "b2")):
        scale = np.abs(weight).max(0) / np.float32(127)
        tensors += [
            numpy_helper.from_array(np.rint(weight / scale).astype(np.int8), f"{name}0"),
            numpy_helper.from_array(scale, f"{name}1"),
            numpy_helper.from_array(np.zeros(COLUMNS, np.int8), f"{name}2"),
            numpy_helper.from_array(np.zeros(COLUMNS, np.float32), f"{name}3"),
        ]
        own = [f"{name}{number}" for number in range(4)]
        inputs = (
            ["x", *own]
            if operator != "MatMulIntegerToFloat"
            else ["q", own[0], "s", own[1], "z", *own[2:]]
        )
        nodes.append(helper.make_node(operator, inputs, [result], domain="com.microsoft"))
    return write(path, [*nodes, helper.make_node("Add", ["a2", "b2"], ["y"])], tensors)


@pytest.mark.parametrize(
    "operator", ["MatMulIntegerToFloat", "DynamicQuantizeMatMul", "blocks", "int4 blocks"]
)
def test_write_dequantized_of_fused_or_blocked_products_matches_source_with_their_weights(
    tmp_path: Path, operator: str
) -> None:
    ort = pytest.importorskip("onnxruntime")
    source, plain, exact = write_source(tmp_path), tmp_path / "plain.onnx", tmp_path / "exact.onnx"
    if "blocks" in operator:
        derived = write_pairs(
            tmp_path / "b.onnx", lambda w, n: blocked(w, n, signed="int4" in operator)
        )
    else:
        derived = write_fused(tmp_path / "b.onnx", operator)
    paired = pair_quantized_weights(source, derived)
    assert (len(paired.pairs), paired.unpaired, max(steps(paired).values()) <= 0.51) == (
        2,
        (),
        True,
    )
    write_with_weights(source, paired.pairs, plain)
    write_dequantized(source, derived, exact)
    rows = {"x": np.random.default_rng(1).standard_normal((5, ROWS)).astype(np.float32)}
    one, other = (
        ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, rows)[0]
        for path in (plain, exact)
    )
    assert np.abs(one - other).max() < 1e-4


def test_pair_quantized_weights_with_wrong_scale_shape_lists_them_as_unpaired(
    tmp_path: Path,
) -> None:
    source = write_source(tmp_path)

    def parts(weight: np.ndarray, name: str) -> tuple[list[Any], list[Any]]:
        nodes, tensors = blocked(weight, name, signed=True)
        tensors[1] = numpy_helper.from_array(np.ones((3, 5), np.float32), f"{name}1")
        return nodes, tensors

    paired = pair_quantized_weights(source, write_pairs(tmp_path / "b.onnx", parts))
    assert (paired.pairs, paired.unpaired) == ((), ("k0", "m0"))


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("per_channel", [False, True])
def test_pair_quantized_weights_of_dynamic_lstm_finds_originals_even_of_renamed_wrong_weights(
    directions: int, per_channel: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    stored = {
        "w": rng.standard_normal((directions, 12, 3)).astype(np.float32),
        "r": rng.standard_normal((directions, 12, 3)).astype(np.float32),
    }
    direction = "bidirectional" if directions > 1 else "forward"
    nodes = f'y = LSTM<hidden_size = 3, direction = "{direction}">(x, w, r)'
    shape = f"(float[T,N,3] x) => (float[T,{directions},N,3] y)"
    path = write_graph(tmp_path / "m.onnx", f"{shape} {{ {nodes} }}", **stored)
    quantize_dynamic(path, tmp_path / "q.onnx", per_channel=per_channel)
    paired = pair_quantized_weights(path, tmp_path / "q.onnx")
    assert paired.unpaired == ()
    assert {pair.origin for pair in paired.pairs} == {"w", "r"}
    steps = {
        p.origin: compute_weight_error(p.original, p.dequantized, p.scale) for p in paired.pairs
    }
    assert max(steps.values()) <= 0.51

    # The weights are paired by their places, since a fault moved all values and another tool
    # renamed them.
    model = onnx.load(tmp_path / "q.onnx")
    (layer,) = [node for node in model.graph.node if node.op_type == "DynamicQuantizeLSTM"]
    layer.name, layer.output[0], model.graph.output[0].name = "", "renamed", "renamed"
    layer.input[1], layer.input[2] = "v1", "v2"
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    tensors["w_quantized"].name, tensors["r_quantized"].name = "v1", "v2"
    for name in ("w_scale", "r_scale"):
        tensors[name].CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(tensors[name]) * 3, name)
        )
    onnx.save(model, tmp_path / "wide.onnx")
    after = pair_quantized_weights(path, tmp_path / "wide.onnx").pairs
    steps = {p.origin: compute_weight_error(p.original, p.dequantized, p.scale) for p in after}
    assert set(steps) == {"w", "r"}
    assert min(steps.values()) > 10


@pytest.mark.parametrize("damage", ["few inputs", "flat weights", "odd scales"])
def test_pair_quantized_weights_of_malformed_lstm_lists_weight_as_unpaired(
    damage: str, tmp_path: Path
) -> None:
    stored = {"w": np.ones((1, 12, 3), np.float32), "r": np.ones((1, 12, 3), np.float32)}
    text = "(float[T,N,3] x) => (float[T,1,N,3] y) { y = LSTM<hidden_size = 3>(x, w, r) }"
    path = write_graph(tmp_path / "m.onnx", text, **stored)
    quantize_dynamic(path, tmp_path / "q.onnx")
    model = onnx.load(tmp_path / "q.onnx")
    (layer,) = [node for node in model.graph.node if node.op_type == "DynamicQuantizeLSTM"]
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    if damage == "few inputs":
        del layer.input[9:]
    elif damage == "flat weights":
        flat = numpy_helper.to_array(tensors["w_quantized"]).reshape(-1)
        tensors["w_quantized"].CopyFrom(numpy_helper.from_array(flat, "w_quantized"))
    else:
        tensors["w_scale"].CopyFrom(numpy_helper.from_array(np.ones(5, np.float32), "w_scale"))
    onnx.save(model, tmp_path / "odd.onnx")
    assert "w_quantized" in pair_quantized_weights(path, tmp_path / "odd.onnx").unpaired
