"""The nodes that run in int8 after the runtime's optimization.

Each other node has a reason.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnx_ops.adapters.optimizers.low_precision import WeightOnlyQuantizer
from onnx_ops.adapters.optimizers.onnxruntime import DynamicQuantizer, StaticQuantizer
from onnx_ops.adapters.runtimes.onnxruntime import OnnxRuntime
from onnx_ops.domain.arithmetic import Arithmetic, detect_arithmetic
from onnx_ops.domain.evidence import Advice, FloatOperator, Int8Coverage
from onnx_ops.domain.execution import SessionSettings
from onnx_ops.domain.pipeline import Calibrate, Quantize
from onnx_ops.domain.target import Target
from onnx_ops.measure.execution import inspect_execution
from onnx_ops.onnx_graph.files import read_model, write_model
from onnx_ops.onnx_graph.int8_coverage import FUSE, advise, measure_int8_coverage
from onnx_ops.ports import Optimizer, OptimizeRequest
from onnx_ops.testing.models import images, rows, write_convolution, write_perceptron
from tests.support.graphs import parse_graph, write_graph

TARGET = Target(name="cpu")


def covered(
    source: Path, method: str, samples: Any, exclude: tuple[str, ...] = (), target: Target = TARGET
) -> Int8Coverage:
    path = source.with_name(f"{method}.onnx")
    section = Quantize(name=method, method=method, calibrate=Calibrate(), exclude=exclude)
    request = OptimizeRequest(section=section, source=source, path=path, calibration=samples)
    (StaticQuantizer() if method == "static" else DynamicQuantizer()).optimize(request)
    found = inspect_execution(OnnxRuntime(), source, path, target, exclude).coverage
    assert found is not None
    return found


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_int8_coverage_of_perceptron_lists_excluded_node_in_float(
    method: str, perceptron: Path
) -> None:
    found = covered(perceptron, method, rows(64), ("third",))
    assert found.int8 == ("first", "second")
    assert [(one.name, one.op_type, one.reason) for one in found.floats] == [
        ("third", "Gemm", "excluded")
    ]
    assert found.unheeded == ()


def test_int8_coverage_of_convolutions_is_complete(tmp_path: Path) -> None:
    assert covered(write_convolution(tmp_path / "model.onnx"), "static", images(32)).int8 == (
        "first",
        "second",
    )


def test_int8_coverage_of_excluded_node_quantized_by_runtime_lists_it_as_unheeded(
    perceptron: Path,
) -> None:
    """ONNX Runtime also quantizes a Gemm's weights between two QuantizeLinear pairs."""
    assert covered(perceptron, "static", rows(64), ("second",)).unheeded == ("second",)


def test_int8_coverage_without_graph_optimization_is_empty(perceptron: Path) -> None:
    plain = Target(name="plain", session=SessionSettings(graph_level="disabled"))
    found = covered(perceptron, "static", rows(64), target=plain)
    assert found.int8 == ()
    assert all("not fused" in one.reason for one in found.floats)
    assert [one.name for one in found.floats] == ["first", "second", "third"]


PAIR = "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)"
BACK = "p = QuantizeLinear(o, s, z) y = DequantizeLinear(p, s, z)"


@pytest.mark.parametrize(
    ("nodes", "zero", "reason"),
    [
        ("y = MatMul(x, w)", np.uint8(0), "the model input supplies it in float"),
        ("r = Relu(x) y = Gemm(r, w)", np.uint8(0), "Relu supplies it in float"),
        ("y = MatMul(x, x)", np.uint8(0), "no constant weight"),
        (f"{PAIR} y = MatMul(d, w)", np.uint8(0), "the model output follows instead"),
        (f"{PAIR} o = MatMul(d, w) {BACK}", np.uint8(0), "though input and output"),
        (f"{PAIR} y = MatMul(d, w)", np.int8(0), "activations are int8"),
        (f"{PAIR} y = MatMul(d, x)", np.uint8(0), "no constant weight"),
        ("y = ConvTranspose(x, k)", np.uint8(0), "no int8 kernel"),
    ],
)
def test_measure_int8_coverage_of_float_node_returns_reason(
    nodes: str, zero: Any, reason: str, tmp_path: Path
) -> None:
    stored = {
        "w": np.ones((4, 4), "f4"),
        "k": np.ones((4, 4, 1, 1), "f4"),
        "s": np.float32(0.1),
        "z": zero,
    }
    path = write_graph(
        tmp_path / "rewritten.onnx", f"(float[batch,4] x) => (float y) {{ {nodes} }}", **stored
    )
    (found,) = measure_int8_coverage(path, path).floats
    assert reason in found.reason


