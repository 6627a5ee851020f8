"""Findings of the parity gate about trees, activations, int8 coverage and NaN."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from onnx_ops.domain.decision import GateResult, Verdict
from onnx_ops.domain.evidence import (
    ActivationMeasurement,
    Advice,
    Evidence,
    FloatOperator,
    Int8Coverage,
    ParityMeasurement,
    SourceLimits,
    TreeStructure,
    WeightMeasurement,
)
from onnx_ops.domain.gate import ParityGate
from onnx_ops.reporting.structure import structure_entries
from onnx_ops.statistics.judge import judge
from onnx_ops.statistics.parity import measure_output
from onnx_ops.statistics.rules.parity import judge_source
from tests.support.evidence import CPU_FACTS, make_evidence
from tests.support.golden import Golden

FLOAT = make_evidence(
    "fp32",
    runtime=CPU_FACTS,
    parity=(
        ParityMeasurement(output="y", group="real", rows=64, error=1e-6, noise=1e-6, ratio=1.0),
    ),
)
INT8 = replace(FLOAT, variant="int8", quantized=True, export_parity=FLOAT.parity, parity=())
WEIGHT = WeightMeasurement(tensor="w", steps=0.5, elements=64)
ACTIVATION = ActivationMeasurement(
    tensor="relu", values=1000, noise=1.73, saturated=0.001, departure=4.0
)


def line(evidence: Evidence, metric: str, gate: ParityGate | None = None) -> GateResult | None:
    found = [r for r in judge([gate or ParityGate()], evidence).results if r.metric == metric]
    assert len(found) < 2
    return found[0] if found else None


def certain(evidence: Evidence, metric: str, gate: ParityGate | None = None) -> GateResult:
    found = line(evidence, metric, gate)
    assert found is not None
    return found


def test_structure_entries_with_recipe_and_advice_lists_settings(golden: Golden) -> None:
    advice = Advice(finding="7 left in float", setting="options: {}", nodes=tuple("abcdefg"))
    entries = structure_entries(
        replace(INT8, recipe=("weights of 7 bits", "why"), advice=(advice,))
    )
    golden("tables", "\n".join(f"{key}: {value}" for key, value in entries.items()))


def test_structure_entries_of_operators_shows_opset_versions() -> None:
    entries = structure_entries(
        replace(FLOAT, opsets={"": 18, "com.microsoft": 1}, operators={"Gemm-13": 2, "Relu-14": 1})
    )
    assert entries == {"opsets": "ai.onnx 18, com.microsoft 1", "operators": "Gemm-13 2, Relu-14 1"}


def test_parity_gate_without_structural_evidence_adds_no_results() -> None:
    for metric in ("trees", "activations", "saturation", "int8 coverage", "NaN"):
        assert line(FLOAT, metric) is None
        assert line(INT8, metric) is None


def test_parity_gate_with_one_changed_tree_node_fails() -> None:
    same = TreeStructure(trees=3, splits=10, leaves=13, changed=0)
    good = certain(replace(FLOAT, trees=same), "trees")
    assert (good.verdict, good.estimate, good.n) == (Verdict.PASS, 0.0, 23)
    bad = certain(
        replace(FLOAT, trees=replace(same, changed=1, differences=("tree 2, node 4: threshold",))),
        "trees",
    )
    assert bad.verdict is Verdict.FAIL
    assert "tree 2, node 4" in bad.reason
    many = replace(same, changed=9, differences=tuple(f"tree {i}" for i in range(9)))
    assert "and 6 more" in certain(replace(FLOAT, trees=many), "trees").reason


def test_parity_gate_judges_activation_noise_by_worst_activation() -> None:
    good = replace(INT8, activations=(ACTIVATION, replace(ACTIVATION, tensor="x", noise=0.0)))
    assert certain(good, "activations").verdict is Verdict.PASS
    assert certain(good, "saturation").verdict is Verdict.PASS
    loud = replace(good, activations=(ACTIVATION, replace(ACTIVATION, tensor="x", noise=3.5)))
    found = certain(loud, "activations")
    assert found.verdict is Verdict.FAIL
    assert "activation 'x'" in found.reason
    assert "weight" not in found.reason
    assert certain(loud, "activations", ParityGate(activation_noise=4.0)).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("share", "verdict", "warned"),
    [
        (0.03, Verdict.PASS, False),
        (0.05, Verdict.PASS, True),
        (0.1, Verdict.PASS, True),
        (0.11, Verdict.FAIL, False),
    ],
)
def test_parity_gate_with_rising_saturation_warns_before_it_fails(
    share: float, verdict: Verdict, warned: bool
) -> None:
    found = certain(
        replace(INT8, activations=(replace(ACTIVATION, saturated=share),)), "saturation"
    )
    assert found.verdict is verdict
    assert ("is suspicious" in found.reason) == warned


def test_parity_gate_with_nan_activation_is_error() -> None:
    unknown = replace(INT8, activations=(ACTIVATION, replace(ACTIVATION, noise=math.nan)))
    found = judge([ParityGate()], unknown).results
    assert [r.verdict for r in found if r.metric == "activations"] == [Verdict.PASS, Verdict.ERROR]


def test_parity_gate_with_int8_coverage_advises_on_unintended_float_and_int8_nodes(
    golden: Golden,
) -> None:
    operators = (
        FloatOperator(name="/fc2", op_type="Gemm", reason="excluded"),
        FloatOperator(name="/conv", op_type="Conv", reason="its input is not quantized"),
    )
    partly = certain(
        replace(INT8, coverage=Int8Coverage(int8=("a", "b"), floats=operators)), "int8 coverage"
    )
    assert partly.advisory
    assert partly.verdict is Verdict.FAIL
    assert partly.estimate == 0.5
    golden("reasons", partly.reason)
    meant = Int8Coverage(int8=("a", "b"), floats=operators[:1])
    assert certain(replace(INT8, coverage=meant), "int8 coverage").verdict is Verdict.PASS
    unheeded = certain(replace(INT8, coverage=replace(meant, unheeded=("b",))), "int8 coverage")
    assert unheeded.verdict is Verdict.FAIL
    assert "excluded, but run in int8" in unheeded.reason
    assert line(replace(INT8, coverage=Int8Coverage()), "int8 coverage") is None


def test_parity_gate_with_source_that_refuses_nan_adds_advisory() -> None:
    found = certain(replace(FLOAT, source=SourceLimits(nan="refused")), "NaN")
    assert found.advisory
    assert "must refuse" in found.reason
    assert line(replace(FLOAT, source=SourceLimits(nan="answered")), "NaN") is None


def test_parity_gate_with_rows_explained_by_jitter_reports_their_number(golden: Golden) -> None:
    jumped = replace(FLOAT.parity[0], explained=7, unexplained=2, error=0.1, ratio=1e5)
    found = certain(replace(FLOAT, parity=(jumped,)), "outputs")
    golden("reasons", found.reason)


@pytest.mark.parametrize(
    ("dtype", "off", "good"),
    [
        ("float32", 0.9e-3, True),
        ("float32", 1.2e-3, False),
        ("float16", 4e-3, True),
        ("float16", 7e-3, False),
    ],
)
def test_parity_gate_without_float64_source_applies_and_names_tolerance(
    dtype: str, off: float, good: bool
) -> None:
    reference = np.linspace(1, 2, 64, dtype=np.float32)
    found = measure_output(
        group="real",
        output="y",
        onnx=(reference * (1 + off)).astype(dtype),
        single=reference,
        double=None,
    )
    rtol = "0.005" if dtype == "float16" else "0.001"
    assert found.tolerance.startswith(f"rtol {rtol} + atol")
    result = certain(replace(FLOAT, parity=(found,)), "outputs")
    assert result.verdict is (Verdict.PASS if good else Verdict.FAIL)
    assert f"rtol {rtol}" in result.reason
    assert "does not run in float64" in result.reason


def test_measure_output_of_bfloat16_uses_tolerance_and_noise_floor_of_that_type() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    reference = np.linspace(1, 2, 64, dtype=np.float32)
    onnx, double = reference.astype(ml_dtypes.bfloat16), reference.astype(np.float64)
    found = measure_output(group="real", output="y", onnx=onnx, single=reference, double=None)
    assert found.tolerance.startswith("rtol 0.03")
    assert 0 < found.ratio <= 10
    exact = measure_output(group="real", output="y", onnx=onnx, single=reference, double=double)
    assert exact.noise == pytest.approx(2 * 2.0**-7 * 2)


def test_structure_entries_lists_measured_structure_only(golden: Golden) -> None:
    assert structure_entries(FLOAT) == {}
    evidence = replace(
        INT8,
        source=SourceLimits(nan="refused", refused={"nan": "Input contains NaN"}),
        trees=TreeStructure(
            trees=1, splits=1, leaves=2, changed=1, differences=("tree 0, node 0: threshold",)
        ),
        activations=(ACTIVATION,),
        coverage=Int8Coverage(
            int8=("a",), floats=(FloatOperator(name="b", op_type="Conv", reason="excluded"),)
        ),
    )
    entries = structure_entries(evidence)
    golden("tables", "\n".join(f"{key}: {value}" for key, value in entries.items()))


def test_judge_source_with_unused_inputs_adds_passing_advisory() -> None:
    evidence = replace(FLOAT, unused_inputs=("item", "age", "city", "plan"))
    (result,) = (
        one for one in judge_source(ParityGate(), evidence) if one.metric == "unused inputs"
    )
    assert (result.advisory, result.verdict) == (True, Verdict.PASS)
    assert "item, age, city and 1 more" in result.reason
    assert not [one for one in judge_source(ParityGate(), FLOAT) if one.metric == "unused inputs"]


def test_parity_gate_with_narrow_or_wide_ranges_fails() -> None:
    good = replace(ACTIVATION, clipping=40.0, stretch=1.1)
    sound = replace(INT8, activations=(good,), weights=(replace(WEIGHT, stretch=2.0),))
    assert certain(sound, "clipping").verdict is Verdict.PASS
    assert certain(sound, "ranges").verdict is Verdict.PASS
    narrow = certain(
        replace(sound, activations=(good, replace(good, tensor="x", clipping=101.0))), "clipping"
    )
    assert narrow.verdict is Verdict.FAIL
    assert "'x'" in narrow.reason
    wide = replace(sound, activations=(good, replace(good, tensor="x", stretch=2.9)))
    assert certain(wide, "ranges").verdict is Verdict.FAIL
    assert certain(wide, "ranges", ParityGate(stretch=3.0)).verdict is Verdict.PASS
    coarse = certain(replace(sound, weights=(replace(WEIGHT, stretch=3.0),)), "ranges")
    assert coarse.verdict is Verdict.FAIL
    assert "weight 'w'" in coarse.reason


@pytest.mark.parametrize(
    ("steps", "output_error", "verdict"),
    [
        (0.51, None, Verdict.PASS),
        (0.52, None, Verdict.FAIL),
        (0.7, 0.8, Verdict.PASS),
        (0.7, 0.99, Verdict.FAIL),
        (0.64, 1.1, Verdict.PASS),
        (0.64, 1.2, Verdict.FAIL),
        (5.0, 0.1, Verdict.FAIL),
    ],
)
def test_parity_gate_with_weight_error_above_limit_passes_only_with_small_output_error(
    steps: float, output_error: float | None, verdict: Verdict
) -> None:
    weights = (replace(WEIGHT, tensor="v"), replace(WEIGHT, steps=steps, output_error=output_error))
    found = certain(replace(INT8, weights=weights), "weights")
    assert (found.verdict, found.n) == (verdict, 128)
    assert "'w'" in found.reason
    assert ("squared error" in found.reason) == (output_error is not None)
