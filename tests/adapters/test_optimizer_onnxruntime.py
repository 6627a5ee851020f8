"""ONNX Runtime's quantizers and their known pitfalls."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tracemalloc
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_ops.adapters.optimizers import onnxruntime as adapter
from onnx_ops.adapters.optimizers.library import BATCH, BatchReader
from onnx_ops.adapters.optimizers.onnxruntime import DynamicQuantizer, StaticQuantizer
from onnx_ops.domain.arithmetic import Arithmetic
from onnx_ops.domain.artifact import digest_file
from onnx_ops.domain.pipeline import Calibrate, Quantize
from onnx_ops.errors import StageError, UserError
from onnx_ops.onnx_graph.files import read_model, read_structure, write_model
from onnx_ops.onnx_graph.model_info import read_model_info, write_lineage
from onnx_ops.onnx_graph.quantized_weights import read_quantized_weights
from onnx_ops.ports import OptimizeRequest
from onnx_ops.testing.models import images, rows, write_convolution, write_perceptron
from onnx_ops.testing.optimizers import HALF_A_STEP, OptimizerSuite
from tests.adapters.model_runs import run
from tests.support.fixtures import fixed

STATIC = Quantize(name="int8-static", method="static", calibrate=Calibrate(samples=40))
DYNAMIC = Quantize(name="int8-dynamic", method="dynamic")


@pytest.mark.processor
class TestDynamic(OptimizerSuite):
    section = fixed(DYNAMIC)
    optimizer = fixed(DynamicQuantizer())


@pytest.mark.processor
class TestStatic(OptimizerSuite):
    @pytest.fixture(params=[True, False], ids=["by channel", "by tensor"])
    def section(self, request: pytest.FixtureRequest) -> Quantize:
        return replace(STATIC, per_channel=request.param)

    optimizer = fixed(StaticQuantizer())


@pytest.fixture
def perceptron(file: Path) -> OptimizeRequest:
    return OptimizeRequest(
        section=STATIC, source=file, path=file.with_name("derived.onnx"), calibration=rows(40)
    )


@pytest.fixture
def convolution(perceptron: OptimizeRequest) -> OptimizeRequest:
    write_convolution(perceptron.source)
    return replace(perceptron, calibration=images(40))


def is_rounded(request: OptimizeRequest) -> bool:
    """Return whether there are quantized weights, all within half a step of their originals."""
    weights = read_quantized_weights(request.source, request.path)
    return bool(weights) and all(
        float((np.abs(one.original - one.dequantized) / one.scale).max()) <= HALF_A_STEP
        for one in weights
    )


def operators(path: Path) -> list[str]:
    return [node.op_type for node in read_structure(path).graph.node]


@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile"])
def test_static_quantizer_with_each_calibration_method_keeps_most_predictions(
    perceptron: OptimizeRequest, method: str
) -> None:
    section = replace(STATIC, calibrate=Calibrate(method=method))  # type: ignore[arg-type]
    StaticQuantizer().optimize(replace(perceptron, section=section, calibration=rows(45)))
    before, after = (
        run(path, rows(64, seed=3))["scores"] for path in (perceptron.source, perceptron.path)
    )
    assert np.mean(before.argmax(1) == after.argmax(1)) > 0.9


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile"])
def test_static_quantizer_with_sharded_ranges_writes_same_file(
    convolution: OptimizeRequest, tmp_path: Path, count: int, method: str
) -> None:
    """With three batches, two of five shards have none."""
    optimizer = StaticQuantizer()
    convolution = replace(convolution, section=replace(STATIC, calibrate=Calibrate(method=method)))  # type: ignore[arg-type]
    optimizer.optimize(convolution)
    parts = [tmp_path / f"ranges-{number}" for number in range(count)]
    for number, part in enumerate(parts):
        optimizer.read_ranges(convolution, part, (number, count))
    written = tuple(part for part in parts if part.exists())
    assert len(written) == min(count, 3)
    sharded = replace(convolution, path=tmp_path / "sharded.onnx", ranges=written)
    optimizer.optimize(replace(sharded, calibration=images(1)))
    assert sharded.path.read_bytes() == convolution.path.read_bytes()


def test_dynamic_quantizer_read_ranges_raises_user_error(
    perceptron: OptimizeRequest, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="calibration cannot be split into shards"):
        DynamicQuantizer().read_ranges(perceptron, tmp_path / "ranges", (0, 2))


def test_static_quantizer_without_machines_uses_uint8_activations_and_int8_channel_weights(
    convolution: OptimizeRequest,
) -> None:
    StaticQuantizer().optimize(convolution)
    tensors = {tensor.name: tensor for tensor in read_structure(convolution.path).graph.initializer}
    assert tensors["first.weight_quantized"].data_type == TensorProto.INT8
    assert list(tensors["first.weight_scale"].dims) == [4]
    assert tensors["image_zero_point"].data_type == TensorProto.UINT8
    assert {"QuantizeLinear", "DequantizeLinear", "Conv"} <= set(operators(convolution.path))


def test_static_quantizer_leaves_softmax_in_float(perceptron: OptimizeRequest) -> None:
    model = read_model(perceptron.source)
    model.graph.node[-1].output[0] = "logits"
    model.graph.node.append(
        helper.make_node("Softmax", ["logits"], ["scores"], name="probabilities")
    )
    write_model(model, perceptron.source)
    StaticQuantizer().optimize(perceptron)
    assert operators(perceptron.path)[-1] == "Softmax"
    np.testing.assert_allclose(run(perceptron.path, rows(64))["scores"].sum(axis=1), 1, atol=1e-6)


def test_dynamic_quantizer_of_convolution_with_default_op_types_raises_user_error(
    convolution: OptimizeRequest,
) -> None:
    with pytest.raises(UserError, match="nothing was quantized"):
        DynamicQuantizer().optimize(replace(convolution, section=DYNAMIC))
    assert not convolution.path.exists()


def test_dynamic_quantizer_with_op_type_conv_quantizes_convolutions(
    convolution: OptimizeRequest,
) -> None:
    section = replace(DYNAMIC, options={"op_types": ["Conv"]}, per_channel=False)
    DynamicQuantizer().optimize(replace(convolution, section=section))
    assert "ConvInteger" in operators(convolution.path)
    weights = read_quantized_weights(convolution.source, convolution.path)
    assert [weight.name for weight in weights] == ["first.weight", "second.weight"]
    assert is_rounded(convolution)


def test_quantizer_of_source_with_inferred_weight_shapes_quantizes_all_weights(
    perceptron: OptimizeRequest,
) -> None:
    """Exports of PyTorch contain inferred shapes of their weights.

    A quantizer that transposes a weight fails on a stale shape.
    """
    model = read_model(perceptron.source)
    for tensor in model.graph.initializer:
        value = helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, list(tensor.dims))
        model.graph.value_info.append(value)
    write_model(model, perceptron.source)
    for optimizer, section in ((DynamicQuantizer(), DYNAMIC), (StaticQuantizer(), STATIC)):
        optimizer.optimize(replace(perceptron, section=section))
        names = {w.name for w in read_quantized_weights(perceptron.source, perceptron.path)}
        assert names >= {"first.weight", "second.weight", "third.weight"}


def test_static_quantizer_of_batch_normalization_keeps_weight_name_of_convolution(
    perceptron: OptimizeRequest,
) -> None:
    """A batch normalization is folded into its convolution.

    The folded weight does not occur in the source.
    """
    write_convolution(perceptron.source)
    model = read_model(perceptron.source)
    model.graph.node[1].input[0] = "first.normal"
    for name in ("scale", "shift", "average", "variance"):
        model.graph.initializer.append(numpy_helper.from_array(np.full(4, 1.5, np.float32), name))
    normalise = ["first.sum", "scale", "shift", "average", "variance"]
    model.graph.node.insert(
        1, helper.make_node("BatchNormalization", normalise, ["first.normal"], name="normal")
    )
    write_model(model, perceptron.source)
    StaticQuantizer().optimize(replace(perceptron, calibration=images(40)))
    assert "first.weight" in {
        weight.name for weight in read_quantized_weights(perceptron.source, perceptron.path)
    }


def test_dynamic_quantizer_with_excluded_bias_excludes_its_fused_operator(
    perceptron: OptimizeRequest,
) -> None:
    """The preparation fuses `first` and its Add into one Gemm.

    Excluding either keeps both in float.
    """
    DynamicQuantizer().optimize(
        replace(perceptron, section=replace(DYNAMIC, exclude=("first_bias",)))
    )
    names = {weight.name for weight in read_quantized_weights(perceptron.source, perceptron.path)}
    assert names == {"second.weight", "third.weight"}


def test_dynamic_quantizer_with_all_nodes_excluded_raises_user_error(
    perceptron: OptimizeRequest,
) -> None:
    section = replace(DYNAMIC, exclude=("first", "second", "third"))
    with pytest.raises(UserError, match=r"nothing was quantized.*excluded"):
        DynamicQuantizer().optimize(replace(perceptron, section=section))


def test_quantizer_with_ineffective_exclusion_raises_user_error(
    perceptron: OptimizeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quantizer looks for the name of a Gemm that it has renamed before.

    The exclusion has no effect then.
    """
    monkeypatch.setattr(adapter._Job, "nodes_to_exclude", lambda self: ["misspelt"])
    for optimizer, section in ((DynamicQuantizer(), DYNAMIC), (StaticQuantizer(), STATIC)):
        with pytest.raises(UserError, match="excluding second had no effect"):
            optimizer.optimize(replace(perceptron, section=replace(section, exclude=("second",))))
        assert not perceptron.path.exists()