VNNI, OLD, ARM = (
    Arithmetic(family="x86"),
    Arithmetic(family="x86", saturates=True),
    Arithmetic(family="arm"),
)


class Maker:
    """A helper that makes a variant of one model and requests advice about it."""

    def __init__(self, folder: Path) -> None:
        self.source, self.path = folder / "source.onnx", folder / "variant.onnx"
        self.rows: dict[str, Any] = rows(64)
        write_perceptron(self.source, opset=21)

    def convolution(self) -> Maker:
        write_convolution(self.source, opset=21)
        self.rows = images(64)
        return self

    def make(
        self,
        optimizer: Optimizer,
        exclude: tuple[str, ...] = (),
        per_channel: bool = True,
        **options: Any,
    ) -> None:
        section = Quantize(
            name="v",
            method="plugin",
            calibrate=Calibrate(),
            exclude=exclude,
            per_channel=per_channel,
            options=options,
        )
        optimizer.optimize(
            OptimizeRequest(
                section=section,
                source=self.source,
                path=self.path,
                calibration=self.rows,
                machines=(OLD,),
            )
        )

    def advice(
        self, machine: Arithmetic = OLD, target: Target = TARGET, exclude: tuple[str, ...] = ()
    ) -> tuple[Advice, ...]:
        rewritten = self.path.with_name("rewritten.onnx")
        OnnxRuntime().rewritten(self.path, target, rewritten)
        coverage = measure_int8_coverage(self.source, rewritten, exclude)
        return advise(self.path, rewritten, target, machine, coverage)


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    return Maker(tmp_path)


def about(found: tuple[Advice, ...], word: str) -> Advice:
    (one,) = [advice for advice in found if word in advice.finding]
    assert one.setting
    return one


def test_advise_on_default_recipe_returns_nothing(maker: Maker) -> None:
    maker.make(StaticQuantizer())
    assert maker.advice() == ()
    maker.make(DynamicQuantizer())
    assert maker.advice() == ()
    maker.convolution().make(StaticQuantizer())
    assert maker.advice() == ()


@pytest.mark.parametrize(
    ("part", "written", "advised"), [("activations", "int8", "uint8"), ("weights", "uint8", "int8")]
)
def test_advise_on_types_slow_on_x86_suggests_others(
    maker: Maker, part: str, written: str, advised: str
) -> None:
    types: dict[str, Any] = {part: written}
    maker.make(StaticQuantizer(), **types)
    found = about(maker.advice(VNNI), f"{part} are {written}")
    assert found.setting == f"options: {{{part}: {advised}}}"
    assert found not in maker.advice(ARM)
    assert part == "weights" or maker.advice(ARM) == ()


def test_advise_on_uint16_activations_suggests_uint8_on_x86_and_arm(maker: Maker) -> None:
    maker.make(StaticQuantizer(), activations="uint16")
    for machine in (VNNI, ARM):
        assert "uint8" in about(maker.advice(machine), "16 bits").setting


@pytest.mark.parametrize("optimizer", [StaticQuantizer(), DynamicQuantizer()])
def test_advise_on_8_bit_weights_without_vnni_suggests_reduce_range(
    maker: Maker, optimizer: Optimizer
) -> None:
    maker.make(optimizer, reduce_range=False)
    assert "reduce_range: true" in about(maker.advice(OLD), "saturate").setting
    assert maker.advice(VNNI) == ()


