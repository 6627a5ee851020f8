"""Float graphs, half precision, and weights in blocks.

The tests are the suite, the known pitfalls of each, and recipes that are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnx_ops.adapters.optimizers import low_precision
from onnx_ops.adapters.optimizers.graph_passes import GraphOptimizer, ShapeOptimizer
from onnx_ops.adapters.optimizers.low_precision import Fp16Optimizer, WeightOnlyQuantizer
from onnx_ops.adapters.optimizers.onnxruntime import DynamicQuantizer, StaticQuantizer
from onnx_ops.domain.arithmetic import Arithmetic
from onnx_ops.domain.pipeline import Calibrate, Quantize
from onnx_ops.errors import StageError, TooLargeError, UserError
from onnx_ops.onnx_graph.files import read_model, read_structure, write_model
from onnx_ops.onnx_graph.model_info import read_model_info
from onnx_ops.onnx_graph.quantized_weights import read_quantized_weights
from onnx_ops.ports import Optimizer, OptimizeRequest
from onnx_ops.testing.models import (
    images,
    rows,
    write_convolution,
    write_perceptron,
)
from onnx_ops.testing.optimizers import OptimizerSuite
from tests.adapters.model_runs import run
from tests.support.fixtures import fixed
from tests.support.graphs import write_graph

X86 = Arithmetic(family="x86", wide=True)
NARROW_X86 = Arithmetic(family="x86", saturates=True)
GPU = Arithmetic(family="accelerator", fp16=True)


class TestGraph(OptimizerSuite):
    @pytest.fixture(params=["basic", "extended", "all"])
    def section(self, request: pytest.FixtureRequest) -> Quantize:
        return Quantize(name="graph", method="graph", options={"level": request.param})

    optimizer = fixed(GraphOptimizer())


class TestHalf(OptimizerSuite):
    section = fixed(Quantize(name="fp16", method="fp16"))
    optimizer = fixed(Fp16Optimizer())


class TestWeightOnly(OptimizerSuite):
    @pytest.fixture(params=[{}, {"symmetric": False, "block": 16}], ids=["symmetric", "asymmetric"])
    def section(self, request: pytest.FixtureRequest) -> Quantize:
        return Quantize(name="w8", method="weight-only", options=request.param)

    optimizer = fixed(WeightOnlyQuantizer())


@pytest.fixture
def perceptron(file: Path) -> OptimizeRequest:
    section = Quantize(name="variant", method="plugin")
    return OptimizeRequest(
        section=section, source=file, path=file.with_name("derived.onnx"), calibration=None
    )


def with_options(request: OptimizeRequest, **options: object) -> OptimizeRequest:
    return replace(request, section=replace(request.section, options=options))  # type: ignore[arg-type]


def answers(request: OptimizeRequest) -> list[Any]:
    """Return the outputs of the source and of the result."""
    return [run(path, rows(64, seed=3))["scores"] for path in (request.source, request.path)]


def operators(path: Path) -> list[str]:
    return [node.op_type for node in read_structure(path).graph.node]


def test_graph_optimizer_writes_fused_graph_and_counts_nodes(perceptron: OptimizeRequest) -> None:
    (note,) = GraphOptimizer().optimize(with_options(perceptron, level="extended"))
    assert "FusedGemm" in operators(perceptron.path)
    assert "extended: 6 nodes" in note
    assert "FusedGemm" in note


def test_graph_optimizer_with_level_all_for_mixed_machines_raises_user_error(
    perceptron: OptimizeRequest,
) -> None:
    mixed = replace(with_options(perceptron, level="all"), machines=(X86, NARROW_X86))
    with pytest.raises(UserError, match="level: extended"):
        GraphOptimizer().optimize(mixed)
    GraphOptimizer().optimize(replace(mixed, machines=(X86,)))
    GraphOptimizer().optimize(with_options(mixed, level="extended"))


def test_quantizer_of_fused_graph_succeeds_if_dynamic_and_raises_stage_error_if_static(
    perceptron: OptimizeRequest, tmp_path: Path
) -> None:
    """Calibration fails for a graph with contrib operators.

    The types of their outputs cannot be inferred, so calibration finds no range for them.
    """
    write_fused_gelu(perceptron.source)
    request = replace(perceptron, path=tmp_path / "int8.onnx", calibration=rows(64))
    request = replace(request, machines=(NARROW_X86,))
    DynamicQuantizer().optimize(
        replace(request, section=Quantize(name="dynamic", method="dynamic"))
    )
    assert len(read_quantized_weights(request.source, request.path)) == 3
    static = Quantize(name="static", method="static", calibrate=Calibrate())
    with pytest.raises(StageError, match="before the fusion of operators"):
        StaticQuantizer().optimize(replace(request, section=static))
    # The dynamic quantizer accepts the fused graph, and its result uses contrib operators.
    assert read_model_info(request.path).opsets["com.microsoft"] == 1


def test_shape_optimizer_fixes_only_known_dimensions_other_than_batch(
    perceptron: OptimizeRequest,
) -> None:
    model = read_model(perceptron.source)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "features"
    write_model(model, perceptron.source)
    assert ShapeOptimizer().optimize(with_options(perceptron, dims={"features": 8})) == (
        "fixed: features = 8",
    )
    assert read_model_info(perceptron.path).inputs[0].shape == ("batch", 8)
    np.testing.assert_array_equal(*answers(perceptron))
    for dims, word in (({"batch": 4}, "'batch'"), ({"feature": 8}, "'feature'"), ({}, "one entry")):
        with pytest.raises(UserError, match=word):
            ShapeOptimizer().optimize(with_options(perceptron, dims=dims))


def test_fp16_optimizer_keeps_interface_and_notes_no_speedup_on_cpu(
    perceptron: OptimizeRequest,
) -> None:
    notes = Fp16Optimizer().optimize(replace(perceptron, machines=(X86,)))
    assert any("not faster" in note for note in notes)
    assert not any(
        "not faster" in note
        for note in Fp16Optimizer().optimize(replace(perceptron, machines=(GPU,)))
    )
    before, after = answers(perceptron)
    assert after.dtype == np.float32
    assert 0 < np.abs(after - before).max() < 0.05


@pytest.mark.parametrize("tiny", [1e-9, 3e-8, 6e-8])
def test_fp16_optimizer_rounds_tiny_weights_to_nearest_half(
    perceptron: OptimizeRequest, tiny: float
) -> None:
    """The converter raises each of them to the smallest half instead."""
    change(perceptron, "second.weight", tiny)
    Fp16Optimizer().optimize(perceptron)
    stored = {
        t.name: numpy_helper.to_array(t) for t in read_model(perceptron.path).graph.initializer
    }
    assert stored["second.weight"][0, 0] == np.float16(tiny)


def test_fp16_optimizer_with_too_large_weights_raises_user_error_unless_excluded(
    perceptron: OptimizeRequest,
) -> None:
    """The converter would clip them without a warning."""
    change(perceptron, "second.weight", 1e5)
    with pytest.raises(UserError, match=r"second\.weight has values beyond 65504.*Add second to"):
        Fp16Optimizer().optimize(perceptron)
    Fp16Optimizer().optimize(
        replace(perceptron, section=replace(perceptron.section, exclude=("second",)))
    )
    assert "second.weight" not in {
        weight.name for weight in read_quantized_weights(perceptron.source, perceptron.path)
    }


@pytest.mark.parametrize(
    ("names", "remedy"),
    [(("held", "product"), "Add held, product to"), (("", "product"), "Give each node")],
)
def test_fp16_optimizer_with_too_large_constant_node_suggests_exclusion_or_node_names(
    perceptron: OptimizeRequest, names: tuple[str, str], remedy: str
) -> None:
    """An exclusion of the node that uses the weight has no effect on a Constant node."""
    text = "(float[batch, 8] x) => (float[batch, 8] y) { y = MatMul(x, weight) }"
    model = read_model(
        write_graph(perceptron.source, text, weight=np.full((8, 8), 1e5, np.float32))
    )
    (weight,) = model.graph.initializer
    (product,) = model.graph.node
    product.name = names[1]
    constant = helper.make_node("Constant", [], ["weight"], name=names[0], value=weight)
    model.graph.node.insert(0, constant)
    del model.graph.initializer[:]
    write_model(model, perceptron.source)
    section = replace(perceptron.section, exclude=("product",))
    for request in (perceptron, replace(perceptron, section=section)):
        with pytest.raises(UserError, match=remedy):
            Fp16Optimizer().optimize(request)


def test_fp16_optimizer_with_keep_option_leaves_types_in_float32(
    perceptron: OptimizeRequest,
) -> None:
    Fp16Optimizer().optimize(with_options(perceptron, keep=["Gemm"]))
    names = {weight.name for weight in read_quantized_weights(perceptron.source, perceptron.path)}
    assert "first.weight" in names
    assert "second.weight" not in names


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"bits": 8}, 0.02),
        ({"bits": 4}, 0.25),
        ({"bits": 4, "symmetric": False}, 0.25),
        ({"bits": 4, "algorithm": "hqq"}, 0.25),
        ({"bits": 4, "algorithm": "gptq"}, 0.35),
        ({"bits": 8, "accuracy": 4}, 0.03),
    ],
)
def test_read_quantized_weights_of_blocks_reproduces_outputs_of_runtime(
    perceptron: OptimizeRequest, options: dict[str, object], error: float
) -> None:
    request = replace(with_options(perceptron, **options), calibration=rows(64))
    notes = WeightOnlyQuantizer().optimize(replace(request, machines=(X86,)))
    assert "saves size, not time" in " ".join(notes)
    before, after = answers(request)
    assert np.sqrt(np.mean((after - before) ** 2)) < error * np.sqrt(np.mean(before**2))
    found = {weight.name: weight for weight in read_quantized_weights(request.source, request.path)}
    assert set(found) == {"first.weight", "second.weight", "third.weight"}
    x = rows(64, seed=3)["x"].astype(np.float64)
    stored = {
        t.name: numpy_helper.to_array(t).astype(np.float64)
        for t in read_model(request.source).graph.initializer
    }
    for layer in ("first", "second", "third"):
        x = x @ found[f"{layer}.weight"].dequantized + stored[f"{layer}.bias"]
        x = np.maximum(x, 0) if layer != "third" else x
    slack = 0.1 if options.get("accuracy") else 1e-4
    np.testing.assert_allclose(after, x, rtol=slack, atol=slack)


ALGORITHMS = pytest.mark.parametrize(
    "options",
    [{"bits": 8}, {"bits": 4}, {"algorithm": "hqq"}, {"algorithm": "gptq"}],
    ids=["rtn 8", "rtn 4", "hqq", "gptq"],
)


def write_three_products(request: OptimizeRequest) -> None:
    """Write three products; the first has a name, and the second has float64 weights."""
    text = """(float[batch, 8] x) => (float[batch, 8] y) {
        [first] h = MatMul(x, one)
        wide = Cast<to = 11>(h)
        product = MatMul(wide, two)
        narrow = Cast<to = 1>(product)
        y = MatMul(narrow, three)
    }"""
    one, two, three = np.random.default_rng(0).standard_normal((3, 8, 8))
    weights = {"one": one.astype(np.float32), "two": two, "three": three.astype(np.float32)}
    write_graph(request.source, text, **weights)


@ALGORITHMS
def test_weight_only_quantizer_with_excluded_and_float64_products_leaves_them_unchanged(
    perceptron: OptimizeRequest, options: dict[str, object]
) -> None:
    write_three_products(perceptron)
    request = replace(with_options(perceptron, **options), calibration=rows(64))
    WeightOnlyQuantizer().optimize(
        replace(request, section=replace(request.section, exclude=("first",)))
    )
    assert [kind for kind in operators(request.path) if kind.startswith("MatMul")] == [
        "MatMul",
        "MatMul",
        "MatMulNBits",
    ]
    before, after = (run(path, rows(64, seed=3))["y"] for path in (request.source, request.path))
    assert 0 < np.abs(after - before).max() < 0.4 * np.abs(before).max()


@ALGORITHMS
def test_weight_only_quantizer_with_excluded_constant_raises_user_error(
    perceptron: OptimizeRequest, options: dict[str, object]
) -> None:
    """The product that uses the weight is quantized."""
    model = read_model(perceptron.source)
    weight = next(t for t in model.graph.initializer if t.name == "second.weight")
    constant = helper.make_node("Constant", [], [weight.name], name="stored", value=weight)
    model.graph.node.insert(0, constant)
    model.graph.initializer.remove(weight)
    write_model(model, perceptron.source)
    request = replace(with_options(perceptron, **options), calibration=rows(64))
    with pytest.raises(UserError, match="excluding stored had no effect"):
        WeightOnlyQuantizer().optimize(
            replace(request, section=replace(request.section, exclude=("stored",)))
        )
    assert not request.path.exists()


def test_weight_only_quantizer_of_convolution_raises_user_error(
    perceptron: OptimizeRequest,
) -> None:
    write_convolution(perceptron.source)
    with pytest.raises(UserError, match="nothing was quantized"):
        WeightOnlyQuantizer().optimize(perceptron)
    assert not perceptron.path.exists()


def test_weight_only_quantizer_leaves_shared_matrix_unchanged(perceptron: OptimizeRequest) -> None:
    model = read_model(perceptron.source)
    for node in model.graph.node:
        if node.name == "third":
            node.input[0] = "again.out"
    again = helper.make_node(
        "Gemm", ["second.out", "second.weight"], ["again.out"], name="again", transB=1
    )
    model.graph.node.insert(len(model.graph.node) - 1, again)
    write_model(model, perceptron.source)
    WeightOnlyQuantizer().optimize(perceptron)
    assert operators(perceptron.path).count("Gemm") == 2
    before, after = answers(perceptron)
    assert np.abs(after - before).max() < 0.1 * np.abs(before).max()


def test_low_precision_optimizer_with_failing_library_raises_stage_error(
    perceptron: OptimizeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.transformers import float16

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(MatMulNBitsQuantizer, "process", fail)
    monkeypatch.setattr(float16, "convert_float_to_float16", fail)
    for optimizer in (WeightOnlyQuantizer(), Fp16Optimizer()):
        with pytest.raises(StageError, match="not today"):
            optimizer.optimize(perceptron)


def test_graph_optimizer_of_convolution_keeps_outputs(perceptron: OptimizeRequest) -> None:
    write_convolution(perceptron.source)
    for level in ("basic", "extended", "all"):
        GraphOptimizer().optimize(with_options(perceptron, level=level))
        before, after = (
            run(path, images(9))["scores"] for path in (perceptron.source, perceptron.path)
        )
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)


def change(request: OptimizeRequest, name: str, value: float) -> None:
    model = read_model(request.source)
    for tensor in model.graph.initializer:
        if tensor.name == name:
            array = numpy_helper.to_array(tensor).copy()
            array[0, 0] = value
            tensor.CopyFrom(numpy_helper.from_array(array, name))
    write_model(model, request.source)


def write_fused_gelu(path: Path) -> None:
    """Write the perceptron with a Gelu operator of ONNX Runtime's own domain.

    ONNX Runtime's tools for transformers write this operator.
    """
    write_perceptron(path)
    model = read_model(path)
    model.graph.node[2].CopyFrom(
        helper.make_node("Gelu", ["first.sum"], ["first.out"], domain="com.microsoft")
    )
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    write_model(model, path)


DYNAMIC, STATIC, WEIGHTS = DynamicQuantizer(), StaticQuantizer(), WeightOnlyQuantizer()
WRONG: list[tuple[Optimizer, Mapping[str, object], str]] = [
    *((optimizer, {"reduce-range": True}, "reduce_range") for optimizer in (DYNAMIC, STATIC)),
    *((optimizer, {"reduce_range": "yes"}, "true or false") for optimizer in (DYNAMIC, STATIC)),
    *((optimizer, {"op_types": "Conv"}, "list") for optimizer in (DYNAMIC, STATIC)),
    *((optimizer, {"op_types": []}, "at least one") for optimizer in (DYNAMIC, STATIC)),
    *((optimizer, {"nonsense": 1}, "op_types") for optimizer in (DYNAMIC, STATIC)),
    # The library accepts some of the following options, but their results cannot be used. They fail
    # to load, lack kernels, or need a missing module.
    (
        STATIC,
        {"activations": "float8e4m3fn"},
        "activations: expected one of 'uint8', 'int8', 'uint16'",
    ),
    (STATIC, {"weights": "float8e4m3fn"}, "weights: expected one of 'int8', 'uint8'"),
    (STATIC, {"activations": "bfloat16"}, "activations: expected one of"),
    (STATIC, {"smooth": True}, "unknown key 'smooth'"),
    (STATIC, {"format": "QOperator"}, "unknown key 'format'"),
    (WEIGHTS, {"bits": 3}, "one of '4', '8'"),
    (WEIGHTS, {"bits": True}, "one of '4', '8'"),
    (WEIGHTS, {"block": 24}, "block"),
    (WEIGHTS, {"algorithm": "awq"}, "'rtn', 'hqq', 'gptq'"),
    (WEIGHTS, {"algorithm": "gptq"}, "calibration rows"),
    (WEIGHTS, {"algorithm": "hqq", "bits": 8}, "bits: 4"),
    (WEIGHTS, {"algorithm": "hqq", "symmetric": True}, "hqq ignores symmetric"),
    (WEIGHTS, {"algorithm": "hqq", "accuracy": 4}, "hqq ignores accuracy"),
    (WEIGHTS, {"blocks": 32}, "did you mean 'block'"),
]


@pytest.mark.parametrize(("optimizer", "options", "said"), WRONG)
def test_optimizer_with_wrong_options_raises_user_error(
    perceptron: OptimizeRequest, optimizer: Optimizer, options: Mapping[str, object], said: str
) -> None:
    section = replace(perceptron.section, calibrate=Calibrate())
    request = replace(
        perceptron, section=section, calibration=None if optimizer is WEIGHTS else rows(32)
    )
    with pytest.raises(UserError, match=said):
        optimizer.optimize(with_options(request, **options))
    assert not request.path.exists()


def test_weight_only_quantizer_with_gptq_and_eight_bits_raises_user_error(
    perceptron: OptimizeRequest,
) -> None:
    with pytest.raises(UserError, match="bits: 4"):
        WEIGHTS.optimize(
            replace(with_options(perceptron, algorithm="gptq", bits=8), calibration=rows(8))
        )


def write_products(path: Path, kind: str) -> None:
    """Write one product with a weight of that type, and one product of two inputs."""
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    x, y = (helper.make_tensor_value_info(name, element, [4, 4]) for name in "xy")
    given = [helper.make_tensor_value_info(name, element, None) for name in ("mixed", "scores")]
    weight = numpy_helper.from_array(np.random.default_rng(0).normal(size=(4, 3)).astype(kind), "w")
    products = [
        helper.make_node("MatMul", ["x", "w"], ["mixed"]),
        helper.make_node("MatMul", ["x", "y"], ["scores"]),
    ]
    graph = helper.make_graph(products, "products", [x, y], given, [weight])
    onnx.save(
        helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 18)]), path
    )


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (DYNAMIC, "float16"),
        (DYNAMIC, "float64"),
        (Fp16Optimizer(), "float16"),
        (Fp16Optimizer(), "float64"),
        (WEIGHTS, "float64"),
    ],
)
def test_optimizer_with_weights_of_other_precision_raises_user_error_with_their_type(
    perceptron: OptimizeRequest, optimizer: Optimizer, kind: str
) -> None:
    write_products(perceptron.source, kind)
    with pytest.raises(UserError, match=r"nothing was (quantized|converted)") as caught:
        optimizer.optimize(perceptron)
    assert f"1 MatMul: weights in {kind}, and only float32 is quantized" in caught.value.why
    assert "1 MatMul: no constant weights" in caught.value.why
    assert "the float32 version" in caught.value.remedy
    assert not perceptron.path.exists()


def test_dynamic_quantizer_of_quantized_model_raises_user_error(
    perceptron: OptimizeRequest,
) -> None:
    DYNAMIC.optimize(perceptron)
    with pytest.raises(UserError, match="already contains quantized") as caught:
        DYNAMIC.optimize(
            replace(
                perceptron, source=perceptron.path, path=perceptron.path.with_name("again.onnx")
            )
        )
    assert caught.value.remedy == "Use the float model from which it was made."


def test_fp16_optimizer_of_model_above_protobuf_limit_raises_too_large_error(
    perceptron: OptimizeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_precision, "PROTOBUF_LIMIT", 100)
    with pytest.raises(TooLargeError, match="more than 2 GiB") as caught:
        Fp16Optimizer().optimize(perceptron)
    assert caught.value.remedy


def test_weight_only_quantizer_of_constant_nodes_quantizes_them(
    perceptron: OptimizeRequest,
) -> None:
    model = read_model(perceptron.source)
    for tensor in model.graph.initializer:
        model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
    del model.graph.initializer[:]
    write_model(model, perceptron.source)
    WeightOnlyQuantizer().optimize(
        replace(perceptron, section=Quantize(name="w8", method="weight-only"))
    )
    assert operators(perceptron.path).count("MatMulNBits") == 3


def write_branches(path: Path, *, constants: bool) -> np.ndarray[Any, Any]:
    """Write a graph with products in branches, and return one row for it.

    A Gemm has a transposed matrix that a branch reads too. The branches have two more products.
    """
    draw = np.random.default_rng(0)
    arrays = {
        name: draw.standard_normal((32, 32)).astype(np.float32) for name in ("shared", "other")
    }
    stored = {name: numpy_helper.from_array(array, name) for name, array in arrays.items()}
    value = helper.make_tensor_value_info

    def branch(
        name: str, *nodes: onnx.NodeProto, initializer: tuple[onnx.TensorProto, ...] = ()
    ) -> onnx.GraphProto:
        return helper.make_graph(nodes, name, [], [value(f"{name}_y", 1, None)], initializer)

    inner = helper.make_node("MatMul", ["h", "other"], ["else_y"], name="inner")
    weight = helper.make_node("Constant", [], ["other"], value=stored["other"])
    nodes = [
        helper.make_node("Gemm", ["x", "shared"], ["h"], name="outer", transB=1),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["is_positive"]),
        helper.make_node(
            "If",
            ["is_positive"],
            ["y"],
            then_branch=branch(
                "then", helper.make_node("MatMul", ["h", "shared"], ["then_y"], name="again")
            ),
            else_branch=branch("else", weight, inner)
            if constants
            else branch("else", inner, initializer=(stored["other"],)),
        ),
    ]
    zero = numpy_helper.from_array(np.zeros((), np.float32), "zero")
    ends = [value("x", 1, ["batch", 32])], [value("y", 1, ["batch", 32])]
    graph = helper.make_graph(nodes, "branches", *ends, [stored["shared"], zero])
    write_model(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path
    )
    return draw.standard_normal((1, 32)).astype(np.float32)


@pytest.mark.parametrize("constants", [False, True], ids=["initializer", "constant node"])
def test_weight_only_quantizer_of_branches_quantizes_and_counts_products(
    perceptron: OptimizeRequest, constants: bool
) -> None:
    row = write_branches(perceptron.source, constants=constants)
    notes = WeightOnlyQuantizer().optimize(
        replace(perceptron, section=Quantize(name="w8", method="weight-only"))
    )
    assert notes[0].endswith("stored the weights of 2 of 3 matrix products in blocks")
    assert notes[1].endswith(": outer")
    for x in (row, -row):
        before, after = (run(path, {"x": x})["y"] for path in (perceptron.source, perceptron.path))
        assert np.abs(after - before).max() < 0.05 * np.abs(before).max()