def test_dynamic_quantizer_with_failing_preparation_warns_and_continues(
    perceptron: OptimizeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Path:
        raise RuntimeError("no shapes today")

    monkeypatch.setattr(adapter, "_preprocess", fail)
    with pytest.warns(RuntimeWarning, match="no shapes today"):
        DynamicQuantizer().optimize(replace(perceptron, section=DYNAMIC))
    assert len(read_quantized_weights(perceptron.source, perceptron.path)) == 3


def test_static_quantizer_with_failing_library_raises_stage_error(
    perceptron: OptimizeRequest,
) -> None:
    with pytest.raises(StageError, match="int8-static"):
        # The library fails: the model has eight features, and these rows have three.
        StaticQuantizer().optimize(
            replace(perceptron, calibration={"x": np.zeros((4, 3), dtype=np.float32)})
        )


def test_static_quantizer_per_channel_below_opset_13_raises_user_error(
    perceptron: OptimizeRequest,
) -> None:
    write_perceptron(perceptron.source, opset=12, ir_version=8)
    with pytest.raises(UserError, match="opset 13"):
        StaticQuantizer().optimize(perceptron)
    StaticQuantizer().optimize(replace(perceptron, section=replace(STATIC, per_channel=False)))
    assert read_model_info(perceptron.path).opsets == {"": 12}


def test_quantizer_of_all_zero_channel_rounds_weights_correctly(
    perceptron: OptimizeRequest,
) -> None:
    model = read_model(perceptron.source)
    for tensor in model.graph.initializer:
        if tensor.name == "second.weight":
            weight = numpy_helper.to_array(tensor).copy()
            weight[3] = 0
            tensor.CopyFrom(numpy_helper.from_array(weight, tensor.name))
    write_model(model, perceptron.source)
    for optimizer, section in ((DynamicQuantizer(), DYNAMIC), (StaticQuantizer(), STATIC)):
        optimizer.optimize(replace(perceptron, section=section))
        assert is_rounded(perceptron)


def test_dynamic_quantizer_keeps_lineage_and_adds_no_tool_metadata(
    perceptron: OptimizeRequest,
) -> None:
    write_lineage(perceptron.source, {"onnx-ops.release": "sha256:0"})
    DynamicQuantizer().optimize(replace(perceptron, section=DYNAMIC))
    properties = {prop.key: prop.value for prop in onnx.load(perceptron.path).metadata_props}
    assert properties == {"onnx-ops.release": "sha256:0", "origin": "testing"}
    assert {entry.domain for entry in onnx.load(perceptron.path).opset_import} == {""}


def test_static_quantizer_with_other_hash_seed_writes_same_bytes(
    perceptron: OptimizeRequest,
) -> None:
    code = """
import sys
from pathlib import Path
from onnx_ops.adapters.optimizers.onnxruntime import StaticQuantizer
from onnx_ops.domain.pipeline import Calibrate, Quantize
from onnx_ops.ports import OptimizeRequest
from onnx_ops.testing.models import rows
StaticQuantizer().optimize(OptimizeRequest(
    section=Quantize(name="int8-static", method="static", calibrate=Calibrate(samples=40)),
    source=Path(sys.argv[1]), path=Path(sys.argv[2]), calibration=rows(40)))
"""
    StaticQuantizer().optimize(perceptron)
    for seed in ("1", "2"):
        other = perceptron.path.with_name(f"{seed}.onnx")
        command = [sys.executable, "-c", code, str(perceptron.source), str(other)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
        assert digest_file(other) == digest_file(perceptron.path)


def test_static_quantizer_leaves_logging_configuration_unchanged(
    perceptron: OptimizeRequest,
) -> None:
    handlers, disabled = list(logging.getLogger().handlers), logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StaticQuantizer().optimize(perceptron)
    assert logging.getLogger().handlers == handlers
    assert logging.root.manager.disable == disabled


def test_batch_reader_of_dynamic_batch_returns_all_rows_in_small_batches(
    perceptron: OptimizeRequest,
) -> None:
    given = rows(2 * BATCH + 5)
    reader = BatchReader(given, read_model_info(perceptron.source))
    assert len(reader) == 3
    batches = []
    for index in range(len(reader)):
        reader.set_range(index, index + 1)
        while batch := reader.get_next():
            batches.append(batch["x"])
    assert [len(batch) for batch in batches] == [BATCH, BATCH, 5]
    np.testing.assert_array_equal(np.concatenate(batches), given["x"])


@pytest.mark.parametrize(
    "method", ["minmax", pytest.param("entropy", marks=pytest.mark.nightly), "percentile"]
)
def test_static_quantizer_with_more_rows_does_not_keep_activations_in_memory(
    convolution: OptimizeRequest, method: str
) -> None:
    """More rows enlarge only the counts of the histograms.

    The activations of only one batch are in memory at a time.
    """
    section = replace(STATIC, calibrate=Calibrate(method=method))  # type: ignore[arg-type]

    def peak(count: int) -> int:
        request = replace(convolution, section=section, calibration=images(count))
        tracemalloc.start()
        try:
            StaticQuantizer().optimize(request)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    # The first call also loads imports and caches.
    peak(16)
    few, many = peak(64), peak(1024)
    # This is the size in bytes of the input and of two layers, if all rows were in memory.
    activations = 1024 * 8 * 8 * (1 + 4 + 4) * 4
    assert many - few < activations / 4


def test_static_quantizer_recipe_depends_on_machine_unless_set(
    convolution: OptimizeRequest,
) -> None:
    old, new, arm = (
        Arithmetic(family="x86", saturates=True),
        Arithmetic(family="x86"),
        Arithmetic(family="arm"),
    )

    def made(*machines: Arithmetic, **options: bool) -> tuple[int, int, tuple[str, ...]]:
        section = replace(STATIC, options=options)
        notes = StaticQuantizer().optimize(replace(convolution, section=section, machines=machines))
        stored = {
            t.name: numpy_helper.to_array(t) for t in read_model(convolution.path).graph.initializer
        }
        largest = int(np.abs(stored["first.weight_quantized"].astype(int)).max())
        return largest, int(stored["image_zero_point"].dtype.kind == "i"), notes

    assert made(new)[:2] == (127, 0)
    assert made(old)[:2] == made(new, old)[:2] == (64, 0)
    assert made(arm)[:2] == (127, 1)
    assert made(arm, new)[:2] == (127, 0)
    assert made(old, reduce_range=False)[0] == 127
    assert any("no VNNI" in note for note in made(old)[2])


@pytest.mark.parametrize("symmetric", [True, False])
def test_static_quantizer_sets_all_zero_points_to_zero_only_if_symmetric(
    convolution: OptimizeRequest, symmetric: bool
) -> None:
    section = replace(STATIC, options={"activations": "int8", "symmetric": symmetric})
    StaticQuantizer().optimize(replace(convolution, section=section))
    stored = read_model(convolution.path).graph.initializer
    zeros = [
        numpy_helper.to_array(t) for t in stored if t.name.endswith("_zero_point") and not t.dims
    ]
    assert {zero.dtype.name for zero in zeros} == {"int8"}
    assert all(zero == 0 for zero in zeros) is symmetric


def test_static_quantizer_with_unsupported_options_raises_user_error(
    convolution: OptimizeRequest,
) -> None:
    section = replace(STATIC, options={"activations": "int8", "weights": "uint8"})
    with pytest.raises(UserError, match="no kernel accepts them"):
        StaticQuantizer().optimize(replace(convolution, section=section))
    for options in ({"activations": "float8"}, {"smooth_quant": True}):
        with pytest.raises(UserError, match="activations"):
            StaticQuantizer().optimize(
                replace(convolution, section=replace(STATIC, options=options))
            )
    with pytest.raises(UserError, match="opset 21"):
        StaticQuantizer().optimize(
            replace(convolution, section=replace(STATIC, options={"activations": "uint16"}))
        )


def test_static_quantizer_of_fixed_batch_calibrates_with_full_batches_only(
    perceptron: OptimizeRequest,
) -> None:
    write_perceptron(perceptron.source, batch=4)
    assert len(BatchReader(rows(11), read_model_info(perceptron.source))) == 2
    StaticQuantizer().optimize(replace(perceptron, calibration=rows(11)))
    assert run(perceptron.path, rows(4))["scores"].shape == (4, 3)
    with pytest.raises(UserError, match=r"do not fill one batch of 4 rows.*with at least 4 rows"):
        StaticQuantizer().optimize(replace(perceptron, calibration=rows(3)))


@pytest.mark.parametrize(
    ("calibration", "word"),
    [
        ({"y": rows(4)["x"]}, r"\['y'\]"),
        ({"x": np.full((4, 8), np.nan, np.float32)}, "NaN"),
        ({"x": np.full((4, 8), np.inf, np.float32)}, "infinity"),
        ({"x": np.zeros((0, 8), np.float32)}, "0 calibration rows"),
    ],
)
def test_static_quantizer_with_unusable_calibration_rows_raises_user_error(
    perceptron: OptimizeRequest, calibration: dict[str, np.ndarray], word: str
) -> None:
    with pytest.raises(UserError, match=word):
        StaticQuantizer().optimize(replace(perceptron, calibration=calibration))