@pytest.mark.processor
def test_quantizers_with_extreme_values_cause_no_saturation_on_this_machine(tmp_path: Path) -> None:
    """Products have values at the ends of their ranges.

    A CPU without VNNI saturates sums of two such products to 16 bits.
    """
    text = "(float[batch,64] x) => (float[batch,8] y) { [product] y = MatMul(x, w) }"
    source, path = (
        write_graph(tmp_path / "ends.onnx", text, w=np.ones((64, 8), np.float32)),
        tmp_path / "int8.onnx",
    )
    data = {"x": np.ones((4, 64), np.float32)}
    machine = detect_arithmetic(OnnxRuntime().fingerprint(TARGET), TARGET)
    section = Quantize(name="v", method="static", calibrate=Calibrate())
    request = OptimizeRequest(
        section=section, source=source, path=path, calibration=data, machines=(machine,)
    )
    for optimizer in (StaticQuantizer(), DynamicQuantizer()):
        optimizer.optimize(request)
        answer: np.ndarray[Any, Any] = OnnxRuntime().run(path, TARGET, (data,))[0]["y"]
        np.testing.assert_allclose(answer, 64.0, rtol=0.02)


def test_advise_on_float_operator_between_int8_operators_names_it(maker: Maker) -> None:
    maker.convolution()
    model = read_model(maker.source)
    model.graph.node[1].op_type = "Erf"
    write_model(model, maker.source)
    maker.make(StaticQuantizer())
    one = about(maker.advice(), "1 Erf in float between int8 operators")
    assert one.nodes == ("first_relu",)
    assert "name Erf in `options.op_types`" in one.setting


def test_advise_on_float_operators_groups_them_by_reason(maker: Maker) -> None:
    maker.make(StaticQuantizer())
    left = FloatOperator(name="a", op_type="Gemm", reason="no pair", setting="name Gemm")
    kept = replace(left, name="c", reason="excluded", setting="")
    coverage = Int8Coverage(floats=(left, replace(left, name="b"), kept))
    rewritten = maker.path.with_name("rewritten.onnx")
    OnnxRuntime().rewritten(maker.path, TARGET, rewritten)
    found = advise(maker.path, rewritten, TARGET, VNNI, coverage)
    assert found == (
        Advice(
            finding="2 operators stay in float, each because no pair",
            setting="name Gemm",
            nodes=("a", "b"),
        ),
    )


def test_advise_on_unfused_pairs_omits_setting_already_in_use(tmp_path: Path) -> None:
    """A branch reads the product, so the runtime keeps it in float at any graph level."""
    text = f"""(float[batch,4] x, bool c) => (float[batch,4] y) {{
        {PAIR} o = MatMul(d, w) p = QuantizeLinear(o, s, z) e = DequantizeLinear(p, s, z)
        y = If(c) <then_branch = a () => (float[batch,4] t) {{ t = Relu(e) }},
            else_branch = b () => (float[batch,4] f) {{ f = Neg(e) }}> }}"""
    stored = {"w": np.ones((4, 4), "f4"), "s": np.float32(0.1), "z": np.uint8(0)}
    path = write_graph(tmp_path / "variant.onnx", text, **stored)
    coverage = measure_int8_coverage(path, path)
    assert [one.name for one in coverage.floats] == ["o"]
    assert advise(path, path, TARGET, VNNI, coverage) == ()
    plain = Target(name="plain", session=SessionSettings(graph_level="basic"))
    assert {one.setting for one in advise(path, path, plain, VNNI, coverage)} == {FUSE}


def test_advise_on_excluded_node_reports_it_only_if_it_runs_in_int8(maker: Maker) -> None:
    maker.make(StaticQuantizer(), exclude=("third",))
    assert maker.advice(exclude=("third",)) == ()
    maker.make(StaticQuantizer(), exclude=("second",))
    assert about(maker.advice(exclude=("second",)), "excluded operators run in int8").nodes == (
        "second",
    )


def test_advise_on_method_that_saves_no_time_reports_it(maker: Maker) -> None:
    maker.make(WeightOnlyQuantizer())
    assert "saves memory" in about(maker.advice(), "blocks").finding
    assert not [
        one for one in maker.advice(Arithmetic(family="accelerator")) if "blocks" in one.finding
    ]
    maker.convolution().make(DynamicQuantizer(), per_channel=False, op_types=["Conv"])
    assert about(maker.advice(), "convolutions compute their ranges").setting == "method: static"


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ("[up] c = Cast<to = 1>(b) d = Erf(c) [down] e = Cast<to = 10>(d)", ("up", "down")),
        ("e = Identity(b)", ()),
    ],
)
def test_advise_on_float16_reports_casts_only_inside_graph(
    nodes: str, told: tuple[str, ...], tmp_path: Path
) -> None:
    text = (
        f"[enters] a = Cast<to = 10>(x) b = Add(a, half) {nodes} f = Add(e, half) "
        "[leaves] y = Cast<to = 1>(f)"
    )
    path = tmp_path / "half.onnx"
    write_graph(path, f"(float[batch,4] x) => (float[batch,4] y) {{ {text} }}", half=np.float16(1))
    found = advise(path, path, TARGET, VNNI, None)
    assert tuple(name for one in found for name in one.nodes) == told
    assert all("keep:" in one.setting for one in found)


@pytest.mark.parametrize("name", ["session.x64quantprecision", "session.qdqisint8allowed"])
def test_advise_on_slow_session_setting_reports_it_on_x86_only(maker: Maker, name: str) -> None:
    maker.make(StaticQuantizer())
    slow = replace(TARGET, session=SessionSettings(config={name: "1"}))
    assert name in about(maker.advice(target=slow), name).setting
    assert not [one for one in maker.advice(ARM, slow) if name in one.finding]


def test_advise_on_basic_graph_level_suggests_all(maker: Maker) -> None:
    maker.make(StaticQuantizer())
    basic = Target(name="basic", session=SessionSettings(graph_level="basic"))
    assert "graph_level: all" in about(maker.advice(target=basic), "at graph level basic").setting


def test_int8_coverage_counts_products_in_branches(tmp_path: Path) -> None:
    text = (
        "(float[N,8] x, bool c) => (float[N,8] y) { h = MatMul(x, w) "
        "y = If(c) <then_branch = t () => (float[N,8] a) { a = MatMul(h, v) }, "
        "else_branch = e () => (float[N,8] b) { b = MatMul(h, u) }> }"
    )
    stored = {name: np.random.default_rng(1).random((8, 8), np.float32) for name in "wvu"}
    found = covered(write_graph(tmp_path / "m.onnx", text, **stored), "dynamic", None)
    assert (len(found.int8), len(found.floats)) == (1, 2)
    assert {one.setting for one in found.floats} == {""}


def test_measure_int8_coverage_counts_recurrent_layer_in_float(tmp_path: Path) -> None:
    text = """(float[2,1,4] x) => (float[2,1,1,3] y, float[1,3] z) {
        [rnn] y, h = LSTM<hidden_size = 3>(x, w, r)
        s = Squeeze(h)
        u = Unsqueeze(s, axis)
        [head] z = MatMul(u, k)
    }"""
    draw = np.random.default_rng(0)
    weights: dict[str, Any] = {name: draw.normal(size=shape).astype(np.float32) for name, shape in
               {"w": (1, 12, 4), "r": (1, 12, 3), "k": (3, 3)}.items()}  # fmt: skip
    onnx.save(parse_graph(text, **weights, axis=np.array([0])), str(tmp_path / "lstm.onnx"))
    coverage = measure_int8_coverage(tmp_path / "lstm.onnx", tmp_path / "lstm.onnx")
    assert coverage.summary == "0 of 2 MatMul/Conv/Gemm/LSTM run in int8"
    assert ["recurrent layers stay in float" in one.reason for one in coverage.floats] == [
        True,
        False,
    ]
